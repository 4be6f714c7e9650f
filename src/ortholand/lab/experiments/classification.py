"""Image classifiers with orthogonal kernels: what mnist, cifar and batch-size have in common."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import parametrize

from ortholand.geometry import distance
from ortholand.geometry.views import View, as_matrices
from ortholand.lab.datasets import Dataset
from ortholand.lab.methods import Trainee
from ortholand.lab.study.environment import Stopwatch
from ortholand.lab.study.figures import METHOD_STYLES, listed, plot_method
from ortholand.lab.study.records import Record, Records, Result
from ortholand.lab.study.spec import Context, Finding, Unit, Verdict

TIMING = "timing"  # the unit in which the iterations of all runs are timed in turn
VIEW: View = "kernel"  # each kh x kw slice of a convolution is an orthogonal matrix
FEWEST_REPETITIONS = 5  # fewer timed iterations decide nothing: other work disturbs some of them
MARGIN = 4  # pixels by which an image may be shifted when it is augmented
TESTED_AT_ONCE = 500  # images


@dataclass(frozen=True)
class Task:
    """One training: a method with a learning rate."""

    method: str
    lr: float
    batch_size: int
    iterations: int
    points: int  # how often the network is tested on the way
    test_images: int
    trial: int = 0  # trials differ in their seeds only


@dataclass(frozen=True)
class Timing:
    """Iterations of several trainings, timed in turn: what disturbs one disturbs them all alike."""

    runs: tuple[Task, ...]
    warm_up: int
    repetitions: int
    trials: int = 1  # how many there are of each run; the first is timed


class Point(NamedTuple):
    """What is recorded of a network on its way."""

    iteration: int
    train_loss: float  # mean over the batches since the point before
    test_error: float  # part of the test images that are taken for something else
    orthogonality_error: float  # of all kernels together
    largest_error: float  # of a single kernel, ||X^T X - I||_F


def is_kernel(_: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is the weight of a convolution: those are orthogonal here."""
    return parameter.ndim == 4


def unit_name(method: str, lr: float, trial: int = 0) -> str:
    """Name of a training."""
    return f"{method}-lr{lr:.3g}" + (f"-trial{trial}" if trial else "")


def training_unit(task: Task) -> Unit[Task | Timing]:
    """The unit of a training."""
    return Unit(unit_name(task.method, task.lr, task.trial), task, task.iterations)


def timing_unit(timing: Timing, name: str = TIMING) -> Unit[Task | Timing]:
    """The unit of a timing."""
    return Unit(name, timing, len(timing.runs) * (timing.warm_up + timing.repetitions))


# Images.


