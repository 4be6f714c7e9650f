"""PCA on tall matrices, beyond the paper: landing against the QR and Cayley retractions.

The paper leaves the Stiefel manifold, n x p with n > p, to future work, and expects that landing
need not be much faster there, since the Cayley retraction takes a solve of size 2p only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import ortholand_lab.rules  # noqa: F401  (registers "tight")
from ortholand.geometry import distance, random_orthogonal
from ortholand.geometry.derivatives import relative_gradient_times_x
from ortholand.geometry.manifold import orthonormal_factor
from ortholand_lab.experiments.descents import (
    FASTER,
    follow,
    iterate,
    iterations_to,
    make_optimizer,
)
from ortholand_lab.problems import PCA
from ortholand_lab.study.figures import DOTS, add_legend, label_plainly, listed, plot_method
from ortholand_lab.study.records import MissingRecordError, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit
from ortholand_lab.study.timing import (
    TIMING,
    Action,
    Timing,
    seconds_per_iteration,
    time_runs,
    timing_unit,
)

# What is run.


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


# What is claimed.


MUCH_FASTER = 2.0
LARGE = 50  # for fewer columns, calling the operations takes longer than their arithmetic
AS_FEW = 1.1  # times as many iterations that count as the same number
LANDED = 1e-4  # a distance to the manifold that counts as on it, in float32 and for 1,000 columns


def all_sizes(records: Records) -> list[int]:
    """Every p of the run."""
    return sorted(records.settings["sizes"])


def large_sizes(records: Records) -> list[int]:
    """The sizes that the claims about time refer to; without any, nothing is decided."""
    large = [p for p in all_sizes(records) if p >= LARGE]
    if not large:
        raise MissingRecordError(f"no p of {LARGE} or more at this preset")
    return large


def iteration_time(records: Records, method: str, p: int) -> float:
    """Median seconds of an iteration, averaged over those up to the accuracy (if reached)."""
    timing, timed = records[unit_name(TIMING, p)], iterations_timed(method)
    times = [seconds_per_iteration(timing, method=method, iteration=k) for k in timed]
    if len(times) == 1:
        return times[0]
    needed = iterations_needed(records, method, p)
    if not math.isfinite(needed):
        return times[-1]
    ends = [min(needed, last) for last in timed.values()]
    spans = [end - start for start, end in pairwise([0.0, *ends])]
    return sum(map(math.prod, zip(spans, times, strict=True))) / needed


def iterations_needed(records: Records, method: str, p: int) -> float:
    """Iterations to the accuracy; Householder's are those of the same retraction."""
    run = unit_name("qr" if method == HOUSEHOLDER else method, p)
    return iterations_to(records[run], "error", records.settings["accuracy"])


def time_needed(records: Records, method: str, p: int) -> float:
    """Seconds to the accuracy: iterations times the mean time of one."""
    return iterations_needed(records, method, p) * iteration_time(records, method, p)


def all_converge(records: Records) -> Finding:
    """Every method at every size; the Frobenius rule is for comparison."""
    needed = {
        p: {method: iterations_needed(records, method, p) for method in STIEFEL_METHODS}
        for p in all_sizes(records)
    }
    measured = "; ".join(f"p = {p}: {listed(by, '.0f')}" for p, by in needed.items())
    finite = all(math.isfinite(k) for by in needed.values() for m, k in by.items() if m != FREE)
    return Finding.of(f"iterations: {measured}", finite)


def takes_as_few_iterations(records: Records) -> Finding:
    """Landing's iterations relative to QR's, at every size."""
    ratios = {
        p: iterations_needed(records, LANDING, p) / iterations_needed(records, "qr", p)
        for p in all_sizes(records)
    }
    measured = ", ".join(f"p = {p}: {ratio:.2f}" for p, ratio in ratios.items())
    return Finding.of(f"in QR's: {measured}", max(ratios.values()) <= AS_FEW)


def is_faster(
    quantity: Callable[[Records, str, int], float],
    method: str,
    rivals: Sequence[str],
    records: Records,
) -> Finding:
    """Whether it takes less time than every rival, at every size."""
    measured, lowest = [], math.inf
    for p in large_sizes(records):
        own = quantity(records, method, p)
        ratios = {rival: quantity(records, rival, p) / own for rival in rivals}
        measured.append(f"p = {p}: {listed(ratios, '.2f')}")
        lowest = min(lowest, *ratios.values())
    return Finding.of("times as long: " + "; ".join(measured), lowest > FASTER)


def not_much_faster_than_cayley(records: Records) -> Finding:
    """Cayley's time at the smallest p, where the solve is smallest compared with the products."""
    p = large_sizes(records)[0]
    ratio = iteration_time(records, "cayley", p) / iteration_time(records, LANDING, p)
    measured = f"n = {records.settings['n']}, p = {p}: Cayley takes {ratio:.2f} times as long"
    return Finding.of(measured, ratio < MUCH_FASTER)


