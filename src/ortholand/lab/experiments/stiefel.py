"""PCA on tall matrices, beyond the paper: landing beside the QR and Cayley retractions.

The paper leaves the Stiefel manifold, n x p with n > p, to future work, and expects that landing
need not be much faster there, since the Cayley retraction takes a solve of size 2p only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor, nn

from ortholand.geometry import distance, random_orthogonal
from ortholand.geometry.derivatives import relative_gradient_times_x
from ortholand.geometry.manifold import orthonormal_factor
from ortholand.lab.study.figures import METHOD_STYLES, MethodStyle
from ortholand.lab.study.records import MissingRecordError, Record, Records, Result
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)
from ortholand.lab.study.timing import Action, time_in_turn
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.problems import PCA

LANDING, TIGHT, AFTER = "landing", "landing-tight", "landing-after"
LANDINGS, RETRACTIONS = (LANDING, TIGHT, AFTER), ("qr", "cayley")
METHODS = (*LANDINGS, *RETRACTIONS)
HOUSEHOLDER, GRADIENT = "qr-householder", "gradient-dense"  # timed only
FASTER = 1.05  # times that differ by less than this factor count as the same
MUCH_FASTER = 2.0
LARGE = 50  # for fewer columns, calling the operations takes longer than their arithmetic
LANDED = 1e-4  # a distance to the manifold that counts as on it, in float32 and for 1,000 columns

_blue = METHOD_STYLES[LANDING].colour
LOOKS: dict[str, MethodStyle] = {
    LANDING: METHOD_STYLES[LANDING],
    TIGHT: MethodStyle("landing, tight safe step", _blue, (0, (5, 2))),
    AFTER: MethodStyle("landing: move, then land", _blue, (0, (1, 1))),
    "qr": METHOD_STYLES["qr"],
    "cayley": METHOD_STYLES["cayley"],
    HOUSEHOLDER: MethodStyle(
        "QR by Householder", METHOD_STYLES["qr"].colour, (0, (5, 1, 1, 1)), 1.0
    ),
    GRADIENT: MethodStyle("gradient, dense C", "#777777", "-", 0.8),
}


@dataclass(frozen=True)
class Settings:
    """Nothing of the paper's: these are ours."""

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
class Task:
    """One run: a method at a size. Retractions make no use of lam and eps."""

    method: str
    n: int
    p: int
    gap: float
    iterations: int
    every: int
    lr: float
    lam: float
    eps: float


@dataclass(frozen=True)
class Timing:
    """Iterations of all methods at a size, timed in turn."""

    runs: tuple[Task, ...]
    repetitions: int
    accuracy: float  # claims ask for the time to it
    sizes: tuple[int, ...]  # of the whole run: claims are about all of them


def unit_name(method: str, p: int) -> str:
    """Name of the run of a method at a size."""
    return f"{method}-p-{p}"


def timing_name(p: int) -> str:
    """Name of the timing at a size."""
    return f"timing-p-{p}"


def plan(settings: Settings) -> list[Unit[Task | Timing]]:
    """Every method at every size, and the timing at every size."""
    units: list[Unit[Task | Timing]] = []
    for p in settings.sizes:
        tasks = tuple(_task(settings, method, p) for method in METHODS)
        units.extend(Unit(unit_name(task.method, p), task, task.iterations) for task in tasks)
        repetitions = settings.repetitions * max(settings.sizes) // p
        timing = Timing(tasks, repetitions, settings.accuracy, settings.sizes)
        units.append(Unit(timing_name(p), timing, repetitions))
    return units


def _task(settings: Settings, method: str, p: int) -> Task:
    return Task(
        method=method,
        n=settings.n,
        p=p,
        gap=settings.gap,
        iterations=settings.iterations,
        every=settings.every,
        lr=settings.lr,
        lam=settings.lam,
        eps=settings.eps,
    )


def run(task: Task | Timing, context: Context) -> Result:
    """Do one unit of work."""
    return run_timing(task, context) if isinstance(task, Timing) else run_alone(task, context)


