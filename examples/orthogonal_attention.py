"""A small language model whose attention projections are orthogonal.

    python examples/orthogonal_attention.py --out orthogonal_attention.png
    python examples/orthogonal_attention.py --optimizer muon --scale 2

A transformer of two layers learns to write Python's documentation, character by character. The
projections of its attention, to queries, keys, values and back, always stay orthogonal matrices:
every input leaves with the same length, and no direction is amplified or lost. (Each head takes
some rows of an orthogonal matrix, which are orthonormal.)

It learns from the same text in the same order as two unconstrained twins: one from the same
orthogonal start, one from torch's usual start.

The text needs no download: it is what `help("for")` and the like show, about half a million
characters in the module `pydoc_data.topics`. It differs between versions of Python, and so do the
numbers.

Needs matplotlib and rich: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import ortholand as ol
from showing import LOOKS, Tell, bars, make_table, two_panels


@dataclass(frozen=True)
class Settings:
    """How large the model is, and how long it learns."""

    steps: int = 1000
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64  # characters
    batch: int = 32
    evaluations: int = 20
    optimizer: Literal["adam", "muon"] = "adam"  # of the orthogonal projections
    angle: float = 5e-2  # radians by which they turn in a step
    scale: float = 1.0  # they are this times orthogonal


PROJECTIONS = "*.attention.*.weight"
QUICK = Settings(steps=80, width=32, context=32, batch=16, evaluations=4)


# --- the text


@dataclass(frozen=True)
class Text:
    """Characters as numbers; the last tenth is for validation."""

    train: Tensor
    validation: Tensor
    alphabet: str


def read_text() -> Text:
    """Python's own documentation."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    alphabet = "".join(sorted(set(text)))
    numbers = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([numbers[character] for character in text])
    border = len(text) * 9 // 10
    return Text(encoded[:border], encoded[border:], alphabet)


def sample(text: Tensor, settings: Settings, generator: torch.Generator) -> Tensor:
    """Random pieces, one character longer than the context: ``(batch, context + 1)``."""
    starts = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=generator)
    return text[starts + torch.arange(settings.context + 1)]


# --- the model


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Orthogonal projections keep lengths, so what they cannot learn, how sharply a head looks and how
    loudly attention speaks, are numbers of their own; for all contestants alike.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.sharpness = nn.Parameter(torch.ones(heads))
        self.loudness = nn.Parameter(torch.ones(()))
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions with those before them."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q = q * self.sharpness[:, None, None]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.loudness * self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron, each added to its normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(gelu(self.wide(self.perceptron_norm(x))))


class Transformer(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, characters: int, settings: Settings) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        blocks = (Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.logits = nn.Linear(settings.width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """``(batch, positions)`` to ``(batch, positions, characters)``."""
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


# --- the contestants: optimizers of a model. Learning rates: see examples/README.md.


def orthogonal(model: Transformer, settings: Settings) -> Optimizer:
    """Projections that are orthogonal, or a number times orthogonal, at every step."""
    # Landing rates are angles: by which columns turn (LandingAdam), or all planes (LandingMuon).
    # AdamW's, 1e-2 for each entry, turns one of 64 entries by up to 8e-2.
    options = {"lr": settings.angle, "scale": settings.scale}
    groups = ol.param_groups(model, orthogonal=PROJECTIONS, options=options)
    kind = ol.LandingAdam if settings.optimizer == "adam" else ol.LandingMuon
    return kind(ol.orthogonalize_(groups), lr=1e-2, attraction="after")


def orthogonal_start(model: Transformer, settings: Settings) -> Optimizer:
    """The twin: it starts at the same orthogonal projections, and may leave."""
    ol.orthogonalize_(model, orthogonal=PROJECTIONS, scale=settings.scale)
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0)


def usual_start(model: Transformer, settings: Settings) -> Optimizer:  # noqa: ARG001
    """The same model as torch would make it."""
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0)


Prepare = Callable[[Transformer, Settings], Optimizer]
CONTESTANTS: dict[str, Prepare] = {
    "orthogonal": orthogonal,
    "free, orthogonal start": orthogonal_start,
    "free, usual start": usual_start,
}


# --- learning


@dataclass(frozen=True)
class Run:
    """What a contestant did."""

    steps: list[int]  # at which it was evaluated
    bits: list[float]  # of the validation text, for a character
    singular_values: list[float]  # of all projections, the largest first
    error: float  # how far the projections are from orthogonal
    milliseconds: float  # for a training step

    @property
    def condition(self) -> float:
        """The largest singular value over the smallest."""
        return self.singular_values[0] / self.singular_values[-1]