def spectral_rule_pays(records: Records) -> Finding:
    """Iterations and time of coupled landing by each rule, at the largest p."""
    p, rules = large_sizes(records)[-1], (LANDING, TIGHT, FREE)
    iterations = {m: iterations_needed(records, m, p) for m in rules}
    times = {m: time_needed(records, m, p) for m in rules}
    measured = f"p = {p}: {listed(iterations, '.0f')} iterations; {listed(times, '.2f')} seconds"
    return Finding.of(measured, times[LANDING] * FASTER < min(times[TIGHT], times[FREE]))


def ends_on_manifold(records: Records) -> Finding:
    """Each way of landing, at every size."""
    sizes = all_sizes(records)
    ends = {m: max(final_distance(records, m, p) for p in sizes) for m in STIEFEL_METHODS}
    landed = all(ends[m] < LANDED for m in STIEFEL_LANDINGS if m != FREE)
    return Finding.of(f"in the end at most: {listed(ends, '.1e')}", landed)


def ends_nearer_than_cayley(records: Records) -> Finding:
    """Cayley's final distance relative to each way of landing, at every size."""
    factors = {
        p: final_distance(records, "cayley", p)
        / max(final_distance(records, m, p) for m in (LANDING, AFTER))
        for p in all_sizes(records)
    }
    return _exceeds_one("Cayley's distance in landing's", factors)


def stays_in_ball(records: Records) -> Finding:
    """Whether all recorded iterates stay in the ball, in the norm of their rule."""
    sizes = all_sizes(records)
    norms = {
        m: "to_manifold" if m in (FREE, TIGHT) else "spectral_distance" for m in STIEFEL_LANDINGS
    }
    largest = {
        m: max(max(records[unit_name(m, p)].series(norm)) for p in sizes)
        for m, norm in norms.items()
    }
    eps = records.settings["eps"]
    holds = max(largest.values()) <= eps
    return Finding.of(f"{listed(largest, '.2g')}; eps = {eps}", holds)


def gradient_dominates(records: Records) -> Finding:
    """Time of the gradient with a dense C, relative to landing's iteration with a diagonal one."""
    ratios = {
        p: iteration_time(records, GRADIENT, p) / iteration_time(records, LANDING, p)
        for p in large_sizes(records)
    }
    return _exceeds_one("in landing's time", ratios)


def final_distance(records: Records, method: str, p: int) -> float:
    """How far from the manifold a run ends."""
    return records[unit_name(method, p)].series("to_manifold")[-1]


def _exceeds_one(what: str, ratios: Mapping[int, float]) -> Finding:
    measured = ", ".join(f"p = {p}: {ratio:.1f}" for p, ratio in ratios.items())
    return Finding.of(f"{what}: {measured}", min(ratios.values()) > 1)


STIEFEL_CLAIMS = (
    Claim.of_paper(
        "Where p is much smaller than n, landing is not much faster than the Cayley retraction, "
        f"whose iteration takes less than {MUCH_FASTER:.0f} times as long (smallest p).",
        "Cayley retraction can be computed by inverting a small 2p x 2p matrix. In this setting, "
        "the landing flow might not be much faster than this retraction.",
        not_much_faster_than_cayley,
    ),
    Claim.beyond(
        "An iteration of landing takes less time than one of the Cayley retraction at every p, "
        f"by more than {FASTER - 1:.0%}.",
        partial(is_faster, iteration_time, LANDING, ("cayley",)),
    ),
    Claim.beyond(
        "It takes less time than one of the QR retraction, by Householder's method and by "
        "Cholesky's as in this library.",
        partial(is_faster, iteration_time, LANDING, (HOUSEHOLDER, "qr")),
    ),
    Claim.beyond(
        "All methods find the subspace, to the accuracy asked for (landing by the Frobenius rule, "
        "whose steps shrink with p, is for comparison).",
        all_converge,
    ),
    Claim.beyond(
        f"Landing takes at most {AS_FEW} times as many iterations as the QR retraction at every p.",
        takes_as_few_iterations,
    ),
    *(
        Claim.beyond(
            f"Landing {how} finds it in less time than the QR retraction (by Cholesky's and by "
            "Householder's method) and the Cayley retraction, at every p.",
            partial(is_faster, time_needed, method, (*STIEFEL_RETRACTIONS, HOUSEHOLDER)),
        )
        for how, method in (("as it is by default", LANDING), ("after the move", AFTER))
    ),
    Claim.beyond(
        "At the largest p the spectral rule pays: coupled landing takes less time to the accuracy "
        "than by the tight rule and by the Frobenius rule.",
        spectral_rule_pays,
    ),
    Claim.beyond(
        f"In the end landing is on the manifold (distance below {LANDED:.0e}), in all its forms "
        "but for the Frobenius rule.",
        ends_on_manifold,
    ),
    Claim.beyond(
        "In the end it is nearer to the manifold than the Cayley retraction.",
        ends_nearer_than_cayley,
    ),
    Claim(
        "The safe step keeps landing within eps of the manifold, in the norm of its rule.",
        "correction",
        stays_in_ball,
    ),
    Claim.beyond(
        "With a dense C the gradient alone would take longer than landing's whole iteration "
        "with a diagonal one: which method steps fastest then matters little.",
        gradient_dominates,
    ),
)


