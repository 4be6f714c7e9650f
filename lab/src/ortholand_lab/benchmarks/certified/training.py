"""Train a network, certify it, and attack it."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import LambdaLR

from ortholand.nn import OrthogonalConv2d, certified_radii, lipschitz_bound
from ortholand_lab.benchmarks.certified.contenders import (
    CONTENDERS,
    LANDING,
    MUON,
    ReshapedConv2d,
    perceptron,
    small_cnn,
)
from ortholand_lab.datasets import Dataset
from ortholand_lab.models.seeding import seeded
from ortholand_lab.study.records import Result
from ortholand_lab.study.spec import Context

RADII = tuple(r / 255 for r in range(0, 361, 12))
ATTACKED_RADII = (36 / 255, 72 / 255, 108 / 255)
SHIFT = 4  # pixels by which images are moved at most
PORTION = 500  # images for one pass of an evaluation


@dataclass(frozen=True)
class TrainingTask:
    """One training run.

    Args:
        method: a name of the contenders.
        lr: the learning rate at the start; it falls linearly to zero.
        seed: of weights and batches.
        epochs: how often the images are seen.
        batch_size: images of a step.
        temperature: of the cross-entropy; scores are multiplied by it.
        images: training images at most.
        held_out: those of them that are left out, to choose a rate; 0 to judge on test images.
        judged: how many images are judged at most.
        attacked: how many of them are attacked at their certified radii, and how many at fixed ones
        attack_steps: steps of an attack.
    """

    method: str
    lr: float
    seed: int
    epochs: int
    batch_size: int
    temperature: float
    images: int
    held_out: int
    judged: int
    attacked: tuple[int, int]
    attack_steps: int


class Split(NamedTuple):
    """Images as numbers in [0, 1], and labels."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, images: Tensor, labels: Tensor) -> "Split":
        """Bytes as numbers."""
        return cls(images.float() / 255, labels)

    def first(self, count: int) -> "Split":
        """So many at most."""
        return Split(self.images[:count], self.labels[:count])


def build(task: TrainingTask, data: Dataset) -> nn.Sequential:
    """The network for these images, with random weights."""
    contender = CONTENDERS[task.method]
    with seeded(task.seed):
        return small_cnn(contender) if data.train_images.shape[1] == 3 else perceptron(contender)


def run_training(task: TrainingTask, context: Context) -> Result:
    """Train and judge one network."""
    data, model = context.dataset, build(task, context.dataset)
    train = Split.of(data.train_images[: task.images], data.train_labels[: task.images])
    judged = Split.of(data.test_images, data.test_labels)
    if task.held_out:
        judged = Split(*(tensor[: task.held_out] for tensor in train))
        train = Split(*(tensor[task.held_out :] for tensor in train))
    trainer, seconds = Trainer(model, task, train), []
    for rows in trainer.batches():
        before = time.process_time()
        trainer.step(rows)
        seconds.append(time.process_time() - before)
        context.tick(1)
    # What is computed from a parameter is computed once.
    with parametrize.cached():
        series, values = judge(model.eval().requires_grad_(False), judged.first(task.judged), task)
    parameters = float(sum(p.numel() for p in model.parameters()))
    return Result(series, values | {"step": median(seconds), "parameters": parameters})


