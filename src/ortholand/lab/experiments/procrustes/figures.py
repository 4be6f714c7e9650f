"""How it is drawn: distances to the optimum and to the manifold, by time and by iteration."""

from collections.abc import Mapping
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ortholand.lab.experiments.procrustes.claims import compared, times_per_iteration
from ortholand.lab.experiments.procrustes.runs import DTYPES, LANDINGS, unit_name
from ortholand.lab.study.figures import add_legend, plot_method
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import FigureSpec


def draw_compared(dtype: str, records: Records) -> Figure:
    """The paper's figure: landing and the retractions."""
    runs = compared(records, dtype)
    return _draw_panels(runs, times_per_iteration(records, runs, dtype))


def draw_landings(dtype: str, records: Records) -> Figure:
    """Landing with momentum and without 1 / p, which are not in the paper's figure."""
    runs = {method: records[unit_name(method, dtype)] for method in LANDINGS}
    return _draw_panels(runs, times_per_iteration(records, runs, dtype))


def _draw_panels(runs: Mapping[str, Record], seconds: Mapping[str, float]) -> Figure:
    """By time and by iteration, to the optimum and to the manifold."""
    figure = Figure(figsize=(8, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for row, name in zip(grid, ("to_optimum", "to_manifold"), strict=True):
        for method, run in runs.items():
            # Without the start: a logarithmic axis has no place for time 0 and distance 0.
            iterations, distances = run.series("iteration")[1:], run.series(name)[1:]
            plot_method(row[0], method, [seconds[method] * k for k in iterations], distances)
            plot_method(row[1], method, iterations, distances)
    for axes in grid.flat:
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
    # Few decades, so that the labels alone would leave the scale in doubt.
    grid[0, 0].yaxis.set_minor_locator(LogLocator(subs="auto"))
    grid[0, 0].yaxis.set_minor_formatter(NullFormatter())
    eps = runs["landing"].configuration["settings"]["eps"]
    for axes in grid[1]:
        axes.axhline(eps, color="#777777", linewidth=0.8, zorder=1)
    beside = dict(xytext=(4, 0), textcoords="offset points", va="center", color="#555555")
    grid[1, 1].annotate("eps", (1, eps), xycoords=("axes fraction", "data"), **beside)
    grid[0, 0].set_ylabel(r"to the optimum, $\|X - X_*\|$")
    grid[1, 0].set_ylabel(r"to the manifold, $\|X^\top X - I\|$")
    grid[1, 0].set_xlabel("time, seconds")
    grid[1, 1].set_xlabel("iterations")
    add_legend(figure, grid[0, 0], len(runs))
    return figure


PROCRUSTES_FIGURES = (
    *(
        FigureSpec(
            f"procrustes-{dtype}",
            f"Procrustes in {dtype}, by landing and by the four retractions. Top: distance to "
            "the optimum, where the curves almost coincide. Bottom: distance to the manifold, "
            "with the radius eps of landing's safe ball; the polar retraction's falls at once "
            "when steps are so short that a series gives the polar factor, in place of an "
            "eigendecomposition. Left: by time, which is the iterations times the median "
            "time of one, timed in turn with the other methods. Right: by iteration.",
            partial(draw_compared, dtype),
        )
        for dtype in DTYPES
    ),
    FigureSpec(
        "procrustes-landing",
        "The whole run of landing in float64, and the two extras: with momentum, and with f "
        "as the paper prints it. Top: distance to the optimum. Bottom: distance to the "
        "manifold, with the radius eps of the safe ball. Left: by time. Right: by iteration.",
        partial(draw_landings, "float64"),
    ),
)
