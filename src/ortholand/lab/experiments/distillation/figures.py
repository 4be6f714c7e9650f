"""How it is drawn: curves of the best runs, and how the learning rates were chosen."""

from matplotlib.figure import Figure

from ortholand.lab.experiments.distillation.runs import (
    LEARNING_RATES,
    best_runs,
    final_loss,
    iteration_seconds,
    runs_of,
)
from ortholand.lab.methods import TRAINING_METHODS
from ortholand.lab.study.figures import (
    METHOD_STYLES,
    add_legend,
    draw_by_time_and_iteration,
    plot_method,
)
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import FigureSpec


def draw_training(records: Records) -> Figure:
    """The paper's figure, by time as there, and by iteration: each method's best run."""
    best = best_runs(records, TRAINING_METHODS)
    figure, _ = draw_by_time_and_iteration(
        {method: [run] for method, run in best.items()},
        {method: iteration_seconds(records, run) for method, run in best.items()},
        {
            "test_loss": "test loss",
            "orthogonality_error": r"orthogonality error, $\|W^\top W - I\|$",
        },
        height=7,
    )
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
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test loss in the end")
    axes.minorticks_off()
    add_legend(figure, axes, 3)
    return figure


DISTILLATION_FIGURES = (
    FigureSpec(
        "distillation",
        "A student network with orthogonal weights is trained by each method with its best "
        "learning rate. Top: loss on a test set. Bottom: orthogonality error of all weights "
        "together. Left: by time, which is the iterations times the median time of one, timed in "
        "turn with the other methods. Right: by iteration. Curves end where the runs do.",
        draw_training,
    ),
    FigureSpec(
        "distillation-rates",
        "Loss on the test set at the end of each run, by learning rate. A dot marks the learning "
        "rate with which the method is shown and compared.",
        draw_rates,
    ),
)
