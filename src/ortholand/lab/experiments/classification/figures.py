"""Figures of training runs: errors by time and by iteration, losses by learning rate."""

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ortholand.lab.experiments.classification.claims import best_rates, tried_rates
from ortholand.lab.study.figures import (
    add_legend,
    draw_by_time_and_iteration,
    label_plainly,
    plot_method,
)
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import FigureSpec


def training_figures(
    name: str, network: str, *, curves: str = "", errors: str = "", rate: str = "learning rate"
) -> tuple[FigureSpec, ...]:
    """The figures of an experiment, with additions to the captions."""
    return (
        training_figure(
            name, f"{network}, each method with its best learning rate{curves}", errors=errors
        ),
        FigureSpec(
            f"{name}-learning-rates",
            f"{network}: mean training loss over the last quarter of the run, against the {rate}. "
            "The lowest point of each method is its rate in the figure above.",
            draw_learning_rates,
        ),
    )


def training_figure(name: str, subject: str, *, errors: str = "") -> FigureSpec:
    """The figure of the training runs that the subject describes."""
    return FigureSpec(
        name,
        f"{subject}. Top: test error. Bottom: orthogonality error of all kernels together{errors}. "
        "Left: by time, which is the iterations times the median time of one, timed in turn with "
        "the other methods. Right: by iteration.",
        draw_training,
    )


def draw_training(records: Records) -> Figure:
    """Test error and orthogonality error of each method, by time and by iteration."""
    best = best_rates(records)
    figure, grid = draw_by_time_and_iteration(
        {method: found.runs for method, found in best.items()},
        {method: found.seconds for method, found in best.items()},
        {
            "test_error": "test error",
            "orthogonality_error": r"orthogonality error, $\|X^\top X - I\|$",
        },
        height=6.6,
    )
    grid[1, 1].set_xscale("linear")
    grid[1, 1].locator_params(axis="x", nbins=6)
    label_plainly(grid[0, 0].yaxis, "{:.3g} %", 100.0)
    label_plainly(grid[1, 0].xaxis)
    return figure


def draw_learning_rates(records: Records) -> Figure:
    """The final training loss against the learning rate: which was best, and how clearly."""
    figure = Figure(figsize=(8, 4.4))
    axes = figure.subplots()
    rates: set[float] = set()
    for method, entries in tried_rates(records).items():
        plot_method(axes, method, [e.lr for e in entries], [e.loss for e in entries], marker="o")
        rates.update(entry.lr for entry in entries)
    axes.set(xscale="log", xlabel="learning rate", yscale="log", ylabel="training loss in the end")
    axes.set_xticks(sorted(rates), [f"{lr:.3g}" for lr in sorted(rates)])
    axes.xaxis.set_minor_locator(NullLocator())
    label_plainly(axes.yaxis)
    add_legend(figure, axes, 3)
    return figure
