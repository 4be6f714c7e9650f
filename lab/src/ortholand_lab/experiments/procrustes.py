"""Orthogonal Procrustes, p = 40 (the paper's figure 3): landing and the four retractions.

Every run starts at the identity, of determinant +1. Neither the safe step nor a retraction ever
lets a determinant change its sign, so the optimum is the best matrix of determinant +1.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn

from ortholand.fields import landing_along, landing_field
from ortholand.geometry import distance, relative_gradient, sym
from ortholand.retractions import retract
from ortholand.safe_step import safe_step_size
from ortholand_lab.experiments.descents import (
    FASTER,
    follow,
    growth,
    iterate,
    iterations_to,
    make_optimizer,
    within_ball,
)
from ortholand_lab.methods import PAPER_RULE
from ortholand_lab.problems import Procrustes
from ortholand_lab.study.figures import draw_by_time_and_iteration, listed
from ortholand_lab.study.records import Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit, Verdict
from ortholand_lab.study.timing import (
    TIMING,
    Action,
    Timing,
    marks,
    seconds_per_iteration,
    time_runs,
    timing_unit,
)
from ortholand_lab.textbook import RETRACTION_FORMS, RETRACTION_NAMES, textbook

# What is run.


LANDINGS = ("landing", "landing-momentum", "landing-unscaled")
PROCRUSTES_METHODS = ("landing", *RETRACTION_NAMES)  # with our care
PAPER_METHODS = tuple(map(textbook, PROCRUSTES_METHODS))  # that the paper compares
DTYPES = ("float32", "float64")
PAPER_TIMING = "timing-textbook"


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
    methods = dict.fromkeys((*LANDINGS, *RETRACTION_NAMES, *PAPER_METHODS))
    runs = [_make_run(settings, method, dtype) for dtype in DTYPES for method in methods]
    units = [Unit(unit_name(run.method, run.dtype), run, run.iterations) for run in runs]
    ours = [run for run in runs if not run.method.endswith("-textbook")]
    formulas = [replace(run, plain=True) for run in ours if run.method in PROCRUSTES_METHODS]
    lengths = (settings.warm_up, settings.repetitions)
    paper = tuple(replace(run, plain=True) for run in runs if run.method in PAPER_METHODS)
    timings = [
        timing_unit(Timing((*ours, *formulas), *lengths)),
        timing_unit(Timing(paper, *lengths), PAPER_TIMING),
    ]
    return [*units, *timings]


def _make_run(settings: ProcrustesSettings, method: str, dtype: str) -> ProcrustesRun:
    iterations = settings.iterations if method == "landing" else settings.extra_iterations
    if method in RETRACTION_FORMS:
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
        if run.method in RETRACTION_FORMS:
            return settings.lr
        A = relative_gradient(X, self.problem.grad(X))
        if run.momentum and self.X in self.optimizer.state:
            A = A + run.momentum * self.optimizer.state[self.X]["momentum_buffer"]
        L = landing_along(X, A, settings.lam)
        safe = safe_step_size(L, distance(X), lam=settings.lam, eps=settings.eps, rule=PAPER_RULE)
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
    if run.method in RETRACTION_FORMS:
        return retract(X, -lr * relative_gradient(X, G), RETRACTION_FORMS[run.method])
    return X - lr * landing_field(X, G, run.settings.lam)


def make_problem(run: ProcrustesRun, context: Context, dtype: torch.dtype) -> Procrustes:
    """The problem of a seed, on the device."""
    problem = Procrustes.gaussian(run.settings.p, seed=context.seed)
    # f / p of sqrt(p) A and sqrt(p) B is f as the paper prints it, with the same optimum.
    factor = 1.0 if run.scaled else math.sqrt(run.settings.p)
    A, B = (factor * M.to(context.device) for M in (problem.A, problem.B))
    return Procrustes(A.to(dtype), B.to(dtype))


# What is claimed.


LANDED = 1e-5  # a distance to the manifold that counts as on it, in float32 too
ARRIVED = 1e-3  # a distance to the optimum, relative to the first, that counts as there
SIMILAR = 0.05  # numbers of iterations that differ by less, relatively, count as the same
DRIFTED = 3.0  # growth of the distance to the manifold that is no longer its fluctuation
CLOSEST = 1e-9  # nearer to the optimum than this, rounding has its part in the distance


def lands(records: Records) -> Finding:
    """The paper: away from the manifold at first, on it in the end."""
    runs = _in_both_precisions(records, "landing")
    measured = "; ".join(
        f"{dtype}: at most {run.value('largest_distance'):.2g}, "
        f"in the end {run.series('to_manifold')[-1]:.1e}"
        for dtype, run in runs.items()
    )
    if any(run.value("largest_distance") < 100 * LANDED for run in runs.values()):
        return Finding(measured, Verdict.FAILS)  # it never left
    return Finding(measured, Verdict.worst([lands_within(run, LANDED) for run in runs.values()]))


def stays_in_ball(records: Records) -> Finding:
    """The safe step's guarantee, at every iteration of every run."""
    runs = [run for m in LANDINGS for run in _in_both_precisions(records, m).values()]
    distances = [run.value("largest_distance") for run in runs]
    return within_ball(distances, len(runs), records.settings["eps"])


