"""What is run: networks with orthogonal kernels learn to classify images."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import parametrize

from ortholand.lab.methods import TRIVIALIZATION_METHODS, Trainee, prepare
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit
from ortholand.lab.study.timing import Action, Timing, time_runs, timing_unit

MARGIN = 4  # pixels by which an image may be shifted when it is augmented
TESTED_AT_ONCE = 500  # images


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What is trained, for how long, and how it is timed."""

    batch_size: int
    learning_rates: tuple[float, ...]
    iterations: int
    trivialization_share: float = 1.0  # part of these that trivializations are run for
    points: int  # how often a network is tested on its way
    test_images: int
    warm_up: int  # iterations before those that are timed in turn
    repetitions: int  # of the iterations that are timed in turn


@dataclass(frozen=True)
class TrainingRun:
    """One training run: a method with a learning rate."""

    method: str
    lr: float
    batch_size: int
    iterations: int
    points: int
    test_images: int
    trial: int = 0  # trials differ in their seeds only


@dataclass(frozen=True)
class TrialTiming(Timing[TrainingRun]):
    """A timing of the first of several trials."""

    trials: int = 1


def prepare_kernels(model: nn.Module, method: str, lr: float, **options: float) -> Trainee:
    """Prepare a model for a method: every slice of a convolution's weight is orthogonal."""
    return prepare(model, method, orthogonal=is_kernel, view="kernel", lr=lr, **options)


