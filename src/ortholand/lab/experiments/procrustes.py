"""Orthogonal Procrustes, p = 40 (the paper's figure 3): landing beside the four retractions.

Every run starts at the identity, of determinant +1. Neither the safe step nor a retraction ever
lets a determinant change its sign, so the optimum is the best matrix of determinant +1.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, pairwise
from statistics import median
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn

from ortholand.fields import landing_field, landing_from_relative
from ortholand.geometry import distance, relative_gradient, sym
from ortholand.lab.study.environment import Stopwatch
from ortholand.lab.study.figures import listed, plot_method
from ortholand.lab.study.records import Record, Records, Result
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)
from ortholand.lab.study.timing import marks
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.problems import Procrustes
from ortholand.retractions import retract
from ortholand.safe_step import safe_step_size

LANDINGS = ("landing", "landing-momentum", "landing-unscaled")
RETRACTIONS = ("exponential", "polar", "cayley", "qr")
METHODS = ("landing", *RETRACTIONS)  # that the paper compares
DTYPES = ("float32", "float64")
TIMING = "timing"  # the unit in which the iterations of all methods are timed in turn
LANDED = 1e-5  # a distance to the manifold that counts as on it, in float32 too
ARRIVED = 1e-3  # a distance to the optimum, relative to the first, that counts as there
SIMILAR = 0.05  # numbers of iterations that differ by less, relatively, count as the same
FASTER = 1.05  # times that differ by less than this factor count as the same
DRIFTED = 3.0  # growth of the distance to the manifold that is no longer its fluctuation
CLOSEST = 1e-9  # nearer to the optimum than this, rounding has its part in the distance


@dataclass(frozen=True)
class Settings:
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
class Task:
    """One run: a method in a precision. Retractions make no use of lam and eps."""

    method: str
    dtype: str
    p: int
    iterations: int
    lr: float
    lam: float
    eps: float
    momentum: float
    scaled: bool  # f = ||XA - B||^2 / p, or as the paper prints it, without 1 / p


@dataclass(frozen=True)
class Timing:
    """Iterations of several runs, timed in turn: what disturbs one disturbs them all alike."""

    runs: tuple[Task, ...]
    warm_up: int
    repetitions: int


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


def plan(settings: Settings) -> list[Unit[Task | Timing]]:
    """Every method in every precision, and the timing of those that the paper compares."""
    tasks = [_task(settings, m, dtype) for dtype in DTYPES for m in (*LANDINGS, *RETRACTIONS)]
    timed = tuple(task for task in tasks if task.method in METHODS)
    units: list[Unit[Task | Timing]] = [
        Unit(unit_name(task.method, task.dtype), task, task.iterations) for task in tasks
    ]
    timing = Timing(timed, settings.warm_up, settings.repetitions)
    steps = len(timed) * (settings.warm_up + settings.repetitions)
    return [*units, Unit(TIMING, timing, steps)]


def _task(settings: Settings, method: str, dtype: str) -> Task:
    return Task(
        method=method,
        dtype=dtype,
        p=settings.p,
        iterations=_iterations(settings, method),
        lr=settings.lr,
        lam=settings.lam,
        eps=settings.eps,
        momentum=settings.momentum if method == "landing-momentum" else 0.0,
        scaled=method != "landing-unscaled",
    )


def _iterations(settings: Settings, method: str) -> int:
    if method in RETRACTIONS:
        return math.ceil(settings.retraction_share * settings.iterations)
    return settings.iterations if method == "landing" else settings.extra_iterations


def run(task: Task | Timing, context: Context) -> Result:
    """Do one unit of work."""
    return run_in_turn(task, context) if isinstance(task, Timing) else run_alone(task, context)


def run_alone(task: Task, context: Context) -> Result:
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


def run_in_turn(timing: Timing, context: Context) -> Result:
    """Time single iterations: one of each run, by the optimizer and by its plain formula.

    In the series, ``run`` is the place of a run in the task's ``runs``, and ``plain`` is 0 for the
    optimizer and 1 for the formula.
    """
    descents = [Descent(task, context) for task in timing.runs]
    for descent in descents:
        descent.advance_to(timing.warm_up)
        context.tick(timing.warm_up)
    turns: list[tuple[int, int, float]] = []
    for k in range(timing.warm_up, timing.warm_up + timing.repetitions):
        for i, descent in enumerate(descents):
            plain = descent.time_plain_step()
            before = descent.stopwatch.seconds
            descent.advance_to(k + 1)
            turns += [(i, 1, plain), (i, 0, descent.stopwatch.seconds - before)]
        context.tick(len(descents))
    return Result(dict(zip(("run", "plain", "seconds"), zip(*turns, strict=True), strict=True)), {})


class Descent:
    """A run of a method on a Procrustes problem, with its measurements."""

    def __init__(self, task: Task, context: Context) -> None:
        self.task = task
        self.problem = make_problem(task, context, getattr(torch, task.dtype))
        self.referee = make_problem(task, context, torch.float64)  # measures in float64
        self.optimum = self.referee.solution(determinant=1)
        start = torch.eye(task.p, dtype=self.problem.A.dtype, device=context.device)
        self.X = nn.Parameter(start)
        self.optimizer = make_optimizer(self.X, task)
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

    def time_plain_step(self) -> float:
        """Seconds that the next iterate takes without an optimizer. The run stays where it is."""
        stopwatch, X = Stopwatch(self.X.device), self.X.detach()
        with stopwatch:
            plain_step(X, self.problem.grad(X), self.task)
        return stopwatch.seconds

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
        """The step of the next iteration: lr, or landing's safe step where that is smaller."""
        X, task = self.X.detach(), self.task
        if task.method in RETRACTIONS:
            return task.lr
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


