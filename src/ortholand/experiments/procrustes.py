"""Orthogonal Procrustes, p = 40 (the paper's figure 3): distances to the optimum and the manifold.

Every run starts at the identity, of determinant +1, and the safe step never lets a determinant
change its sign. So the optimum is the minimiser among the matrices of determinant +1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from ortholand.experiments.environment import Stopwatch
from ortholand.experiments.figures import plot_method
from ortholand.experiments.records import MissingRecordError, Record, Records, Result
from ortholand.experiments.spec import (
    Claim,
    Context,
    Experiment,
    FigureSpec,
    Finding,
    Unit,
    Verdict,
)
from ortholand.fields import landing_from_relative
from ortholand.geometry import distance, relative_gradient, sym
from ortholand.optim import LandingSGD
from ortholand.problems import Procrustes
from ortholand.safe_step import safe_step_size

METHODS = ("landing", "landing-momentum", "landing-unscaled")
DTYPES = ("float32", "float64")
LANDED = 1e-5  # a distance to the manifold that counts as on it, in float32 too
ARRIVED = 1e-3  # a distance to the optimum, relative to the first, that counts as there


@dataclass(frozen=True)
class Settings:
    """The paper's settings are the defaults; it does not say how many iterations."""

    p: int = 40
    iterations: int = 40_000
    extra_iterations: int = 10_000  # of the runs that are not in the paper's figure
    lr: float = 0.1
    lam: float = 1.0
    eps: float = 0.5
    momentum: float = 0.9


@dataclass(frozen=True)
class Task:
    """One run: a method in a precision."""

    method: str
    dtype: str
    p: int
    iterations: int
    lr: float
    lam: float
    eps: float
    momentum: float
    scaled: bool  # f = ||XA - B||^2 / p, or as the paper prints it, without 1 / p


class Point(NamedTuple):
    """What is recorded of an iterate."""

    iteration: int
    seconds: float  # spent on gradients and steps, not on measuring
    to_optimum: float  # ||X - X*||_F
    to_manifold: float  # ||X^T X - I||_F
    cost_gap: float  # f(X) - f(X*), negative where X off the manifold costs less
    step: float  # that the next iteration takes: lr, or the safe step if smaller


def unit_name(method: str, dtype: str) -> str:
    """Name of the run of a method in a precision."""
    return f"{method}-{dtype}"


def plan(settings: Settings) -> list[Unit[Task]]:
    """Every method in every precision."""
    tasks = [_task(settings, method, dtype) for dtype in DTYPES for method in METHODS]
    return [Unit(unit_name(task.method, task.dtype), task, task.iterations) for task in tasks]


def _task(settings: Settings, method: str, dtype: str) -> Task:
    return Task(
        method=method,
        dtype=dtype,
        p=settings.p,
        iterations=settings.iterations if method == "landing" else settings.extra_iterations,
        lr=settings.lr,
        lam=settings.lam,
        eps=settings.eps,
        momentum=settings.momentum if method == "landing-momentum" else 0.0,
        scaled=method != "landing-unscaled",
    )


def run(task: Task, context: Context) -> Result:
    """Iterate, measuring now and then."""
    Descent(task, context).advance_to(3)  # the first steps of a process pay for its set-up
    descent = Descent(task, context)
    points = [descent.measure()]
    for mark in marks(task.iterations)[1:]:
        descent.advance_to(mark)
        points.append(descent.measure())
        context.tick(mark - points[-2].iteration)
    series = dict(zip(Point._fields, zip(*points, strict=True), strict=True))
    values = {"largest_distance": descent.largest_distance, "curvature": descent.curvature()}
    return Result(series, values)


def marks(iterations: int, ratio: float = 1.05) -> list[int]:
    """Iterations to record: geometric, as the axes of the figure are, with the first and last."""
    count = math.ceil(math.log(iterations, ratio)) if iterations > 1 else 0
    inner = {min(round(ratio**i), iterations) for i in range(count + 1)}
    return sorted(inner | {0, iterations})