def run_alone(task: Task, context: Context) -> Result:
    """Iterate in float32, measuring in float64."""
    problem, referee = (make_problem(task, context, t) for t in (torch.float32, torch.float64))
    X = nn.Parameter(start(task, context))
    optimizer = make_optimizer(X, task)
    columns: dict[str, list[float]] = {n: [] for n in ("iteration", "error", "to_manifold")}
    for k in range(task.iterations + 1):
        if k % task.every == 0 or k == task.iterations:
            Y = X.detach().double()
            numbers = (k, float(referee.subspace_error(Y)), float(distance(Y)))
            for column, number in zip(columns.values(), numbers, strict=True):
                column.append(number)
        if k < task.iterations:
            iterate(X, problem, optimizer)
            context.tick(1)
    return Result(columns, {})


def run_timing(timing: Timing, context: Context) -> Result:
    """Seconds of single iterations, gradient and step, and of a gradient with a dense matrix."""
    actions = {task.method: iteration_action(task, context) for task in timing.runs}
    task = timing.runs[0]
    X, problem = start(task, context), make_problem(task, context, torch.float32)
    actions[HOUSEHOLDER] = Action(lambda: householder_step(X, problem.grad(X), task.lr))
    generator = torch.Generator().manual_seed(context.seed)
    dense = torch.randn(task.n, task.n, generator=generator).to(context.device)
    actions[GRADIENT] = Action(partial(PCA(dense, task.p).grad, X))
    return Result(
        time_in_turn(
            actions, repetitions=timing.repetitions, device=context.device, tick=context.tick
        ),
        {},
    )


def iteration_action(task: Task, context: Context) -> Action:
    """An iteration, each time from the same start."""
    problem, X0 = make_problem(task, context, torch.float32), start(task, context)
    X = nn.Parameter(X0.clone())
    optimizer = make_optimizer(X, task)
    return Action(partial(iterate, X, problem, optimizer), partial(X.data.copy_, X0))


def iterate(X: nn.Parameter, problem: PCA, optimizer: torch.optim.Optimizer) -> None:
    """One iteration."""
    X.grad = problem.grad(X.detach())
    optimizer.step()


def make_problem(task: Task, context: Context, dtype: torch.dtype) -> PCA:
    """PCA with a diagonal matrix: its gradient costs little beside the step of any method."""
    problem = PCA.with_gap(task.n, task.p, gap=task.gap, diagonal=True, dtype=dtype)
    return PCA(problem.C.to(context.device), task.p)


def start(task: Task, context: Context) -> Tensor:
    """A random start, the same for all methods."""
    return random_orthogonal(task.n, task.p, seed=context.seed).to(context.device)


def make_optimizer(X: nn.Parameter, task: Task) -> LandingSGD | RiemannianSGD:
    """The optimizer that steps as the method does."""
    if task.method in RETRACTIONS:
        return RiemannianSGD([X], lr=task.lr, retraction=task.method)
    return LandingSGD(
        [X],
        lr=task.lr,
        lam=task.lam,
        eps=task.eps,
        safe_step="frobenius" if task.method == LANDING else "tight",
        attraction="after" if task.method == AFTER else "coupled",
    )


def householder_step(X: Tensor, G: Tensor, lr: float) -> Tensor:
    """The QR retraction as a short program has it: by LAPACK's QR, without an optimizer."""
    return orthonormal_factor(X - lr * relative_gradient_times_x(X, G))


# Claims.


def all_sizes(records: Records) -> list[int]:
    """Every p of the run."""
    timings = [record for name, record in records.items() if name.startswith("timing")]
    if not timings:
        raise MissingRecordError("no timing is recorded")
    return sorted(timings[0].configuration["sizes"])


def large_sizes(records: Records) -> list[int]:
    """Those that the claims about time speak of."""
    return [p for p in all_sizes(records) if p >= LARGE]


def seconds_per_iteration(records: Records, method: str, p: int) -> float:
    """Median time of an iteration."""
    return median(records[timing_name(p)].series(method))