def unscaled_lands(records: Records) -> Finding:
    """The paper's statement with the cost as printed."""
    runs = _in_both_precisions(records, "landing-unscaled")
    measured = "; ".join(
        f"{dtype}: in the end {run.series('to_manifold')[-1]:.2g}" for dtype, run in runs.items()
    )
    verdicts = [settles(run, "to_manifold", LANDED) for run in runs.values()]
    return Finding(measured, Verdict.worst(verdicts))


def unscaled_rides_boundary(records: Records) -> Finding:
    """The correction: only the safe step restrains it, and it never lands."""
    runs = list(_in_both_precisions(records, "landing-unscaled").values())
    eps, lr = (records.settings[name] for name in ("eps", "lr"))
    # The last half: at the start every run is near the identity.
    nearest = min(min(_last_half(run, "to_manifold")) for run in runs)
    longest = max(max(_last_half(run, "step")) for run in runs)
    return Finding.of(
        f"second half: distance at least {nearest:.2g}, steps at most {longest:.2g} of {lr}",
        nearest > eps / 2 and longest < lr,
    )


def reaches_optimum(method: str, records: Records) -> Finding:
    """Whether a method converges to the optimum, in float64."""
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
    lr = run.configuration["settings"]["lr"]
    predicted = -math.log1p(-lr * run.value("curvature"))
    pairs = zip(_last_half(run, "iteration"), _last_half(run, "to_optimum"), strict=True)
    # The rate is that of the end: not before the neighbourhood of the optimum, nor at rounding.
    points = [(k, math.log(d)) for k, d in pairs if CLOSEST < d < 1]
    if len(points) < 5:
        return Finding("not near enough to the optimum, or there too soon", Verdict.OPEN)
    (k0, log0), (k1, log1) = points[-5], points[-1]
    rate = (log0 - log1) / (k1 - k0)
    return Finding.of(
        f"{rate:.3g} per iteration, predicted {predicted:.3g}",
        abs(rate / predicted - 1) < 0.1,
    )


def momentum_is_faster(records: Records) -> Finding:
    """How soon momentum arrives where plain landing ends."""
    plain = records[unit_name("landing", "float64")]
    momentum = records[unit_name("landing-momentum", "float64")]
    goal, total = plain.series("to_optimum")[-1], plain.configuration["iterations"]
    curve = zip(momentum.series("iteration"), momentum.series("to_optimum"), strict=True)
    there = next((int(k) for k, d in curve if d <= goal), None)
    if there is None:
        within = momentum.configuration["iterations"]
        return Finding(f"not as near ({goal:.1e}) within {within} iterations", Verdict.FAILS)
    measured = f"to {goal:.1e}: {total} iterations without, {there} with momentum"
    return Finding.of(measured, 2 * there <= total)


def similar_iterations(methods: Iterable[str], records: Records) -> Finding:
    """How many iterations each method takes to come as close to the optimum as all do."""
    runs = compared(records, "float64", methods)
    start = runs["landing"].series("to_optimum")[0]
    goal = max(CLOSEST, *(run.series("to_optimum")[-1] for run in runs.values()))
    if goal > start / 10:
        return Finding(
            f"not near enough to the optimum: at {goal:.2g} of {start:.2g}", Verdict.OPEN
        )
    needed = {method: iterations_to(run, "to_optimum", goal) for method, run in runs.items()}
    similar = all(abs(k / needed["landing"] - 1) <= SIMILAR for k in needed.values())
    measured = f"from {start:.2g} to {goal:.2g}: {listed(needed, '.0f')} iterations"
    return Finding.of(measured, similar)


def landing_is_faster(
    timing: str, methods: Iterable[str], plain: bool, records: Records
) -> Finding:
    """Time per iteration of each retraction as a multiple of landing's, from the timing alone."""
    measured, lowest = [], math.inf
    for dtype in DTYPES:
        times = times_per_iteration(records, methods, dtype, plain=plain, timing=timing)
        landing = times.pop("landing")
        ratios = {method: seconds / landing for method, seconds in times.items()}
        others = listed(ratios, ".2f")
        measured.append(f"{dtype}: landing {1e6 * landing:.0f} µs, {others} times as long")
        lowest = min(lowest, *ratios.values())
    return Finding.of("; ".join(measured), lowest > FASTER)


