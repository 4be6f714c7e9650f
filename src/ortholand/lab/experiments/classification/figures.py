"""How trainings are drawn: errors by time and by iteration, losses by learning rate."""

from statistics import median

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ortholand.lab.experiments.classification.claims import Tried, best_rates, tried_rates
from ortholand.lab.study.figures import METHOD_STYLES, add_legend, plot_method
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import FigureSpec


def training_figures(
    name: str, network: str, *, curves: str = "", errors: str = "", rate: str = "learning rate"
) -> tuple[FigureSpec, ...]:
    """The figures of an experiment; more on its curves, errors and rates for the captions."""
    return (
        FigureSpec(
            name,
            f"{network}, each method with its best learning rate{curves}. Top: test error. Bottom: "
            f"orthogonality error of all kernels together{errors}. Left: by time, which is the "
            "iterations times the median time of one, timed in turn with the other methods. "
            "Right: by iteration.",
            draw_training,
        ),
        FigureSpec(
            f"{name}-learning-rates",
            f"{network}: mean training loss over the last quarter of the run, against the {rate}. "
            "The lowest point of each method is its rate in the figure above.",
            draw_learning_rates,
        ),
    )


def draw_training(records: Records) -> Figure:
    """Test error and orthogonality error of each method, by time and by iteration."""
    figure = Figure(figsize=(8, 6.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    best = best_rates(records)
    for row, series in enumerate(("test_error", "orthogonality_error")):
        for method, found in best.items():
            _draw_method(grid[row, 0], method, found, series, found.seconds)
            _draw_method(grid[row, 1], method, found, series, 1.0)
        grid[row, 0].set(xscale="log", yscale="log")
    label_plainly(grid[0, 0].yaxis, "{:.3g} %", 100.0)
    label_plainly(grid[1, 0].xaxis)
    grid[0, 0].set_ylabel("test error")
    orthogonality = r"orthogonality error, $\|X^\top X - I\|$"
    grid[1, 0].set(xlabel="time, seconds", ylabel=orthogonality)
    grid[1, 1].set_xlabel("iterations")
    add_legend(figure, grid[0, 0], 3)
    return figure


def _draw_method(axes: Axes, method: str, best: Tried, series: str, unit: float) -> None:
    """The median of the trials, and behind it each of them, if there are several."""
    x = [unit * k for k in best.runs[0].series("iteration")[1:]]
    curves = [run.series(series)[1:] for run in best.runs]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(x, curve, color=METHOD_STYLES[method].colour, alpha=0.3, linewidth=0.8)
    plot_method(axes, method, x, [median(values) for values in zip(*curves, strict=True)])


def draw_learning_rates(records: Records) -> Figure:
    """The training loss in the end, against the learning rate: which was best, and how clearly."""
    figure = Figure(figsize=(8, 4.4))
    axes = figure.subplots()
    rates: set[float] = set()
    for method, entries in tried_rates(records).items():
        plot_method(axes, method, [e.lr for e in entries], [e.loss for e in entries])
        axes.lines[-1].set_marker("o")
        rates.update(entry.lr for entry in entries)
    axes.set(xscale="log", xlabel="learning rate", yscale="log", ylabel="training loss in the end")
    axes.set_xticks(sorted(rates), [f"{lr:.3g}" for lr in sorted(rates)])
    axes.xaxis.set_minor_locator(NullLocator())
    label_plainly(axes.yaxis)
    add_legend(figure, axes, 3)
    return figure


def label_plainly(axis: Axis, form: str = "{:g}", factor: float = 1.0) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, ...; over many decades with the powers of 10 alone."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: form.format(factor * x)))
    axis.set_minor_formatter(NullFormatter())
