"""A network that marks its own orthogonal weights, compared with torch's parametrization.

    python examples/marked_weights.py --out marked_weights.png
    python examples/marked_weights.py --search    # for rates, with a separate seed

Twenty layers of one width with tanh between them read digits. Despite its depth the network learns
if its layers start orthogonal, and three classes differ only in the line that makes a layer:
`ol.orthogonal(layer)` marks its weight, which LandingAdam then keeps orthogonal;
`torch.nn.utils.parametrizations.orthogonal(layer)` recomputes it in each forward pass, as the
exponential of a skew matrix, for Adam; the third leaves it free after the same start. All start
with the same weights and see the same batches.

Needs matplotlib, rich and scikit-learn: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.optim import Adam, Optimizer

import ortholand as ol
from showing import LOOKS, Tell, bars, cell, make_table, two_panels


@dataclass(frozen=True)
class Settings:
    """How large the network is, and how long it learns."""

    depth: int = 20
    width: int = 64
    steps: int = 400
    batch: int = 64
    test: int = 500  # images
    evaluations: int = 20


QUICK = Settings(depth=4, width=16, steps=40, evaluations=2)
SEARCH_SEED = 100
LEARNT = 0.3  # a test loss
Layer = Callable[[nn.Linear], nn.Module]


class Network(nn.Module):
    """Hidden layers as the class wants them."""

    def __init__(self, make_layer: Layer, settings: Settings) -> None:
        super().__init__()
        self.stem = nn.Linear(64, settings.width)
        layers = [nn.Linear(settings.width, settings.width) for _ in range(settings.depth)]
        self.hidden = nn.ModuleList(make_layer(started_orthogonal(layer)) for layer in layers)
        self.head = nn.Linear(settings.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = torch.tanh(self.stem(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.head(x)


def started_orthogonal(layer: nn.Linear) -> nn.Linear:
    """From where all start."""
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class Contestant:
    """How a layer is made, who trains it, and the rates that were tried."""

    make_layer: Layer
    optimize: Callable[[nn.Module, float], Optimizer]
    lr: float  # the best of those that were tried
    tried: Sequence[float]


# The best rates of --search, with seed 100; the seeds that judge are 0, 1, 2, ...
CONTESTANTS = {
    "ol.orthogonal": Contestant(
        ol.orthogonal,
        lambda model, lr: ol.LandingAdam(ol.param_groups(model), lr=lr),
        1e-2,
        (1e-3, 3e-3, 1e-2, 3e-2),
    ),
    "parametrization": Contestant(
        parametrizations.orthogonal,
        lambda model, lr: Adam(model.parameters(), lr=lr),
        3e-3,
        (3e-4, 1e-3, 3e-3, 1e-2),
    ),
    "free": Contestant(
        lambda layer: layer,
        lambda model, lr: Adam(model.parameters(), lr=lr),
        3e-4,
        (1e-4, 3e-4, 1e-3, 3e-3),
    ),
}


# --- learning


@dataclass(frozen=True)
class Digits:
    """Images and labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def read_digits(settings: Settings, seed: int) -> Digits:
    """scikit-learn's, in a random order."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, answers = (
        torch.from_numpy(pixels).float()[order] / 8 - 1,
        torch.from_numpy(labels)[order],
    )
    n = settings.test
    return Digits((images[n:], answers[n:]), (images[:n], answers[:n]))


@dataclass(frozen=True)
class Outcome:
    """What became of a network."""

    losses: list[float]  # of test images
    accuracy: float
    error: float  # how far hidden weights are from orthogonal
    seconds: float  # of the processor, a whole step


def learn(contestant: Contestant, settings: Settings, seed: int, tell: Tell) -> Outcome:
    """Train a network."""
    digits = read_digits(settings, seed)
    torch.manual_seed(seed)
    model = Network(contestant.make_layer, settings)
    optimizer = contestant.optimize(model, contestant.lr)
    generator = torch.Generator().manual_seed(seed)
    images, answers = digits.train
    losses, every = [evaluate(model, digits)[0]], settings.steps // settings.evaluations
    seconds = []
    for i in range(1, settings.steps + 1):
        rows = torch.randint(len(images), (settings.batch,), generator=generator)
        start = time.process_time()
        optimizer.zero_grad()
        loss = cross_entropy(model(images[rows]), answers[rows])
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - start)
        tell(f"loss {loss.item():.3f}")
        if i % every == 0:
            losses.append(evaluate(model, digits)[0])
    weights = [layer.weight.detach().double() for layer in model.hidden]
    error = max(float(ol.distance(W)) for W in weights)
    return Outcome(losses, evaluate(model, digits)[1], error, statistics.median(seconds))


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Loss, and the part of the images that is read correctly."""
    logits, answers = model(digits.test[0]), digits.test[1]
    right = (logits.argmax(-1) == answers).float().mean()
    return float(cross_entropy(logits, answers)), float(right)


