"""How it is shown: time against size and number of the matrices, and a table of the cases."""

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ortholand.lab.benchmarks.steps.runs import CASES
from ortholand.lab.study.records import MissingRecordError, Record, Records
from ortholand.lab.study.spec import FigureSpec, TableSpec

CURVES = {  # name of the step -> colour, line
    "LandingSGD": ("#0072B2", "-"),
    "LandingSGD, after": ("#D55E00", "--"),
    "bare products": ("#000000", ":"),
    "torch SGD, unconstrained": ("#7F7F7F", "-."),
    "POGO + SGD": ("#009E73", "--"),
    "geoopt, EuclideanStiefel": ("#E69F00", "-"),
    "geoopt, Stiefel": ("#8A8A00", ":"),
    "torch parametrization, Cayley": ("#CC79A7", "-."),
    "geotorch, Cayley": ("#A6611A", ":"),
    "torch Muon": ("#56B4E9", "--"),
}


def draw(kind: str, label: str, records: Records) -> Figure:
    """Time of one step at each point of a curve."""
    points = sorted((int(unit.split("-")[1]), unit) for unit in records if unit.startswith(kind))
    figure = Figure(figsize=(7.2, 4.6))
    axes: Axes = figure.subplots()
    for name, (colour, line) in CURVES.items():
        curve = [
            (x, 1e3 * records[unit].value(name))
            for x, unit in points
            if name in records[unit].result.values
        ]
        if curve:
            axes.plot(*zip(*curve, strict=True), line, color=colour, label=name, marker=".")
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds per step")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def make_table(records: Records) -> list[list[str]]:
    """Milliseconds per step at one thread, in brackets relative to LandingSGD."""
    cases = {case: records[f"{case}.1"] for case in CASES if f"{case}.1" in records}
    if not cases:
        raise MissingRecordError("no case is recorded")
    found = {name for record in cases.values() for name in record.result.values}
    names = sorted(found, key=lambda name: (not name.startswith("Landing"), name))
    rows = [[name, *(_cell(record, name) for record in cases.values())] for name in names]
    return [["one step, ms (times ours)", *cases], *rows]


def _cell(record: Record, name: str) -> str:
    if name not in record.result.values:
        return "-"
    seconds = record.value(name)
    return f"{1e3 * seconds:.3g} ({seconds / record.value('LandingSGD'):.2g})"


FIGURES = (
    FigureSpec(
        "bench-size",
        "Time of one step against the size of the matrix.",
        partial(draw, "size", "rows and columns p of one matrix"),
    ),
    FigureSpec(
        "bench-count",
        "Time of one step against the number of matrices.",
        partial(draw, "count", "number of 3 x 3 matrices"),
    ),
)
TABLES = (TableSpec("steps", "One step at one thread", make_table),)
