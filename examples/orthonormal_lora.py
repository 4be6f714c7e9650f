"""Low-rank adapters with orthonormal factors: teach a trained network to read digits lying down.

    python examples/orthonormal_lora.py --out orthonormal_lora.png

A network is trained on upright digits and frozen. Then it must learn to read digits turned by 90
degrees from a few hundred of them, by an update of low rank to each hidden layer. LoRA (Hu et al.
2021) learns W + B A. Here the update is W + B diag(s) A, where B has orthonormal columns and A has
orthonormal rows: a learnt singular value decomposition, so no direction can hide behind another,
and s says how much each of them counts.

The digits are the 1,797 that come with scikit-learn, or those of MNIST if the environment variable
ORTHOLAND_DATA names a folder that has them.

Needs scikit-learn, matplotlib and rich: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

import ortholand as ol
from ortholand_lab.datasets import DatasetError, find_dataset
from showing import LOOKS, Tell, bars, cell, make_table, two_panels


@dataclass(frozen=True)
class Settings:
    """Sizes of the network and of its two lessons."""

    rank: int = 8
    hidden: int = 128
    pretraining: int = 60  # epochs
    adaptation: int = 100
    upright: int = 800  # images to be trained on
    turned: int = 300  # images to be adapted with
    batch: int = 32


QUICK = Settings(rank=4, hidden=64, pretraining=10, adaptation=20)


# --- the digits


@dataclass(frozen=True)
class Digits:
    """Images and labels: upright ones to be trained on, turned ones to adapt with, and tests."""

    upright: tuple[Tensor, Tensor]
    turned: tuple[Tensor, Tensor]
    upright_test: tuple[Tensor, Tensor]
    turned_test: tuple[Tensor, Tensor]


def read_images() -> tuple[Tensor, Tensor, str]:
    """Images with values from 0 to 1, labels, and what they are."""
    folder = os.environ.get("ORTHOLAND_DATA")
    if folder:
        data = find_dataset("mnist", Path(folder)).load()
        return data.train_images[:5000, 0] / 255, data.train_labels[:5000], "5,000 of MNIST"
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 8, 8) / 16
    return images, torch.from_numpy(labels).long(), "scikit-learn's digits"


def split_images(images: Tensor, labels: Tensor, settings: Settings, seed: int) -> Digits:
    """No image is in two parts; the tests are of the same images, upright and turned."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    turned = torch.rot90(images, dims=(1, 2))
    a, b = settings.upright, settings.upright + settings.turned
    return Digits(
        upright=(images[:a], labels[:a]),
        turned=(turned[a:b], labels[a:b]),
        upright_test=(images[b:], labels[b:]),
        turned_test=(turned[b:], labels[b:]),
    )


# --- adapters


class LoRA(nn.Module):
    """A frozen linear layer and an update B A of low rank, zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.empty(rank, layer.in_features).uniform_(-1, 1))
        self.A.data /= layer.in_features**0.5
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and the update's."""
        return self.layer(x) + (x @ self.A.T) @ self.B.T

    def update(self) -> Tensor:
        """As one matrix."""
        return self.B @ self.A


class OrthonormalLoRA(nn.Module):
    """An update B diag(s) A; B has orthonormal columns, A orthonormal rows, s is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(rank, layer.in_features))
        self.B = nn.Parameter(torch.randn(layer.out_features, rank))
        self.s = nn.Parameter(torch.zeros(rank))
        ol.orthogonalize_([self.A, self.B])

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and the update's."""
        return self.layer(x) + (self.s * (x @ self.A.T)) @ self.B.T

    def update(self) -> Tensor:
        """As one matrix."""
        return (self.B * self.s) @ self.A


def make_network(pixels: int, hidden: int) -> nn.Sequential:
    """A perceptron with two hidden layers."""
    layers = (nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden, 10))


# --- the contestants: how a frozen network is made to learn. Learning rates: examples/README.md.


def orthonormal(network: nn.Sequential, rank: int) -> Optimizer:
    """Orthonormal factors, by landing."""
    network[1], network[3] = OrthonormalLoRA(network[1], rank), OrthonormalLoRA(network[3], rank)
    groups = ol.param_groups(network, orthogonal=["*.A", "*.B"])
    return ol.LandingAdam(groups, lr=0.1, attraction="after")


def plain(network: nn.Sequential, rank: int) -> Optimizer:
    """The twin: factors of the same sizes, without constraint."""
    network[1], network[3] = LoRA(network[1], rank), LoRA(network[3], rank)
    return Adam([p for p in network.parameters() if p.requires_grad], lr=0.03)


def everything(network: nn.Sequential, rank: int) -> Optimizer:  # noqa: ARG001
    """No adapters: all weights learn."""
    return Adam(network.requires_grad_(True).parameters(), lr=0.01)


Prepare = Callable[[nn.Sequential, int], Optimizer]
CONTESTANTS: dict[str, Prepare] = {
    "orthonormal LoRA": orthonormal,
    "plain LoRA": plain,
    "all weights": everything,
}


# --- learning


@dataclass(frozen=True)
class Run:
    """What a contestant did."""

    curve: list[float]  # accuracy on turned test digits, after each epoch
    kept: float  # accuracy on upright test digits, at the end
    loss: float  # on the digits it was adapted with
    spectra: list[list[float]]  # singular values of each update, the largest first
    error: float | None  # how far the factors are from orthonormal
    weights: int
    seconds: float

    @property
    def rank_used(self) -> float | None:
        """Participation ratio (sum s)^2 / sum s^2 over the rank, mean of the updates; 1 is all."""
        ratios = [sum(s) ** 2 / sum(x * x for x in s) / len(s) for s in self.spectra]
        return sum(ratios) / len(ratios) if ratios else None


