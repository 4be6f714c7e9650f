"""Time and memory of one optimizer step, with targets.

Every number is a median of repetitions that took turns with their competitors.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ortholand_lab.benchmarks.steps.contenders import (
    BACKWARD,
    GEMM,
    RESNET_SHAPES,
    WHOLE,
    Step,
    StepsCase,
    lenet_iterations,
    steps_of,
    whole_steps,
)
from ortholand_lab.study.environment import torch_threads
from ortholand_lab.study.records import MissingRecordError, Record, Records, Result
from ortholand_lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    TableSpec,
    Unit,
    Verdict,
)
from ortholand_lab.study.timing import Action, medians, peak_bytes, time_in_turn

# What is run.


RESNET = "resnet-18"
CASES: dict[str, StepsCase] = {
    "40x40": StepsCase(1, (40, 40)),
    "100x100": StepsCase(1, (100, 100)),
    "10-of-100x100": StepsCase(10, (100, 100)),
    "200-of-64x64": StepsCase(200, (64, 64)),
    "512x512": StepsCase(1, (512, 512)),
    "1024x1024": StepsCase(1, (1024, 1024)),
    "2000x100": StepsCase(1, (2000, 100)),
    "lenet-6-of-5x5": StepsCase(1, (6, 1, 5, 5), "kernel"),
    "lenet-96-of-5x5": StepsCase(1, (16, 6, 5, 5), "kernel"),
    "lenet-1920-of-4x4": StepsCase(1, (120, 16, 4, 4), "kernel"),
    "262144-of-3x3": StepsCase(1, (512, 512, 3, 3), "kernel"),
    "24-of-384x64": StepsCase(24, (384, 64)),
    "48-of-768x16": StepsCase(48, (768, 16)),
    "48-of-16x768": StepsCase(48, (16, 768)),
    "1000-of-8x3": StepsCase(1, (1000, 8, 3), "kernel"),
    "12-of-384x384": StepsCase(12, (384, 384)),
    "200-of-32x32": StepsCase(200, (32, 32)),
    RESNET: StepsCase(1, RESNET_SHAPES[-1], others=RESNET_SHAPES[:-1]),
    "130x130": StepsCase(1, (130, 130)),
    "vit-s-block": StepsCase(1, (1152, 384), others=((384, 384), (1536, 384), (384, 1536))),
    "gpt-2-layer": StepsCase(1, (3072, 768)),
    "convnext-t-pointwise": StepsCase(1, (1536, 384)),
    "lstm-1024x256": StepsCase(1, (1024, 256)),
    "64-of-4096x4": StepsCase(64, (4096, 4)),
    "64-of-4x4096": StepsCase(64, (4, 4096)),
    "8-of-4096x64": StepsCase(8, (4096, 64)),
    "1000000x4": StepsCase(1, (1_000_000, 4)),
    "100000-of-3x3": StepsCase(1, (100_000, 3, 3), "kernel"),
    "1000000-of-2x2": StepsCase(1, (1_000_000, 2, 2), "kernel"),
    "1000-of-12x12": StepsCase(1, (1000, 12, 12), "kernel"),
    "50257-unit-vectors": StepsCase(1, (50257, 64, 1), "kernel"),
    "100-separate-4x4": StepsCase(100, (4, 4)),
    "500-separate-4x4": StepsCase(500, (4, 4)),
    "binding-64x64": StepsCase(1, (64, 64), lr=1e3),
    "binding-512x512": StepsCase(1, (512, 512), lr=1e3),
}
TRAINING = "lenet-training"
WHOLE_STEPS = "whole-step-"


@dataclass(frozen=True)
class StepsSettings:
    """What is timed, and for how long."""

    cases: tuple[str, ...] = tuple(CASES)
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    counts: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
    threads: tuple[int, ...] = (1, 2)
    seconds: float = 3.0  # for each case
    whole: bool = False  # whether training steps of models are timed


@dataclass(frozen=True)
class StepsTask:
    """One group of steps that take turns."""

    case: StepsCase | str | None  # a model, for its whole training steps; None: that of LeNet
    threads: int = 1
    seconds: float = 0.0  # zero: memory is measured instead of time


def plan(settings: StepsSettings) -> list[Unit[StepsTask]]:
    """All cases at all numbers of threads, the two curves, and memory."""
    timed = {
        f"{name}.{threads}": StepsTask(CASES.get(name), threads, settings.seconds)
        for threads in settings.threads
        for name in (*settings.cases, TRAINING)
    }
    curves = {f"size-{p}": StepsCase(1, (p, p)) for p in settings.sizes}
    curves |= {f"count-{n}": StepsCase(1, (n, 3, 3), "kernel") for n in settings.counts}
    timed |= {name: StepsTask(case, 1, settings.seconds / 2) for name, case in curves.items()}
    if settings.whole:
        timed |= {f"{WHOLE_STEPS}{name}": StepsTask(name, 1, settings.seconds) for name in WHOLE}
    memory = {f"{name}.memory": StepsTask(CASES[name]) for name in settings.cases}
    return [
        *(Unit(name, task, 1, timed=True) for name, task in timed.items()),
        *(Unit(name, task, 1) for name, task in memory.items()),
    ]


def run(task: StepsTask, context: Context) -> Result:
    """Median seconds of each step, or its peak memory in units of the parameters."""
    with torch_threads(task.threads):
        steps = _steps(task.case)
        values = _times(task, steps) if task.seconds else _memory(task, steps)
    context.tick(1)
    return Result({}, values)


def _steps(case: StepsCase | str | None) -> dict[str, Step]:
    if case is None:
        return lenet_iterations()
    return whole_steps(case) if isinstance(case, str) else steps_of(case)


def _times(task: StepsTask, steps: Mapping[str, Step]) -> dict[str, float]:
    case = task.case if isinstance(task.case, StepsCase) else None
    huge = case is not None and case.numel > 3_000_000  # seconds for a single step
    actions = {name: Action(step) for name, step in steps.items()}
    repetitions = 3 if huge else 7
    clock = time.process_time if task.threads == 1 else time.perf_counter  # others may compute too
    found = medians(
        time_in_turn(actions, repetitions=repetitions, seconds=task.seconds, warm_up=2, clock=clock)
    )
    if case is not None:
        found["limit, arithmetic"] = found.pop(GEMM) * case.operations / 512**3
    return found


def _memory(task: StepsTask, steps: Mapping[str, Step]) -> dict[str, float]:
    assert isinstance(task.case, StepsCase)
    for step in steps.values():
        step()  # its state is there now
    peaks = {name: peak_bytes(step) for name, step in steps.items() if name != GEMM}
    return {name: peak / (4 * task.case.numel) for name, peak in peaks.items()}


# What is claimed.


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
        Claim.beyond(
            f"{ours}, move, then land, in the time of {theirs}: a fraction in every case.",
            partial(each_at_most, IN_POGOS, name, theirs),
        )
        for ours, name, theirs in (
            ("LandingAdam", "LandingAdam, after", "POGO + VectorAdam"),
            ("Momentum", "LandingSGD, momentum, after", "POGO + SGD, momentum"),
        )
    ),
    Claim.beyond(
        "LandingAdam is faster than geoopt's RiemannianAdam in every case.",
        partial(
            each_at_most, dict.fromkeys(CASES, 1.0), "LandingAdam, after", "geoopt, RiemannianAdam"
        ),
    ),
    Claim.beyond(
        "LandingAdam takes at most twice as long as torch's AdamW on the shapes of LoRA.",
        partial(each_at_most, LORA, "LandingAdam, after", "torch AdamW, unconstrained"),
    ),
    *(
        Claim.beyond(said, partial(at_most, bound, cases, theirs))
        for said, bound, cases, theirs in TARGETS
    ),
    Claim.beyond("At most two temporaries of the parameter's size.", little_memory),
    Claim.beyond(
        "Move, then land: a step is cheaper than POGO's in every case.",
        cheaper_than_pogo,
    ),
)


# How it is drawn.


CURVES = {  # name of the step -> colour, line
    "LandingSGD": ("#0072B2", "-"),
    "LandingSGD, after": ("#D55E00", "--"),
    "bare products": ("#000000", ":"),
    "torch SGD, unconstrained": ("#7F7F7F", "-."),
    "POGO + SGD": ("#009E73", "--"),
    "geoopt, EuclideanStiefel": ("#E69F00", "-"),
    "geoopt, Stiefel": ("#8A8A00", ":"),
    "torch parametrization, Cayley": ("#CC79A7", "-."),
    "geotorch, Cayley": ("#A6611A", ":"),
    "torch Muon": ("#56B4E9", "--"),
}


def draw(kind: str, label: str, records: Records) -> Figure:
    """Time of one step at each point of a curve."""
    points = sorted((int(unit.split("-")[1]), unit) for unit in records if unit.startswith(kind))
    if not points:
        raise MissingRecordError(f"no {kind} is recorded")
    figure = Figure(figsize=(7.2, 4.6))
    axes: Axes = figure.subplots()
    for name, (colour, line) in CURVES.items():
        curve = [
            (x, 1e3 * records[unit].value(name))
            for x, unit in points
            if name in records[unit].result.values
        ]
        if curve:
            axes.plot(*zip(*curve, strict=True), line, color=colour, label=name, marker=".")
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds per step")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


# Columns, by what was timed. Peers are compared with ours of the same moments.
COLUMNS = {
    "LandingSGD": "SGD",
    "LandingSGD, momentum": "momentum",
    "LandingSGD, after": "SGD, after",
    "LandingSGD, momentum, after": "momentum, after",
    "LandingAdam, after": "LandingAdam",
    "LandingSGD, not compiled": "SGD, not compiled",
    "bare products": "bare products",
    "limit, arithmetic": "limit, arithmetic",
    "limit, bytes": "limit, bytes",
    "torch SGD, unconstrained": "torch SGD",
    "torch AdamW, fused": "AdamW, fused",
}
PEERS = {
    "POGO + SGD": "LandingSGD",
    "POGO + SGD, momentum": "LandingSGD, momentum, after",
    "POGO + VectorAdam": "LandingAdam, after",
    "geoopt, EuclideanStiefel": "LandingSGD",
    "geoopt, Stiefel": "LandingSGD",
    "geoopt, RiemannianAdam": "LandingAdam, after",
    "torch parametrization, Cayley": "LandingSGD",
    "geotorch, Cayley": "LandingSGD",
    "torch Muon": "LandingSGD",
}


def make_table(records: Records) -> list[list[str]]:
    """Milliseconds of our steps at one thread, and of the least that they could cost."""
    rows = [[case, *(_cell(record, name) for name in COLUMNS)] for case, record in _cases(records)]
    return [["ms", *COLUMNS.values()], *rows]


def make_peers(records: Records) -> list[list[str]]:
    """Milliseconds of peers' steps, in brackets relative to ours of the same moments."""
    rows = [
        [case, *(_cell(record, name, ours) for name, ours in PEERS.items())]
        for case, record in _cases(records)
    ]
    return [["ms (times ours)", *PEERS], *rows]


