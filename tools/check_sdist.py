"""Is all in a source distribution that its pages name? ``make sdist`` runs it.

Links and pictures of its Markdown pages must lead to files of the distribution, files that they
speak of by name must be there, and so must what building, testing and citing need.
"""

import re
import sys
import tarfile
import tempfile
from pathlib import Path

LINK = re.compile(
    r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)|<img src=\"(?!https?:)([^\"]+)\""
)
# What is named in code or in a command: a file that must be here, from the root.
NAMED = re.compile(
    r"\b(?:examples|lab/src|tools|tests|benchmarks|docs|src)/[\w/.-]*\w\.(?:py|md|cpp|h|png|ipynb)\b"
)
NEEDED = (
    ".github/workflows/tests.yml",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "constraints-oldest.txt",
    "constraints.txt",
    "hatch_build.py",
    "lab/pyproject.toml",
    "mkdocs.yml",
    "pyproject.toml",
    "src/ortholand/py.typed",
)
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def main(archive: Path) -> None:
    """Unpack it and look."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        missing = missing_files(root)
        files = sum(path.is_file() for path in root.rglob("*"))
    if missing:
        sys.exit(f"{archive.name} lacks:\n" + "\n".join(f"  {line}" for line in missing))
    size = archive.stat().st_size / 1e6
    print(f"{archive.name}: {files} files, {size:.1f} MB, nothing missing")


def missing_files(root: Path) -> list[str]:
    """What is named and not there, and who names it."""
    missing = [f"{name} (needed)" for name in NEEDED if not (root / name).exists()]
    for page in pages(root):
        missing += [
            f"{target} ({page.relative_to(root)})"
            for target, path in named_files(page, root)
            if not path.exists()
        ]
    return missing


def pages(root: Path) -> list[Path]:
    """Everything that is read by people."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/*.md")])


def named_files(page: Path, root: Path) -> list[tuple[str, Path]]:
    """Links of a page, and files that its prose names from the root."""
    text = page.read_text()
    links = [first or second for first, second in LINK.findall(FENCE.sub("", text))]
    named = [
        name for name in NAMED.findall(LINK.sub("", text)) if not (page.parent / name).exists()
    ]
    return [
        *((link, page.parent / link) for link in links),
        *((name, root / name) for name in named),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