@torch.no_grad()
def accuracy(network: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """What part of the digits is read correctly."""
    images, labels = test
    return (network(images).argmax(1) == labels).float().mean().item()


def train_epoch(
    network: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor], batch: int
) -> float:
    """One pass through the data in random order; the mean loss."""
    images, labels = data
    losses = []
    for chosen in torch.randperm(len(labels)).split(batch):
        optimizer.zero_grad()
        loss = cross_entropy(network(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def pretrain(digits: Digits, settings: Settings, seed: int, tell: Tell) -> nn.Sequential:
    """A network that reads upright digits, frozen."""
    torch.manual_seed(seed)
    network = make_network(digits.upright[0][0].numel(), settings.hidden)
    optimizer = Adam(network.parameters(), lr=1e-3)
    for _ in range(settings.pretraining):
        loss = train_epoch(network, optimizer, digits.upright, settings.batch)
        tell(f"loss {loss:.4f}")
    return network.requires_grad_(False)


def adapt(
    prepare: Prepare,
    network: nn.Sequential,
    digits: Digits,
    settings: Settings,
    seed: int,
    tell: Tell,
) -> Run:
    """Adapt a copy of the network to turned digits."""
    torch.manual_seed(seed)
    network = copy.deepcopy(network)
    optimizer = prepare(network, settings.rank)
    curve, loss, start = [accuracy(network, digits.turned_test)], float("nan"), time.perf_counter()
    for _ in range(settings.adaptation):
        loss = train_epoch(network, optimizer, digits.turned, settings.batch)
        curve.append(accuracy(network, digits.turned_test))
        tell(f"loss {loss:.4f}")
    adapters = [layer for layer in network if isinstance(layer, LoRA | OrthonormalLoRA)]
    factors = [factor for adapter in adapters for factor in (adapter.A, adapter.B)]
    return Run(
        curve=curve,
        kept=accuracy(network, digits.upright_test),
        loss=loss,
        spectra=[torch.linalg.svdvals(a.update())[: settings.rank].tolist() for a in adapters],
        error=ol.orthogonality_error(factors) if factors else None,
        weights=sum(p.numel() for p in network.parameters() if p.requires_grad),
        seconds=time.perf_counter() - start,
    )


def learn_all(
    digits: Digits, settings: Settings, seed: int, console: Console
) -> tuple[nn.Sequential, dict[str, Run]]:
    """Train the network, then adapt it in every way, with a bar for each."""
    with bars(console) as bar:
        network = pretrain(digits, settings, seed, bar("training", settings.pretraining))
        runs = {
            name: adapt(prepare, network, digits, settings, seed, bar(name, settings.adaptation))
            for name, prepare in CONTESTANTS.items()
        }
    return network, runs


# --- telling and drawing


def table(network: nn.Module, digits: Digits, runs: dict[str, Run], settings: Settings) -> Table:
    """What came out, on test digits."""
    title = f"Adapted to digits turned by 90 degrees, rank {settings.rank}"
    tested = f"{settings.turned} digits to adapt with, {len(digits.turned_test[1])} to test. "
    headings = ("adapted by", "turned", "upright", "rank used", "error", "weights", "seconds")
    before = (accuracy(network, test) for test in (digits.turned_test, digits.upright_test))
    rows = [("nothing", *(cell(a, ".1%") for a in before), "-", "-", "-", "-")]
    for name, run in runs.items():
        parts = (cell(run.curve[-1], ".1%"), cell(run.kept, ".1%"), cell(run.rank_used, ".0%"))
        rest = (cell(run.error, ".1e"), f"{run.weights:,}", f"{run.seconds:.0f}")
        rows.append((name, *parts, *rest))
    return make_table(title, headings, rows, f"{tested}Error: ‖XᵀX - I‖ of the factors")


def draw(runs: dict[str, Run], settings: Settings, path: Path) -> None:
    """Accuracy against epochs, and the singular values of the updates."""
    with two_panels(path) as (left, right):
        for marker, plain_look, (name, run) in zip("os^", LOOKS, runs.items(), strict=False):
            look = dict(color=plain_look["color"], marker=marker, markersize=4)
            curve = [100 * a for a in run.curve]
            left.plot(curve, label=name, markevery=max(1, len(curve) // 10), **look)
            for dashes, layer, values in zip(("-", "--"), (1, 2), run.spectra, strict=False):
                relative = [s / values[0] for s in values]
                label = f"{name}, layer {layer}"
                right.plot(range(1, len(values) + 1), relative, dashes, label=label, **look)
        left.set(xlabel="epoch", title="turned test digits read correctly, in %", ylim=(0, 100))
        right.set(xlabel="number", title="singular values of the update / the largest")
        right.set(xticks=range(1, settings.rank + 1), ylim=(0, 1.05))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 1 if the digits could not be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("orthonormal_lora.png"), help="the figure")
    parser.add_argument("--rank", type=int, help=f"of the updates, {Settings.rank} unless said")
    parser.add_argument("--seed", type=int, default=0, help="of images, weights and batches")
    parser.add_argument("--quick", action="store_true", help="small and short: a few seconds")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else Settings()
    settings = replace(settings, rank=options.rank or settings.rank)
    try:
        images, labels, name = read_images()
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.print(f"Digits: {name}.")
    digits = split_images(images, labels, settings, options.seed)
    network, runs = learn_all(digits, settings, options.seed, console)
    console.print(table(network, digits, runs, settings))
    draw(runs, settings, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
