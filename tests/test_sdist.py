"""What the check of the source distribution sees; ``make sdist`` builds and checks one."""

import tarfile
from pathlib import Path

import pytest
from tools import check_sdist

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "ortholand-1.0"
    for name in check_sdist.NEEDED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    return root


def test_a_whole_tree_lacks_nothing(tree):
    assert check_sdist.missing_files(tree) == []


@pytest.mark.parametrize("name", check_sdist.NEEDED)
def test_what_is_needed_is_missed(tree, name):
    (tree / name).unlink()
    assert check_sdist.missing_files(tree) == [f"{name} (needed)"]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("[here](docs/gone.md#part)", "docs/gone.md"),
        ('<img src="docs/gone.png" width="3">', "docs/gone.png"),
        ("run `python examples/gone.py --quick`", "examples/gone.py"),
        ("```bash\npython tools/gone.py\n```", "tools/gone.py"),
    ],
)
def test_what_a_page_names_is_missed(tree, text, missing):
    (tree / "README.md").write_text(text)
    assert check_sdist.missing_files(tree) == [f"{missing} (README.md)"]
    (tree / missing).parent.mkdir(exist_ok=True)
    (tree / missing).write_text("")
    assert check_sdist.missing_files(tree) == []


def test_addresses_and_code_are_no_links(tree):
    (tree / "README.md").write_text("[a](https://b.c/d.md) [e](#f)\n```python\ng[h](i)\n```\n")
    assert check_sdist.missing_files(tree) == []


def test_links_are_seen_from_the_page(tree):
    (tree / "docs").mkdir()
    (tree / "docs" / "page.md").write_text("[up](../README.md) [wrong](README.md)")
    assert check_sdist.missing_files(tree) == ["README.md (docs/page.md)"]


def test_an_archive_that_lacks_something_is_refused(tree, tmp_path, capsys):
    def packed():
        archive = tmp_path / "ortholand-1.0.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tree, tree.name)
        return archive

    check_sdist.main(packed())
    assert "nothing missing" in capsys.readouterr().out
    (tree / "LICENSE").unlink()
    with pytest.raises(SystemExit, match="LICENSE"):
        check_sdist.main(packed())


def test_every_page_of_the_repository_names_files_that_exist():
    needed_here = [line for line in check_sdist.missing_files(ROOT) if "PKG-INFO" not in line]
    assert needed_here == []
