"""What is run: paths through the plane of the figure, and the landing field on it.

The matrices ``[[a, b], [-b, a]]``, multiples of rotations, are a plane that no method here leaves:
the relative gradient is a multiple of ``[[0, 1], [-1, 0]]``, which commutes with them, and
``X X^T - I`` is a multiple of the identity. So the picture, the paper's axes (1, 1) and (1, 2), is
no projection: it shows all there is. The rotations are its unit circle.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ortholand.geometry import distance, gram_residual, relative_gradient_times_x
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.problems import Procrustes

LANDING, RETRACTION, FIELD, SINGULAR = "landing", "exponential", "field", "landing-singular"
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
    problem = make_problem(task.settings.target, context)
    X = nn.Parameter(task.radius * rotation(task.start, context))
    optimizer = make_optimizer(X, task)
    iterates = [X.detach().clone()]
    for _ in range(task.settings.iterations):
        X.grad = problem.grad(X.detach())
        optimizer.step()
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


def make_optimizer(X: nn.Parameter, task: Trajectory) -> LandingSGD | RiemannianSGD:
    """The optimizer of a method."""
    settings = task.settings
    if task.method == RETRACTION:
        return RiemannianSGD([X], lr=settings.lr, retraction=task.method)
    rule = "frobenius" if task.radius > 0 else None  # no meaning outside the safe step's ball
    return LandingSGD([X], lr=settings.lr, lam=settings.lam, eps=settings.eps, safe_step=rule)