class Scale(NamedTuple):
    """Mean and standard deviation of each channel."""

    mean: Tensor
    deviation: Tensor

    def apply(self, images: Tensor, device: torch.device) -> Tensor:
        """Images as a network wants them: of mean 0 and deviation 1."""
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
    """Batches without end: epoch after epoch in an order of the seed's, a last part left out."""
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
    """Shift each image by up to ``MARGIN`` pixels, black coming in, and mirror half of them."""
    n, channels, height, width = images.shape
    padded = pad(images, [MARGIN] * 4)
    top, left = torch.randint(2 * MARGIN + 1, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    image, channel = torch.arange(n).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


# Training.


class Training:
    """A network on its way, with its measurements."""

    def __init__(
        self,
        trainee: Trainee,
        data: Dataset,
        *,
        batch_size: int,
        seed: int,
        augment: bool = False,
        lr_drop: int | None = None,
    ) -> None:
        self.trainee = trainee
        self.data = data
        self.device = next(trainee.model.parameters()).device
        self.scale = scale_of(data.train_images)
        self.batches = batches(
            data.train_images, data.train_labels, batch_size=batch_size, seed=seed, augment=augment
        )
        self.stopwatch = Stopwatch(self.device)
        self.lr_drop = lr_drop
        self.iteration = 0
        self.losses: list[Tensor] = []  # since the last measurement

    def advance_to(self, iteration: int) -> None:
        """Train until there."""
        while self.iteration < iteration:
            images, labels = next(self.batches)
            images, labels = self.scale.apply(images, self.device), labels.to(self.device)
            if self.iteration == self.lr_drop:
                for group in self.trainee.optimizer.param_groups:
                    group["lr"] /= 10
            with self.stopwatch:
                loss = cross_entropy(self.trainee.model(images), labels)
                self.trainee.step(loss)
            self.losses.append(loss.detach())
            self.iteration += 1

    @torch.no_grad()
    def measure(self, test_images: int) -> Point:
        """The network as it is now."""
        with parametrize.cached():  # else a trivialization would be computed for every batch
            test_error = self.test_error(test_images)
            orthogonality_error = self.trainee.orthogonality_error()
            largest_error = self.largest_error()
        train_loss = float(torch.stack(self.losses).double().mean()) if self.losses else math.nan
        self.losses.clear()
        return Point(self.iteration, train_loss, test_error, orthogonality_error, largest_error)

    @torch.no_grad()
    def largest_error(self) -> float:
        """``||X^T X - I||_F`` of the kernel that is furthest from the manifold."""
        view, weights = self.trainee.view, self.trainee.weights()
        errors = [distance(as_matrices(X.double(), view)).max() for X in weights]
        return float(torch.stack(errors).max())  # of tensors: a NaN is never passed over

    @torch.no_grad()
    def test_error(self, test_images: int) -> float:
        """Part of the first so many test images that the network takes for something else."""
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


Start = Callable[[Task, Context], Training]  # the training of a task, before its first step


def data_of(context: Context) -> Dataset:
    """The data set of an experiment that has one."""
    if context.data is None:
        raise ValueError("This experiment needs a data set in its context, got none.")
    return context.data


def run_unit(start: Start, task: Task | Timing, context: Context) -> Result:
    """Do one unit of work."""
    if isinstance(task, Timing):
        return run_in_turn([start(run, context) for run in task.runs], task, context)
    return run_alone(start(task, context), task, context)


def run_alone(training: Training, task: Task, context: Context) -> Result:
    """Train, testing now and then."""
    points = [training.measure(task.test_images)]
    for mark in even_marks(task.iterations, task.points):
        while training.iteration < mark:
            before = training.iteration
            training.advance_to(min(mark, before + 50))
            context.tick(training.iteration - before)
        points.append(training.measure(task.test_images))
    return Result(dict(zip(Point._fields, zip(*points, strict=True), strict=True)), {})


def even_marks(iterations: int, points: int) -> list[int]:
    """So many iterations at even distances, the last one among them."""
    return sorted({math.ceil(iterations * (i + 1) / points) for i in range(points)})


def run_in_turn(trainings: Sequence[Training], timing: Timing, context: Context) -> Result:
    """Time single iterations; in the series, ``run`` is the place in the task's ``runs``."""
    turns: list[tuple[int, float]] = []
    for k in range(timing.warm_up + timing.repetitions):
        for i, training in enumerate(trainings):
            before = training.stopwatch.seconds
            training.advance_to(k + 1)
            if k >= timing.warm_up:
                turns.append((i, training.stopwatch.seconds - before))
        context.tick(len(trainings))
    return Result(dict(zip(("run", "seconds"), zip(*turns, strict=True), strict=True)), {})


# What the records say.


def median_times(timing: Record) -> list[float]:
    """Median seconds of an iteration of each run of a timing, in their order."""
    turns = list(zip(timing.series("run"), timing.series("seconds"), strict=True))
    runs = range(len(timing.configuration["runs"]))
    return [median(seconds for j, seconds in turns if j == i) for i in runs]


class Tried(NamedTuple):
    """A method with a learning rate."""

    lr: float
    runs: Sequence[Record]  # one of each trial
    seconds: float  # of an iteration, in turn with all others

    @property
    def loss(self) -> float:
        """Training loss in the end, the median of the trials."""
        return median(final_loss(run) for run in self.runs)

    def end(self, series: str) -> float:
        """Where a series ends, the median of the trials."""
        return median(run.series(series)[-1] for run in self.runs)


def tried_rates(records: Records) -> dict[str, list[Tried]]:
    """All runs by method, one entry for each learning rate, in rising order."""
    timing = records[TIMING]
    tried: dict[str, list[Tried]] = {}
    for run, seconds in zip(timing.configuration["runs"], median_times(timing), strict=True):
        method, lr = run["method"], run["lr"]
        trials = range(timing.configuration["trials"])
        runs = [records[unit_name(method, lr, trial)] for trial in trials]
        tried.setdefault(method, []).append(Tried(lr, runs, seconds))
    return {m: sorted(entries, key=lambda entry: entry.lr) for m, entries in tried.items()}


def best_rates(records: Records) -> dict[str, Tried]:
    """Each method with the learning rate of the fastest convergence.

    That is the one with the smallest training loss in the end. Test images have no say in it.
    """
    tried = tried_rates(records)
    return {m: min(entries, key=lambda entry: entry.loss) for m, entries in tried.items()}


def final_loss(run: Record) -> float:
    """Mean training loss over the last quarter of a run; infinite if it is not a number."""
    losses = run.series("train_loss")[1:]  # nothing was trained at the start
    loss = fmean(losses[-math.ceil(len(losses) / 4) :])
    return math.inf if math.isnan(loss) else loss


def takes_longer(
    times: Mapping[str, float], others: Sequence[str], factor: float, repetitions: int
) -> Finding:
    """Whether an iteration of each of the others takes at least so many times as long.

    Args:
        times: seconds of an iteration; the first is the one that others are compared with.
        others: methods that should take longer.
        factor: how many times.
        repetitions: how many iterations were timed.
    """
    method, seconds = next(iter(times.items()))
    ratios = {other: times[other] / seconds for other in others}
    measured = (
        f"{METHOD_STYLES[method].label} {1e3 * seconds:,.{0 if seconds >= 0.1 else 2}f} ms per iteration; "
        f"{listed(ratios, '.2f')} times as long"
    )
    if repetitions < FEWEST_REPETITIONS:
        return Finding(f"{measured}; too few were timed to tell", Verdict.OPEN)
    holds = min(ratios.values()) >= factor
    return Finding(measured, Verdict.of(holds))


def stays_in_ball(methods: Sequence[str], eps: float, records: Records) -> Finding:
    """Whether every kernel was within eps of the manifold whenever a network was measured."""
    tried = tried_rates(records)
    runs = [run for method in methods for entry in tried[method] for run in entry.runs]
    errors = [error for run in runs for error in run.series("largest_error")]
    holds = all(error <= eps for error in errors)  # false also where one is not a number
    return Finding(
        f"at most {max(errors):.3g} in {len(runs)} runs, measured {len(errors)} times; eps = {eps}",
        Verdict.of(holds),
    )


# Figures.


def draw_training(records: Records) -> Figure:
    """Test error and orthogonality error of each method, by time and by iteration.

    The time is that of the timing: by the clocks of their own runs, methods would seem slow that
    were run while the machine was busy.
    """
    figure = Figure(figsize=(8, 6.6))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    best = best_rates(records)
    for row, series in enumerate(("test_error", "orthogonality_error")):
        for method, found in best.items():
            _draw_method(grid[row, 0], method, found, series, found.seconds)
            _draw_method(grid[row, 1], method, found, series, 1.0)
        grid[row, 0].set_yscale("log")
        grid[row, 0].set_xscale("log")
    label_plainly(grid[0, 0].yaxis, "{:.3g} %", 100.0)
    label_plainly(grid[1, 0].xaxis)
    grid[0, 0].set_ylabel("test error")
    grid[1, 0].set_ylabel(r"orthogonality error, $\|X^\top X - I\|$")
    grid[1, 0].set_xlabel("time, seconds")
    grid[1, 1].set_xlabel("iterations")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _draw_method(axes: Axes, method: str, best: Tried, series: str, unit: float) -> None:
    """The median of the trials, and behind it each of them, if there are several."""
    x = [unit * k for k in best.runs[0].series("iteration")[1:]]
    curves = [run.series(series)[1:] for run in best.runs]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(x, curve, color=METHOD_STYLES[method].colour, alpha=0.3, linewidth=0.8)
    plot_method(axes, method, x, [median(values) for values in zip(*curves, strict=True)])


def draw_learning_rates(records: Records) -> Figure:
    """The training loss in the end, against the learning rate: which was best, and how clearly."""
    figure = Figure(figsize=(8, 4.4))
    axes = figure.subplots()
    rates: set[float] = set()
    for method, entries in tried_rates(records).items():
        plot_method(axes, method, [e.lr for e in entries], [e.loss for e in entries])
        axes.lines[-1].set_marker("o")
        rates.update(entry.lr for entry in entries)
    axes.set_xscale("log")
    axes.set_xticks(sorted(rates), [f"{lr:.3g}" for lr in sorted(rates)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log")
    label_plainly(axes.yaxis)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss in the end")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def label_plainly(axis: Axis, form: str = "{:g}", factor: float = 1.0) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, ...; over many decades with the powers of 10 alone."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: form.format(factor * x)))
    axis.set_minor_formatter(NullFormatter())
