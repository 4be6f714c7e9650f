"""How it is drawn: error and distance by time, and times against p."""

from matplotlib.figure import Figure

from ortholand.lab.experiments.stiefel import claims
from ortholand.lab.experiments.stiefel.runs import STIEFEL_METHODS, TIMED_METHODS, unit_name
from ortholand.lab.study.figures import DOTS, add_legend, label_plainly, plot_method
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
        plot_method(errors, method, time, run.series("error"))
        plot_method(distances, method, time[1:], run.series("to_manifold")[1:])
    settings = records.settings
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
    panels = (
        (single, "time of an iteration", TIMED_METHODS, claims.iteration_time),
        (whole, "time to the accuracy", STIEFEL_METHODS, claims.time_needed),
    )
    for axes, label, methods, seconds in panels:
        for method in methods:
            plot_method(axes, method, sizes, [seconds(records, method, p) for p in sizes], **DOTS)
        axes.set(xscale="log", yscale="log", xlabel="p", ylabel=f"{label}, seconds")
        axes.set_xticks(sizes, [str(p) for p in sizes])
        axes.xaxis.minorticks_off()
        label_plainly(axes.yaxis)
    add_legend(figure, single, 3)
    return figure


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
