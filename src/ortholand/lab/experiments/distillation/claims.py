"""What is claimed: who learns fastest, who stays orthogonal, what an iteration costs."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ortholand.lab.experiments.descents import FASTER, growth, iterations_to, largest, within_ball
from ortholand.lab.experiments.distillation.runs import (
    PAPER_ITERATIONS,
    PAPER_SIZE,
    TIMED_RATE,
    best_runs,
    final_loss,
    iteration_seconds,
    runs_of,
)
from ortholand.lab.methods import RETRACTION_METHODS, TRAINING_METHODS, TRIVIALIZATION_METHODS
from ortholand.lab.study.figures import METHOD_STYLES, listed
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import Claim, Finding, Verdict
from ortholand.lab.study.timing import TIMING, seconds_per_iteration

LANDING_METHODS = ("landing", "landing-momentum")
SIMILAR = 0.1  # numbers of iterations that differ by less, relatively, count as the same
ENOUGH = 100  # iterations, without which it is too early to compare test losses
LEARNT = 0.1  # a test loss, relative to the first, that counts as having learnt something
GROWN = 1.5  # growth of the orthogonality error that is no longer its fluctuation
ROUNDING = 10.0  # what a few products of rounded matrices may add to the error of one rounding
TOO_EARLY = Finding("some methods have hardly begun to learn", Verdict.OPEN)

_listed = partial(listed, between="; ")  # numbers with the names of their methods


# Learning.


def momentum_is_fastest(records: Records) -> Finding:
    """Time to a test loss that every method reaches, each with its fastest learning rate."""
    runs = best_runs(records, TRAINING_METHODS)
    level, p = common_level(runs), runs["landing"].configuration["p"]
    if level is None:
        return TOO_EARLY
    needed = {method: time_to(records, method, level) for method in TRAINING_METHODS}
    fastest = min(needed, key=needed.__getitem__)
    measured = f"p = {p}, to a test loss of {level:.2g}, in seconds: {_listed(needed, '.2g')}"
    return Finding.of(measured, fastest == "landing-momentum")


def landing_needs_as_many_iterations(records: Records) -> Finding:
    """Iterations to a test loss that landing and the retractions reach, each as fast as it can."""
    methods = ("landing", *RETRACTION_METHODS)
    level = common_level(best_runs(records, methods))
    if level is None:
        return TOO_EARLY
    needed = {m: min(_iterations_to(level, run) for run in runs_of(records, m)) for m in methods}
    similar = all(abs(k / needed["landing"] - 1) <= SIMILAR for k in needed.values())
    measured = f"to a test loss of {level:.2g}: {_listed(needed, '.0f')} iterations"
    return Finding.of(measured, similar)


def momentum_helps(records: Records) -> Finding:
    """Final test loss of landing."""
    runs = best_runs(records, LANDING_METHODS)
    if common_level(runs) is None:
        return TOO_EARLY
    losses = {method: final_loss(run) for method, run in runs.items()}
    better = losses["landing-momentum"] < losses["landing"]
    return Finding.of(f"in the end: {_listed(losses, '.2g')}", better)


def time_to(records: Records, method: str, level: float) -> float:
    """Seconds until the test loss is at the level, with the learning rate that is fastest there."""
    return min(
        _iterations_to(level, run) * iteration_seconds(records, run)
        for run in runs_of(records, method)
    )


def common_level(runs: Mapping[str, Record]) -> float | None:
    """The smallest test loss that all runs end at; None if some have hardly begun to learn."""
    level = max(final_loss(run) for run in runs.values())
    start = next(iter(runs.values())).series("test_loss")[0]
    begun = level <= LEARNT * start and all(_iterations(r) >= ENOUGH for r in runs.values())
    return level if begun else None


def _iterations_to(level: float, run: Record) -> float:
    return iterations_to(run, "test_loss", level)


def _iterations(run: Record) -> int:
    return int(run.series("iteration")[-1])


# Time of an iteration.


def takes_longer(methods: Sequence[str], others: Sequence[str], records: Records) -> Finding:
    """Iteration time of each method relative to the slowest other, at the largest size."""
    timing = records[TIMING]
    p = max(run["p"] for run in timing.configuration["runs"])
    wanted = dict(lr=TIMED_RATE, p=p)
    seconds = {m: seconds_per_iteration(timing, method=m, **wanted) for m in (*methods, *others)}
    slowest = max(others, key=seconds.__getitem__)
    ratios = {method: seconds[method] / seconds[slowest] for method in methods}
    one = f"{METHOD_STYLES[slowest].label}, {1e3 * seconds[slowest]:.2g} ms"
    measured = f"p = {p}, in times of {one}: {_listed(ratios, '.2f')}"
    if p < PAPER_SIZE[0]:  # where all is overhead
        return Finding(measured, Verdict.OPEN)
    return Finding.of(measured, min(ratios.values()) > FASTER)


# Orthogonality.


def ends_nearer(method: str, records: Records) -> Finding:
    """The final orthogonality errors of a landing method and of the retractions."""
    runs = best_runs(records, (method, *RETRACTION_METHODS))
    errors = {m: run.series("orthogonality_error")[-1] for m, run in runs.items()}
    measured = f"after {_iterations(runs[method])} iterations: {_listed(errors, '.1e')}"
    if _iterations(runs[method]) < PAPER_ITERATIONS:
        # The retractions' errors add up, and landing's is as small as its gradients are: who is
        # nearer early says little, either way.
        return Finding(f"{measured}; the paper iterates longer", Verdict.OPEN)
    nearer = errors[method] < min(errors[m] for m in RETRACTION_METHODS)
    return Finding.of(measured, nearer)


def retractions_accumulate(records: Records) -> Finding:
    """Growth of the retractions' error after the first percent of the iterations."""
    runs = best_runs(records, RETRACTION_METHODS)
    growths = {method: growth(run, "orthogonality_error") for method, run in runs.items()}
    iterations = _iterations(runs["exponential"])
    measured = f"growth within {iterations} iterations: {_listed(growths, '.2g')}"
    if min(growths.values()) > GROWN:
        return Finding(measured, Verdict.HOLDS)
    return Finding(measured, Verdict.OPEN if iterations < PAPER_ITERATIONS else Verdict.FAILS)