# How it is drawn.


def draw_runs(records: Records) -> Figure:
    """Error and distance to the manifold by time, at the largest p."""
    figure = Figure(figsize=(8, 4.4))
    errors, distances = figure.subplots(1, 2, sharex=True)
    p = all_sizes(records)[-1]
    for method in STIEFEL_METHODS:
        run = records[unit_name(method, p)]
        step = iteration_time(records, method, p)
        time = [step * k for k in run.series("iteration")]
        plot_method(errors, method, time, run.series("error"))
        plot_method(distances, method, time[1:], run.series("to_manifold")[1:])
    settings = records.settings
    errors.axhline(settings["accuracy"], color="#777777", linewidth=0.8, zorder=1)
    errors.set(yscale="log", ylabel="subspace error", ylim=(1e-6, None), xlim=(0, None))
    distances.set(yscale="log", ylabel=r"to the manifold, $\|X^\top X - I\|$")
    for axes in (errors, distances):
        axes.set_xlabel(f"time, seconds (n = {settings['n']:,}, p = {p})")
    add_legend(figure, errors, 3)
    return figure


def draw_times(records: Records) -> Figure:
    """Time of an iteration, and to the accuracy, against p."""
    figure = Figure(figsize=(8, 4.6))
    single, whole = figure.subplots(1, 2)
    sizes = all_sizes(records)
    panels = (
        (single, "time of an iteration", TIMED_METHODS, iteration_time),
        (whole, "time to the accuracy", STIEFEL_METHODS, time_needed),
    )
    for axes, label, methods, seconds in panels:
        for method in methods:
            plot_method(axes, method, sizes, [seconds(records, method, p) for p in sizes], **DOTS)
        axes.set(xscale="log", yscale="log", xlabel="p", ylabel=f"{label}, seconds")
        axes.set_xticks(sizes, [str(p) for p in sizes])
        axes.xaxis.minorticks_off()
        label_plainly(axes.yaxis)
    add_legend(figure, single, 3)
    return figure


STIEFEL_FIGURES = (
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
)


STIEFEL = Study(
    name="stiefel",
    title="PCA on tall matrices: landing against QR and Cayley",
    summary=(
        "f(X) = -Tr(X^T C X) over n x p matrices with orthonormal columns, from a random start, in "
        "float32. C has eigenvalues from 1 to 0.5 on the subspace that is looked for and from 0.25 "
        "to 0 elsewhere, and is diagonal: all methods treat rotated problems alike, so this is as "
        "general as any C, but the gradient costs next to nothing and the methods' own time is "
        "seen. (What a dense C would cost is timed too. A diagonal C also lets the subspace error "
        "fall below the rounding of float32, so only errors down to 1e-3 are compared.) Landing "
        "as it is by default (spectral rule of the safe step), moving first and then landing, and "
        "coupled by the tight and the Frobenius rule, compared with RiemannianSGD with the QR and "
        "Cayley retractions; the same step eta = 1 for "
        "all, with lam = 1/2, so that eta lam = 1/2 lands at once. The library's QR is Cholesky's "
        "from 64 columns on, and its Cayley a solve of size 2p; QR by Householder's method, as a "
        "short program has it, is timed too. Times are medians of iterations that took turns, on "
        f"one thread; landing's of iterations {', '.join(map(str, LANDING_TIMED))}, weighted by "
        "how many are like them: the first pay for better bounds of the safe step. Errors are "
        "measured in float64. Quick and smoke have smaller matrices."
    ),
    settings={
        "smoke": StiefelSettings(n=200, sizes=(10, 20, 40), every=4, repetitions=5),
        "quick": StiefelSettings(n=2_000, sizes=(50, 100, 200, 300), every=4),
        "paper": StiefelSettings(),
    },
    plan=plan,
    run=run_unit,
    claims=STIEFEL_CLAIMS,
    figures=STIEFEL_FIGURES,
    seconds={"smoke": 4, "quick": 50, "paper": 1200},
)
