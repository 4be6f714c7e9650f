"""How it is drawn: paths and shares of the random problems, paths of the example."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ortholand.lab.experiments.plam.runs import EXPLODED, INFEASIBLE_METHODS, LANDED
from ortholand.lab.study.figures import METHOD_STYLES, plot_method
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import FigureSpec


def draw_problems(records: Records) -> Figure:
    """The paper's figure, and what became of all problems."""
    figure = Figure(figsize=(8, 4.2))
    paths, shares = figure.subplots(1, 2)
    runs = {method: records[f"problems-{method}"] for method in INFEASIBLE_METHODS}
    for run in runs.values():
        _draw_paths(paths, run)
        _draw_shares(shares, run)
    configuration = runs["plam"].configuration
    paths.set(xscale="log", yscale="log", ylim=(1e-9, 1e4), xlim=(1, None))
    paths.set(xlabel="iterations", ylabel=r"to the manifold, $\|X^\top X - I\|$")
    shares.set(xscale="log", xlim=(1, None), ylim=(-3, 103), xlabel="iterations")
    shares.set_ylabel(f"share of {configuration['problems']:,} problems, %")
    shares.legend(loc="center left", fontsize=9)
    handles = paths.lines[:: configuration["drawn"]]
    labels = [METHOD_STYLES[method].label for method in INFEASIBLE_METHODS]
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _draw_paths(axes: Axes, run: Record) -> None:
    """Draw the paths without the start, which a logarithmic axis cannot show."""
    for i in range(run.configuration["drawn"]):
        # What is not finite would not be drawn, and the curve would end before it explodes.
        y = [d if d < EXPLODED else EXPLODED for d in run.series(f"distance_{i}")]
        thin = dict(linewidth=1.1, linestyle="-", alpha=0.8)
        plot_method(axes, run.configuration["method"], run.series("iteration")[1:], y[1:], **thin)


def _draw_shares(axes: Axes, run: Record) -> None:
    method = run.configuration["method"]
    looks: dict[str, Any] = {"exploded": "-", "near": (0, (4, 2))}
    for name, dashes in looks.items():
        y = [100 * share for share in run.series(name)]
        look = dict(linestyle=dashes, linewidth=1.6, label=f"{METHOD_STYLES[method].label}: {name}")
        plot_method(axes, method, run.series("iteration")[1:], y[1:], **look)


def draw_example(records: Records) -> Figure:
    """The entry x = 1 + delta: with PLAM for every alpha; with landing, independent of alpha."""
    figure = Figure(figsize=(8, 4.2))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, method in zip(panels, INFEASIBLE_METHODS, strict=True):
        run = records[f"example-{method}"]
        time = [run.configuration["lr"] * k for k in run.series("iteration")]
        for i, (alpha, _) in enumerate(run.configuration["starts"]):
            axes.plot(time, run.series(f"x_{i}"), linewidth=1.5, **_look(run, alpha))
        axes.set(xlabel="iterations times step", xlim=(0, time[-1]), ylim=(-0.05, 2.0))
        axes.set_title(METHOD_STYLES[method].label, fontsize=10)
    panels[0].set_ylabel(r"$x = 1 + \delta$")
    named = dict(zip(*panels[0].get_legend_handles_labels()[::-1], strict=True))  # each alpha once
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named))
    return figure


def _look(run: Record, alpha: float) -> dict[str, Any]:
    if run.configuration["method"] != "plam":
        return dict(color=METHOD_STYLES[run.configuration["method"]].colour)
    alphas = sorted({a for a, _ in run.configuration["starts"]})
    shade = 0.9 * alphas.index(alpha) / max(1, len(alphas) - 1)
    return dict(color=matplotlib.colormaps["cividis"](shade), label=f"$\\alpha$={alpha:.3g}")


PLAM_FIGURES = (
    FigureSpec(
        "plam",
        "Left: distance to the manifold on ten random problems with p = 2, by PLAM and by "
        "landing. Right: share of all problems on which either has exploded by then, or is near "
        f"the manifold (within {LANDED:g}), as all are at the start.",
        draw_problems,
    ),
    FigureSpec(
        "plam-example",
        "The paper's example: the entry x = 1 + delta of diag(1, x), which is 1 on the manifold, "
        "from 1.1 and from 0.9, by PLAM (left) and by landing (right, where alpha makes no "
        "difference). PLAM explodes or becomes singular for 2 alpha^2 > lam = 1, that is for "
        "alpha > 0.707.",
        draw_example,
    ),
)