def make_optimizer(X: nn.Parameter, task: Task) -> LandingSGD | RiemannianSGD:
    """The optimizer that steps as the method does."""
    if task.method in RETRACTIONS:
        return RiemannianSGD([X], lr=task.lr, retraction=task.method)
    return LandingSGD([X], lr=task.lr, momentum=task.momentum, lam=task.lam, eps=task.eps)


def plain_step(X: Tensor, G: Tensor, task: Task) -> Tensor:
    """The next iterate by the paper's formula: no safe step, no momentum, no checks."""
    if task.method in RETRACTIONS:
        return retract(X, -task.lr * relative_gradient(X, G), task.method)
    return X - task.lr * landing_field(X, G, task.lam)


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
    return Finding(measured, Verdict.worst([lands_within(run, LANDED) for run in runs]))


def stays_in_ball(records: Records) -> Finding:
    """The promise of the safe step, at every iteration of every run."""
    runs = [records[unit_name(method, dtype)] for method in LANDINGS for dtype in DTYPES]
    largest = max(run.value("largest_distance") for run in runs)
    eps = runs[0].configuration["eps"]
    holds = all(run.value("largest_distance") <= run.configuration["eps"] for run in runs)
    return Finding(
        f"at most {largest:.4f} in {len(runs)} runs, eps = {eps}",
        Verdict.of(holds),
    )


