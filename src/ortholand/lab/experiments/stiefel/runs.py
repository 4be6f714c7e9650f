"""What is run: PCA by every method at every size, in float32, and the timing of iterations.

C is diagonal, so that its gradient costs little compared with a step of any method.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ortholand.lab.rules  # noqa: F401  (registers "tight")
from ortholand.geometry import distance, random_orthogonal
from ortholand.geometry.derivatives import relative_gradient_times_x
from ortholand.geometry.manifold import orthonormal_factor
from ortholand.lab.experiments.descents import follow, iterate, make_optimizer
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import TIMING, Action, Timing, time_runs, timing_unit
from ortholand.problems import PCA

LANDING, AFTER = "landing", "landing-after"
FREE, TIGHT = "landing-frobenius", "landing-tight"
STIEFEL_LANDINGS = {
    LANDING: dict(safe_step="spectral", attraction="coupled"),
    AFTER: dict(safe_step="spectral", attraction="after"),
    FREE: dict(safe_step="frobenius", attraction="coupled"),
    TIGHT: dict(safe_step="tight", attraction="coupled"),
}
STIEFEL_RETRACTIONS = ("qr", "cayley")
STIEFEL_METHODS = (*STIEFEL_LANDINGS, *STIEFEL_RETRACTIONS)
HOUSEHOLDER, GRADIENT = "qr-householder", "gradient-dense"  # timed only
TIMED_METHODS = (*STIEFEL_METHODS, HOUSEHOLDER, GRADIENT)
# The iterations that are timed, each with the last of those that it stands for. Landing's first
# ones pay for better bounds of the safe step; those of other methods are all alike.
LANDING_TIMED = {2: 3, 6: 8, 12: 20, 30: math.inf}
OTHERS_TIMED = {6: math.inf}


@dataclass(frozen=True)
class StiefelSettings:
    """Settings of our choice: the paper has no such experiment."""

    n: int = 5_000
    sizes: tuple[int, ...] = (100, 200, 500, 1000)  # p
    gap: float = 0.25  # between the eigenvalues that are looked for and the others
    iterations: int = 100
    every: int = 2  # iterations between records
    accuracy: float = 1e-3  # subspace error that counts as there
    lr: float = 1.0
    lam: float = 0.5
    eps: float = 0.5
    repetitions: int = 15  # at the largest p, and accordingly more at smaller ones


@dataclass(frozen=True)
class StiefelRun:
    """A method at a size. Retractions ignore lam and eps."""

    settings: StiefelSettings
    method: str
    p: int


@dataclass(frozen=True)
class TimedIteration(StiefelRun):
    """One iteration of a run."""

    iteration: int = 1


def iterations_timed(method: str) -> dict[int, float]:
    """The timed iterations of a method, each with the last iteration that it stands for."""
    return LANDING_TIMED if method in (LANDING, AFTER) else OTHERS_TIMED


def unit_name(method: str, p: int) -> str:
    """Name of the run of a method, or of the timing, at a size."""
    return f"{method}-p-{p}"


def plan(settings: StiefelSettings) -> list[Unit[Any]]:
    """Every method at every size, and the timing at every size."""
    units = []
    for p in sorted(settings.sizes, reverse=True):  # the last ones to run side by side are short
        runs = {method: StiefelRun(settings, method, p) for method in STIEFEL_METHODS}
        units += [Unit(unit_name(m, p), run, settings.iterations) for m, run in runs.items()]
        repetitions = settings.repetitions * max(settings.sizes) // p
        iterations = [
            TimedIteration(settings, m, p, k) for m in TIMED_METHODS for k in iterations_timed(m)
        ]
        timing = Timing(tuple(iterations), warm_up=1, repetitions=repetitions)
        units.append(timing_unit(timing, unit_name(TIMING, p)))
    return units


def run_unit(task: StiefelRun | Timing[TimedIteration], context: Context) -> Result:
    """Iterate in float32, measuring in float64; or time single iterations in turn."""
    if isinstance(task, Timing):
        return time_runs(task, timed_iteration, context)
    referee = make_problem(task, context, torch.float64)
    X, advance = begin(task, context)

    def measure() -> dict[str, float]:
        Y = X.detach().double()
        return {
            "error": float(referee.subspace_error(Y)),
            "to_manifold": float(distance(Y)),
            "spectral_distance": float(distance(Y, spectral=True)),
        }

    iterations, every = task.settings.iterations, task.settings.every
    marks = sorted({*range(0, iterations, every), iterations})
    return Result(follow(marks, advance, measure, context.tick), {})


def timed_iteration(run: TimedIteration, context: Context) -> Action:
    """Gradient and step, each time from the same iterate; or a gradient with a dense matrix."""
    n = run.settings.n
    if run.method == GRADIENT:
        generator = torch.Generator().manual_seed(context.seed)
        dense = torch.randn(n, n, generator=generator).to(context.device)
        return Action(partial(PCA(dense, run.p).grad, start(run, context)))
    X, advance = begin(replace(run, method="qr") if run.method == HOUSEHOLDER else run, context)
    for _ in range(run.iteration - 1):
        advance()
    X0 = X.detach().clone()
    if run.method == HOUSEHOLDER:
        problem = make_problem(run, context, torch.float32)
        return Action(lambda: householder_step(X0, problem.grad(X0), run.settings.lr))
    return Action(advance, partial(X.data.copy_, X0))


def begin(run: StiefelRun, context: Context) -> tuple[nn.Parameter, Callable[[], None]]:
    """The start of a run, and the function that makes its next iterate."""
    settings, problem = run.settings, make_problem(run, context, torch.float32)
    X = nn.Parameter(start(run, context))
    options = dict(lam=settings.lam, eps=settings.eps, **STIEFEL_LANDINGS.get(run.method, {}))
    return X, partial(iterate, X, problem, make_optimizer(X, run.method, settings.lr, **options))


def make_problem(run: StiefelRun, context: Context, dtype: torch.dtype) -> PCA:
    """The problem of a size, on the device."""
    n = run.settings.n
    problem = PCA.with_gap(n, run.p, gap=run.settings.gap, diagonal=True, dtype=dtype)
    return PCA(problem.C.to(context.device), run.p)


def start(run: StiefelRun, context: Context) -> Tensor:
    """A random start, the same for all methods."""
    return random_orthogonal(run.settings.n, run.p, seed=context.seed).to(context.device)


def householder_step(X: Tensor, G: Tensor, lr: float) -> Tensor:
    """The QR retraction as in a short program: by LAPACK's QR, without an optimizer."""
    return orthonormal_factor(X - lr * relative_gradient_times_x(X, G))
