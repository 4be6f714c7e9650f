"""What is claimed: the targets, all at one thread."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from ortholand.lab.benchmarks.steps.runs import CASES, TRAINING
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import Claim, Finding, Verdict

LENET = ("lenet-6-of-5x5", "lenet-96-of-5x5", "lenet-1920-of-4x4")
BARE = ("bare products",)
GEOOPT = ("geoopt, Stiefel", "geoopt, EuclideanStiefel")
RIVALS = ("POGO + SGD", *GEOOPT)


def ratio(
    cases: Sequence[str], theirs: str, records: Records, *, ours: str = "LandingSGD"
) -> tuple[float, str]:
    """Time of our step relative to theirs, summed over some cases; and both in words."""
    found = [records[f"{case}.1"].result.values for case in cases]
    mine = sum(values[ours] for values in found)
    other = sum(values.get(theirs, math.nan) for values in found)
    if math.isnan(other):
        return math.nan, f"{theirs} is not installed"
    return mine / other, f"{1e3 * mine:.3g} ms against {1e3 * other:.3g} ms ({theirs})"


def at_most(bound: float, cases: Sequence[str], theirs: Sequence[str], records: Records) -> Finding:
    """Our time is at most ``bound`` times each of theirs."""
    found = [ratio(cases, name, records) for name in theirs]
    words = "; ".join(f"{r:.2f}: {text}" for r, text in found)
    return Finding(words, _verdict([r for r, _ in found], bound))


def each_at_most(bounds: Mapping[str, float], ours: str, theirs: str, records: Records) -> Finding:
    """Our time is at most a multiple of theirs, in each case."""
    found = {case: ratio([case], theirs, records, ours=ours)[0] for case in bounds}
    words = ", ".join(f"{case}: {r:.2f} (at most {bounds[case]})" for case, r in found.items())
    return Finding(words, _verdict([r / bounds[case] for case, r in found.items()], 1.0))


def cheaper_than_pogo(records: Records) -> Finding:
    """Move, then land, against the peer that does the same without a safe step."""
    after = partial(ratio, theirs="POGO + SGD", records=records, ours="LandingSGD, after")
    return _each({case: after([case])[0] for case in CASES}, 1.0)


def little_memory(records: Records) -> Finding:
    """Temporaries of a step, in units of the parameters."""
    return _each({case: records[f"{case}.memory"].value("LandingSGD") for case in CASES}, 2.0)


def _each(found: dict[str, float], bound: float) -> Finding:
    words = ", ".join(f"{case}: {r:.2f}" for case, r in found.items())
    return Finding(words, _verdict(list(found.values()), bound))


def _verdict(ratios: Sequence[float], bound: float) -> Verdict:
    if any(math.isnan(r) for r in ratios):
        return Verdict.OPEN
    return Verdict.of(all(r <= bound for r in ratios))


# Statement, bound, cases, and whose time it is a multiple of.
TARGETS: tuple[tuple[str, float, Sequence[str], Sequence[str]], ...] = (
    *(
        (f"{case}: a step takes at most 1.15 times its three bare products.", 1.15, [case], BARE)
        for case in ("512x512", "1024x1024")
    ),
    ("Ten 100 x 100: at most 1.7 times the thirty bare products.", 1.7, ["10-of-100x100"], BARE),
    (
        "Ten 100 x 100: at least 2.5 times faster than geoopt and POGO.",
        1 / 2.5,
        ["10-of-100x100"],
        RIVALS,
    ),
    ("One 40 x 40: faster than a bare Cayley solve.", 1.0, ["40x40"], ["bare Cayley solve"]),
    ("One 40 x 40: at least twice as fast as geoopt and POGO.", 1 / 2, ["40x40"], RIVALS),
    (
        "200 of 64 x 64: at least 3 times faster than geoopt and POGO.",
        1 / 3,
        ["200-of-64x64"],
        RIVALS,
    ),
    (
        "A convolution (512, 512, 3, 3) in the view 'kernel': at least 8 times faster than the "
        "landing step by batched products without a safe step.",
        1 / 8,
        ["262144-of-3x3"],
        ["landing by hand, unsafe"],
    ),
    ("The same: at least 15 times faster than geoopt.", 1 / 15, ["262144-of-3x3"], GEOOPT),
    ("LeNet's three kernels: at least twice as fast as geoopt and POGO.", 1 / 2, LENET, RIVALS),
    ("One 2000 x 100: at most 1.3 times its four bare products.", 1.3, ["2000x100"], BARE),
    (
        "Training LeNet at batch size 4: an iteration takes at most 1.35 times the unconstrained.",
        1.35,
        [TRAINING],
        ["torch SGD, unconstrained"],
    ),
)

# Of the time of POGO with the same moments: shapes of LoRA, attention heads, convolutions.
IN_POGOS = {
    "48-of-768x16": 0.4,
    "48-of-16x768": 0.4,
    "24-of-384x64": 0.65,
    "resnet-18": 0.9,
    "1000-of-8x3": 0.35,
    "12-of-384x384": 0.75,
}
LORA = {"48-of-768x16": 2.0, "48-of-16x768": 2.0}

CLAIMS = (
    *(
        Claim(
            f"{ours}, move, then land, in the time of {theirs}: a fraction in every case.",
            "beyond the paper",
            partial(each_at_most, IN_POGOS, name, theirs),
        )
        for ours, name, theirs in (
            ("LandingAdam", "LandingAdam, after", "POGO + VectorAdam"),
            ("Momentum", "LandingSGD, momentum, after", "POGO + SGD, momentum"),
        )
    ),
    Claim(
        "LandingAdam is faster than geoopt's RiemannianAdam in every case.",
        "beyond the paper",
        partial(
            each_at_most, dict.fromkeys(CASES, 1.0), "LandingAdam, after", "geoopt, RiemannianAdam"
        ),
    ),
    Claim(
        "LandingAdam takes at most twice as long as torch's AdamW on the shapes of LoRA.",
        "beyond the paper",
        partial(each_at_most, LORA, "LandingAdam, after", "torch AdamW, unconstrained"),
    ),
    *(
        Claim(said, "beyond the paper", partial(at_most, bound, cases, theirs))
        for said, bound, cases, theirs in TARGETS
    ),
    Claim("At most two temporaries of the parameter's size.", "beyond the paper", little_memory),
    Claim(
        "Move, then land: a step is cheaper than POGO's in every case.",
        "beyond the paper",
        cheaper_than_pogo,
    ),
)