class Descent:
    """A run of the landing algorithm on a Procrustes problem, with its measurements."""

    def __init__(self, task: Task, context: Context) -> None:
        self.task = task
        self.problem = make_problem(task, context, getattr(torch, task.dtype))
        self.referee = make_problem(task, context, torch.float64)  # measures in float64
        self.optimum = self.referee.solution(determinant=1)
        start = torch.eye(task.p, dtype=self.problem.A.dtype, device=context.device)
        self.X = nn.Parameter(start)
        self.optimizer = LandingSGD(
            [self.X], lr=task.lr, momentum=task.momentum, lam=task.lam, eps=task.eps
        )
        self.stopwatch = Stopwatch(context.device)
        self.iteration = 0
        self.largest_distance = 0.0

    def advance_to(self, iteration: int) -> None:
        """Iterate until there."""
        while self.iteration < iteration:
            with self.stopwatch:
                self.X.grad = self.problem.grad(self.X.detach())
                self.optimizer.step()
            self.iteration += 1
            # At every iteration, recorded or not: the claim is "never".
            d = float(distance(self.X.detach().double()))
            if math.isnan(d) or d > self.largest_distance:  # max() would pass over a NaN
                self.largest_distance = d

    @torch.no_grad()
    def measure(self) -> Point:
        """The present iterate, seen in float64."""
        X = self.X.double()
        cost_gap = self.referee.fun(X) - self.referee.fun(self.optimum)
        return Point(
            iteration=self.iteration,
            seconds=self.stopwatch.seconds,
            to_optimum=float(torch.linalg.matrix_norm(X - self.optimum)),
            to_manifold=float(distance(X)),
            cost_gap=float(cost_gap),
            step=self.next_step(),
        )

    @torch.no_grad()
    def next_step(self) -> float:
        """The step of the next iteration: lr, or the safe step where that is smaller."""
        X, task = self.X.detach(), self.task
        A = relative_gradient(X, self.problem.grad(X))
        if task.momentum and self.iteration:
            A = A + task.momentum * self.optimizer.state[self.X]["momentum_buffer"]
        L, d, _ = landing_from_relative(X, A, task.lam)
        return min(task.lr, float(safe_step_size(L, d, lam=task.lam, eps=task.eps)))

    def curvature(self) -> float:
        """Smallest eigenvalue of the Riemannian Hessian at the optimum.

        On the manifold ``f = const - 2 <X, B A^T> / p``. Turning the optimum by t in the plane
        of the i-th and j-th eigenvectors of ``B A^T X*^T``, eigenvalues s, costs
        ``t^2 (s_i + s_j) / p``.
        """
        problem = self.referee
        s = torch.linalg.eigvalsh(sym(problem.B @ problem.A.mT @ self.optimum.mT))
        return float(s[0] + s[1]) / problem.p


def make_problem(task: Task, context: Context, dtype: torch.dtype) -> Procrustes:
    """The problem of a seed, on the device."""
    problem = Procrustes.gaussian(task.p, seed=context.seed)
    # f / p of sqrt(p) A and sqrt(p) B is f as the paper prints it, with the same optimum.
    factor = 1.0 if task.scaled else math.sqrt(task.p)
    A, B = (factor * M.to(context.device) for M in (problem.A, problem.B))
    return Procrustes(A.to(dtype), B.to(dtype))


# Claims.


def lands(records: Records) -> Finding:
    """The paper: away from the manifold at first, on it in the end."""
    runs = [records[unit_name("landing", dtype)] for dtype in DTYPES]
    measured = "; ".join(
        f"{run.configuration['dtype']}: at most {run.value('largest_distance'):.2g}, "
        f"in the end {run.series('to_manifold')[-1]:.1e}"
        for run in runs
    )
    if any(run.value("largest_distance") < 100 * LANDED for run in runs):
        return Finding(measured, Verdict.FAILS)  # it never left
    return Finding(measured, _worst([settles(run, "to_manifold", LANDED) for run in runs]))


def stays_in_ball(records: Records) -> Finding:
    """The promise of the safe step, at every iteration of every run."""
    runs = [records[unit_name(method, dtype)] for method in METHODS for dtype in DTYPES]
    largest = max(run.value("largest_distance") for run in runs)
    eps = runs[0].configuration["eps"]
    holds = all(run.value("largest_distance") <= run.configuration["eps"] for run in runs)
    return Finding(
        f"at most {largest:.4f} in {len(runs)} runs, eps = {eps}",
        Verdict.HOLDS if holds else Verdict.FAILS,
    )


