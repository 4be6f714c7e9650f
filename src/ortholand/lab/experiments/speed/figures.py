"""How it is drawn: time of a step against p, and in units of landing's time."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ortholand.lab.experiments.speed.claims import all_sizes, ratios, seconds_of
from ortholand.lab.experiments.speed.runs import (
    CAREFUL,
    OPTIMIZER,
    TEXTBOOK,
    TEXTBOOK_RETRACTIONS,
    form_name,
)
from ortholand.lab.study.figures import DOTS, add_legend, label_plainly, plot_method
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import FigureSpec


def draw_times(records: Records) -> Figure:
    """The paper's figure, and the same in units of landing's time."""
    figure = Figure(figsize=(8, 4))
    times, relative = figure.subplots(1, 2)
    runs = all_sizes(records)
    for method in ("landing", *TEXTBOOK_RETRACTIONS):
        name = form_name(TEXTBOOK, method)
        seconds = [seconds_of(run, name) for run in runs.values()]
        plot_method(times, method, list(runs), seconds, **DOTS)
    times.set(xscale="log", yscale="log", xlabel="p", ylabel="time of a step, seconds")
    _draw_ratios(relative, runs, TEXTBOOK)
    relative.set_ylabel("in units of landing's time")
    add_legend(figure, times)
    return figure


def draw_forms(records: Records) -> Figure:
    """Ratios for carefully written retractions, and for whole optimizers."""
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2, sharey=True)
    titles = {CAREFUL: "carefully written formulas", OPTIMIZER: "optimizers, whole steps"}
    for axes, (form, title) in zip(panels, titles.items(), strict=True):
        _draw_ratios(axes, all_sizes(records), form)
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("in units of landing's time")
    add_legend(figure, panels[0])
    return figure


def _draw_ratios(axes: Axes, runs: dict[int, Record], form: str) -> None:
    plot_method(axes, "landing", list(runs), [1.0] * len(runs))
    for method in TEXTBOOK_RETRACTIONS:
        found = [ratios(run, form)[method] for run in runs.values()]
        plot_method(axes, method, list(runs), found, **DOTS)
    axes.set(xscale="log", yscale="log", xlabel="p")
    label_plainly(axes.yaxis)


FIGURES = (
    FigureSpec(
        "speed",
        "Time of one step as p grows, float32, one thread: landing, and the four retractions "
        "by torch's functions. Left: seconds. Right: in units of landing's time.",
        draw_times,
    ),
    FigureSpec(
        "speed-forms",
        "The same ratios where the retractions are written as carefully as in this library "
        "(left), and for whole steps of optimizers, landing's safe step included (right).",
        draw_forms,
    ),
)
