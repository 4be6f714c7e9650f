"""Claims about training runs: each method's best learning rate, and findings based on it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

from ortholand.lab.experiments.classification.runs import final_name, unit_name
from ortholand.lab.experiments.descents import EPS
from ortholand.lab.study.figures import METHOD_STYLES, listed
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import Claim, Finding
from ortholand.lab.study.timing import TIMING, seconds_per_iteration

MOST_TRIALS = 5  # of a final training
FEWEST_REPETITIONS = 5  # fewer timed iterations decide nothing: other work disturbs some of them


class Tried(NamedTuple):
    """A method with a learning rate."""

    lr: float
    runs: Sequence[Record]  # one of each trial
    seconds: float  # of an iteration, in turn with all others

    @property
    def loss(self) -> float:
        """The final training loss, median over the trials."""
        return median(final_loss(run) for run in self.runs)

    def end(self, series: str) -> float:
        """The final value of a series, median over the trials."""
        return median(run.series(series)[-1] for run in self.runs)


def tried_rates(records: Records, methods: Collection[str] = ()) -> dict[str, list[Tried]]:
    """All runs by method, or of some methods; one entry for each learning rate, in rising order."""
    timing = records[TIMING]
    trials = range(timing.configuration["trials"])
    tried: dict[str, list[Tried]] = {}
    for method, lr in ((run["method"], run["lr"]) for run in timing.configuration["runs"]):
        if methods and method not in methods:
            continue
        runs = [records[unit_name(method, lr, trial)] for trial in trials]
        seconds = seconds_per_iteration(timing, method=method, lr=lr)
        tried.setdefault(method, []).append(Tried(lr, runs, seconds))
    return {m: sorted(entries, key=lambda entry: entry.lr) for m, entries in tried.items()}


def best_rates(records: Records, methods: Collection[str] = ()) -> dict[str, Tried]:
    """Each method, or some, with the learning rate of the fastest convergence.

    That is the one with the smallest training loss in the end. Test images have no say in it. Where
    the method was trained longer with it, by those trainings.
    """
    tried = tried_rates(records, methods)
    best = {m: min(entries, key=lambda entry: entry.loss) for m, entries in tried.items()}
    return {m: _at_length(records, m, entry) for m, entry in best.items()}


def _at_length(records: Records, method: str, best: Tried) -> Tried:
    """A method's best rate with its final training runs, as many as there are."""
    names = [final_name(method, best.lr, trial) for trial in range(MOST_TRIALS)]
    finals = [records[name] for name in names if name in records]
    return best._replace(runs=finals) if finals else best


def final_loss(run: Record) -> float:
    """Mean training loss over the last quarter of a run; infinite if it is not a number."""
    losses = run.series("train_loss")[1:]  # nothing was trained at the start
    loss = fmean(losses[-math.ceil(len(losses) / 4) :])
    return math.inf if math.isnan(loss) else loss


def doubt_of_times(timing: Record) -> str:
    """Why the times of a timing decide nothing, if they do not."""
    few = timing.configuration["repetitions"] < FEWEST_REPETITIONS
    return "too few were timed to tell" if few else ""


def takes_longer(times: Mapping[str, float], factor: float, doubt: str) -> Finding:
    """Whether all but the first take at least ``factor`` times as long as the first.

    Args:
        times: seconds of an iteration, by method.
        factor: how many times.
        doubt: why the times decide nothing, if they do not.
    """
    (method, seconds), *others = times.items()
    ratios = {other: time / seconds for other, time in others}
    milliseconds = f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 2}f} ms per iteration"
    return Finding.of(
        f"{METHOD_STYLES[method].label} {milliseconds}; {listed(ratios, '.2f')} times as long",
        min(ratios.values()) >= factor,
        doubt,
    )


def compare_ends(
    series: str,
    methods: Sequence[str],
    holds: Callable[[Mapping[str, float]], bool],
    enough: Mapping[str, int],
    records: Records,
) -> Finding:
    """Where a series ends with each method, and whether the claim holds.

    Args:
        series: of errors.
        methods: that are compared.
        holds: what is claimed of their ends.
        enough: what every run's configuration must have at least; with less nothing is decided.
        records: of all runs.
    """
    best = best_rates(records, methods)
    ends = {method: best[method].end(series) for method in methods}
    runs = [run.configuration for method in methods for run in best[method].runs]
    span = _span([run["iterations"] for run in runs])
    seeds = _span([len(best[method].runs) for method in methods])
    medians = "" if seeds == "1" else f", medians of {seeds} seeds"
    small = any(run[name] < least for run in runs for name, least in enough.items())
    needed = ", ".join(f"{name} >= {least:,}" for name, least in enough.items())
    return Finding.of(
        f"after {span} iterations{medians}: "
        f"{listed(ends, '.2%' if series == 'test_error' else '.1e')}",
        holds(ends),
        f"to tell, it takes {needed}" if small else "",
    )


def _span(numbers: Sequence[int]) -> str:
    """The smallest and largest, or just one if they are equal."""
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(numbers), max(numbers))))


def ball_claim(methods: Sequence[str]) -> Claim:
    """The claim that the safe step keeps its guarantee, for these methods."""
    return Claim(
        "The corrected safe step keeps every kernel within eps of the manifold.",
        "correction",
        partial(stays_in_ball, methods),
    )


def stays_in_ball(methods: Sequence[str], records: Records) -> Finding:
    """Whether every kernel was within eps of the manifold whenever a network was measured."""
    tried, best = tried_rates(records, methods), best_rates(records, methods)
    entries = [entry for method in methods for entry in (*tried[method], best[method])]
    runs = list({id(run): run for entry in entries for run in entry.runs}.values())  # each once
    errors = [error for run in runs for error in run.series("largest_error")]
    counted = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return Finding.of(
        f"at most {max(errors):.3g} in {counted}, measured {len(errors)} times; eps = {EPS}",
        all(error <= EPS for error in errors),  # false also where one is not a number
    )
