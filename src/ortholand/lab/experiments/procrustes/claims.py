"""What is claimed about the records: landing, the four retractions, and two extras."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import compress

from ortholand.lab.experiments.descents import FASTER, growth, iterations_to, within_ball
from ortholand.lab.experiments.procrustes.runs import (
    DTYPES,
    LANDINGS,
    PROCRUSTES_METHODS,
    unit_name,
)
from ortholand.lab.study.figures import listed
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import Claim, Finding, Verdict
from ortholand.lab.study.timing import TIMING, seconds_per_iteration
from ortholand.retractions import RETRACTIONS

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


def similar_iterations(records: Records) -> Finding:
    """How many iterations each method takes to come as close to the optimum as all do."""
    runs = compared(records, "float64")
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


def landing_is_faster(plain: bool, records: Records) -> Finding:
    """Time per iteration of each retraction as a multiple of landing's, from the timing alone."""
    measured, lowest = [], math.inf
    for dtype in DTYPES:
        times = times_per_iteration(records, PROCRUSTES_METHODS, dtype, plain=plain)
        landing = times.pop("landing")
        ratios = {method: seconds / landing for method, seconds in times.items()}
        others = listed(ratios, ".2f")
        measured.append(f"{dtype}: landing {1e6 * landing:.0f} µs, {others} times as long")
        lowest = min(lowest, *ratios.values())
    return Finding.of("; ".join(measured), lowest > FASTER)


def ends_nearer(dtype: str, records: Records) -> Finding:
    """Landing against the exponential and Cayley, after the same number of iterations."""
    runs = compared(records, dtype)
    ends = {method: run.series("to_manifold")[-1] for method, run in runs.items()}
    iterations = runs["landing"].series("iteration")[-1]
    verdict = lands_within(runs["landing"], min(ends["exponential"], ends["cayley"]))
    on_its_way = "; landing is still on its way" if verdict is Verdict.OPEN else ""
    measured = f"after {iterations:.0f} iterations: {listed(ends, '.1e')}{on_its_way}"
    return Finding(measured, verdict)


def projections_do_not_drift(records: Records) -> Finding:
    """Growth of the distance to the manifold, with the other two for comparison."""
    measured, largest = [], 0.0
    for dtype in DTYPES:
        growths = {m: growth(records[unit_name(m, dtype)], "to_manifold") for m in RETRACTIONS}
        measured.append(f"{dtype}: {listed(growths, '.2g')}")
        largest = max(largest, growths["polar"], growths["qr"])
    return Finding.of("growth in " + "; ".join(measured), largest < DRIFTED)


def compared(records: Records, dtype: str) -> dict[str, Record]:
    """The runs that the paper compares, up to the last iteration that all of them recorded."""
    runs = {method: records[unit_name(method, dtype)] for method in PROCRUSTES_METHODS}
    last = max(set.intersection(*(set(run.series("iteration")) for run in runs.values())))
    return {method: _up_to(run, last) for method, run in runs.items()}


def _up_to(run: Record, last: float) -> Record:
    kept = [k <= last for k in run.series("iteration")]
    series = {name: list(compress(y, kept)) for name, y in run.result.series.items()}
    return replace(run, result=replace(run.result, series=series))


def times_per_iteration(
    records: Records, methods: Iterable[str], dtype: str, *, plain: bool = False
) -> dict[str, float]:
    """Median seconds of an iteration of each method, by the optimizer or by its plain formula."""
    which = dict(dtype=dtype, plain=plain)
    return {m: seconds_per_iteration(records[TIMING], method=m, **which) for m in methods}


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


PROCRUSTES_CLAIMS = (
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
    *(
        Claim(
            f"In {dtype} the exponential and Cayley retractions end further from the manifold "
            "than landing.",
            "paper" if dtype == "float32" else "beyond the paper",
            partial(ends_nearer, dtype),
        )
        for dtype in DTYPES
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
    Claim("With the cost as printed, without 1 / p, landing lands too.", "paper", unscaled_lands),
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
        f"With momentum landing converges too: the distance falls {1 / ARRIVED:.0f}-fold or more.",
        "beyond the paper",
        partial(reaches_optimum, "landing-momentum"),
    ),
    Claim(
        "With momentum, landing needs at most half the iterations.",
        "beyond the paper",
        momentum_is_faster,
    ),
)
