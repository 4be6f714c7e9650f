"""How many lines a user writes to make a layer orthogonal, by library.

Counts the lines of code of each script in ``benchmarks/lines_of_code`` that the plain training
script does not have. Run: ``python benchmarks/lines_of_code.py``
"""

import difflib
from pathlib import Path

FOLDER = Path(__file__).parent / "lines_of_code"


def code_lines(path: Path) -> list[str]:
    """Lines of code: no blank lines, no comments, not the docstring on top."""
    lines = path.read_text().splitlines()[1:]
    return [line.rstrip() for line in lines if line.strip() and not line.strip().startswith("#")]


def lines_written(name: str) -> list[str]:
    """The lines of a script that the plain one does not have, added or changed."""
    difference = difflib.ndiff(code_lines(FOLDER / "plain.py"), code_lines(FOLDER / f"{name}.py"))
    return [line[2:] for line in difference if line.startswith("+ ")]


if __name__ == "__main__":
    for library in ("torch", "geotorch", "ortholand", "pogo", "geoopt"):
        print(f"{library:<12} {len(lines_written(f'with_{library}')):>2} lines")
