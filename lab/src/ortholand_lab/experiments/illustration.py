"""Trajectories for p = 2 (the paper's figure 1): landing, a retraction, and the field.

The matrices ``[[a, b], [-b, a]]``, multiples of rotations, are a plane that no method here leaves:
the relative gradient is a multiple of ``[[0, 1], [-1, 0]]``, which commutes with them, and
``X X^T - I`` is a multiple of the identity. So the picture, the paper's axes (1, 1) and (1, 2), is
no projection: it shows all there is. The rotations are its unit circle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor, nn

from ortholand.geometry import distance, gram_residual, relative_gradient_times_x
from ortholand_lab.experiments.descents import iterate, make_optimizer
from ortholand_lab.methods import PAPER_RULE
from ortholand_lab.problems import Procrustes
from ortholand_lab.study.figures import METHOD_STYLES, add_legend, listed, plot_method
from ortholand_lab.study.records import Record, Records, Result
from ortholand_lab.study.spec import (
    EXPERIMENT_PRESETS,
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
)

# What is run.


LANDING, FIELD, SINGULAR = "landing", "field", "landing-singular"
RETRACTION = "exponential-textbook"
AWAY = ("landing-inside", "landing-outside")  # runs of landing that start off the manifold


@dataclass(frozen=True)
class IllustrationSettings:
    """Settings of our choice: the paper shows the picture without giving numbers."""

    start: float = 0.0  # angle of the rotation X_0
    target: float = 2.2  # angle of the optimum X_*
    inside: float = 0.85  # X = inside * rotation: starts off the manifold
    outside: float = 1.15
    lr: float = 0.4
    lam: float = 1.0
    eps: float = 0.5
    iterations: int = 60
    radii: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)  # where arrows are drawn
    directions: int = 32


@dataclass(frozen=True)
class Trajectory:
    """One run, from ``radius`` times the rotation by ``start``."""

    settings: IllustrationSettings
    method: str
    start: float
    radius: float


def plan(settings: IllustrationSettings) -> list[Unit[Trajectory | IllustrationSettings]]:
    """The field, the two runs of the paper's figure, and three of landing from elsewhere."""
    paths = {
        LANDING: Trajectory(settings, LANDING, settings.start, 1.0),
        RETRACTION: Trajectory(settings, RETRACTION, settings.start, 1.0),
        # From the other side of the optimum, where they do not hide the paper's two paths.
        AWAY[0]: Trajectory(settings, LANDING, settings.target + 2.6, settings.inside),
        AWAY[1]: Trajectory(settings, LANDING, settings.target + 1.7, settings.outside),
        SINGULAR: Trajectory(settings, LANDING, settings.start, 0.0),
    }
    return [
        Unit(FIELD, settings, 1),
        *(Unit(name, path, settings.iterations) for name, path in paths.items()),
    ]


def run(task: Trajectory | IllustrationSettings, context: Context) -> Result:
    """Follow a path, or measure the field on its grid. Nothing here is random."""
    if isinstance(task, Trajectory):
        return run_trajectory(task, context)
    return run_field(task, context)


def run_trajectory(task: Trajectory, context: Context) -> Result:
    """Iterate, and record every iterate."""
    settings, problem = task.settings, make_problem(task.settings.target, context)
    X = nn.Parameter(task.radius * rotation(task.start, context))
    rule = PAPER_RULE if task.radius > 0 else None  # no meaning outside the safe step's ball
    options = dict(lam=settings.lam, eps=settings.eps, safe_step=rule)
    optimizer = make_optimizer(X, task.method, settings.lr, **options)
    iterates = [X.detach().clone()]
    for _ in range(settings.iterations):
        iterate(X, problem, optimizer)
        iterates.append(X.detach().clone())
        context.tick(1)
    return Result(measure(torch.stack(iterates), problem), {})