def ends_nearer(methods: Iterable[str], records: Records) -> Finding:
    """Landing against the exponential and Cayley, after as many iterations, in both precisions."""
    measured, verdicts = [], []
    for dtype in DTYPES:
        runs = compared(records, dtype, ("landing", *methods))
        ends = {method: run.series("to_manifold")[-1] for method, run in runs.items()}
        verdicts.append(lands_within(runs["landing"], min(ends[m] for m in methods)))
        on_its_way = ", landing still on its way" if verdicts[-1] is Verdict.OPEN else ""
        iterations = runs["landing"].series("iteration")[-1]
        measured.append(f"{dtype}, {iterations:.0f} iterations: {listed(ends, '.1e')}{on_its_way}")
    return Finding("; ".join(measured), Verdict.worst(verdicts))


def projections_do_not_drift(records: Records) -> Finding:
    """Growth of the distance to the manifold, with the other two for comparison."""
    measured, largest = [], 0.0
    for dtype in DTYPES:
        growths = {m: growth(records[unit_name(m, dtype)], "to_manifold") for m in RETRACTION_NAMES}
        measured.append(f"{dtype}: {listed(growths, '.2g')}")
        largest = max(largest, growths["polar"], growths["qr"])
    return Finding.of("growth in " + "; ".join(measured), largest < DRIFTED)


def compared(records: Records, dtype: str, methods: Iterable[str]) -> dict[str, Record]:
    """The runs of these methods, up to the last iteration that all of them recorded."""
    runs = {method: records[unit_name(method, dtype)] for method in methods}
    last = max(set.intersection(*(set(run.series("iteration")) for run in runs.values())))
    return {method: _up_to(run, last) for method, run in runs.items()}


def _up_to(run: Record, last: float) -> Record:
    kept = [k <= last for k in run.series("iteration")]
    series = {name: list(compress(y, kept)) for name, y in run.result.series.items()}
    return replace(run, result=replace(run.result, series=series))


def times_per_iteration(
    records: Records,
    methods: Iterable[str],
    dtype: str,
    *,
    plain: bool = False,
    timing: str = TIMING,
) -> dict[str, float]:
    """Median seconds of an iteration of each method, by the optimizer or by its plain formula."""
    which = dict(dtype=dtype, plain=plain)
    return {m: seconds_per_iteration(records[timing], method=m, **which) for m in methods}


def lands_within(run: Record, tolerance: float) -> Verdict:
    """Whether a run ends within the tolerance of the manifold; undecided on its way to the optimum.

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


def _in_both_precisions(records: Records, method: str) -> dict[str, Record]:
    return {dtype: records[unit_name(method, dtype)] for dtype in DTYPES}


DRIFTING = ("exponential", "cayley")
PROCRUSTES_CLAIMS = (
    Claim.of_paper(
        "To come equally near to the optimum, each retraction needs as many iterations as "
        f"landing, within {SIMILAR:.0%} (float64).",
        "Looking at the distance to the optimum, all methods are similar in term of iterations.",
        partial(similar_iterations, PAPER_METHODS),
        partial(similar_iterations, PROCRUSTES_METHODS),
    ),
    Claim.of_paper(
        "An iteration of landing takes less time than one of each retraction, by more than "
        f"{FASTER - 1:.0%}: the formulas, without an optimizer and without the safe step.",
        "Since one iteration of the landing algorithm is cheaper, we get an overall faster method.",
        partial(landing_is_faster, PAPER_TIMING, PAPER_METHODS, True),
        partial(landing_is_faster, TIMING, PROCRUSTES_METHODS, True),
    ),
    Claim.beyond(
        "The same holds of gradient and step of our optimizers, landing's with its safe step.",
        partial(landing_is_faster, TIMING, PROCRUSTES_METHODS, False),
    ),
    Claim.of_paper(
        "Landing starts by moving away from the manifold, and in the end lands on it "
        f"(distance below {LANDED:.0e}).",
        "the landing algorithm starts by moving away from the manifold, but in the end lands on "
        "the manifold",
        lands,
    ),
    Claim.of_paper(
        "The exponential and Cayley retractions end further from the manifold than landing, in "
        "float64 and in float32.",
        "The exponential and Cayley retractions suffer from numerical errors, and end up being "
        "further from the manifold than the landing algorithm.",
        partial(ends_nearer, tuple(map(textbook, DRIFTING))),
        partial(ends_nearer, DRIFTING),
    ),
    Claim.beyond(
        "The polar and QR retractions do not accumulate errors: over the last 99 % of the run "
        f"their distance to the manifold grows less than {DRIFTED:.0f}-fold.",
        projections_do_not_drift,
    ),
    Claim.of_paper(
        f"Landing converges to the optimum: the distance falls {1 / ARRIVED:.0f}-fold or more.",
        "which produces iterates that are not necessarily orthogonal, but which converge to a "
        "local minimum",
        partial(reaches_optimum, "landing"),
    ),
    Claim.of_paper(
        "Near the optimum the distance falls at the rate eta mu, where mu is the smallest "
        "eigenvalue of the Riemannian Hessian.",
        "when lambda >= mu_min, we get the same rate as Riemannian gradient descent",
        local_rate,
    ),
    Claim.of_paper(
        "With the cost as printed, without 1 / p, landing lands too.",
        "define the Procrustes cost function as f(X) = ||XA - B||^2 [...] with a fixed step-size "
        "eta = 0.1",
        unscaled_lands,
        erratum="procrustes-scale",
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
    Claim.beyond(
        f"With momentum landing converges too: the distance falls {1 / ARRIVED:.0f}-fold or more.",
        partial(reaches_optimum, "landing-momentum"),
    ),
    Claim.beyond(
        "With momentum, landing needs at most half the iterations.",
        momentum_is_faster,
    ),
)


# How it is drawn.


def draw_compared(dtype: str, records: Records) -> Figure:
    """The paper's figure: landing and the textbook retractions, by their formulas' times."""
    runs = compared(records, dtype, PAPER_METHODS)
    timing = dict(plain=True, timing=PAPER_TIMING)
    return _draw_panels(runs, times_per_iteration(records, runs, dtype, **timing))


def draw_landings(dtype: str, records: Records) -> Figure:
    """Landing with momentum and without 1 / p, which are not in the paper's figure."""
    runs = {method: records[unit_name(method, dtype)] for method in LANDINGS}
    return _draw_panels(runs, times_per_iteration(records, runs, dtype))