def _cases(records: Records) -> list[tuple[str, Record]]:
    cases = [(case, records[f"{case}.1"]) for case in CASES if f"{case}.1" in records]
    if not cases:
        raise MissingRecordError("no case is recorded")
    return cases


def _cell(record: Record, name: str, unit: str = "") -> str:
    if name not in record.result.values:
        return "-"
    seconds = record.value(name)
    return f"{1e3 * seconds:.3g}" + (f" ({seconds / record.value(unit):.2g})" if unit else "")


FIGURES = (
    FigureSpec(
        "bench-size",
        "Time of one step against the size of the matrix.",
        partial(draw, "size", "rows and columns p of one matrix"),
    ),
    FigureSpec(
        "bench-count",
        "Time of one step against the number of matrices.",
        partial(draw, "count", "number of 3 x 3 matrices"),
    ),
)


def make_whole_table(records: Records) -> list[list[str]]:
    """Milliseconds of a step of all weights of a model, in brackets relative to its gradients."""
    whole = {f"{WHOLE_STEPS}{model}": model for model in WHOLE}
    found = {model: records[unit] for unit, model in whole.items() if unit in records}
    if not found:
        raise MissingRecordError("no whole step is recorded")
    names = [*next(iter(found.values())).result.values]
    rows = [[name, *(_cell(record, name, BACKWARD) for record in found.values())] for name in names]
    return [["one thread, ms (times forward and backward)", *found], *rows]


TABLES = (
    TableSpec("steps", "Ours, and the least they could cost", make_table),
    TableSpec("peers", "Peers", make_peers),
    TableSpec("whole-steps", "Training steps at one thread", make_whole_table),
)


STEPS = Study(
    name="steps",
    title="Time and memory of one step, against every peer that is installed",
    summary=(
        "One optimizer step with a fixed gradient in float32, safe step on. A peer's cost is all "
        "that a user pays per step: for parametrizations the way forward and backward through "
        "them too. Medians of repetitions that take turns, so that what disturbs one disturbs all; "
        "only ratios within one case mean something on a noisy machine. Targets are judged at one "
        "thread. Memory is what torch's allocator holds at the peak of a step beyond what was "
        "there before, in units of the parameters."
    ),
    settings={
        "smoke": StepsSettings(
            cases=("40x40", "lenet-96-of-5x5"), sizes=(4, 16), counts=(1, 10), seconds=0.05
        ),
        "quick": StepsSettings(seconds=1.0, whole=True),
        "full": StepsSettings(whole=True),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    tables=TABLES,
    seconds={"smoke": 15, "quick": 1200, "full": 2400},
)
