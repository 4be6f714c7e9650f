"""How it is drawn: distances to the optimum and to the manifold, by time and by iteration."""

from collections.abc import Mapping
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ortholand.lab.experiments.procrustes.claims import compared, times_per_iteration
from ortholand.lab.experiments.procrustes.runs import DTYPES, LANDINGS, unit_name
from ortholand.lab.study.figures import draw_by_time_and_iteration
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
    """Distances to the optimum and to the manifold, by time and by iteration."""
    labels = {
        "to_optimum": r"to the optimum, $\|X - X_*\|$",
        "to_manifold": r"to the manifold, $\|X^\top X - I\|$",
    }
    trials = {method: [run] for method, run in runs.items()}
    figure, grid = draw_by_time_and_iteration(
        trials, seconds, labels, height=5.6, legend_columns=len(runs)
    )
    # Few decades, so that the labels alone would leave the scale in doubt.
    grid[0, 0].yaxis.set_minor_locator(LogLocator(subs="auto"))
    grid[0, 0].yaxis.set_minor_formatter(NullFormatter())
    eps = runs["landing"].configuration["settings"]["eps"]
    for axes in grid[1]:
        axes.axhline(eps, color="#777777", linewidth=0.8, zorder=1)
    aside = dict(xytext=(4, 0), textcoords="offset points", va="center", color="#555555")
    grid[1, 1].annotate("eps", (1, eps), xycoords=("axes fraction", "data"), **aside)
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
