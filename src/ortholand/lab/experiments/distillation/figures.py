"""How it is drawn: curves of the best runs, and how the learning rates were chosen."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ortholand.lab.experiments.distillation.runs import (
    LEARNING_RATES,
    best_runs,
    final_loss,
    iteration_seconds,
    runs_of,
)
from ortholand.lab.methods import TRAINING_METHODS
from ortholand.lab.study.figures import METHOD_STYLES, add_legend, plot_method
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import FigureSpec


def draw_training(records: Records) -> Figure:
    """The paper's figure, by time as there, and by iteration: each method's best run."""
    figure = Figure(figsize=(8, 7))
    grid = figure.subplots(2, 2, sharex="row", sharey="col")
    for method, run in best_runs(records, TRAINING_METHODS).items():
        iterations = run.series("iteration")
        by_time = [iteration_seconds(records, run) * k for k in iterations]
        for row, x in zip(grid, (by_time, iterations), strict=True):
            for axes, y in zip(row, ("orthogonality_error", "test_loss"), strict=True):
                # Without the start, for which a logarithmic axis has no place.
                plot_method(axes, method, x[1:], run.series(y)[1:])
    for row, label in zip(grid, ("time, seconds", "iterations"), strict=True):
        _logarithmic(row[0], label, r"orthogonality error, $\|W^\top W - I\|$")
        _logarithmic(row[1], label, "test loss")
    add_legend(figure, grid[0, 0], 3)
    return figure


def draw_rates(records: Records) -> Figure:
    """How the learning rates were chosen."""
    figure = Figure(figsize=(8, 4.6))
    axes = figure.subplots()
    for method in TRAINING_METHODS:
        losses = [final_loss(run) for run in runs_of(records, method)]
        plot_method(axes, method, LEARNING_RATES, losses)
        loss, lr = min(zip(losses, LEARNING_RATES, strict=True))
        axes.plot(lr, loss, "o", color=METHOD_STYLES[method].colour, markersize=6)
    _logarithmic(axes, "learning rate", "test loss in the end")
    add_legend(figure, axes, 3)
    return figure


def _logarithmic(axes: Axes, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.minorticks_off()


DISTILLATION_FIGURES = (
    FigureSpec(
        "distillation",
        "A student network with orthogonal weights is trained by each method with its best "
        "learning rate. Left: orthogonality error of all weights together. Right: loss on a test "
        "set. Top: by time, which is the iterations times the median time of one, timed in turn "
        "with the other methods. Bottom: by iteration. Curves end where the runs do.",
        draw_training,
    ),
    FigureSpec(
        "distillation-rates",
        "Loss on the test set at the end of each run, by learning rate. A dot marks the learning "
        "rate with which the method is shown and compared.",
        draw_rates,
    ),
)
