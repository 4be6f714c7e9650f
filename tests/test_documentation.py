"""The code in README and docs runs, and what they say of themselves is true."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks.lines_of_code import FOLDER, lines_written
from tools.run_notebook import code_cells, run_cell

from tests import needs

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run_in_order(page, capsys):
    namespace: dict = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_documentation_is_short_and_wrapped():
    """What the laboratory generates is in docs/results, and not counted."""
    pages = [p for p in PAGES if "results" not in p.parts and p.name != "SECURITY.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= 20_000
    others = (ROOT / name for name in ("SECURITY.md", "CHANGELOG.md", "examples/README.md"))
    for page in (*pages, *others):
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            assert len(line) <= 100 or line.startswith(("|", "![", "<img", "$$")), (page, line)


def test_the_landing_step_by_itself_is_short_and_lands(capsys):
    (block,) = [b for b in python_blocks(ROOT / "docs" / "index.md") if "landing_field" in b]
    assert len([line for line in block.splitlines() if line.strip()]) < 12
    namespace: dict = {}
    exec(block, namespace)
    assert namespace["ol"].distance(namespace["X"]) < 1e-5


def test_the_training_script_of_the_readme_ends_as_it_says(capsys):
    block = python_blocks(ROOT / "README.md")[0]
    assert block == python_blocks(ROOT / "docs" / "index.md")[0]
    namespace: dict = {}
    exec("import torch; torch.manual_seed(0)\n" + block, namespace)
    error = float(capsys.readouterr().out)
    assert 1e-5 < error < 1e-3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def sources(*suffixes: str) -> list[Path]:
    folders = (ROOT / name for name in ("src", "lab", "tests", "tools"))
    return [p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes]


def test_files_that_the_architecture_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in sources(".py", ".cpp", ".h")]
    for name in re.findall(r"[\w/]+\.(?:py|cpp|h)\b", page):
        assert any(path.endswith(f"/{name}") for path in files), name


def test_pages_that_the_code_names_exist():
    here = Path(__file__)
    for path in sources(".py"):
        pages = re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text()) if path != here else []
        for page in pages:
            assert (ROOT / page).exists() or path.name == "test_sdist.py", (path, page)


@needs.compiled_steps
@pytest.mark.thorough
def test_the_compiled_step_of_the_page_runs(monkeypatch):
    """Without Inductor, which takes half a minute: what is traced is tests/optim/test_compile."""
    page = ROOT / "docs" / "running.md"
    compiled = re.search(r"^```py\n(.*?torch\.compile.*?)^```", page.read_text(), re.M | re.S)[1]
    namespace: dict = {}
    exec(python_blocks(page)[0], namespace)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    exec(compiled, namespace)
    before = namespace["model"][0].weight.detach().clone()
    namespace["step"]()
    assert not torch.equal(namespace["model"][0].weight, before)


def test_two_lines_make_layers_orthogonal():
    assert len(lines_written("with_ortholand")) == 2
    landing = [line for line in lines_written("with_ortholand_everywhere") if "ol" in line.split()]
    assert landing == ["import ortholand as ol"]
    page = (ROOT / "docs/results/lines_of_code.md").read_text()
    for library in ("torch", "geotorch", "ortholand", "pogo", "geoopt"):
        assert f"| {library} | {len(lines_written(f'with_{library}'))} |" in page
    for name in ("with_ortholand", "with_ortholand_everywhere"):
        namespace: dict = {}
        exec((FOLDER / f"{name}.py").read_text(), namespace)
        assert namespace["ol"].orthogonality_error(namespace["optimizer"]) < 0.01


# Where no window can be opened, showing a figure warns.
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.thorough
def test_the_tutorial_runs_and_its_outputs_are_stored():
    notebook = ROOT / "docs" / "tutorial.ipynb"
    stored = [cell for cell in json.loads(notebook.read_text())["cells"] if "outputs" in cell]
    namespace: dict = {}
    for code, cell in zip(code_cells(notebook), stored, strict=True):
        kinds = [output["output_type"] for output in run_cell(code, namespace)]
        assert kinds == [output["output_type"] for output in cell["outputs"]]
