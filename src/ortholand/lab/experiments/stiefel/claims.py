"""What is claimed about the records: time and iterations of landing, QR and Cayley."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from ortholand.lab.experiments.descents import FASTER, iterations_to
from ortholand.lab.experiments.stiefel.runs import (
    AFTER,
    FREE,
    GRADIENT,
    HOUSEHOLDER,
    LANDING,
    STIEFEL_LANDINGS,
    STIEFEL_METHODS,
    STIEFEL_RETRACTIONS,
    TIGHT,
    iterations_timed,
    unit_name,
)
from ortholand.lab.study.figures import listed
from ortholand.lab.study.records import MissingRecordError, Records
from ortholand.lab.study.spec import Claim, Finding
from ortholand.lab.study.timing import TIMING, seconds_per_iteration

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
    Claim(
        "Where p is much smaller than n, landing is not much faster than the Cayley retraction, "
        f"whose iteration takes less than {MUCH_FASTER:.0f} times as long (smallest p).",
        "paper",
        not_much_faster_than_cayley,
    ),
    Claim(
        "An iteration of landing takes less time than one of the Cayley retraction at every p, "
        f"by more than {FASTER - 1:.0%}.",
        "beyond the paper",
        partial(is_faster, iteration_time, LANDING, ("cayley",)),
    ),
    Claim(
        "It takes less time than one of the QR retraction, by Householder's method and by "
        "Cholesky's as in this library.",
        "beyond the paper",
        partial(is_faster, iteration_time, LANDING, (HOUSEHOLDER, "qr")),
    ),
    Claim(
        "All methods find the subspace, to the accuracy asked for (landing by the Frobenius rule, "
        "whose steps shrink with p, is for comparison).",
        "beyond the paper",
        all_converge,
    ),
    Claim(
        f"Landing takes at most {AS_FEW} times as many iterations as the QR retraction at every p.",
        "beyond the paper",
        takes_as_few_iterations,
    ),
    *(
        Claim(
            f"Landing {how} finds it in less time than the QR retraction (by Cholesky's and by "
            "Householder's method) and the Cayley retraction, at every p.",
            "beyond the paper",
            partial(is_faster, time_needed, method, (*STIEFEL_RETRACTIONS, HOUSEHOLDER)),
        )
        for how, method in (("as it is by default", LANDING), ("after the move", AFTER))
    ),
    Claim(
        "At the largest p the spectral rule pays: coupled landing takes less time to the accuracy "
        "than by the tight rule and by the Frobenius rule.",
        "beyond the paper",
        spectral_rule_pays,
    ),
    Claim(
        f"In the end landing is on the manifold (distance below {LANDED:.0e}), in all its forms "
        "but for the Frobenius rule.",
        "beyond the paper",
        ends_on_manifold,
    ),
    Claim(
        "In the end it is nearer to the manifold than the Cayley retraction.",
        "beyond the paper",
        ends_nearer_than_cayley,
    ),
    Claim(
        "The safe step keeps landing within eps of the manifold, in the norm of its rule.",
        "correction",
        stays_in_ball,
    ),
    Claim(
        "With a dense C the gradient alone would take longer than landing's whole iteration "
        "with a diagonal one: which method steps fastest then matters little.",
        "beyond the paper",
        gradient_dominates,
    ),
)
