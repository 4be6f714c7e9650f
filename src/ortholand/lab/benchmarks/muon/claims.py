"""What is claimed about directions, their costs, and training runs."""

import math
from collections.abc import Collection, Mapping
from functools import partial
from statistics import fmean

from ortholand.lab.benchmarks.muon.contenders import CONTENDERS, DUAL, OURS
from ortholand.lab.benchmarks.muon.directions import PUBLISHED_RATE
from ortholand.lab.benchmarks.muon.runs import STEP_TIMES
from ortholand.lab.benchmarks.muon.searches import (
    TANGENCY,
    VALUE,
    Case,
    Quality,
    Tried,
    good_enough,
)
from ortholand.lab.benchmarks.muon.training import Outcome
from ortholand.lab.datasets import dataset_title
from ortholand.lab.study.records import MissingRecordError, Record, Records
from ortholand.lab.study.spec import Claim, Finding

SHARE = 1 / 3  # of the dual ascent's time
POINTS = 0.002  # of test accuracy, that we may be below the dual ascent
LARGEST_ERROR = 1e-5
ENOUGH_SEEDS, ENOUGH_TUNING_SEEDS = 5, 3


# Directions.


def cases_of(records: Records) -> list[Case]:
    """All cases that were searched and timed."""
    found = [records[unit].configuration["case"] for unit in records if unit.startswith("search-")]
    if not found:
        raise MissingRecordError("no search is recorded")
    return [Case(**case) for case in found]


def tall_cases(records: Records) -> list[Case]:
    """The cases in which the dual ascent does not start at the optimum."""
    return [case for case in cases_of(records) if case.rows > case.columns]


def tried_in(search: Record) -> list[Tried]:
    """The directions that a search has seen."""
    rows = zip(*(search.series(name) for name in Tried._fields), strict=True)
    return [Tried(*row) for row in rows]


def needed(search: Record, rate: float | None = None) -> float:
    """The fewest inner steps that suffice, with one rate or with the best; infinite if none do."""
    good = [t.steps for t in tried_in(search) if rate in (None, t.rate) and good_enough(t)]
    return min(good, default=math.inf)


def our_quality(search: Record) -> Quality:
    """The quality of the library's direction."""
    return Quality(*(search.value(f"our_{name}") for name in Quality._fields))


def time_of(case: Case, records: Records, rate: float | None = None) -> float:
    """Seconds of a sufficiently accurate dual ascent, and of the return to the manifold.

    Where it is not with the most steps that were tried, these count: a lower bound.
    """
    search, cost = records[f"search-{case.name}"], records[f"cost-{case.name}"]
    steps = min(needed(search, rate), search.configuration["cap"])
    return steps * cost.value("inner_step") + cost.value("retraction")


def ours_is_good(records: Records) -> Finding:
    """The worst value and the worst tangency of our directions."""
    all_ours = [our_quality(records[f"search-{case.name}"]) for case in cases_of(records)]
    value, tangency = min(q.value for q in all_ours), max(q.tangency for q in all_ours)
    return Finding.of(
        f"in {len(all_ours)} cases: value {value:.4f} and more, tangent to {tangency:.1e}",
        value >= 1 - VALUE and tangency <= TANGENCY,
    )


def ours_is_cheap(rate: float | None, records: Records) -> Finding:
    """Our time relative to the dual ascent's, in every tall case."""
    shares = {
        case.name: records[f"cost-{case.name}"].value("ours") / time_of(case, records, rate)
        for case in tall_cases(records)
    }
    words = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    few = any(records[f"cost-{name}"].configuration["seconds"] < 1 for name in shares)
    doubt = "too few steps were timed to tell" if few else ""
    return Finding.of(words, max(shares.values(), default=0.0) <= SHARE, doubt)


# Trainings.


def judged(training: Record) -> list[Outcome]:
    """The training runs by which a method is judged."""
    return _with_seeds(training, "seeds")