def measure(X: Tensor, problem: Procrustes) -> dict[str, list[float]]:
    """Iterates ``(k, 2, 2)`` in the plane of the figure, and how far they are."""
    return {
        "x": X[:, 0, 0].tolist(),
        "y": X[:, 0, 1].tolist(),
        "out_of_plane": (X - in_plane(X[:, 0, 0], X[:, 0, 1])).norm(dim=(-2, -1)).tolist(),
        "to_manifold": distance(X).tolist(),
        "to_optimum": (X - problem.solution(determinant=1)).norm(dim=(-2, -1)).tolist(),
    }


def run_field(settings: IllustrationSettings, context: Context) -> Result:
    """Both parts of the landing field at every point of the grid, and their scalar product."""
    turns = torch.arange(settings.directions, dtype=torch.float64)
    angles = 2 * math.pi * turns / settings.directions
    radii = torch.tensor(settings.radii, dtype=torch.float64)
    grid = torch.stack([torch.cos(angles), torch.sin(angles)])[:, None] * radii[:, None]
    X = in_plane(*grid.flatten(1).to(context.device))
    tangent = relative_gradient_times_x(X, make_problem(settings.target, context).grad(X))
    normal = settings.lam * X @ gram_residual(X)
    drawn = {"": X, "tangent_": tangent, "normal_": normal}
    columns = {f"{name}{c}": M[:, 0, j] for name, M in drawn.items() for j, c in enumerate("xy")}
    columns["scalar_product"] = (tangent * normal).sum((-2, -1))
    columns["product_of_norms"] = tangent.norm(dim=(-2, -1)) * normal.norm(dim=(-2, -1))
    context.tick(1)
    return Result({name: column.tolist() for name, column in columns.items()}, {})


def in_plane(x: Tensor, y: Tensor) -> Tensor:
    """The matrices ``[[x, y], [-y, x]]``."""
    return torch.stack([torch.stack([x, y], -1), torch.stack([-y, x], -1)], -2)


def rotation(angle: float, context: Context) -> Tensor:
    """The rotation by an angle, which is also its angle in the figure."""
    at = torch.tensor(angle, dtype=torch.float64, device=context.device)
    return in_plane(at.cos(), at.sin())


def make_problem(target: float, context: Context) -> Procrustes:
    """``f(X) = ||X - X_*||^2 / 2``: on the circle, 2 - 2 cos of the angle to go."""
    optimum = rotation(target, context)
    return Procrustes(torch.eye(2, dtype=optimum.dtype, device=optimum.device), optimum)


# What is claimed.


ARRIVED = 1e-6  # a distance to the optimum, or to the manifold, that counts as there
LEFT = 1e-2  # a distance to the manifold that is seen in the figure
ROUNDING = 1e-13  # of float64, with room for some tens of operations


def both_converge(records: Records) -> Finding:
    """The caption of the paper's figure."""
    ends = {m: records[m].series("to_optimum")[-1] for m in (LANDING, RETRACTION)}
    start = records[LANDING].series("to_optimum")[0]
    measured = f"from {start:.2g} to: {listed(ends, '.1e')}"
    return Finding.of(measured, max(ends.values()) < ARRIVED)


def only_landing_leaves(records: Records) -> Finding:
    """Away from the manifold and back on it; the retraction on it all the time."""
    landing, retraction = (records[m].series("to_manifold") for m in (LANDING, RETRACTION))
    measured = (
        f"landing at most {max(landing):.2g}, in the end {landing[-1]:.1e}; "
        f"retraction at most {max(retraction):.1e}"
    )
    away_and_back = max(landing) > LEFT and landing[-1] < ARRIVED
    return Finding.of(measured, away_and_back and max(retraction) < ARRIVED)


def parts_are_orthogonal(records: Records) -> Finding:
    """Whether the parts are orthogonal wherever there is an arrow and neither vanishes."""
    field = records[FIELD]
    pairs = list(zip(field.series("scalar_product"), field.series("product_of_norms"), strict=True))
    cosines = [abs(product) / size for product, size in pairs if size > ARRIVED]
    largest = max(cosines, default=math.inf)
    measured = (
        f"cosine of their angle at most {largest:.1e}, at {len(cosines)} of {len(pairs)} points; "
        "one of them vanishes at the others"
    )
    return Finding.of(measured, largest < ROUNDING)


