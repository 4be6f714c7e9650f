"""The published protocol: a perceptron of three layers without biases learns CIFAR-10.

Batches of 1,024 with the last part of an epoch, a learning rate that falls linearly to zero, no
momentum but a method's own. Each method takes the learning rate with the best mean test accuracy
over some seeds, and is judged by others. Where the best rate is an edge of its grid, the grid goes
on beyond it.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from time import process_time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ortholand.geometry.manifold import gram_residual, residual_norm
from ortholand.geometry.matrices import tall
from ortholand.parameters import orthogonalize_
from ortholand_lab.benchmarks.muon.contenders import CONTENDERS, DIRECTIONS, STEPPED
from ortholand_lab.benchmarks.muon.directions import best_value, quality
from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments.classification import scale_of
from ortholand_lab.models import relu_mlp
from ortholand_lab.study.records import Result
from ortholand_lab.study.spec import Context
from ortholand_lab.study.timing import Action, medians, time_in_turn

WIDTHS = (3 * 32 * 32, 128, 64, 10)
PROBE = 0.01  # of the learning rate: a move so short is its direction


@dataclass(frozen=True)
class TrainingTask:
    """One method: choose its learning rate, then judge it.

    Args:
        method: its name.
        rates: learning rates to choose from.
        extensions: how many rates may be added to these, one by one, beyond an edge that is best.
        widths: of the network.
        epochs: of a training.
        batch_size: of a training.
        tuning_seeds: with which every rate is tried.
        seeds: with which the best one is judged.
        test_images: how many at most.
    """

    method: str
    rates: tuple[float, ...]
    extensions: int
    widths: tuple[int, ...]
    epochs: int
    batch_size: int
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    test_images: int

    @property
    def trainings(self) -> int:
        """The largest number of training runs."""
        tried = len(self.rates) + self.extensions
        return tried * len(self.tuning_seeds) + len(self.seeds)


@dataclass(frozen=True)
class StepTimes:
    """Steps of all methods on the network, in turn."""

    methods: tuple[str, ...]
    widths: tuple[int, ...]
    batch_size: int
    seconds: float


class Images(NamedTuple):
    """A data set in the form that the network takes."""

    train: Tensor  # (N, 3072), mean 0 and deviation 1 in each channel
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@lru_cache(maxsize=1)  # one data set serves all units of a process
def prepare_images(data: Dataset) -> Images:
    """Scale and flatten the images, once."""
    scale, cpu = scale_of(data.train_images), torch.device("cpu")
    train, test = (
        scale.apply(images, cpu).flatten(1) for images in (data.train_images, data.test_images)
    )
    return Images(train, data.train_labels, test, data.test_labels)


class Outcome(NamedTuple):
    """The outcome of a training run."""

    seed: float
    lr: float
    accuracy: float
    loss: float  # mean over the last epoch
    # NaN where they are not measured:
    error: float  # ||X^T X - I||_F, the largest of any weight after any step
    singular: float  # the largest singular value of any weight after any step
    value: float  # share of the best value that its moves have
    tangency: float  # of the direction before it is brought back; NaN if there is none


def run_training(task: TrainingTask, context: Context) -> Result:
    """Choose the learning rate with some seeds, judge it with others; a row for each run."""
    images, outcomes = prepare_images(context.dataset), []

    def train_with(seed: int, lr: float, *, judged: bool) -> Outcome:
        outcome = Training(task, images, 10_000 * context.seed + seed, lr).run(judged=judged)
        outcomes.append(outcome._replace(seed=seed))
        context.tick(1)
        return outcome

    def accuracy(lr: float) -> float:
        return fmean(train_with(seed, lr, judged=False).accuracy for seed in task.tuning_seeds)

    accuracies = {lr: accuracy(lr) for lr in task.rates}
    for _ in range(task.extensions):
        beyond = rate_beyond(accuracies)
        if beyond is None:
            context.tick(len(task.tuning_seeds))
        else:
            accuracies[beyond] = accuracy(beyond)
    best = best_rate(accuracies)
    for seed in task.seeds:
        train_with(seed, best, judged=True)
    return Result.of_rows(Outcome._fields, outcomes, best=best)


def best_rate(accuracies: Mapping[float, float]) -> float:
    """The learning rate with the best accuracy; the smallest of equals."""
    return max(sorted(accuracies), key=accuracies.__getitem__)


def rate_beyond(accuracies: Mapping[float, float]) -> float | None:
    """The rate beyond the edge of a grid, if that is where the best one is.

    As far from the best as its neighbour is, in ratio, to two digits.
    """
    rates, best = sorted(accuracies), best_rate(accuracies)
    if len(rates) < 2 or best not in (rates[0], rates[-1]):
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:.2g}")


def batches(images: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """The batches of an epoch; the last one has the remaining images."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    yield from order.split(batch_size)