def iterations_to(run: Record, goal: float) -> float:
    """When the error first is the goal; between records by interpolation; infinite if never."""
    points = zip(run.series("iteration"), run.series("error"), strict=True)
    for (k0, e0), (k1, e1) in pairwise(points):
        if e1 <= goal:
            return k0 + (k1 - k0) * math.log(e0 / goal) / math.log(e0 / e1) if e1 > 0 else k1
    return math.inf


def iterations_needed(records: Records, method: str, p: int) -> float:
    """Iterations to the accuracy."""
    goal = records[timing_name(p)].configuration["accuracy"]
    return iterations_to(records[unit_name(method, p)], goal)


def time_needed(records: Records, method: str, p: int) -> float:
    """Seconds to the accuracy: iterations times the time of one."""
    return iterations_needed(records, method, p) * seconds_per_iteration(records, method, p)


def all_converge(records: Records) -> Finding:
    """Every method at every size."""
    needed = {p: {m: iterations_needed(records, m, p) for m in METHODS} for p in all_sizes(records)}
    measured = "; ".join(f"p = {p}: {_listed(by, '.0f')}" for p, by in needed.items())
    finite = all(math.isfinite(k) for by in needed.values() for k in by.values())
    return Finding(f"iterations: {measured}", Verdict.of(finite))


def is_faster(
    quantity: Callable[[Records, str, int], float],
    method: str,
    rivals: Sequence[str],
    records: Records,
) -> Finding:
    """Less time than every rival, at every size."""
    measured, lowest = [], math.inf
    if not large_sizes(records):
        return _too_small()
    for p in large_sizes(records):
        own = quantity(records, method, p)
        ratios = {rival: quantity(records, rival, p) / own for rival in rivals}
        measured.append(f"p = {p}: {_listed(ratios, '.2f')}")
        lowest = min(lowest, *ratios.values())
    return Finding("times as long: " + "; ".join(measured), Verdict.of(lowest > FASTER))


def not_much_faster_than_cayley(records: Records) -> Finding:
    """At the smallest p, where the solve is smallest beside the products."""
    if not large_sizes(records):
        return _too_small()
    p = large_sizes(records)[0]
    n = records[unit_name("cayley", p)].configuration["n"]
    ratio = seconds_per_iteration(records, "cayley", p) / seconds_per_iteration(records, LANDING, p)
    measured = f"n = {n}, p = {p}: Cayley takes {ratio:.2f} times as long"
    return Finding(measured, Verdict.of(ratio < MUCH_FASTER))


def tight_rule_pays(records: Records) -> Finding:
    """Iterations and time of the free rule in units of the tight rule's, at the largest p."""
    if not large_sizes(records):
        return _too_small()
    p = large_sizes(records)[-1]
    iterations = {m: iterations_needed(records, m, p) for m in (LANDING, TIGHT)}
    times = {m: time_needed(records, m, p) for m in (LANDING, TIGHT)}
    measured = f"p = {p}: {_listed(iterations, '.0f')} iterations; {_listed(times, '.2f')} seconds"
    return Finding(measured, Verdict.of(times[TIGHT] * FASTER < times[LANDING]))


def ends_on_manifold(records: Records) -> Finding:
    """Each way of landing, at every size."""
    ends = {
        m: max(records[unit_name(m, p)].series("to_manifold")[-1] for p in all_sizes(records))
        for m in METHODS
    }
    landed = all(ends[m] < LANDED for m in LANDINGS)
    return Finding(f"in the end at most: {_listed(ends, '.1e')}", Verdict.of(landed))


def ends_nearer_than_cayley(records: Records) -> Finding:
    """Each way of landing, at every size: which of the two rounding leaves further away."""
    factors = {
        p: records[unit_name("cayley", p)].series("to_manifold")[-1]
        / max(records[unit_name(m, p)].series("to_manifold")[-1] for m in LANDINGS)
        for p in all_sizes(records)
    }
    measured = ", ".join(f"p = {p}: {factor:.1f}" for p, factor in factors.items())
    return Finding(
        f"Cayley's distance in landing's: {measured}", Verdict.of(min(factors.values()) > 1)
    )