def is_kernel(_: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is the weight of a convolution."""
    return parameter.ndim == 4


def unit_name(method: str, lr: float, trial: int = 0) -> str:
    """Name of a training run."""
    return f"{method}-lr{lr:.3g}" + (f"-trial{trial}" if trial else "")


def final_name(method: str, lr: float, trial: int) -> str:
    """Name of a longer training run of a method with its best rate."""
    return f"final-{method}-lr{lr:.3g}-trial{trial}"


def runs_of(settings: TrainingSettings, methods: Iterable[str]) -> list[TrainingRun]:
    """Every method with every learning rate."""
    short = math.ceil(settings.trivialization_share * settings.iterations)
    lengths = {m: short if m in TRIVIALIZATION_METHODS else settings.iterations for m in methods}
    measured = (settings.points, settings.test_images)
    return [
        TrainingRun(method, lr, settings.batch_size, iterations, *measured)
        for method, iterations in lengths.items()
        for lr in settings.learning_rates
    ]


def plan_trainings(
    settings: TrainingSettings, runs: Sequence[TrainingRun], trials: int = 1
) -> list[Unit[Any]]:
    """All trials of all runs, and the timing of the runs."""
    timing = TrialTiming(tuple(runs), settings.warm_up, settings.repetitions, trials)
    trainings = [
        Unit(unit_name(run.method, run.lr, i), replace(run, trial=i), run.iterations)
        for run in runs
        for i in range(trials)
    ]
    return [*trainings, timing_unit(timing)]


# Images.


class Scale(NamedTuple):
    """Mean and standard deviation of each channel."""

    mean: Tensor
    deviation: Tensor

    def apply(self, images: Tensor, device: torch.device) -> Tensor:
        """Images in the form a network takes: of mean 0 and deviation 1."""
        shape = (-1, 1, 1)
        centred = images.to(device).float() - self.mean.to(device).view(shape)
        return centred / self.deviation.to(device).view(shape)


@lru_cache(maxsize=1)  # a data set serves all trainings of an experiment
def scale_of(images: Tensor) -> Scale:
    """The scale of uint8 images ``(N, C, H, W)``, exactly and without a copy of them as floats."""
    levels = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
    )
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = weights @ levels
    deviation = ((levels - mean[:, None]).square() * weights).sum(1).sqrt()
    return Scale(mean.float(), deviation.clamp_min(1.0).float())


def batches(
    images: Tensor, labels: Tensor, *, batch_size: int, seed: int, augment: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: epoch after epoch, shuffled by the seed, without partial batches."""
    whole = len(images) // batch_size * batch_size
    if not whole:
        raise ValueError(
            f"A batch of {batch_size} images needs as many, but there are {len(images)}."
        )
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)[:whole]
        for chosen in order.split(batch_size):
            taken = images[chosen]
            yield (crop_and_flip(taken, generator) if augment else taken), labels[chosen]


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to ``MARGIN`` pixels, padding with black, and mirror half of them."""
    n, channels, height, width = images.shape
    padded = pad(images, [MARGIN] * 4)
    top, left = torch.randint(2 * MARGIN + 1, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    image, channel = torch.arange(n).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


# Training.


class Point(NamedTuple):
    """What is recorded of a network during training."""

    iteration: int
    train_loss: float  # mean over the batches since the point before
    test_error: float  # part of the test images that are taken for something else
    orthogonality_error: float  # of all kernels together
    largest_error: float  # of a single kernel, ||X^T X - I||_F


class Training:
    """A network in training, with its measurements."""

    def __init__(
        self,
        trainee: Trainee,
        context: Context,
        *,
        batch_size: int,
        seed: int,
        augment: bool = False,
        lr_drop: int | None = None,
    ) -> None:
        if context.data is None:
            raise ValueError("A training needs a data set in its context, got none.")
        self.trainee = trainee
        self.data = data = context.data
        self.device = next(trainee.model.parameters()).device
        self.scale = scale_of(data.train_images)
        self.batches = batches(
            data.train_images, data.train_labels, batch_size=batch_size, seed=seed, augment=augment
        )
        self.lr_drop = lr_drop
        self.iteration = 0
        self.losses: list[Tensor] = []  # since the last measurement

    def prepare(self) -> None:
        """The untimed part before an iteration: the batch and the learning rate."""
        images, labels = next(self.batches)
        self.batch = self.scale.apply(images, self.device), labels.to(self.device)
        if self.iteration == self.lr_drop:
            for group in self.trainee.optimizer.param_groups:
                group["lr"] /= 10

    def step(self) -> None:
        """An iteration: forward pass, gradient and step."""
        images, labels = self.batch
        loss = cross_entropy(self.trainee.model(images), labels)
        self.trainee.step(loss)
        self.losses.append(loss.detach())
        self.iteration += 1

    def action(self) -> Action:
        """An iteration for the timer."""
        return Action(self.step, self.prepare)

    def advance_to(self, iteration: int) -> None:
        """Train up to an iteration."""
        while self.iteration < iteration:
            self.prepare()
            self.step()

    @torch.no_grad()
    def measure(self, test_images: int) -> Point:
        """Measure the current network."""
        with parametrize.cached():  # else a trivialization would be computed for every batch
            test_error = self.test_error(test_images)
            orthogonality_error = self.trainee.orthogonality_error()
            largest_error = self.trainee.largest_error()
        train_loss = float(torch.stack(self.losses).double().mean()) if self.losses else math.nan
        self.losses.clear()
        return Point(self.iteration, train_loss, test_error, orthogonality_error, largest_error)

    @torch.no_grad()
    def test_error(self, test_images: int) -> float:
        """The share of the first ``test_images`` test images that the network misclassifies."""
        images, labels = self.data.test_images[:test_images], self.data.test_labels[:test_images]
        self.trainee.model.eval()
        wrong = 0
        for part, truth in zip(
            images.split(TESTED_AT_ONCE), labels.split(TESTED_AT_ONCE), strict=True
        ):
            scores = self.trainee.model(self.scale.apply(part, self.device))
            wrong += int((scores.argmax(1).cpu() != truth).sum())
        self.trainee.model.train()
        return wrong / len(labels)


Start = Callable[[Any, Context], Training]  # the training of a run, before its first step


def run_unit(start: Start, task: TrainingRun | Timing[Any], context: Context) -> Result:
    """Do one unit of work: train, or time the iterations of several runs."""
    if isinstance(task, Timing):
        return time_runs(task, lambda run, context: start(run, context).action(), context)
    return train(start(task, context), task, context)


def train(training: Training, run: TrainingRun, context: Context) -> Result:
    """Train, testing now and then."""
    points = [training.measure(run.test_images)]
    for mark in even_marks(run.iterations, run.points):
        while training.iteration < mark:
            before = training.iteration
            training.advance_to(min(mark, before + 50))
            context.tick(training.iteration - before)
        points.append(training.measure(run.test_images))
    return Result.of_rows(Point._fields, points)


def even_marks(iterations: int, points: int) -> list[int]:
    """Evenly spaced iterations, including the last."""
    return sorted({math.ceil(iterations * (i + 1) / points) for i in range(points)})
