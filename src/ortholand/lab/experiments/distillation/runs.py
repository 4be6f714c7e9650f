"""What is run: a student with each method and learning rate; and what is read from the records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry import distance
from ortholand.lab.experiments.descents import largest
from ortholand.lab.methods import TRAINING_METHODS, TRIVIALIZATION_METHODS, prepare
from ortholand.lab.models import TanhMLP
from ortholand.lab.study.records import Record, Records, Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import (
    TIMING,
    Action,
    Timing,
    marks,
    seconds_per_iteration,
    time_runs,
    timing_unit,
)

LEARNING_RATES = (1.0, 0.1, 0.01, 0.001)
TIMED_RATE = 0.01  # at the paper's size, where times are costly to take: all learn with it
WARM_UP = 2  # iterations before those that are timed
PAPER_SIZE = (100, 10)  # width and depth
PAPER_ITERATIONS = 10_000


@dataclass(frozen=True)
class DistillationSettings:
    """The paper's settings are the defaults; it does not say how large the test set is."""

    p: int = PAPER_SIZE[0]
    depth: int = PAPER_SIZE[1]
    batch: int = 256
    iterations: int = PAPER_ITERATIONS
    trivialization_share: float = 1.0  # part of these that the trivializations are run for
    momentum: float = 0.9
    test_size: int = 1_000
    timed_size: tuple[int, int] = PAPER_SIZE  # at which, besides the runs' own, times are taken
    repetitions: int = 30  # of the iterations that are timed in turn


@dataclass(frozen=True)
class DistillationRun:
    """A method with a learning rate."""

    method: str
    lr: float
    p: int
    depth: int
    batch: int
    iterations: int
    momentum: float
    test_size: int


class Point(NamedTuple):
    """What is recorded of a student."""

    iteration: int
    test_loss: float
    orthogonality_error: float  # of all weights together
    largest_error: float  # of a single weight, ||W^T W - I||_F


def plan(settings: DistillationSettings) -> list[Unit[Any]]:
    """Every method with every learning rate, and the timing; with one rate at the larger size."""
    runs = [_run(settings, method, lr) for method in TRAINING_METHODS for lr in LEARNING_RATES]
    p, depth = settings.timed_size
    large = [replace(run, p=p, depth=depth) for run in runs if run.lr == TIMED_RATE]
    timed = tuple(dict.fromkeys([*runs, *large]))  # once, where the sizes are the same
    units = [Unit(f"{run.method}-lr{run.lr:g}", run, run.iterations) for run in runs]
    return [*units, timing_unit(Timing(timed, WARM_UP, settings.repetitions))]


def _run(s: DistillationSettings, method: str, lr: float) -> DistillationRun:
    share = s.trivialization_share if method in TRIVIALIZATION_METHODS else 1.0
    iterations = math.ceil(share * s.iterations)
    return DistillationRun(method, lr, s.p, s.depth, s.batch, iterations, s.momentum, s.test_size)


def run(task: DistillationRun | Timing[DistillationRun], context: Context) -> Result:
    """Train, measuring now and then; or time single iterations."""
    if isinstance(task, Timing):
        return time_runs(task, begin, context)
    lesson = Lesson(task, context)
    points = [lesson.measure()]
    for mark in marks(task.iterations, ratio=1.15)[1:]:
        while lesson.iteration < mark:
            lesson.next_batch()
            lesson.learn()
        points.append(lesson.measure())
        context.tick(mark - points[-2].iteration)
    return Result.of_rows(Point._fields, points)


def begin(task: DistillationRun, context: Context) -> Action:
    """An iteration to be timed, without the time for its examples."""
    lesson = Lesson(task, context)
    return Action(lesson.learn, lesson.next_batch)


class Lesson:
    """A teacher, a student that is trained by a method, and the examples."""

    batch: tuple[Tensor, Tensor]

    def __init__(self, task: DistillationRun, context: Context) -> None:
        self.task, self.device = task, context.device
        # A seed each: what one draws must not shift what another does.
        teacher, student, batches, tests = range(4 * context.seed, 4 * context.seed + 4)
        self.teacher = self._network(teacher)
        self.trainee = prepare(
            self._network(student),
            task.method,
            orthogonal=lambda name, _: name.endswith("weight"),
            view="matrix",
            lr=task.lr,
            momentum=task.momentum,
            # Methods with momentum have it for the biases too.
            plain_momentum=task.momentum if task.method.endswith("-momentum") else 0.0,
        )
        self.draw = torch.Generator().manual_seed(batches)
        self.tests = self._examples(task.test_size, torch.Generator().manual_seed(tests))
        self.iteration = 0

    def next_batch(self) -> None:
        """Draw the next batch of examples."""
        self.batch = self._examples(self.task.batch, self.draw)

    def learn(self) -> None:
        """One iteration, with the examples at hand."""
        x, y = self.batch
        self.trainee.step(loss(self.trainee.model(x), y))
        self.iteration += 1

    @torch.no_grad()
    def measure(self) -> Point:
        """The student as it is now."""
        x, y = self.tests
        errors = [float(distance(W.double())) for W in self.trainee.weights()]
        test_loss = float(loss(self.trainee.model(x), y))
        return Point(self.iteration, test_loss, math.hypot(*errors), largest(errors))

    def _network(self, seed: int) -> TanhMLP:
        # Determinants +1: all that the paper's trivializations exp(A) could be.
        return TanhMLP(self.task.p, self.task.depth, seed=seed, special=True).to(self.device)

    @torch.no_grad()
    def _examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs, drawn on the CPU and so the same on every device, and the teacher's answers."""
        x = torch.randn(count, self.task.p, generator=generator).to(self.device)
        return x, self.teacher(x)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The paper's: squared distances, averaged over the examples."""
    return (outputs - targets).square().sum(-1).mean()


def runs_of(records: Records, method: str) -> list[Record]:
    """The runs of a method with each learning rate."""
    return [records[f"{method}-lr{lr:g}"] for lr in LEARNING_RATES]


def best_runs(records: Records, methods: Sequence[str]) -> dict[str, Record]:
    """The run of each method with the smallest final test loss."""
    return {method: min(runs_of(records, method), key=final_loss) for method in methods}


def final_loss(run: Record) -> float:
    """The test loss in the end; infinite if it is not a number."""
    value = run.series("test_loss")[-1]
    return math.inf if math.isnan(value) else value


def iteration_seconds(records: Records, run: Record) -> float:
    """Median time of an iteration of a run, timed in turn with all others."""
    wanted = {name: run.configuration[name] for name in ("method", "lr", "p")}
    return seconds_per_iteration(records[TIMING], **wanted)