def bits(model: nn.Module, pieces: Tensor) -> Tensor:
    """Mean bits needed to write a character, given those before it."""
    logits = model(pieces[:, :-1])
    return cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten()) / math.log(2)


@torch.no_grad()
def validate(model: nn.Module, text: Text, settings: Settings) -> float:
    """On the same pieces of the validation text every time."""
    generator = torch.Generator().manual_seed(0)
    pieces = sample(text.validation, replace(settings, batch=512), generator)
    return bits(model, pieces).item()


def learn(prepare: Prepare, text: Text, settings: Settings, seed: int, tell: Tell) -> Run:
    """Train one model, with a learning rate that rises and falls once."""
    torch.manual_seed(seed)  # the same start for all
    model = Transformer(len(text.alphabet), settings)
    optimizer = prepare(model, settings)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = OneCycleLR(optimizer, rates, settings.steps, cycle_momentum=False)
    data = torch.Generator().manual_seed(seed + 1)  # the same pieces for all
    every = max(1, settings.steps // settings.evaluations)
    steps, curve, seconds = [0], [validate(model, text, settings)], 0.0
    for step in range(1, settings.steps + 1):
        start = time.perf_counter()
        loss = bits(model, sample(text.train, settings, data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seconds += time.perf_counter() - start
        tell(f"{loss.item():.3f} bits")
        if step % every == 0:
            steps.append(step)
            curve.append(validate(model, text, settings))
    return Run(steps, curve, *examine(model, settings.scale), 1e3 * seconds / settings.steps)


@torch.no_grad()
def examine(model: Transformer, scale: float) -> tuple[list[float], float]:
    """Singular values of all projections, and how far these are from ``scale`` times orthogonal."""
    projections = ol.param_groups(model, orthogonal=PROJECTIONS)[0]["params"]
    projections = [p for _, p in projections]
    values = torch.linalg.svdvals(torch.stack(projections)).flatten()
    error = ol.orthogonality_error(projections, scale=scale)
    return values.sort(descending=True).values.tolist(), error


def learn_all(text: Text, settings: Settings, seed: int, console: Console) -> dict[str, Run]:
    """All contestants, one after the other, with a bar for each."""
    with bars(console) as bar:
        return {
            name: learn(prepare, text, settings, seed, bar(name, settings.steps))
            for name, prepare in CONTESTANTS.items()
        }


# --- telling and drawing


def table(runs: dict[str, Run], settings: Settings) -> Table:
    """What came out."""
    title = f"Bits per character of Python's documentation, {settings.steps} steps"
    headings = ("projections", "validation", "‖WᵀW - I‖", "condition", "ms / step")
    rows = []
    for name, run in runs.items():
        numbers = (f"{run.bits[-1]:.3f}", f"{run.error:.1e}", f"{run.condition:.4g}")
        rows.append((name, *numbers, f"{run.milliseconds:.0f}"))
    return make_table(title, headings, rows)


def draw(runs: dict[str, Run], path: Path) -> None:
    """Validation against steps, and the singular values of the projections."""
    with two_panels(path) as (left, right):
        for look, (name, run) in zip(LOOKS, runs.items(), strict=False):
            left.plot(run.steps[1:], run.bits[1:], label=name, **look)
            right.plot(run.singular_values, **look)
        left.set(xlabel="step", title="validation, bits per character")
        right.set(yscale="log", xlabel="number", title="singular values of the projections")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path("orthogonal_attention.png")
    parser.add_argument("--out", type=Path, default=default, help="the figure")
    parser.add_argument("--steps", type=int, help=f"of training, {Settings.steps} unless said")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    optimizer = "of the orthogonal projections: LandingAdam (unless said) or LandingMuon"
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam", help=optimizer)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="projections are this x orthogonal"
    )
    parser.add_argument("--quick", action="store_true", help="small and short: a few seconds")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else Settings()
    settings = replace(
        settings,
        steps=options.steps or settings.steps,
        optimizer=options.optimizer,
        scale=options.scale,
    )
    text, console = read_text(), Console()
    length = len(text.train) + len(text.validation)
    console.print(
        f"Text: the documentation of Python {platform.python_version()}, {length:,} characters, "
        f"{len(text.alphabet)} different ones."
    )
    runs = learn_all(text, settings, options.seed, console)
    console.print(table(runs, settings))
    draw(runs, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