def tuning(training: Record) -> list[Outcome]:
    """The training runs by which its learning rate was chosen."""
    return _with_seeds(training, "tuning_seeds")


def _with_seeds(training: Record, which: str) -> list[Outcome]:
    rows = zip(*(training.series(name) for name in Outcome._fields), strict=True)
    return [o for o in (Outcome(*row) for row in rows) if o.seed in training.configuration[which]]


def accuracy_of(training: Record) -> float:
    """The mean accuracy over the seeds."""
    return fmean(outcome.accuracy for outcome in judged(training))


def is_as_accurate(records: Records) -> Finding:
    """Mean test accuracies of our method and the dual ascent."""
    trainings = {m: records[f"training-{m}"] for m in (OURS, DUAL)}
    means = {m: accuracy_of(training) for m, training in trainings.items()}
    return Finding.of(
        _listed(means, ".2%"), means[OURS] >= means[DUAL] - POINTS, _doubt(trainings.values())
    )


def stays_near(records: Records) -> Finding:
    """The largest error after any step of any seed."""
    names = [m for m in CONTENDERS if m.startswith(OURS) and f"training-{m}" in records]
    trainings = {m: records[f"training-{m}"] for m in names or [OURS]}
    errors = {m: max(o.error for o in judged(t)) for m, t in trainings.items()}
    return Finding.of(
        _listed(errors, ".1e"), max(errors.values()) <= LARGEST_ERROR, _doubt(trainings.values())
    )


def step_is_short(records: Records) -> Finding:
    """The time of our step on the network relative to the dual ascent's."""
    times = records[STEP_TIMES]
    share = times.value(OURS) / times.value(DUAL)
    doubt = "too few steps were timed to tell" if times.configuration["seconds"] < 1 else ""
    words = f"{1e3 * times.value(OURS):.2f} ms against {1e3 * times.value(DUAL):.2f} ms"
    return Finding.of(f"{share:.2f}: {words}", share <= SHARE, doubt)


def _listed(numbers: Mapping[str, float], form: str) -> str:
    return "; ".join(f"{CONTENDERS[m].label} {x:{form}}" for m, x in numbers.items())


def _doubt(trainings: Collection[Record]) -> str:
    """Why training runs decide nothing, if they do not."""
    if any(len(judged(training)) < ENOUGH_SEEDS for training in trainings):
        return f"to tell, it takes {ENOUGH_SEEDS} seeds"
    if any(len(t.configuration["tuning_seeds"]) < ENOUGH_TUNING_SEEDS for t in trainings):
        return f"to choose a learning rate, it takes {ENOUGH_TUNING_SEEDS} seeds"
    title = dataset_title("cifar10")
    if not all(t.request.options.data.startswith(title) for t in trainings):
        return f"not {title}"
    return ""


_claim = partial(Claim, source="beyond the paper")
CLAIMS = (
    _claim(
        f"Our direction has {1 - VALUE:.0%} of the optimal value or more, and is tangent to "
        f"{TANGENCY:.0e}, in every case.",
        check=ours_is_good,
    ),
    _claim(
        "Our step takes at most a third of the time of a dual ascent that is tangent to "
        f"{TANGENCY:.0e} and within {VALUE:.0%} of the optimum, with the published rate, in every "
        "case with more rows than columns.",
        check=partial(ours_is_cheap, PUBLISHED_RATE),
    ),
    _claim("The same, with the best rate for each case.", check=partial(ours_is_cheap, None)),
    _claim(
        f"Mean test accuracy: LandingMuon's is at most {100 * POINTS:.1f} points below that of "
        "manifold Muon by dual ascent.",
        check=is_as_accurate,
    ),
    _claim(
        f"The orthogonality error of LandingMuon is at most {LARGEST_ERROR:.0e} after every step.",
        check=stays_near,
    ),
    _claim(
        "A step of LandingMuon on the network takes at most a third of the time of manifold Muon's "
        "by dual ascent.",
        check=step_is_short,
    ),
)