def trivializations_are_exact(records: Records) -> Finding:
    """The largest error of a trivialized weight, in units of the rounding error of its entries."""
    runs = best_runs(records, TRIVIALIZATION_METHODS)
    rounding = torch.finfo(torch.float32).eps * runs["trivialization-sgd"].configuration["p"]
    worst = {m: largest(run.series("largest_error")) / rounding for m, run in runs.items()}
    measured = f"in units of p times the rounding unit: {_listed(worst, '.2g')}"
    return Finding.of(measured, largest([*worst.values()]) <= ROUNDING)


def stays_in_ball(records: Records) -> Finding:
    """The safe step's guarantee, with every learning rate."""
    runs = [run for method in LANDING_METHODS for run in runs_of(records, method)]
    return within_ball([largest(run.series("largest_error")) for run in runs], len(runs))


DISTILLATION_CLAIMS = (
    Claim(
        "Landing with momentum is the fastest method: it takes the least time to a test loss that "
        "all methods reach.",
        "paper",
        momentum_is_fastest,
    ),
    Claim(
        "Landing with momentum leads to a smaller orthogonality error than the exponential and "
        "Cayley retractions.",
        "paper",
        partial(ends_nearer, "landing-momentum"),
    ),
    Claim("Landing without momentum does so too.", "paper", partial(ends_nearer, "landing")),
    Claim(
        "The exponential and Cayley retractions accumulate numerical errors: over the last 99 % "
        f"of the run their orthogonality error grows more than {GROWN}-fold.",
        "paper",
        retractions_accumulate,
    ),
    Claim(
        f"Trivializations are exact: no weight is further from the manifold than {ROUNDING:.0f} p "
        "rounding units.",
        "paper",
        trivializations_are_exact,
    ),
    Claim(
        f"At p = {PAPER_SIZE[0]}, an iteration of landing takes less time than one of the "
        f"exponential and Cayley retractions, by more than {FASTER - 1:.0%}.",
        "paper",
        partial(takes_longer, RETRACTION_METHODS, ["landing"]),
    ),
    Claim(
        f"At p = {PAPER_SIZE[0]}, an iteration of each trivialization takes longer than one of "
        "every other method: the gradient goes through a matrix exponential.",
        "paper",
        partial(takes_longer, TRIVIALIZATION_METHODS, (*LANDING_METHODS, *RETRACTION_METHODS)),
    ),
    Claim(
        "The corrected safe step keeps every recorded iterate of landing within eps of the "
        "manifold, with every learning rate.",
        "correction",
        stays_in_ball,
    ),
    Claim(
        "To the same test loss, each with its fastest learning rate, the exponential and Cayley "
        f"retractions need as many iterations as landing, within {SIMILAR:.0%}.",
        "beyond the paper",
        landing_needs_as_many_iterations,
    ),
    Claim(
        "With momentum, landing reaches a smaller test loss in as many iterations.",
        "beyond the paper",
        momentum_helps,
    ),
)