class Trainer:
    """Takes the steps of a training run, at a rate that falls linearly to zero."""

    def __init__(self, model: nn.Module, task: TrainingTask, train: Split) -> None:
        self._model, self._task, self._train = model, task, train
        self._steps = task.epochs * (len(train.labels) // task.batch_size)
        self._optimizer = CONTENDERS[task.method].optimizer(model, task.lr)
        self._rate = LambdaLR(self._optimizer, lambda done: max(0.0, 1 - done / self._steps))
        self._generator = torch.Generator().manual_seed(task.seed)

    def batches(self) -> Iterator[Tensor]:
        """The rows of all batches, which depend on the seed only."""
        generator = torch.Generator().manual_seed(self._task.seed + 1)
        count = len(self._train.labels)
        whole = count // self._task.batch_size * self._task.batch_size
        for _ in range(self._task.epochs):
            rows = torch.randperm(count, generator=generator)[:whole]
            yield from rows.view(-1, self._task.batch_size)

    def step(self, rows: Tensor) -> None:
        """One step."""
        self._optimizer.zero_grad()
        images = augmented(self._train.images[rows], self._generator)
        scores = self._task.temperature * self._model(images)
        functional.cross_entropy(scores, self._train.labels[rows]).backward()
        self._optimizer.step()
        self._rate.step()


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Colour images moved by some pixels, half of them mirrored."""
    if x.shape[1] != 3:
        return x
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    down, right = torch.randint(2 * SHIFT + 1, (2,), generator=generator).tolist()
    height, width = x.shape[2:]
    padded = functional.pad(x, (SHIFT,) * 4)
    return padded[..., down : down + height, right : right + width]


def judge(
    model: nn.Sequential, judged: Split, task: TrainingTask
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Accuracy, certificates and attacks."""
    scores = torch.cat([model(images) for images in judged.images.split(PORTION)])
    correct = scores.argmax(1) == judged.labels
    bound = measured_bound(model, judged.images.shape[1:])
    said = said_bound(model, task.method) or bound
    radii = {"said": certified_radii(scores, said), "certified": certified_radii(scores, bound)}
    series = {"radius": list(RADII)}
    for name, radius in radii.items():
        series[name] = [float((correct & (radius > r)).double().mean()) for r in RADII]
    values = {"accuracy": float(correct.double().mean()), "bound": bound, "said_bound": said}
    by_radius, fixed = (judged.first(count) for count in task.attacked)
    predicted = Split(by_radius.images, scores.argmax(1)[: len(by_radius.labels)])
    lowest = attack(model, predicted, radii["said"][: len(predicted.labels)], task.attack_steps)
    values |= {"attacked": float(len(lowest)), "changed": float((lowest < 0).sum())}
    for r in ATTACKED_RADII:
        lowest = attack(model, fixed, torch.full(fixed.labels.shape, r), task.attack_steps)
        values[f"robust_{255 * r:.0f}"] = float((lowest > 0).double().mean())
    return series, values


def attack(model: nn.Module, targets: Split, radius: Tensor, steps: int) -> Tensor:
    """The lowest margin of each label that projected gradient descent finds within a radius.

    Perturbed images may leave [0, 1], as the certificates allow.
    """
    portions = zip(*(t.split(PORTION) for t in (*targets, radius.float())), strict=True)
    return torch.cat([_attack(model, Split(x, y), r, steps) for x, y, r in portions])


def _attack(model: nn.Module, targets: Split, radius: Tensor, steps: int) -> Tensor:
    radius = radius.view(-1, *(1,) * (targets.images.ndim - 1))
    moved = torch.zeros_like(targets.images)
    lowest = margins(model(targets.images), targets.labels)
    for _ in range(steps):
        moved.requires_grad_()
        with torch.enable_grad():
            margin = margins(model(targets.images + moved), targets.labels)
            (gradient,) = torch.autograd.grad(margin.sum(), moved)
        lowest = torch.minimum(lowest, margin.detach())
        moved = within(moved.detach() - within(gradient, radius, on=True) * (2.5 / steps), radius)
    return torch.minimum(lowest, margins(model(targets.images + moved), targets.labels))


def margins(scores: Tensor, labels: Tensor) -> Tensor:
    """By how much the score of a label exceeds the largest other one."""
    own = scores.gather(1, labels[:, None])
    others = scores.scatter(1, labels[:, None], -math.inf)
    return own[:, 0] - others.amax(1)


def within(x: Tensor, radius: Tensor, on: bool = False) -> Tensor:
    """Images of at most this norm, or of exactly this norm."""
    norms = x.flatten(1).norm(dim=1).clamp(min=1e-12).view_as(radius)
    return x * (radius / norms if on else (radius / norms).clamp(max=1))


def said_bound(model: nn.Sequential, method: str) -> float | None:
    """The bound of margins that a method promises, if it does."""
    if method in (LANDING, MUON):
        return lipschitz_bound(model, margins=True)
    return widest_margin(model) if CONTENDERS[method].believed else None


def measured_bound(model: nn.Sequential, shape: torch.Size) -> float:
    """The bound of margins by the measured norms of all layers, on images of this shape."""
    x, bound = torch.zeros(1, *shape), widest_margin(model)
    for layer in list(model)[:-1]:
        if (convolution := kernel_and_stride(layer)) is not None:
            bound *= circular_norm(*convolution, x.shape[2:])
        elif isinstance(layer, nn.Linear):
            bound *= float(torch.linalg.matrix_norm(layer.weight.double(), 2))
        x = layer(x)
    return bound


def widest_margin(model: nn.Sequential) -> float:
    """By how much the last layer can change a margin, divided by the root of 2."""
    last = model[len(model) - 1]
    assert isinstance(last, nn.Linear)
    rows = last.weight.detach().double().flatten(1)
    return float(torch.pdist(rows).max()) / math.sqrt(2)


def kernel_and_stride(layer: nn.Module) -> tuple[Tensor, int] | None:
    """What a convolution is made of."""
    if isinstance(layer, OrthogonalConv2d):
        return layer.kernel(), layer.stride
    if isinstance(layer, (nn.Conv2d, ReshapedConv2d)):
        return layer.weight, layer.stride[0]
    return None


def circular_norm(kernel: Tensor, s: int, size: torch.Size) -> float:
    """The norm of a convolution with circular padding, by its symbols at all frequencies.

    Frequencies that a stride s identifies make one block.
    """
    symbols = torch.fft.fft2(kernel.double(), tuple(size)) / s
    aliases = symbols.unflatten(-1, (s, -1)).unflatten(-3, (s, -1))
    blocks = aliases.permute(3, 5, 0, 1, 2, 4).flatten(3)  # (frequencies, rows, aliases)
    return float(torch.linalg.matrix_norm(blocks, 2).max())