def stays_in_ball(records: Records) -> Finding:
    """All recorded iterates."""
    runs = [records[unit_name(m, p)] for m in LANDINGS for p in all_sizes(records)]
    largest = {
        m: max(max(r.series("to_manifold")) for r in runs if r.configuration["method"] == m)
        for m in LANDINGS
    }
    eps = runs[0].configuration["eps"]
    return Finding(
        f"{_listed(largest, '.2g')}; eps = {eps}", Verdict.of(max(largest.values()) <= eps)
    )


def gradient_dominates(records: Records) -> Finding:
    """What a dense C would cost, beside the whole iteration of landing with a diagonal one."""
    if not large_sizes(records):
        return _too_small()
    ratios = {
        p: seconds_per_iteration(records, GRADIENT, p) / seconds_per_iteration(records, LANDING, p)
        for p in large_sizes(records)
    }
    measured = ", ".join(f"p = {p}: {ratio:.1f}" for p, ratio in ratios.items())
    return Finding(f"in landing's time: {measured}", Verdict.of(min(ratios.values()) > 1))


def _too_small() -> Finding:
    return Finding(f"no p of {LARGE} or more at this preset", Verdict.OPEN)


def _listed(numbers: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{LOOKS[method].label} {x:{form}}" for method, x in numbers.items())


# Figures.


def draw_runs(records: Records) -> Figure:
    """Error and distance to the manifold by time, at the largest p."""
    figure = Figure(figsize=(8, 4.4))
    errors, distances = figure.subplots(1, 2, sharex=True)
    p = all_sizes(records)[-1]
    for method in METHODS:
        run = records[unit_name(method, p)]
        step = seconds_per_iteration(records, method, p)
        time = [step * k for k in run.series("iteration")]
        _plot(errors, method, time, run.series("error"))
        _plot(distances, method, time[1:], run.series("to_manifold")[1:])
    configuration = records[timing_name(p)].configuration
    errors.axhline(configuration["accuracy"], color="#777777", linewidth=0.8, zorder=1)
    errors.set(yscale="log", ylabel="subspace error", ylim=(1e-6, None), xlim=(0, None))
    distances.set(yscale="log", ylabel=r"to the manifold, $\|X^\top X - I\|$")
    for axes in (errors, distances):
        axes.set_xlabel(f"time, seconds (n = {configuration['runs'][0]['n']:,}, p = {p})")
    _add_legend(figure, errors)
    return figure


def draw_times(records: Records) -> Figure:
    """Time of an iteration, and to the accuracy, against p."""
    figure = Figure(figsize=(8, 4.6))
    single, whole = figure.subplots(1, 2)
    sizes = all_sizes(records)
    for method in (*METHODS, HOUSEHOLDER, GRADIENT):
        _plot(single, method, sizes, [seconds_per_iteration(records, method, p) for p in sizes])
        single.lines[-1].set(marker="o", markersize=3)
    for method in METHODS:
        _plot(whole, method, sizes, [time_needed(records, method, p) for p in sizes])
        whole.lines[-1].set(marker="o", markersize=3)
    for axes, label in ((single, "time of an iteration"), (whole, "time to the accuracy")):
        axes.set(xscale="log", yscale="log", xlabel="p", ylabel=f"{label}, seconds")
        axes.set_xticks(sizes, [str(p) for p in sizes])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    _add_legend(figure, single)
    return figure


def _plot(axes: Axes, method: str, x: Sequence[float], y: Sequence[float]) -> None:
    look = LOOKS[method]
    style: dict[str, Any] = dict(color=look.colour, linestyle=look.dashes, linewidth=look.width)
    axes.plot(x, y, label=look.label, **style)


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)


