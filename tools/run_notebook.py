"""Runs a notebook from top to bottom and stores its outputs, without Jupyter.

    .venv/bin/python tools/run_notebook.py docs/tutorial.ipynb

Cells show what they print and draw; the value of a last line is not shown.
"""

import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def code_cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(code: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of one cell: its text, then its figures."""
    text = io.StringIO()
    with redirect_stdout(text):
        exec(compile(code, "cell", "exec"), namespace)
    outputs = []
    if text.getvalue():
        lines = text.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=120, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def run(path: Path) -> None:
    """All cells in one namespace; the outputs replace those that were stored."""
    notebook = json.loads(path.read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["outputs"] = run_cell("".join(cell["source"]), namespace)
        cell["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