def unscaled_lands(records: Records) -> Finding:
    """The paper's statement with the cost as printed."""
    runs = [records[unit_name("landing-unscaled", dtype)] for dtype in DTYPES]
    measured = "; ".join(
        f"{run.configuration['dtype']}: in the end {run.series('to_manifold')[-1]:.2g}"
        for run in runs
    )
    return Finding(measured, Verdict.worst([settles(run, "to_manifold", LANDED) for run in runs]))


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
        Verdict.of(holds),
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
    pairs = zip(iterations, distances, strict=True)
    points = [(k, math.log(d)) for k, d in pairs if CLOSEST < d < 1]
    if len(points) < 5:
        return Finding("not near enough to the optimum, or there too soon", Verdict.OPEN)
    (k0, log0), (k1, log1) = points[-5], points[-1]
    measured = (log0 - log1) / (k1 - k0)
    near = abs(measured / predicted - 1) < 0.1
    return Finding(
        f"{measured:.3g} per iteration, predicted {predicted:.3g}",
        Verdict.of(near),
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
    return Finding(measured, Verdict.of(2 * there <= total))


def similar_iterations(records: Records) -> Finding:
    """How many iterations it takes each method to come as near to the optimum as all do."""
    runs = compared(records, "float64")
    start = runs["landing"].series("to_optimum")[0]
    goal = max(CLOSEST, *(run.series("to_optimum")[-1] for run in runs.values()))
    if goal > start / 10:
        return Finding(
            f"not near enough to the optimum: at {goal:.2g} of {start:.2g}", Verdict.OPEN
        )
    needed = {method: iterations_to(run, goal) for method, run in runs.items()}
    similar = all(abs(k / needed["landing"] - 1) <= SIMILAR for k in needed.values())
    return Finding(
        f"from {start:.2g} to {goal:.2g}: {listed(needed, '.0f')} iterations",
        Verdict.of(similar),
    )


def landing_is_faster(plain: bool, records: Records) -> Finding:
    """Time per iteration of each retraction as a multiple of landing's, from the timing alone."""
    measured, lowest = [], math.inf
    for dtype in DTYPES:
        times = times_per_iteration(records[TIMING], dtype, plain=plain)
        landing = times.pop("landing")
        ratios = {method: seconds / landing for method, seconds in times.items()}
        others = listed(ratios, ".2f")
        measured.append(f"{dtype}: landing {1e6 * landing:.0f} µs, {others} times as long")
        lowest = min(lowest, *ratios.values())
    verdict = Verdict.of(lowest > FASTER)
    return Finding("; ".join(measured), verdict)


def ends_nearer(dtype: str, records: Records) -> Finding:
    """Landing beside the retractions, after as many iterations; the polar and QR do not count."""
    runs = compared(records, dtype)
    ends = {method: run.series("to_manifold")[-1] for method, run in runs.items()}
    iterations = runs["landing"].series("iteration")[-1]
    nearest = min(ends["exponential"], ends["cayley"])
    verdict = lands_within(runs["landing"], nearest)
    on_its_way = "; landing is still on its way" if verdict is Verdict.OPEN else ""
    measured = f"after {iterations:.0f} iterations: {listed(ends, '.1e')}{on_its_way}"
    return Finding(measured, verdict)


def projections_do_not_drift(records: Records) -> Finding:
    """Growth of the distance to the manifold, beside that of the other two retractions."""
    measured, largest = [], 0.0
    for dtype in DTYPES:
        growths = {m: growth(records[unit_name(m, dtype)], "to_manifold") for m in RETRACTIONS}
        measured.append(f"{dtype}: {listed(growths, '.2g')}")
        largest = max(largest, growths["polar"], growths["qr"])
    verdict = Verdict.of(largest < DRIFTED)
    return Finding("growth in " + "; ".join(measured), verdict)


def compared(records: Records, dtype: str) -> dict[str, Record]:
    """The runs that the paper compares, up to the last iteration that all of them recorded."""
    runs = {method: records[unit_name(method, dtype)] for method in METHODS}
    last = max(set.intersection(*(set(run.series("iteration")) for run in runs.values())))
    return {method: _up_to(run, last) for method, run in runs.items()}


def _up_to(run: Record, last: float) -> Record:
    kept = [k <= last for k in run.series("iteration")]
    return _with_series(run, {n: list(compress(y, kept)) for n, y in run.result.series.items()})


def _with_series(run: Record, series: Mapping[str, Sequence[float]]) -> Record:
    result = replace(run.result, series={**run.result.series, **series})
    return replace(run, result=result)


def iterations_to(run: Record, goal: float) -> float:
    """When the distance to the optimum first is the goal; between records by interpolation."""
    points = zip(run.series("iteration"), run.series("to_optimum"), strict=True)
    for (k0, d0), (k1, d1) in pairwise(points):
        if d1 <= goal:
            return k0 + (k1 - k0) * math.log(d0 / goal) / math.log(d0 / d1)
    return math.inf


def times_per_iteration(timing: Record, dtype: str, *, plain: bool) -> dict[str, float]:
    """Median seconds of an iteration of each method, by the optimizer or by its plain formula."""
    columns = (timing.series(name) for name in ("run", "plain", "seconds"))
    turns = list(zip(*columns, strict=True))
    return {
        run["method"]: median(s for j, is_plain, s in turns if (j, is_plain) == (i, plain))
        for i, run in enumerate(timing.configuration["runs"])
        if run["dtype"] == dtype
    }


def growth(run: Record, series: str) -> float:
    """The last value of a series over the one after 1 % of the iterations."""
    first = max(1, run.series("iteration")[-1] / 100)
    pairs = zip(run.series("iteration"), run.series(series), strict=True)
    early = next(value for k, value in pairs if k >= first)
    return run.series(series)[-1] / max(early, sys.float_info.min)


def lands_within(run: Record, tolerance: float) -> Verdict:
    """Whether a run ends so near to the manifold; not decided on its way to the optimum.

    Landing is as far from the manifold as its gradient is long, squared, which may grow for a
    while: that the distance does not fall just now decides nothing.
    """
    landed = settles(run, "to_manifold", tolerance)
    arrived = settles(run, "to_optimum", ARRIVED * run.series("to_optimum")[0])
    return arrived if (landed, arrived) == (Verdict.FAILS, Verdict.OPEN) else landed


def settles(run: Record, series: str, tolerance: float) -> Verdict:
    """Whether a series ends below the tolerance; not decided while it still falls."""
    values = run.series(series)
    if values[-1] <= tolerance:
        return Verdict.HOLDS
    return Verdict.OPEN if values[-1] < 0.8 * _last_half(run, series)[0] else Verdict.FAILS


def _last_half(run: Record, series: str) -> list[float]:
    half = run.series("iteration")[-1] / 2
    pairs = zip(run.series("iteration"), run.series(series), strict=True)
    return [value for k, value in pairs if k >= half]


# Figures.


def draw_compared(dtype: str, records: Records) -> Figure:
    """The paper's figure: landing and the retractions.

    The time is that of the timing. By the clocks of their own runs, methods would seem slow that
    were run while the machine was busy.
    """
    times = times_per_iteration(records[TIMING], dtype, plain=False)
    runs = {
        method: _with_series(run, {"seconds": [times[method] * k for k in run.series("iteration")]})
        for method, run in compared(records, dtype).items()
    }
    return _draw_panels(runs)


def draw_landings(dtype: str, records: Records) -> Figure:
    """Landing with momentum and without 1 / p, which are not in the paper's figure."""
    return _draw_panels({method: records[unit_name(method, dtype)] for method in LANDINGS})


def _draw_panels(runs: Mapping[str, Record]) -> Figure:
    """By time and by iteration, to the optimum and to the manifold."""
    figure = Figure(figsize=(8, 5.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for row, y in enumerate(("to_optimum", "to_manifold")):
        for column, x in enumerate(("seconds", "iteration")):
            _draw_curves(grid[row, column], runs, x, y)
    # Few decades, so that the labels alone would leave the scale in doubt.
    grid[0, 0].yaxis.set_minor_locator(LogLocator(subs="auto"))
    grid[0, 0].yaxis.set_minor_formatter(NullFormatter())
    eps = runs["landing"].configuration["eps"]
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


def _draw_curves(axes: Axes, runs: Mapping[str, Record], x: str, y: str) -> None:
    for method, run in runs.items():
        # Without the start: a logarithmic axis has no place for time 0 and distance 0.
        plot_method(axes, method, run.series(x)[1:], run.series(y)[1:])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()


PROCRUSTES = Study(
    name="procrustes",
    title="Orthogonal Procrustes: distance to the optimum and to the manifold",
    paper_figure="Figure 3",
    summary=(
        "Gradient descent on f(X) = ||XA - B||^2 / p with A and B standard normal, from the "
        "identity and with the step eta = 0.1: by the landing algorithm, with the safe step, and "
        "by the exponential, polar, Cayley and QR retractions. The paper prints f without 1 / p; "
        "that is run too, as an extra, because at that scale the safe step alone sets the pace "
        "and nothing lands. Landing with momentum is the other extra. The optimum is the best "
        "matrix of determinant +1, the determinant of the start, whose sign no method changes. "
        "How many iterations it takes to get there depends on the smallest curvature at the "
        "optimum, which varies much from seed to seed; distances are measured in float64, and "
        "the time does not include measuring. Where the retractions are run for fewer iterations "
        "than landing (the retraction share below), figures and comparisons end where they do. "
        "What is said about time rests on a run of its own, in which the methods take turns "
        "iteration by iteration, after a warm-up; medians are compared."
    ),
    settings={
        "smoke": Settings(p=10, iterations=400, extra_iterations=250, warm_up=10, repetitions=20),
        "quick": Settings(iterations=18_000, retraction_share=0.5, extra_iterations=2_500),
        "paper": Settings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim(
            "To come equally near to the optimum, each retraction needs as many iterations as "
            f"landing, within {SIMILAR:.0%} (float64).",
            "paper",
            similar_iterations,
        ),
        Claim(
            "An iteration of landing takes less time than one of each retraction, by more than "
            f"{FASTER - 1:.0%}: gradient and step of the library's optimizers.",
            "paper",
            partial(landing_is_faster, False),
        ),
        Claim(
            "The same, for the formulas alone: plain functions, without an optimizer's overhead "
            "and without the safe step.",
            "paper",
            partial(landing_is_faster, True),
        ),
        Claim(
            "Landing starts by moving away from the manifold, and in the end lands on it "
            f"(distance below {LANDED:.0e}).",
            "paper",
            lands,
        ),
        Claim(
            "In float32 the exponential and Cayley retractions end further from the manifold than "
            "landing.",
            "paper",
            partial(ends_nearer, "float32"),
        ),
        Claim(
            "In float64 the exponential and Cayley retractions end further from the manifold than "
            "landing.",
            "beyond the paper",
            partial(ends_nearer, "float64"),
        ),
        Claim(
            "The polar and QR retractions do not accumulate errors: over the last 99 % of the run "
            f"their distance to the manifold grows less than {DRIFTED:.0f}-fold.",
            "beyond the paper",
            projections_do_not_drift,
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
            "With the cost as printed, without 1 / p, landing lands too.", "paper", unscaled_lands
        ),
        Claim(
            "With the cost as printed, it rides the boundary of the safe ball and never lands.",
            "correction",
            unscaled_rides_boundary,
        ),
        Claim(
            "The corrected safe step keeps every iterate of landing within eps of the manifold.",
            "correction",
            stays_in_ball,
        ),
        Claim(
            "With momentum landing converges too: the distance falls "
            f"{1 / ARRIVED:.0f}-fold or more.",
            "beyond the paper",
            partial(reaches_optimum, "landing-momentum"),
        ),
        Claim(
            "With momentum, landing needs at most half the iterations.",
            "beyond the paper",
            momentum_is_faster,
        ),
    ),
    figures=(
        *(
            FigureSpec(
                f"procrustes-{dtype}",
                f"Procrustes in {dtype}, by landing and by the four retractions. Top: distance to "
                "the optimum, where the curves almost coincide. Bottom: distance to the manifold, "
                "with the radius eps of landing's safe ball; the polar retraction's falls at once "
                "when steps are so short that a series gives the polar factor, in place of an "
                "eigendecomposition. Left: by time, which is the iterations times the median "
                "time of one, timed in turn with the other methods. Right: by iteration.",
                partial(draw_compared, dtype),
            )
            for dtype in DTYPES
        ),
        FigureSpec(
            "procrustes-landing",
            "The whole run of landing in float64, and the two extras: with momentum, and with f "
            "as the paper prints it. Top: distance to the optimum. Bottom: distance to the "
            "manifold, with the radius eps of the safe ball. Left: by time. Right: by iteration.",
            partial(draw_landings, "float64"),
        ),
    ),
    threads=1,  # such small matrices are not worth sharing: threads wait longer than they work
    revision=2,
)