Outcomes = dict[str, list[Outcome]]


def learn_all(settings: Settings, seeds: Sequence[int], console: Console) -> Outcomes:
    """All contestants, seed by seed."""
    outcomes: Outcomes = {name: [] for name in CONTESTANTS}
    with bars(console) as bar:
        for seed in seeds:
            for name, contestant in CONTESTANTS.items():
                tell = bar(f"{name} {seed}", settings.steps)
                outcomes[name].append(learn(contestant, settings, seed, tell))
    return outcomes


def search(settings: Settings, console: Console) -> None:
    """Every contestant at every rate."""
    rows = []
    with bars(console) as bar:
        for name, contestant in CONTESTANTS.items():
            tell = bar(name, settings.steps * len(contestant.tried))
            for lr in contestant.tried:
                run = learn(replace(contestant, lr=lr), settings, SEARCH_SEED, tell)
                rows.append((name, f"{lr:g}", f"{run.losses[-1]:.3f}", f"{run.accuracy:.1%}"))
    headings = ("", "lr", "loss", "read correctly")
    console.print(make_table(f"Rates, seed {SEARCH_SEED}", headings, rows))


# --- shown


def show(outcomes: Outcomes, settings: Settings, console: Console) -> None:
    """A table: medians, with the smallest and the largest."""
    fastest = statistics.median(run.seconds for run in outcomes["free"])
    rows = []
    for name, runs in outcomes.items():
        seconds = statistics.median(run.seconds for run in runs)
        rows.append(
            (
                name,
                spread([run.losses[-1] for run in runs], ".3f"),
                spread([run.accuracy for run in runs], ".1%"),
                spread([steps_to_learn(run, settings) for run in runs], ".0f"),
                f"{max(run.error for run in runs):.1e}",
                f"{1e3 * seconds:.1f} ({seconds / fastest:.2f})",
            )
        )
    headings = ("", "loss", "read correctly", f"steps to {LEARNT}", "‖WᵀW − I‖", "ms a step")
    seeds = len(next(iter(outcomes.values())))
    console.print(make_table(f"Test digits, {seeds} seeds", headings, rows))


def spread(values: Sequence[float], form: str) -> str:
    """The median, and from where to where."""
    middle, low, high = (cell(f(values), form) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def steps_to_learn(run: Outcome, settings: Settings) -> float:
    """When the test loss was first seen that low; infinite if never."""
    every = settings.steps // settings.evaluations
    return next((every * i for i, loss in enumerate(run.losses) if loss <= LEARNT), math.inf)


def draw(outcomes: Outcomes, settings: Settings, path: Path) -> None:
    """Test losses by steps, and by the processor's time."""
    steps = [settings.steps * i // settings.evaluations for i in range(settings.evaluations + 1)]
    with two_panels(path, f"{settings.depth} layers with tanh, test digits") as axes:
        for (name, runs), look in zip(outcomes.items(), LOOKS, strict=False):
            means = [statistics.mean(each) for each in zip(*(r.losses for r in runs), strict=True)]
            seconds = statistics.median(run.seconds for run in runs)
            axes[0].plot(steps, means, label=name, **look)
            axes[1].plot([seconds * step for step in steps[1:]], means[1:], label=name, **look)
        axes[0].set(xlabel="step", ylabel="test loss, mean of seeds", yscale="log")
        axes[1].set(xlabel="seconds of the processor", yscale="log", xscale="log")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("marked_weights.png"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument("--search", action="store_true", help="compare rates, with seed 100")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    settings = QUICK if options.quick else Settings()
    if options.search:
        search(settings, console)
        return 0
    outcomes = learn_all(settings, range(options.seeds), console)
    show(outcomes, settings, console)
    draw(outcomes, settings, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