def _draw_panels(runs: Mapping[str, Record], seconds: Mapping[str, float]) -> Figure:
    """Distances to the optimum and to the manifold, by time and by iteration."""
    labels = {
        "to_optimum": r"to the optimum, $\|X - X_*\|$",
        "to_manifold": r"to the manifold, $\|X^\top X - I\|$",
    }
    trials = {method: [run] for method, run in runs.items()}
    figure, grid = draw_by_time_and_iteration(
        trials, seconds, labels, height=5.6, legend_columns=len(runs)
    )
    # Few decades, so that the labels alone would leave the scale in doubt.
    grid[0, 0].yaxis.set_minor_locator(LogLocator(subs="auto"))
    grid[0, 0].yaxis.set_minor_formatter(NullFormatter())
    eps = runs["landing"].configuration["settings"]["eps"]
    for axes in grid[1]:
        axes.axhline(eps, color="#777777", linewidth=0.8, zorder=1)
    aside = dict(xytext=(4, 0), textcoords="offset points", va="center", color="#555555")
    grid[1, 1].annotate("eps", (1, eps), xycoords=("axes fraction", "data"), **aside)
    return figure


PROCRUSTES_FIGURES = (
    *(
        FigureSpec(
            f"procrustes-{dtype}",
            f"Procrustes in {dtype}, by landing and by the four textbook retractions. Top: "
            "distance to the optimum, where the curves almost coincide. Bottom: distance to the "
            "manifold, "
            "with the radius eps of landing's safe ball. Left: by time, which is the iterations "
            "times the median time of a formula, timed in turn with the others. Right: by "
            "iteration.",
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
)


PROCRUSTES = Study(
    name="procrustes",
    title="Orthogonal Procrustes: distance to the optimum and to the manifold",
    paper_figure="Figure 3",
    summary=(
        "Gradient descent on f(X) = ||XA - B||^2 / p with A and B standard normal, from the "
        "identity and with the step eta = 0.1: by the landing algorithm, with the safe step, and "
        "by the exponential, polar, Cayley and QR retractions, in textbook form and in ours. The "
        "paper prints f without 1 / p; "
        "that is run too, as an extra, because at that scale the safe step alone sets the pace "
        "and nothing lands. Landing with momentum is the other extra. The optimum is the best "
        "matrix of determinant +1, the determinant of the start, whose sign no method changes. "
        "How many iterations it takes to get there depends on the smallest curvature at the "
        "optimum, which varies much from seed to seed; distances are measured in float64. Where "
        "the retractions are run for fewer iterations than landing (the retraction share below), "
        "figures and comparisons end where they do. What is said about time rests on a run of its "
        "own, in which the methods take turns iteration by iteration, after a warm-up; medians "
        "are compared, and figures by time show iterations times the median time of one."
    ),
    settings={
        "smoke": ProcrustesSettings(
            p=10, iterations=400, extra_iterations=250, warm_up=10, repetitions=20
        ),
        "quick": ProcrustesSettings(
            iterations=18_000, retraction_share=0.5, extra_iterations=2_500
        ),
        "paper": ProcrustesSettings(),
    },
    plan=plan,
    run=run_unit,
    claims=PROCRUSTES_CLAIMS,
    figures=PROCRUSTES_FIGURES,
    revision=2,
)
