"""What is run: steps from a random rotation, timed in turn at each size.

A step begins with the Euclidean gradient G and ends with the next iterate. Retractions are timed
in three forms: as a short program has them, the formulas of the paper's table 1 by torch's
functions; as carefully as this library writes them; and as a whole step of an optimizer.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ortholand.fields import landing_field, penalty_field
from ortholand.geometry import polar_projection, random_orthogonal, relative_gradient
from ortholand.geometry.manifold import orthonormal_factor
from ortholand.geometry.matrices import identity_like
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import Action, time_in_turn
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.retractions import Retraction, retract

TEXTBOOK, CAREFUL, OPTIMIZER = "textbook", "careful", "optimizer"  # forms of a step
WARM_UP = 1  # repetitions that do not count


@dataclass(frozen=True)
class SpeedSettings:
    """The paper uses 500 repetitions on a GPU, and does not say how long the steps are."""

    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1000, 2000)
    repetitions: int = 500  # at most
    least_repetitions: int = 7
    work: float = 2e10  # fewer repetitions where they times p^3 would exceed it
    lr: float = 0.1
    lam: float = 1.0


@dataclass(frozen=True)
class SpeedTask:
    """Steps of all methods at one size, timed in turn."""

    p: int
    settings: SpeedSettings  # of the whole run: claims are about all its sizes

    @property
    def repetitions(self) -> int:
        """The number of repetitions, fewer for large matrices."""
        by_work = int(self.settings.work / self.p**3)
        return min(self.settings.repetitions, max(self.settings.least_repetitions, by_work))


def unit_name(p: int) -> str:
    """Name of the unit of a size."""
    return f"p-{p}"


def plan(settings: SpeedSettings) -> list[Unit[SpeedTask]]:
    """A unit for each size."""
    tasks = [SpeedTask(p, settings) for p in settings.sizes]
    return [Unit(unit_name(t.p), t, WARM_UP + t.repetitions, timed=True) for t in tasks]


def run(task: SpeedTask, context: Context) -> Result:
    """Time every action in turn, as often as requested."""
    seconds = time_in_turn(
        make_actions(task, context),
        repetitions=task.repetitions,
        warm_up=WARM_UP,
        device=context.device,
        tick=context.tick,
    )
    return Result(seconds, {})


def make_actions(task: SpeedTask, context: Context) -> dict[str, Action]:
    """Steps from a random rotation with a random gradient, whose singular values are about 1."""
    X = random_orthogonal(task.p, task.p, seed=context.seed)
    generator = torch.Generator().manual_seed(context.seed + 1)
    G = torch.randn(task.p, task.p, generator=generator) / math.sqrt(task.p)
    X, G = X.to(context.device), G.to(context.device)
    lr, lam = task.settings.lr, task.settings.lam
    actions = {
        "landing": Action(lambda: X - lr * landing_field(X, G, lam)),
        "landing-field": Action(lambda: landing_field(X, G, lam)),
        "penalty-field": Action(lambda: penalty_field(X, G, lam)),
        form_name(OPTIMIZER, "landing"): optimizer_action(LandingSGD, X, G, lr=lr, lam=lam),
    }
    for name, textbook in TEXTBOOK_RETRACTIONS.items():
        for form, function in ((TEXTBOOK, textbook), (CAREFUL, partial(retract, method=name))):
            actions[form_name(form, name)] = Action(partial(riemannian_step, function, X, G, lr))
        actions[form_name(OPTIMIZER, name)] = optimizer_action(
            RiemannianSGD, X, G, lr=lr, retraction=name
        )
    return actions


def form_name(form: str, method: str) -> str:
    """Name of the action for a step of a method in a form; landing has only one formula."""
    return "landing" if method == "landing" and form != OPTIMIZER else f"{form}-{method}"


def riemannian_step(retraction: Retraction, X: Tensor, G: Tensor, lr: float) -> Tensor:
    """A step of Riemannian gradient descent."""
    return retraction(X, -lr * relative_gradient(X, G))


def optimizer_action(
    kind: type[LandingSGD] | type[RiemannianSGD], X: Tensor, G: Tensor, **options: float | str
) -> Action:
    """An optimizer's step, each time from the same X, because its cost depends on its length."""
    parameter = nn.Parameter(X.clone())
    parameter.grad = G.clone()
    optimizer = kind([parameter], **options)  # pyrefly: ignore
    return Action(optimizer.step, partial(parameter.data.copy_, X))


# The paper's table 1, as a short program has it.


def exponential(X: Tensor, A: Tensor) -> Tensor:
    """``exp(A) X``."""
    return torch.linalg.matrix_exp(A) @ X


def polar(X: Tensor, A: Tensor) -> Tensor:
    """Nearest orthogonal matrix to ``X + A X``, by its singular value decomposition."""
    return polar_projection(X + A @ X)


def cayley(X: Tensor, A: Tensor) -> Tensor:
    """``(I - A/2)^-1 (I + A/2) X``."""
    identity = identity_like(A)
    return torch.linalg.solve(identity - A / 2, (identity + A / 2) @ X)


def qr(X: Tensor, A: Tensor) -> Tensor:
    """Q of ``X + A X`` by Householder's method."""
    return orthonormal_factor(X + A @ X)


TEXTBOOK_RETRACTIONS: dict[str, Retraction] = {
    retraction.__name__: retraction for retraction in (exponential, polar, cayley, qr)
}