def unscaled_lands(records: Records) -> Finding:
    """The paper's statement with the cost as printed."""
    runs = [records[unit_name("landing-unscaled", dtype)] for dtype in DTYPES]
    measured = "; ".join(
        f"{run.configuration['dtype']}: in the end {run.series('to_manifold')[-1]:.2g}"
        for run in runs
    )
    return Finding(measured, _worst([settles(run, "to_manifold", LANDED) for run in runs]))


def unscaled_rides_boundary(records: Records) -> Finding:
    """The correction: the safe step is all that holds it, and it keeps it out."""
    runs = [records[unit_name("landing-unscaled", dtype)] for dtype in DTYPES]
    eps, lr = (runs[0].configuration[name] for name in ("eps", "lr"))
    # The last half: at the start every run is near the identity.
    nearest = min(min(_last_half(run, "to_manifold")) for run in runs)
    longest = max(max(_last_half(run, "step")) for run in runs)
    holds = nearest > eps / 2 and longest < lr
    return Finding(
        f"second half: distance at least {nearest:.2g}, steps at most {longest:.2g} of {lr}",
        Verdict.HOLDS if holds else Verdict.FAILS,
    )


def reaches_optimum(method: str, records: Records) -> Finding:
    """Convergence, in float64."""
    run = records[unit_name(method, "float64")]
    series = run.series("to_optimum")
    verdict = settles(run, "to_optimum", ARRIVED * series[0])
    falling = ", still falling" if verdict is Verdict.OPEN else ""
    iterations = run.configuration["iterations"]
    return Finding(
        f"from {series[0]:.2g} to {series[-1]:.1e} in {iterations} iterations{falling}", verdict
    )


def local_rate(records: Records) -> Finding:
    """Linear convergence at the rate ``eta mu``, mu the smallest eigenvalue of the Hessian."""
    run = records[unit_name("landing", "float64")]
    predicted = -math.log1p(-run.configuration["lr"] * run.value("curvature"))
    iterations, distances = _last_half(run, "iteration"), _last_half(run, "to_optimum")
    # The rate is that of the end: not before the neighbourhood of the optimum, nor at rounding.
    points = [(k, math.log(d)) for k, d in zip(iterations, distances, strict=True) if 1e-9 < d < 1]
    if len(points) < 5:
        return Finding("not near enough to the optimum, or there too soon", Verdict.OPEN)
    (k0, log0), (k1, log1) = points[-5], points[-1]
    measured = (log0 - log1) / (k1 - k0)
    near = abs(measured / predicted - 1) < 0.1
    return Finding(
        f"{measured:.3g} per iteration, predicted {predicted:.3g}",
        Verdict.HOLDS if near else Verdict.FAILS,
    )


def momentum_is_faster(records: Records) -> Finding:
    """How soon momentum is where plain landing ends."""
    plain = records[unit_name("landing", "float64")]
    momentum = records[unit_name("landing-momentum", "float64")]
    goal, total = plain.series("to_optimum")[-1], plain.configuration["iterations"]
    curve = zip(momentum.series("iteration"), momentum.series("to_optimum"), strict=True)
    there = next((int(k) for k, d in curve if d <= goal), None)
    if there is None:
        within = momentum.configuration["iterations"]
        return Finding(f"not as near ({goal:.1e}) within {within} iterations", Verdict.FAILS)
    measured = f"to {goal:.1e}: {total} iterations without, {there} with momentum"
    return Finding(measured, Verdict.HOLDS if 2 * there <= total else Verdict.FAILS)


def needs_retractions(_: Records) -> Finding:
    """The paper's comparisons, until there is something to compare with."""
    return Finding("no retraction was run: this version has none", Verdict.OPEN)


def settles(run: Record, series: str, tolerance: float) -> Verdict:
    """Whether a series ends below the tolerance; not decided while it still falls."""
    values = run.series(series)
    if values[-1] <= tolerance:
        return Verdict.HOLDS
    return Verdict.OPEN if values[-1] < 0.8 * _last_half(run, series)[0] else Verdict.FAILS


def _last_half(run: Record, series: str) -> list[float]:
    half = run.configuration["iterations"] / 2
    pairs = zip(run.series("iteration"), run.series(series), strict=True)
    return [value for k, value in pairs if k >= half]


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    order = (Verdict.FAILS, Verdict.OPEN, Verdict.HOLDS)
    return min(verdicts, key=order.index)


# Figures.