def lands_from_anywhere(records: Records) -> Finding:
    """As printed: it lands from every start, hence from a singular matrix too."""
    runs = [records[name] for name in (*AWAY, SINGULAR)]
    return Finding.of(_from_to(runs), all(_lands(run) for run in runs))


def lands_from_full_rank(records: Records) -> Finding:
    """As corrected: it lands from full rank; a singular matrix is at distance 1 or more."""
    runs, singular = [records[name] for name in AWAY], records[SINGULAR]
    stays = min(singular.series("to_manifold")) >= 1
    measured = f"{_from_to(runs)}; singular: {_from_to([singular])}"
    return Finding.of(measured, stays and all(_lands(run) for run in runs))


def _lands(run: Record) -> bool:
    distances = run.series("to_manifold")
    return distances[0] > LEFT and distances[-1] < ARRIVED


def _from_to(runs: Sequence[Record]) -> str:
    ends = [(run.series("to_manifold")[0], run.series("to_manifold")[-1]) for run in runs]
    return "; ".join(f"from {first:.2g} to {last:.2g}" for first, last in ends)


def picture_is_complete(records: Records) -> Finding:
    """Check that drawing two of four coefficients hides nothing."""
    names = (LANDING, RETRACTION, *AWAY)
    furthest = max(max(records[name].series("out_of_plane")) for name in names)
    return Finding.of(f"at most {furthest:.1e} out of the plane", furthest < ROUNDING)


CLAIMS = (
    Claim.of_paper(
        "Landing and the retraction both converge to the optimum X_* "
        f"(distance below {ARRIVED:.0e}).",
        "Both methods start from X_0 and converge to the correct solution X_*.",
        both_converge,
    ),
    Claim.of_paper(
        f"The retraction stays on the manifold (within {ARRIVED:.0e}); landing leaves it on the "
        "way and in the end is on it.",
        "The retraction method stays on O_p (black dotted line) while the landing algorithm can "
        "deviate.",
        only_landing_leaves,
    ),
    Claim.of_paper(
        "The two parts of the landing field, tangent and normal, are orthogonal wherever an "
        "arrow is drawn, on the manifold and off it.",
        "it is always orthogonal to the Riemannian gradient of f",
        parts_are_orthogonal,
    ),
    Claim.of_paper(
        "Landing arrives on the manifold regardless of its start: from inside, from outside, "
        "and from the singular matrix 0.",
        "the flow converges to the orthogonal manifold regardless of initialization",
        lands_from_anywhere,
        erratum="singular",
    ),
    Claim(
        "It arrives on the manifold from the starts of full rank, inside and outside; a "
        "singular matrix stays singular.",
        "correction",
        lands_from_full_rank,
    ),
    Claim.beyond(
        "The picture hides nothing: no iterate leaves the plane of the multiples of rotations.",
        picture_is_complete,
    ),
)


# How it is drawn.


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


ILLUSTRATION = Study(
    name="illustration",
    title="Trajectories for p = 2: landing and a retraction",
    paper_figure="Figure 1",
    summary=(
        "Gradient descent on f(X) = ||X - X_*||^2 / 2 for 2 x 2 matrices, X_* a rotation, by the "
        "landing algorithm and by the exponential retraction from the same rotation X_0; and by "
        "landing from two starts off the manifold. The paper shows such a picture without its "
        "numbers: problem, starts and step are ours, with a step long enough to be seen. All "
        "iterates are multiples of rotations, so the two coefficients that are drawn say all. "
        "Nothing is random and nothing is reduced: all presets are the same."
    ),
    settings=dict.fromkeys(EXPERIMENT_PRESETS, IllustrationSettings()),
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    seconds=dict.fromkeys(EXPERIMENT_PRESETS, 2),
)