STIEFEL = Study(
    name="stiefel",
    title="PCA on tall matrices: landing beside QR and Cayley",
    summary=(
        "f(X) = -Tr(X^T C X) over n x p matrices with orthonormal columns, from a random start, in "
        "float32. C has eigenvalues from 1 to 0.5 on the subspace that is looked for and from 0.25 "
        "to 0 elsewhere, and is diagonal: all methods treat rotated problems alike, so this is as "
        "general as any C, but the gradient costs next to nothing and the methods' own time is "
        "seen. (What a dense C would cost is timed too. A diagonal C also lets the subspace error "
        "fall below the rounding of float32, so only errors down to 1e-3 are compared.) Landing "
        "with its free safe step, with the tight one, and moving first and then landing (tight, "
        "too), beside RiemannianSGD with the QR and Cayley retractions; the same step eta = 1 for "
        "all, with lam = 1/2, so that eta lam = 1/2 lands at once. The library's QR is Cholesky's "
        "from 64 columns on, and its Cayley a solve of size 2p; QR by Householder's method, as a "
        "short program has it, is timed beside them. Times are medians of iterations that took "
        "turns, on one thread. Errors are measured in float64. Quick and smoke have smaller "
        "matrices."
    ),
    settings={
        "smoke": Settings(n=200, sizes=(10, 20, 40), every=4, repetitions=5),
        "quick": Settings(n=2_000, sizes=(50, 100, 200, 300), every=4),
        "paper": Settings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim(
            "Where p is much smaller than n, landing is not much faster than the Cayley "
            "retraction, whose iteration takes less than "
            f"{MUCH_FASTER:.0f} times as long (smallest p).",
            "paper",
            not_much_faster_than_cayley,
        ),
        Claim(
            "An iteration of landing takes less time than one of the Cayley retraction at every "
            f"p, by more than {FASTER - 1:.0%}.",
            "beyond the paper",
            partial(is_faster, seconds_per_iteration, LANDING, ("cayley",)),
        ),
        Claim(
            "It takes less time than one of the QR retraction, by Householder's method and by "
            "Cholesky's as in this library.",
            "beyond the paper",
            partial(is_faster, seconds_per_iteration, LANDING, (HOUSEHOLDER, "qr")),
        ),
        Claim(
            "All methods find the subspace, to the accuracy asked for.",
            "beyond the paper",
            all_converge,
        ),
        Claim(
            "Landing with its default safe step finds it in less time than the QR and Cayley "
            "retractions at every p.",
            "beyond the paper",
            partial(is_faster, time_needed, LANDING, RETRACTIONS),
        ),
        Claim(
            "Landing with the tight safe step finds it in less time than the QR and Cayley "
            "retractions at every p.",
            "beyond the paper",
            partial(is_faster, time_needed, TIGHT, RETRACTIONS),
        ),
        Claim(
            "At the largest p the tight safe step pays: one more product, and less time to the "
            "accuracy than with the free one.",
            "beyond the paper",
            tight_rule_pays,
        ),
        Claim(
            f"In the end landing is on the manifold (distance below {LANDED:.0e}), in all three "
            "forms.",
            "beyond the paper",
            ends_on_manifold,
        ),
        Claim(
            "In the end it is nearer to the manifold than the Cayley retraction.",
            "beyond the paper",
            ends_nearer_than_cayley,
        ),
        Claim(
            "The safe step keeps landing within eps of the manifold.",
            "correction",
            stays_in_ball,
        ),
        Claim(
            "With a dense C the gradient alone would take longer than landing's whole iteration "
            "with a diagonal one: which method steps fastest then matters little.",
            "beyond the paper",
            gradient_dominates,
        ),
    ),
    figures=(
        FigureSpec(
            "stiefel",
            "PCA at the largest p, by time (iterations times the median time of one). Left: error "
            "of the subspace, with the accuracy that counts as there. Right: distance to the "
            "manifold.",
            draw_runs,
        ),
        FigureSpec(
            "stiefel-time",
            "Left: time of one iteration against p, and of a gradient with a dense matrix C. "
            "Right: time to the accuracy.",
            draw_times,
        ),
    ),
    threads=1,
    seconds={"smoke": 4, "quick": 50, "paper": 1200},
)