def draw(dtype: str, records: Records) -> Figure:
    """The paper's figure: by time and by iteration, to the optimum and to the manifold."""
    runs = {m: records[name] for m in METHODS if (name := unit_name(m, dtype)) in records}
    if not runs:
        raise MissingRecordError(f"no run in {dtype} is recorded")
    figure = Figure(figsize=(8, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for row, y in enumerate(("to_optimum", "to_manifold")):
        for column, x in enumerate(("seconds", "iteration")):
            _draw_curves(grid[row, column], runs, x, y)
    eps = next(iter(runs.values())).configuration["eps"]
    for axes in grid[1]:
        axes.axhline(eps, color="#777777", linewidth=0.8, zorder=1)
    beside = dict(xytext=(4, 0), textcoords="offset points", va="center", color="#555555")
    grid[1, 1].annotate("eps", (1, eps), xycoords=("axes fraction", "data"), **beside)
    grid[0, 0].set_ylabel(r"to the optimum, $\|X - X_*\|$")
    grid[1, 0].set_ylabel(r"to the manifold, $\|X^\top X - I\|$")
    grid[1, 0].set_xlabel("time, seconds")
    grid[1, 1].set_xlabel("iterations")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(runs))
    return figure


def _draw_curves(axes: Axes, runs: dict[str, Record], x: str, y: str) -> None:
    for method, run in runs.items():
        # Without the start: a logarithmic axis has no place for time 0 and distance 0.
        plot_method(axes, method, run.series(x)[1:], run.series(y)[1:])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()


PROCRUSTES = Experiment(
    name="procrustes",
    title="Orthogonal Procrustes: distance to the optimum and to the manifold",
    paper_figure="Figure 3",
    summary=(
        "Gradient descent on f(X) = ||XA - B||^2 / p with A and B standard normal, from the "
        "identity, by the landing algorithm with the safe step. The paper prints f without "
        "1 / p; that is run too, as an extra, because at that scale the safe step alone sets the "
        "pace and nothing lands. Landing with momentum is the other extra. The optimum is the "
        "best matrix of determinant +1, the determinant of the start, whose sign landing never "
        "changes. How many iterations it takes to get there depends on the smallest curvature at "
        "the optimum, which varies much from seed to seed; distances are measured in float64, "
        "and the time does not include measuring."
    ),
    settings={
        "smoke": Settings(p=10, iterations=1_000, extra_iterations=500),
        "quick": Settings(iterations=20_000, extra_iterations=5_000),
        "paper": Settings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim(
            "Landing starts by moving away from the manifold, and in the end lands on it "
            f"(distance below {LANDED:.0e}).",
            "paper",
            lands,
        ),
        Claim("With the cost as printed, without 1 / p, it lands too.", "paper", unscaled_lands),
        Claim(
            "With the cost as printed, it rides the boundary of the safe ball and never lands.",
            "correction",
            unscaled_rides_boundary,
        ),
        Claim(
            "The corrected safe step keeps every iterate within eps of the manifold.",
            "correction",
            stays_in_ball,
        ),
        Claim(
            f"Landing converges to the optimum: the distance falls {1 / ARRIVED:.0f}-fold or more.",
            "paper",
            partial(reaches_optimum, "landing"),
        ),
        Claim(
            "Near the optimum the distance falls at the rate eta mu, where mu is the smallest "
            "eigenvalue of the Riemannian Hessian.",
            "paper",
            local_rate,
        ),
        Claim(
            f"With momentum too: the distance falls {1 / ARRIVED:.0f}-fold or more.",
            "beyond the paper",
            partial(reaches_optimum, "landing-momentum"),
        ),
        Claim(
            "With momentum, landing needs at most half the iterations.",
            "beyond the paper",
            momentum_is_faster,
        ),
        Claim(
            "As many iterations as with retractions, less time, and closer to the manifold in the "
            "end than with the exponential and Cayley retractions.",
            "paper",
            needs_retractions,
        ),
    ),
    figures=tuple(
        FigureSpec(
            f"procrustes-{dtype}",
            f"Procrustes in {dtype}. Top: distance to the optimum. Bottom: distance to the "
            "manifold, with the radius eps of the safe ball. Left: by time. Right: by iteration.",
            partial(draw, dtype),
        )
        for dtype in DTYPES
    ),
    threads=1,  # such small matrices are not worth sharing: threads wait longer than they work
)