def start(
    method: str, lr: float, seed: int, widths: Sequence[int] = WIDTHS
) -> tuple[nn.Module, Optimizer]:
    """Network and optimizer; if the method is constrained, all weights are on the manifold."""
    contender, model = (CONTENDERS | STEPPED)[method], relu_mlp(*widths, seed=seed)
    if contender.constrained:
        orthogonalize_(model, orthogonal=nn.Linear)
    return model, contender.make(model.parameters(), lr)


class Training:
    """One training run and its measurements."""

    def __init__(self, task: TrainingTask, images: Images, seed: int, lr: float) -> None:
        self.task, self.images, self.seed, self.lr = task, images, seed, lr
        self.model, self.optimizer = start(task.method, lr, seed, task.widths)
        self.weights = list(self.model.parameters())
        self.errors: list[float] = []
        self.singular: list[float] = []
        self.probes: list[tuple[float, float]] = []

    def run(self, *, judged: bool) -> Outcome:
        """Train; judged runs are measured after every step.

        At the start of every epoch but the last, the direction of a step is examined as well.
        """
        task, count = self.task, len(self.images.train)
        steps = task.epochs * -(-count // task.batch_size)
        done, losses = 0, []
        for epoch in range(task.epochs):
            losses = []
            chosen = batches(count, task.batch_size, 1000 * self.seed + epoch)
            for i, batch in enumerate(chosen):
                self.set_rate(self.lr * (1 - done / steps))
                losses.append(self.differentiate(batch))
                if judged and i == 0 and epoch < max(1, task.epochs - 1):
                    self.look()
                self.optimizer.step()
                if judged:
                    self.measure()
                done += 1
        return self.outcome(fmean(losses))

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def differentiate(self, batch: Tensor) -> float:
        """Compute the gradients of the loss on a batch."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.images.train[batch]), self.images.train_labels[batch])
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def measure(self) -> None:
        """Record errors and singular values of all weights, in float64."""
        weights = [tall(p.double()) for p in self.weights]
        residuals = [gram_residual(X) for X in weights]
        self.errors.append(max(float(residual_norm(D)) for D in residuals))
        largest = max(float(torch.linalg.eigvalsh(D)[-1]) for D in residuals)
        self.singular.append(math.sqrt(1 + largest))

    @torch.no_grad()
    def look(self) -> None:
        """Record the share of the best value in a short move, and how tangent the direction is."""
        if not (CONTENDERS | STEPPED)[self.task.method].constrained:
            return
        points = [
            (tall(p.double()), tall(p.grad.double())) for p in self.weights if p.grad is not None
        ]
        moves = [tall(move.double()) for move in short_move(self.optimizer, self.weights)]
        reached = sum(
            (G * R).sum() / torch.linalg.matrix_norm(R, 2)
            for (_, G), R in zip(points, moves, strict=True)
        )
        best = sum(best_value(X, G) for X, G in points)
        self.probes.append((float(reached / best), self.tangency(points)))

    def tangency(self, points: Sequence[tuple[Tensor, Tensor]]) -> float:
        """The largest tangency of all weights, for a method that reveals its direction."""
        direction = DIRECTIONS.get(self.task.method)
        if direction is None:
            return math.nan
        found = [quality(X, G, direction(X.float(), G.float())).tangency for X, G in points]
        return max(found)

    @torch.no_grad()
    def outcome(self, loss: float) -> Outcome:
        """The outcome of the run."""
        test, labels = (x[: self.task.test_images] for x in self.images[2:])
        accuracy = float((self.model(test).argmax(1) == labels).float().mean())
        values, tangencies = zip(*self.probes or [(math.nan,) * 2], strict=True)
        return Outcome(
            self.seed,
            self.lr,
            accuracy,
            loss,
            max(self.errors, default=math.nan),
            max(self.singular, default=math.nan),
            fmean(values),
            max(tangencies),
        )


@torch.no_grad()
def short_move(optimizer: Optimizer, weights: Sequence[nn.Parameter]) -> list[Tensor]:
    """What a step with a small fraction of the learning rate would subtract; nothing is changed."""
    before = [p.detach().clone() for p in weights]
    state = copy.deepcopy(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] *= PROBE
    optimizer.step()
    moves = [X - p for X, p in zip(before, weights, strict=True)]
    for X, p in zip(before, weights, strict=True):
        p.copy_(X)
    optimizer.load_state_dict(state)
    return moves


def time_steps(task: StepTimes, context: Context) -> Result:
    """Median processor seconds for a step of each method, with the gradients of one batch."""
    images, actions = prepare_images(context.dataset), {}
    for method in task.methods:
        model, optimizer = start(method, 1e-4, context.seed, task.widths)
        logits = model(images.train[: task.batch_size])
        cross_entropy(logits, images.train_labels[: task.batch_size]).backward()
        actions[method] = Action(optimizer.step)
    times = time_in_turn(
        actions, repetitions=5, seconds=task.seconds, warm_up=2, clock=process_time
    )
    context.tick(1)
    return Result({}, medians(times))
