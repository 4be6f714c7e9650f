"""How it is drawn: error and distance by time, and times against p."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ortholand.lab.experiments.stiefel import claims
from ortholand.lab.experiments.stiefel.runs import STIEFEL_METHODS, TIMED_METHODS, unit_name
from ortholand.lab.study.figures import add_legend
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import FigureSpec


def draw_runs(records: Records) -> Figure:
    """Error and distance to the manifold by time, at the largest p."""
    figure = Figure(figsize=(8, 4.4))
    errors, distances = figure.subplots(1, 2, sharex=True)
    p = claims.all_sizes(records)[-1]
    for method in STIEFEL_METHODS:
        run = records[unit_name(method, p)]
        step = claims.iteration_time(records, method, p)
        time = [step * k for k in run.series("iteration")]
        _plot(errors, method, time, run.series("error"))
        _plot(distances, method, time[1:], run.series("to_manifold")[1:])
    settings = claims.settings_of(records)
    errors.axhline(settings["accuracy"], color="#777777", linewidth=0.8, zorder=1)
    errors.set(yscale="log", ylabel="subspace error", ylim=(1e-6, None), xlim=(0, None))
    distances.set(yscale="log", ylabel=r"to the manifold, $\|X^\top X - I\|$")
    for axes in (errors, distances):
        axes.set_xlabel(f"time, seconds (n = {settings['n']:,}, p = {p})")
    add_legend(figure, errors, 3)
    return figure


def draw_times(records: Records) -> Figure:
    """Time of an iteration, and to the accuracy, against p."""
    figure = Figure(figsize=(8, 4.6))
    single, whole = figure.subplots(1, 2)
    sizes = claims.all_sizes(records)
    for method in TIMED_METHODS:
        _plot(single, method, sizes, [claims.iteration_time(records, method, p) for p in sizes])
    for method in STIEFEL_METHODS:
        _plot(whole, method, sizes, [claims.time_needed(records, method, p) for p in sizes])
    for axes, label in ((single, "time of an iteration"), (whole, "time to the accuracy")):
        for line in axes.lines:
            line.set(marker="o", markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="p", ylabel=f"{label}, seconds")
        axes.set_xticks(sizes, [str(p) for p in sizes])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    add_legend(figure, single, 3)
    return figure


def _plot(axes: Axes, method: str, x: Sequence[float], y: Sequence[float]) -> None:
    style = claims.STIEFEL_STYLES[method]
    look: dict[str, Any] = dict(color=style.colour, linestyle=style.dashes, linewidth=style.width)
    axes.plot(x, y, label=style.label, **look)


STIEFEL_FIGURES = (
    FigureSpec(
        "stiefel",
        "PCA at the largest p, by time (iterations times the median time of one). Left: error "
        "of the subspace, with the accuracy that counts as there. Right: distance to the "
        "manifold.",
        draw_runs,
    ),
    FigureSpec(
        "stiefel-time",
        "Left: time of one iteration against p, and of a gradient with a dense matrix C. "
        "Right: time to the accuracy.",
        draw_times,
    ),
)
