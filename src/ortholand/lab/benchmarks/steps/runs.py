"""What is run: every case at every number of threads, two curves, and memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from ortholand.lab.benchmarks.steps.contenders import (
    RESNET_SHAPES,
    Step,
    StepsCase,
    lenet_iterations,
    steps_of,
)
from ortholand.lab.study.environment import torch_threads
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import Action, medians, peak_bytes, time_in_turn

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
}
TRAINING = "lenet-training"


@dataclass(frozen=True)
class StepsSettings:
    """What is timed, and for how long."""

    cases: tuple[str, ...] = tuple(CASES)
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    counts: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
    threads: tuple[int, ...] = (1, 2)
    seconds: float = 3.0  # for each case


@dataclass(frozen=True)
class StepsTask:
    """One group of steps that take turns."""

    case: StepsCase | None  # None: training of LeNet
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
    memory = {f"{name}.memory": StepsTask(CASES[name]) for name in settings.cases}
    return [
        *(Unit(name, task, 1, timed=True) for name, task in timed.items()),
        *(Unit(name, task, 1) for name, task in memory.items()),
    ]


def run(task: StepsTask, context: Context) -> Result:
    """Median seconds of each step, or its peak memory in units of the parameters."""
    with torch_threads(task.threads):
        steps = lenet_iterations() if task.case is None else steps_of(task.case)
        values = _times(task, steps) if task.seconds else _memory(task, steps)
    context.tick(1)
    return Result({}, values)


def _times(task: StepsTask, steps: Mapping[str, Step]) -> dict[str, float]:
    huge = task.case is not None and task.case.numel > 3_000_000  # seconds for a single step
    actions = {name: Action(step) for name, step in steps.items()}
    return medians(
        time_in_turn(actions, repetitions=3 if huge else 7, seconds=task.seconds, warm_up=2)
    )


def _memory(task: StepsTask, steps: Mapping[str, Step]) -> dict[str, float]:
    assert task.case is not None
    for step in steps.values():
        step()  # its state is there now
    return {name: peak_bytes(step) / (4 * task.case.numel) for name, step in steps.items()}
