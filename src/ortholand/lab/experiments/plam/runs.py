"""What is run: random problems with p = 2, and the paper's example of a flow that explodes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ortholand.geometry import distance
from ortholand.lab.methods import PAPER_RULE
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import marks
from ortholand.optim import LandingSGD
from ortholand.optim.infeasible import PLAM as PlamSGD  # noqa: N811

INFEASIBLE_METHODS = ("plam", "landing")
EXPLODED = 1e6  # a distance to the manifold from which PLAM does not return
LANDED = 1e-3  # a distance to the manifold that counts as on it


@dataclass(frozen=True)
class PlamSettings:
    """The paper's settings are the defaults; it does not say how many iterations."""

    problems: int = 1_000  # the paper has 10
    drawn: int = 10  # of these problems, in the figure
    iterations: int = 40_000
    lr: float = 1e-3
    lam: float = 1.0
    eps: float = 0.5
    # The middle one is the corrected boundary, 1 is the printed one.
    alphas: tuple[float, ...] = (0.5, 0.6, math.sqrt(0.5), 0.8, 0.9, 1.0, 1.2)
    deltas: tuple[float, ...] = (0.1, -0.1)
    example_lr: float = 0.01
    example_iterations: int = 1_500


@dataclass(frozen=True)
class PlamRun:
    """A method on many matrices at once."""

    method: str
    iterations: int
    lr: float
    lam: float
    eps: float


@dataclass(frozen=True)
class RandomProblems(PlamRun):
    """A method on random problems, of which some are drawn."""

    problems: int
    drawn: int


@dataclass(frozen=True)
class Example(PlamRun):
    """A method on the paper's example, for pairs of alpha and delta."""

    starts: tuple[tuple[float, float], ...]


def plan(settings: PlamSettings) -> list[Unit[RandomProblems | Example]]:
    """Both parts, with both methods."""
    s, units = settings, []
    starts = tuple((alpha, delta) for delta in s.deltas for alpha in s.alphas)
    for method in INFEASIBLE_METHODS:
        problems = RandomProblems(method, s.iterations, s.lr, s.lam, s.eps, s.problems, s.drawn)
        example = Example(method, s.example_iterations, s.example_lr, s.lam, s.eps, starts)
        units.append(Unit(f"problems-{method}", problems, problems.iterations))
        units.append(Unit(f"example-{method}", example, example.iterations))
    return units


def run(task: RandomProblems | Example, context: Context) -> Result:
    """Do one unit of work."""
    if isinstance(task, Example):
        return run_example(task, context)
    return run_problems(task, context)


def run_problems(task: RandomProblems, context: Context) -> Result:
    """Distances of the problems to be drawn, and what has become of all so far."""
    start = torch.eye(2, dtype=torch.float64, device=context.device).repeat(task.problems, 1, 1)
    rows, wanted, largest = [], set(marks(task.iterations)), distance(start)
    gradient = random_gradient(task.problems, context)
    for k, X in iterates(task, start, gradient, context):
        d = distance(X)
        torch.maximum(largest, d, out=largest)
        if k in wanted:
            shares = [float(which.double().mean()) for which in (has_exploded(d), d < LANDED)]
            rows.append((k, *shares, *d[: task.drawn].tolist()))
    names = ("iteration", "exploded", "near", *(f"distance_{i}" for i in range(task.drawn)))
    return Result.of_rows(names, rows, largest_distance=float(largest.max()))


def run_example(task: Example, context: Context) -> Result:
    """The entry x = 1 + delta of every start, now and then."""
    alphas, deltas = torch.tensor(task.starts, dtype=torch.float64, device=context.device).mT
    start = torch.diag_embed(torch.stack([torch.ones_like(deltas), 1 + deltas], -1))
    wanted = {*range(0, task.iterations, max(1, task.iterations // 250)), task.iterations}
    path = iterates(task, start, example_gradient(alphas), context)
    rows = [(k, *X[:, 1, 1].tolist()) for k, X in path if k in wanted]
    names = ("iteration", *(f"x_{i}" for i in range(len(task.starts))))
    return Result.of_rows(names, rows)


def iterates(
    task: PlamRun, start: Tensor, gradient: Callable[[Tensor], Tensor], context: Context
) -> Iterator[tuple[int, Tensor]]:
    """Every iterate of a method on a batch of matrices, each matrix by itself."""
    X = nn.Parameter(start)
    # PLAM as it is; landing with its safe step.
    shared = dict(lr=task.lr, lam=task.lam, view="kernel")
    plam = task.method == "plam"
    optimizer = (
        PlamSGD([X], **shared)
        if plam
        else LandingSGD([X], eps=task.eps, safe_step=PAPER_RULE, **shared)
    )
    yield 0, X.detach()
    for k in range(1, task.iterations + 1):
        X.grad = gradient(X.detach())
        optimizer.step()
        context.tick(1)
        yield k, X.detach()


def random_gradient(problems: int, context: Context) -> Callable[[Tensor], Tensor]:
    """Gradients of ``||A X - B||^2``, A and B standard normal. A is on the left here."""
    generator = torch.Generator().manual_seed(context.seed)
    A, B = torch.randn(2, problems, 2, 2, generator=generator, dtype=torch.float64)
    gram, target = (M.to(context.device) for M in (2 * A.mT @ A, 2 * A.mT @ B))
    return lambda X: torch.baddbmm(target, gram, X, beta=-1)


def example_gradient(alphas: Tensor) -> Callable[[Tensor], Tensor]:
    """Gradients of ``||alpha X - B||^2``, B = diag(1, 0)."""
    B = torch.diag(torch.tensor([1.0, 0.0], dtype=alphas.dtype, device=alphas.device))
    factor = alphas[:, None, None]
    return lambda X: 2 * factor * (factor * X - B)


def has_exploded(d: Tensor) -> Tensor:
    """Whether a matrix is far from the manifold, or no longer a number."""
    return ~(d < EXPLODED)
