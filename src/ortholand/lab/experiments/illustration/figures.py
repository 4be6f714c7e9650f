"""How it is drawn: the plane with its circle, field and paths, and distances to the circle."""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from ortholand.lab.experiments.illustration.runs import AWAY, FIELD, LANDING, RETRACTION
from ortholand.lab.study.figures import METHOD_STYLES, add_legend, plot_method
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import FigureSpec


def draw(records: Records) -> Figure:
    """The circle, the field and the paths, and how far the iterates are from the circle."""
    figure = Figure(figsize=(8.4, 4.9))
    plane, distances = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _draw_plane(plane, records[FIELD])
    for name in (LANDING, RETRACTION, *AWAY):
        _draw_path(plane, name, records[name].series("x"), records[name].series("y"))
        errors = records[name].series("to_manifold")
        # The start of a run on the manifold has no place on a logarithmic axis.
        shown = [(k, d) for k, d in enumerate(errors) if d > 0]
        _draw_path(distances, name, *zip(*shown, strict=True))
        distances.lines[-1].set(markersize=2)
    _mark_ends(plane, records[FIELD].configuration)
    distances.set(yscale="log", xlabel="iteration", ylabel=r"$\|X^\top X - I\|$")
    distances.set_ylim(bottom=1e-18)
    add_legend(figure, plane, 4)
    return figure


def _draw_plane(axes: Axes, field: Record) -> None:
    """The manifold, and the direction in which landing moves. Longer arrows would overlap."""
    axes.add_patch(Circle((0, 0), 1, fill=False, linestyle=":", linewidth=1.6, color="black"))
    columns = ("x", "y", "tangent_x", "tangent_y", "normal_x", "normal_y")
    x, y, tx, ty, nx, ny = (torch.tensor(field.series(name)) for name in columns)
    u, v = -(tx + nx), -(ty + ny)
    shorten = (u.square() + v.square()).sqrt().clamp(min=1e-12).pow(-0.5)
    arrows = dict(color="#a8a8a8", width=0.0035, angles="xy", scale_units="xy", scale=9)
    axes.quiver(x, y, shorten * u, shorten * v, zorder=1, **arrows)
    axes.set(aspect="equal", xlim=(-1.42, 1.42), ylim=(-1.42, 1.42))
    axes.set(xlabel="coefficient (1, 1)", ylabel="coefficient (1, 2)")
    axes.grid(False)


def _draw_path(axes: Axes, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    if name in AWAY:
        colour, marker = METHOD_STYLES[LANDING].colour, "v" if name == AWAY[0] else "^"
        label = f"landing, from {name.removeprefix('landing-')}"
        axes.plot(x, y, color=colour, linewidth=0.8, marker=marker, markersize=3.5, label=label)
        return
    plot_method(axes, name, x, y, linewidth=1.5, marker="o", markersize=4)


def _mark_ends(axes: Axes, settings: Mapping[str, float]) -> None:
    """Names for the start and the optimum, inside the circle where there is room."""
    for end, marker, name in (("start", "ks", "$X_0$"), ("target", "k*", "$X_*$")):
        x, y = math.cos(settings[end]), math.sin(settings[end])
        axes.plot(x, y, marker, markersize=9, zorder=4)
        axes.text(0.8 * x, 0.8 * y, name, ha="center", va="center", fontsize=13, zorder=5)


FIGURES = (
    FigureSpec(
        "illustration",
        "Left: coefficients (1, 1) and (1, 2) of the iterates, 2 x 2 matrices. The dotted "
        "circle is the manifold; arrows show where landing moves (minus the field, long ones "
        "shortened). The retraction stays on the circle; landing leaves it and lands again, "
        "also from starts inside and outside. Right: distance of the same iterates to the "
        "manifold.",
        draw,
    ),
)
