"""Are blocks of a weight better orthogonal by themselves, as a whole, or free?

    python examples/blocks_or_whole.py --seeds 3

Two small language models learn to write Python's documentation: the transformer of
`orthogonal_attention.py`, whose attention projections consist of heads, and an LSTM, whose
recurrent weight consists of four gates. Each is trained with these weights orthogonal block by
block, as one matrix, and free from the usual start, on the same pieces of text.

Needs matplotlib and rich: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import ortholand as ol
from orthogonal_attention import Settings, Text, Transformer, bits, read_text, sample, validate
from showing import make_table

SETTINGS = Settings(steps=250)
QUICK = Settings(steps=20, width=16, layers=1, heads=2, context=16, batch=8)
WEIGHTS = ("blocks", "whole", "free")  # what is orthogonal
RATE, ANGLE = 1e-2, 5e-2  # of all other weights, and of orthogonal ones, by which they turn


class Recurrent(nn.Module):
    """An LSTM over characters."""

    def __init__(self, characters: int, settings: Settings) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, settings.width)
        self.lstm = nn.LSTM(settings.width, settings.width, batch_first=True)
        self.logits = nn.Linear(settings.width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """``(batch, positions)`` to ``(batch, positions, characters)``."""
        return self.logits(self.lstm(self.characters(text))[0])


def heads(characters: int, settings: Settings, weights: str) -> nn.Module:
    """A transformer whose attention projections are orthogonal: each head's part, or all."""
    model = Transformer(characters, settings)
    for module in model.modules() if weights != "free" else ():
        if isinstance(module, type(model.blocks[0].attention)):
            for name in ("query", "key", "value", "output"):
                n = settings.heads
                grid = (1, n) if name == "output" else (n, 1)
                layer = module.get_submodule(name)
                ol.orthogonal(layer, blocks=grid if weights == "blocks" else None)
    return model


def gates(characters: int, settings: Settings, weights: str) -> nn.Module:
    """An LSTM whose recurrent weight is orthogonal: each gate's part, or all as a tall matrix."""
    model = Recurrent(characters, settings)
    if weights != "free":
        blocks = "gates" if weights == "blocks" else None
        ol.orthogonal(model.lstm, "weight_hh_l0", blocks=blocks)
    return model


MODELS: dict[str, Callable[[int, Settings, str], nn.Module]] = {
    "transformer, heads": heads,
    "LSTM, gates": gates,
}


def learn(
    make: Callable[..., nn.Module], weights: str, text: Text, settings: Settings, seed: int
) -> tuple[float, float]:
    """Bits per character of the validation text, and how far marked weights are from orthogonal."""
    torch.manual_seed(seed)
    model = make(len(text.alphabet), settings, weights)
    if weights == "free":
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0)
    else:
        groups = ol.param_groups(model, options={"lr": ANGLE})
        optimizer = ol.LandingAdam(groups, lr=RATE)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = OneCycleLR(optimizer, rates, settings.steps, cycle_momentum=False)
    data = torch.Generator().manual_seed(seed + 1)
    for _ in range(settings.steps):
        loss = bits(model, sample(text.train, settings, data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    error = 0.0 if weights == "free" else ol.orthogonality_error(optimizer)
    return validate(model, text, settings), error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--steps", type=int, help=f"of training, {SETTINGS.steps} unless said")
    parser.add_argument("--quick", action="store_true", help="small and short: a few seconds")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else SETTINGS
    settings = replace(settings, steps=options.steps or settings.steps)
    text, console, rows = read_text(), Console(), []
    for name, make in MODELS.items():
        for weights in WEIGHTS:
            seeds = range(options.seeds)
            results = [learn(make, weights, text, settings, seed) for seed in seeds]
            found = [each for each, _ in results]
            middle, ends = statistics.median(found), f"{min(found):.3f} to {max(found):.3f}"
            error = f"{max(error for _, error in results):.1e}" if weights != "free" else "-"
            rows.append((f"{name}: {weights}", f"{middle:.3f}", ends, error))
            console.print(*rows[-1])
    title = f"Bits per character, {settings.steps} steps, {options.seeds} seeds"
    headings = ("model: weights", "median", "all", "error")
    console.print(make_table(title, headings, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
