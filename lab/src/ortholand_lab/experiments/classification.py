"""Image classifiers with orthogonal kernels: what mnist, cifar and batch-size share."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import parametrize

from ortholand_lab.experiments.descents import EPS, late
from ortholand_lab.methods import Trainee, as_in_the_paper, careful, is_trivialization, prepare
from ortholand_lab.study.figures import (
    METHOD_STYLES,
    add_legend,
    draw_by_time_and_iteration,
    label_plainly,
    listed,
    plot_method,
)
from ortholand_lab.study.records import MissingRecordError, Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Unit
from ortholand_lab.study.timing import (
    TIMING,
    Action,
    Timing,
    seconds_per_iteration,
    time_runs,
    timing_unit,
)

# What is run.


MARGIN = 4  # pixels by which an image may be shifted when it is augmented
TESTED_AT_ONCE = 500  # images
PAPER_TIMING = "timing-as-in-the-paper"  # of the methods as the paper has them


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
    lengths = {m: short if is_trivialization(m) else settings.iterations for m in methods}
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
        self.trainee = trainee
        self.data = data = context.dataset
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


# What is claimed.


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
        """The median of a series over the last tenth of a run, median over the trials."""
        return median(late(run, series) for run in self.runs)


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
    the method was trained longer with it, by those trainings. A method as the paper has it that
    was not searched for has the rate, and the seeds, of its careful twin.
    """
    best: dict[str, Tried] = {}
    searched = {run["method"] for run in records[TIMING].configuration["runs"]}
    for method in methods or tuple(tried_rates(records)):
        twin = method if method in searched else careful(method)
        found = min(tried_rates(records, (twin,))[twin], key=lambda entry: entry.loss)
        if twin != method:
            seconds = seconds_per_iteration(records[PAPER_TIMING], method=method)
            found = found._replace(seconds=seconds)
        best[method] = _at_length(records, method, found, whole=twin != method)
    return best


def _at_length(records: Records, method: str, best: Tried, *, whole: bool) -> Tried:
    """A method's best rate with its final training runs, as many as there are.

    At least one if ``whole``: the others are not the method's.
    """
    names = [final_name(method, best.lr, trial) for trial in range(MOST_TRIALS)]
    finals = [records[name] for name in names if name in records]
    if finals:
        return best._replace(runs=finals)
    if whole:
        raise MissingRecordError(f"the run {names[0]} is missing")
    return best


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
    """Where a series ends with each method, by its last tenth, and whether the claim holds.

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
    medians = "" if seeds == "1" else f", {seeds} seeds"
    small = any(run[name] < least for run in runs for name, least in enough.items())
    needed = ", ".join(f"{name} >= {least:,}" for name, least in enough.items())
    return Finding.of(
        f"last tenth of {span} iterations{medians}: "
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


# How it is drawn.


def training_figures(
    name: str, network: str, *, curves: str = "", errors: str = "", rate: str = "learning rate"
) -> tuple[FigureSpec, ...]:
    """The figures of an experiment, with additions to the captions."""
    return (
        training_figure(
            name, f"{network}, each method with its best learning rate{curves}", errors=errors
        ),
        FigureSpec(
            f"{name}-learning-rates",
            f"{network}: mean training loss over the last quarter of the run, against the {rate}. "
            "The lowest point of each method is its rate in the figure above.",
            draw_learning_rates,
        ),
    )


def training_figure(name: str, subject: str, *, errors: str = "") -> FigureSpec:
    """The figure of the training runs that the subject describes."""
    return FigureSpec(
        name,
        f"{subject}. Top: test error. Bottom: orthogonality error of all kernels together{errors}. "
        "Left: by time, which is the iterations times the median time of one, timed in turn with "
        "the other methods. Right: by iteration.",
        draw_training,
    )


def draw_training(records: Records) -> Figure:
    """Test error and orthogonality error of each method, by time and by iteration.

    As the paper has the method, where it was trained so.
    """
    trained = {unit.split("-lr")[0].removeprefix("final-") for unit in records}
    names = [(method, as_in_the_paper(method)) for method in tried_rates(records)]
    best = best_rates(records, [paper if paper in trained else ours for ours, paper in names])
    figure, grid = draw_by_time_and_iteration(
        {method: found.runs for method, found in best.items()},
        {method: found.seconds for method, found in best.items()},
        {
            "test_error": "test error",
            "orthogonality_error": r"orthogonality error, $\|X^\top X - I\|$",
        },
        height=6.6,
    )
    grid[1, 1].set_xscale("linear")
    grid[1, 1].locator_params(axis="x", nbins=6)
    label_plainly(grid[0, 0].yaxis, "{:.3g} %", 100.0)
    label_plainly(grid[1, 0].xaxis)
    return figure


def draw_learning_rates(records: Records) -> Figure:
    """The final training loss against the learning rate: which was best, and how clearly."""
    figure = Figure(figsize=(8, 4.4))
    axes = figure.subplots()
    rates: set[float] = set()
    for method, entries in tried_rates(records).items():
        plot_method(axes, method, [e.lr for e in entries], [e.loss for e in entries], marker="o")
        rates.update(entry.lr for entry in entries)
    axes.set(xscale="log", xlabel="learning rate", yscale="log", ylabel="training loss in the end")
    axes.set_xticks(sorted(rates), [f"{lr:.3g}" for lr in sorted(rates)])
    axes.xaxis.set_minor_locator(NullLocator())
    label_plainly(axes.yaxis)
    add_legend(figure, axes, 3)
    return figure
