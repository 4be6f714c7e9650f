"""What is run: a descent by every method in every precision, and the timing of their iterations.

Every run starts at the identity, of determinant +1. Neither the safe step nor a retraction ever
lets a determinant change its sign, so the optimum is the best matrix of determinant +1.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ortholand.fields import landing_field, landing_from_relative
from ortholand.geometry import distance, relative_gradient, sym
from ortholand.lab.experiments.descents import follow, iterate, make_optimizer
from ortholand.lab.methods import PAPER_RULE
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import Action, Timing, marks, time_runs, timing_unit
from ortholand.problems import Procrustes
from ortholand.retractions import RETRACTIONS, retract
from ortholand.safe_step import safe_step_size

LANDINGS = ("landing", "landing-momentum", "landing-unscaled")
PROCRUSTES_METHODS = ("landing", *RETRACTIONS)  # that the paper compares
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class ProcrustesSettings:
    """The paper's settings are the defaults; it does not say how many iterations."""

    p: int = 40
    iterations: int = 40_000
    retraction_share: float = 1.0  # part of these iterations that the retractions are run for
    extra_iterations: int = 10_000  # of the runs that are not in the paper's figure
    lr: float = 0.1
    lam: float = 1.0
    eps: float = 0.5
    momentum: float = 0.9
    warm_up: int = 200  # iterations before those that are timed in turn
    repetitions: int = 200  # of the iterations that are timed in turn


@dataclass(frozen=True)
class ProcrustesRun:
    """A method in a precision. Retractions ignore lam and eps."""

    settings: ProcrustesSettings
    method: str
    dtype: str
    iterations: int
    momentum: float
    scaled: bool  # f = ||XA - B||^2 / p, or as the paper prints it, without 1 / p
    plain: bool = False  # to be timed by the paper's formula, without the optimizer


def unit_name(method: str, dtype: str) -> str:
    """Name of the run of a method in a precision."""
    return f"{method}-{dtype}"


def plan(settings: ProcrustesSettings) -> list[Unit[Any]]:
    """Every method in every precision, and their timing, including the plain formulas."""
    methods = (*LANDINGS, *RETRACTIONS)
    runs = [_make_run(settings, method, dtype) for dtype in DTYPES for method in methods]
    formulas = [replace(run, plain=True) for run in runs if run.method in PROCRUSTES_METHODS]
    timing = Timing((*runs, *formulas), settings.warm_up, settings.repetitions)
    units = [Unit(unit_name(run.method, run.dtype), run, run.iterations) for run in runs]
    return [*units, timing_unit(timing)]


def _make_run(settings: ProcrustesSettings, method: str, dtype: str) -> ProcrustesRun:
    iterations = settings.iterations if method == "landing" else settings.extra_iterations
    if method in RETRACTIONS:
        iterations = math.ceil(settings.retraction_share * settings.iterations)
    momentum = settings.momentum if method == "landing-momentum" else 0.0
    scaled = method != "landing-unscaled"
    return ProcrustesRun(settings, method, dtype, iterations, momentum, scaled)


def run_unit(task: ProcrustesRun | Timing[ProcrustesRun], context: Context) -> Result:
    """Iterate, measuring now and then; or time single iterations of all runs in turn."""
    if isinstance(task, Timing):
        return time_runs(task, timed_iteration, context)
    descent = Descent(task, context)
    series = follow(marks(task.iterations), descent.advance, descent.measure, context.tick)
    values = {"largest_distance": descent.largest_distance, "curvature": descent.curvature()}
    return Result(series, values)


def timed_iteration(run: ProcrustesRun, context: Context) -> Action:
    """The next iteration of a run, by its optimizer; or, if ``plain``, by the formula alone."""
    descent = Descent(run, context)
    if not run.plain:
        return Action(descent.iterate)
    return Action(lambda: plain_step(descent.X.detach(), descent.problem, run), descent.iterate)


class Descent:
    """A run of a method on a Procrustes problem, with its measurements."""

    def __init__(self, run: ProcrustesRun, context: Context) -> None:
        self.run, settings = run, run.settings
        self.problem = make_problem(run, context, getattr(torch, run.dtype))
        self.referee = make_problem(run, context, torch.float64)  # measures in float64
        self.optimum = self.referee.solution(determinant=1)
        start = torch.eye(settings.p, dtype=self.problem.A.dtype, device=context.device)
        self.X = nn.Parameter(start)
        ball = dict(lam=settings.lam, eps=settings.eps, safe_step=PAPER_RULE)
        options: dict[str, Any] = dict(momentum=run.momentum, **ball)
        self.optimizer = make_optimizer(self.X, run.method, settings.lr, **options)
        self.largest_distance = 0.0

    def iterate(self) -> None:
        """One iteration, unmeasured."""
        iterate(self.X, self.problem, self.optimizer)

    def advance(self) -> None:
        """One iteration, and its distance whether recorded or not, since the claim says "never"."""
        self.iterate()
        d = float(distance(self.X.detach().double()))
        if math.isnan(d) or d > self.largest_distance:  # max() would pass over a NaN
            self.largest_distance = d

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Measure the current iterate in float64."""
        X = self.X.double()
        return {
            "to_optimum": float(torch.linalg.matrix_norm(X - self.optimum)),
            "to_manifold": float(distance(X)),
            # Negative where X off the manifold costs less.
            "cost_gap": float(self.referee.fun(X) - self.referee.fun(self.optimum)),
            "step": self.next_step(),
        }

    @torch.no_grad()
    def next_step(self) -> float:
        """The step of the next iteration: lr, or landing's safe step where that is smaller."""
        X, run, settings = self.X.detach(), self.run, self.run.settings
        if run.method in RETRACTIONS:
            return settings.lr
        A = relative_gradient(X, self.problem.grad(X))
        if run.momentum and self.X in self.optimizer.state:
            A = A + run.momentum * self.optimizer.state[self.X]["momentum_buffer"]
        L, _, d, _ = landing_from_relative(X, A, settings.lam)
        safe = safe_step_size(L, d, lam=settings.lam, eps=settings.eps, rule=PAPER_RULE)
        return min(settings.lr, float(safe))

    def curvature(self) -> float:
        """Smallest eigenvalue of the Riemannian Hessian at the optimum.

        On the manifold ``f = const - 2 <X, B A^T> / p``. Turning the optimum by t in the plane
        of the i-th and j-th eigenvectors of ``B A^T X*^T``, eigenvalues s, costs
        ``t^2 (s_i + s_j) / p``.
        """
        problem = self.referee
        s = torch.linalg.eigvalsh(sym(problem.B @ problem.A.mT @ self.optimum.mT))
        return float(s[0] + s[1]) / problem.p


def plain_step(X: Tensor, problem: Procrustes, run: ProcrustesRun) -> Tensor:
    """The next iterate by the paper's formula: no safe step, no momentum, no checks."""
    G, lr = problem.grad(X), run.settings.lr
    if run.method in RETRACTIONS:
        return retract(X, -lr * relative_gradient(X, G), run.method)
    return X - lr * landing_field(X, G, run.settings.lam)


def make_problem(run: ProcrustesRun, context: Context, dtype: torch.dtype) -> Procrustes:
    """The problem of a seed, on the device."""
    problem = Procrustes.gaussian(run.settings.p, seed=context.seed)
    # f / p of sqrt(p) A and sqrt(p) B is f as the paper prints it, with the same optimum.
    factor = 1.0 if run.scaled else math.sqrt(run.settings.p)
    A, B = (factor * M.to(context.device) for M in (problem.A, problem.B))
    return Procrustes(A.to(dtype), B.to(dtype))
