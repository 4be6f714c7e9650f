"""The benchmark as an experiment: records, targets as claims, figures, a report.

Every number is a median of repetitions that were interleaved with those it is compared with.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ortholand.lab.benchmarks.steps.actions import Case, actions_for
from ortholand.lab.benchmarks.steps.training import lenet_iterations
from ortholand.lab.study.environment import torch_threads
from ortholand.lab.study.records import Record, Records, Result
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)
from ortholand.lab.study.timing import Action, medians, peak_bytes, time_in_turn

CASES: dict[str, Case] = {
    "40x40": Case(1, (40, 40)),
    "100x100": Case(1, (100, 100)),
    "10-of-100x100": Case(10, (100, 100)),
    "200-of-64x64": Case(200, (64, 64)),
    "512x512": Case(1, (512, 512)),
    "1024x1024": Case(1, (1024, 1024)),
    "2000x100": Case(1, (2000, 100)),
    "lenet-6-of-5x5": Case(1, (6, 1, 5, 5), "kernel"),
    "lenet-96-of-5x5": Case(1, (16, 6, 5, 5), "kernel"),
    "lenet-1920-of-4x4": Case(1, (120, 16, 4, 4), "kernel"),
    "262144-of-3x3": Case(1, (512, 512, 3, 3), "kernel"),
}
LENET = ("lenet-6-of-5x5", "lenet-96-of-5x5", "lenet-1920-of-4x4")
TRAINING = "lenet-training"
CURVES = {  # of the figures: name of the action -> colour, line
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


@dataclass(frozen=True)
class Settings:
    """What is timed, and for how long."""

    cases: tuple[str, ...] = tuple(CASES)
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    counts: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
    threads: tuple[int, ...] = (1, 2)
    seconds: float = 3.0  # for each case


@dataclass(frozen=True)
class Task:
    """One group of things that are timed in turn."""

    case: Case | None  # None: training of LeNet
    threads: int
    seconds: float
    memory: bool = field(default=False)  # measure memory in place of time


def plan(settings: Settings) -> list[Unit[Task]]:
    """All cases at all numbers of threads, the two curves, and memory."""
    units = [
        Unit(f"{name}.{threads}", Task(CASES[name], threads, settings.seconds), 1, timed=True)
        for threads in settings.threads
        for name in settings.cases
    ]
    units += [
        Unit(f"{TRAINING}.{threads}", Task(None, threads, settings.seconds), 1, timed=True)
        for threads in settings.threads
    ]
    curve_seconds = settings.seconds / 2
    for p in settings.sizes:
        units.append(Unit(f"size-{p}", Task(Case(1, (p, p)), 1, curve_seconds), 1, timed=True))
    for count in settings.counts:
        case = Case(1, (count, 3, 3), "kernel")
        units.append(Unit(f"count-{count}", Task(case, 1, curve_seconds), 1, timed=True))
    for name in settings.cases:
        units.append(Unit(f"{name}.memory", Task(CASES[name], 1, 0.0, memory=True), 1, timed=True))
    return units


def run(task: Task, context: Context) -> Result:
    """Median seconds of each action, or its peak of memory in units of the parameters."""
    with torch_threads(task.threads):
        actions = lenet_iterations() if task.case is None else actions_for(task.case)
        values = _memory(task.case, actions) if task.memory else _times(task, actions)
    context.tick(1)
    return Result({}, values)


def _times(task: Task, actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    huge = task.case is not None and task.case.numel > 3_000_000  # seconds for a single step
    timed = {name: Action(act) for name, act in actions.items()}
    return medians(
        time_in_turn(timed, repetitions=3 if huge else 7, seconds=task.seconds, warm_up=2)
    )


def _memory(case: Case | None, actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    assert case is not None
    size = 4 * case.numel
    for action in actions.values():
        action()  # its state is there now
    return {name: peak_bytes(action) / size for name, action in actions.items()}


# Targets.


def ratio(
    case: str, ours: str, theirs: str, records: Records, *, kind: str = "1"
) -> tuple[float, str]:
    """Time of one action in units of another's, and both in words."""
    record = records[f"{case}.{kind}"]
    if theirs not in record.result.values:
        return float("nan"), f"{theirs} is not installed"
    mine, other = record.value(ours), record.value(theirs)
    return mine / other, f"{1e3 * mine:.3g} ms against {1e3 * other:.3g} ms ({theirs})"


def at_most(bound: float, case: str, theirs: Sequence[str], ours: str, records: Records) -> Finding:
    """Our time is at most ``bound`` times each of theirs."""
    found = [ratio(case, ours, name, records) for name in theirs]
    words = "; ".join(f"{r:.2f}: {text}" for r, text in found)
    return Finding(words, _verdict([r for r, _ in found], bound))


def lenet_at_most(bound: float, theirs: Sequence[str], records: Records) -> Finding:
    """The same for the sum over LeNet's three weights."""
    found = []
    for name in theirs:
        pairs = [_pair(records[f"{case}.1"], name) for case in LENET]
        found.append((sum(a for a, _ in pairs) / sum(b for _, b in pairs), name))
    words = "; ".join(f"{r:.2f} of {name}" for r, name in found)
    return Finding(words, _verdict([r for r, _ in found], bound))


def _pair(record: Record, theirs: str) -> tuple[float, float]:
    return record.value("LandingSGD"), record.result.values.get(theirs, float("nan"))


def _verdict(ratios: Sequence[float], bound: float) -> Verdict:
    if any(r != r for r in ratios):
        return Verdict.OPEN
    return Verdict.of(all(r <= bound for r in ratios))


