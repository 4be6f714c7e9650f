"""What is claimed: for large matrices a step of landing takes less time than any retraction's."""

from functools import partial
from statistics import median, quantiles

from ortholand.lab.experiments.descents import FASTER
from ortholand.lab.experiments.speed.runs import (
    CAREFUL,
    OPTIMIZER,
    TEXTBOOK,
    TEXTBOOK_RETRACTIONS,
    form_name,
    unit_name,
)
from ortholand.lab.study.figures import METHOD_STYLES
from ortholand.lab.study.records import MissingRecordError, Record, Records
from ortholand.lab.study.spec import Claim, Finding, Verdict

LARGE = 100  # sizes from here on are what the claims speak of
PAPER_FACTOR, ABOUT = 8.0, 1.5  # "about 8 times faster": that, within this factor
ORDER_OF_MAGNITUDE = 10.0
HALF_MORE = (1.25, 1.75)  # ratios that round to "50 % more" rather than to none or twice


def all_sizes(records: Records) -> dict[int, Record]:
    """The record of every size, smallest first."""
    return {p: records[unit_name(p)] for p in sorted(records.settings["sizes"])}


def large_sizes(records: Records) -> dict[int, Record]:
    """The records of the sizes that the claims refer to."""
    large = {p: record for p, record in all_sizes(records).items() if p >= LARGE}
    if not large:
        raise MissingRecordError(f"no size of {LARGE} or more at this preset")
    return large


def seconds_of(record: Record, action: str) -> float:
    """Median time of an action."""
    return median(record.series(action))


def ratios(record: Record, form: str) -> dict[str, float]:
    """Time of a step of each retraction, relative to landing's."""
    landing = seconds_of(record, form_name(form, "landing"))
    return {m: seconds_of(record, form_name(form, m)) / landing for m in TEXTBOOK_RETRACTIONS}


def large_ratios(form: str, records: Records) -> dict[int, dict[str, float]]:
    """:func:`ratios` for every large size."""
    return {p: ratios(record, form) for p, record in large_sizes(records).items()}


def landing_is_faster(form: str, records: Records) -> Finding:
    """Whether landing is faster than every retraction, at every large size."""
    found = large_ratios(form, records)
    return Finding.of(_ranges(found), _least(found) > FASTER)


def about_eight_times(anywhere: bool, records: Records) -> Finding:
    """Every retraction takes about 8 times as long or more; the paper says so of a GPU."""
    found = large_ratios(TEXTBOOK, records)
    if not anywhere and _device(records).startswith("cpu"):
        return Finding("not run on a GPU", Verdict.OPEN)
    return Finding.of(_ranges(found), _least(found) > PAPER_FACTOR / ABOUT)


def exponential_is_fastest(records: Records) -> Finding:
    """Whether the exponential is the fastest retraction by torch's functions."""
    found = large_ratios(TEXTBOOK, records)
    fastest = {p: min(of, key=of.__getitem__) for p, of in found.items()}
    named = ", ".join(f"p = {p}: {METHOD_STYLES[name].label}" for p, name in fastest.items())
    return Finding.of(f"fastest at {named}", set(fastest.values()) == {"exponential"})


def polar_is_slowest_by_far(records: Records) -> Finding:
    """Whether polar is far slower than any other retraction; the paper says so of a GPU."""
    factors = [
        of["polar"] / max(ratio for name, ratio in of.items() if name != "polar")
        for of in large_ratios(TEXTBOOK, records).values()
    ]
    low, high = min(factors), max(factors)
    measured = f"{low:.1f} to {high:.1f} times the slowest other, on {_device(records)}"
    if _device(records).startswith("cpu"):
        return Finding(f"{measured}; not run on a GPU", Verdict.OPEN)
    return Finding.of(measured, low >= ORDER_OF_MAGNITUDE)


def field_costs_half_more(records: Records) -> Finding:
    """Three products against two, at every large size; not decided where times scatter more."""
    named, verdicts = [], []
    for p, record in large_sizes(records).items():
        turns = zip(record.series("landing-field"), record.series("penalty-field"), strict=True)
        low, middle, high = quantiles([a / b for a, b in turns], n=4, method="inclusive")
        named.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) at p = {p}")
        inside = HALF_MORE[0] < low and high < HALF_MORE[1]
        beyond = high <= HALF_MORE[0] or low >= HALF_MORE[1]
        verdicts.append(Verdict.of(inside) if inside or beyond else Verdict.OPEN)
    measured = f"in its time, median and quartiles: {', '.join(named)}"
    return Finding(measured, Verdict.worst(verdicts))


def _least(found: dict[int, dict[str, float]]) -> float:
    return min(min(of.values()) for of in found.values())


def _ranges(found: dict[int, dict[str, float]]) -> str:
    """How the ratios vary over the sizes."""
    listed = ", ".join(
        f"{METHOD_STYLES[name].label} {min(of[name] for of in found.values()):.1f} to "
        f"{max(of[name] for of in found.values()):.1f}"
        for name in TEXTBOOK_RETRACTIONS
    )
    return f"p = {min(found)} to {max(found)}, in landing's time: {listed}"


def _device(records: Records) -> str:
    return next(iter(records.values())).request.options.device


CLAIMS = (
    Claim(
        f"For p >= {LARGE} a step of landing takes less time than one of each retraction, by "
        f"more than {FASTER - 1:.0%}: the paper's formulas by torch's functions.",
        "paper",
        partial(landing_is_faster, TEXTBOOK),
    ),
    Claim(
        "The same, compared with retractions as carefully written as this library's.",
        "beyond the paper",
        partial(landing_is_faster, CAREFUL),
    ),
    Claim(
        "The same for whole steps of optimizers: LandingSGD with its safe step, and RiemannianSGD.",
        "beyond the paper",
        partial(landing_is_faster, OPTIMIZER),
    ),
    Claim(
        f"On a GPU landing is about {PAPER_FACTOR:.0f} times faster than the retractions (each "
        f"takes at least {PAPER_FACTOR / ABOUT:.1f} times as long, p >= {LARGE}).",
        "paper",
        partial(about_eight_times, False),
    ),
    Claim(
        f"On the device of this run, too, it is about {PAPER_FACTOR:.0f} times faster.",
        "beyond the paper",
        partial(about_eight_times, True),
    ),
    Claim(
        "Of the retractions the exponential is the fastest in torch.",
        "paper",
        exponential_is_fastest,
    ),
    Claim(
        "On a GPU the projection (polar) retraction is orders of magnitude more costly than "
        "the others.",
        "paper",
        polar_is_slowest_by_far,
    ),
    Claim(
        "The landing field takes 50 % more time than the gradient of the penalty method, three "
        f"products instead of two (given the gradient of f, p >= {LARGE}; 25 to 75 %).",
        "paper",
        field_costs_half_more,
    ),
)