def cheaper_than_pogo(records: Records) -> Finding:
    """Move, then land, against the peer that does the same without a safe step."""
    found = [(ratio(c, "LandingSGD, after", "POGO + SGD", records)[0], c) for c in CASES]
    words = ", ".join(f"{c}: {r:.2f}" for r, c in found)
    return Finding(words, _verdict([r for r, _ in found], 1.0))


def little_memory(records: Records) -> Finding:
    """Temporaries of a step, in units of the parameters."""
    found = [(records[f"{c}.memory"].value("LandingSGD"), c) for c in CASES]
    words = ", ".join(f"{c}: {r:.2f}" for r, c in found)
    return Finding(words, _verdict([r for r, _ in found], 2.0))


GEOOPT = ("geoopt, Stiefel", "geoopt, EuclideanStiefel")
PEERS = ("POGO + SGD", *GEOOPT)


def _claim(statement: str, check: Callable[[Records], Finding]) -> Claim:
    return Claim(statement, "beyond the paper", check)


CLAIMS = (
    *(
        _claim(
            f"{case}: a step takes at most 1.15 times its three bare products.",
            partial(at_most, 1.15, case, ("bare products",), "LandingSGD"),
        )
        for case in ("512x512", "1024x1024")
    ),
    _claim(
        "Ten 100 x 100: at most 1.7 times the thirty bare products.",
        partial(at_most, 1.7, "10-of-100x100", ("bare products",), "LandingSGD"),
    ),
    _claim(
        "Ten 100 x 100: at least 2.5 times faster than geoopt and POGO.",
        partial(at_most, 1 / 2.5, "10-of-100x100", PEERS, "LandingSGD"),
    ),
    _claim(
        "One 40 x 40: faster than a bare Cayley solve.",
        partial(at_most, 1.0, "40x40", ("bare Cayley solve",), "LandingSGD"),
    ),
    _claim(
        "One 40 x 40: at least twice as fast as geoopt and POGO.",
        partial(at_most, 1 / 2, "40x40", PEERS, "LandingSGD"),
    ),
    _claim(
        "200 of 64 x 64: at least 3 times faster than geoopt and POGO.",
        partial(at_most, 1 / 3, "200-of-64x64", PEERS, "LandingSGD"),
    ),
    _claim(
        "A convolution (512, 512, 3, 3) in the view 'kernel': at least 8 times faster than the "
        "landing step by batched products without a safe step.",
        partial(at_most, 1 / 8, "262144-of-3x3", ("landing by hand, unsafe",), "LandingSGD"),
    ),
    _claim(
        "The same: at least 15 times faster than geoopt.",
        partial(at_most, 1 / 15, "262144-of-3x3", GEOOPT, "LandingSGD"),
    ),
    _claim(
        "LeNet's three kernels: at least twice as fast as geoopt and POGO.",
        partial(lenet_at_most, 1 / 2, PEERS),
    ),
    _claim(
        "One 2000 x 100: at most 1.3 times its four bare products.",
        partial(at_most, 1.3, "2000x100", ("bare products",), "LandingSGD"),
    ),
    _claim(
        "Training LeNet at batch size 4: an iteration takes at most 1.35 times the unconstrained.",
        partial(at_most, 1.35, TRAINING, ("torch SGD, unconstrained",), "LandingSGD"),
    ),
    _claim("At most two temporaries of the parameter's size.", little_memory),
    _claim("Move, then land: a step is cheaper than POGO's in every case.", cheaper_than_pogo),
)


# Figures.


def draw_sizes(records: Records) -> Figure:
    """Time against the size of one matrix."""
    return _draw(records, "size", "rows and columns p of one matrix")


def draw_counts(records: Records) -> Figure:
    """Time against the number of matrices."""
    return _draw(records, "count", "number of 3 x 3 matrices")


def _draw(records: Records, kind: str, label: str) -> Figure:
    points = sorted((int(unit.split("-")[1]), unit) for unit in records if unit.startswith(kind))
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
        "smoke": Settings(
            cases=("40x40", "lenet-96-of-5x5"), sizes=(4, 16), counts=(1, 10), seconds=0.05
        ),
        "quick": Settings(seconds=1.0),
        "full": Settings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=(
        FigureSpec("bench-size", "Time of one step against the size of the matrix.", draw_sizes),
        FigureSpec("bench-count", "Time of one step against the number of matrices.", draw_counts),
    ),
    seconds={"smoke": 15, "quick": 300, "full": 600},
)


def markdown_table(records: Records) -> str:
    """Milliseconds per step at one thread, in brackets in units of LandingSGD's."""
    cases = [case for case in CASES if f"{case}.1" in records]
    found = {name for case in cases for name in records[f"{case}.1"].result.values}
    names = sorted(found, key=lambda name: (not name.startswith("Landing"), name))
    lines = ["| one step, ms (times ours) | " + " | ".join(cases) + " |"]
    lines.append("| --- |" + " --- |" * len(cases))
    for name in names:
        cells = [_cell(records[f"{case}.1"], name) for case in cases]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(record: Record, name: str) -> str:
    if name not in record.result.values:
        return "-"
    seconds = record.value(name)
    return f"{1e3 * seconds:.3g} ({seconds / record.value('LandingSGD'):.2g})"


def bench_json(records: Records) -> str:
    """All medians, by unit and action: seconds, or units of the parameters for memory."""
    values = {unit: dict(record.result.values) for unit, record in records.items()}
    return json.dumps(values, indent=1) + "\n"
