"""A recurrent network that remembers: the copying task with an orthogonal recurrent matrix.

    python examples/orthogonal_rnn.py --out orthogonal_rnn.png

Ten symbols are shown, then many blanks, then a mark; at the mark the network must repeat the ten
symbols (Hochreiter and Schmidhuber 1997; Arjovsky, Shah and Bengio 2016). Whatever it remembers
passes through its recurrent matrix once for every blank: singular values below 1 lose it, larger
ones blow it up. An orthogonal matrix does neither.

Four networks with about the same number of weights learn from the same sequences: one whose
recurrent matrix stays orthogonal; the same network from the same orthogonal start, but free from
then on; the same network from torch's usual start; and an LSTM.

Needs matplotlib and rich: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, relu
from torch.optim import Adam, Optimizer

import ortholand as ol
from showing import LOOKS, Tell, bars, cell, make_table, two_panels

COPIED, ALPHABET = 10, 8  # so many symbols to remember, each one of eight
BLANK, MARK = ALPHABET, ALPHABET + 1  # two more that only ever separate


@dataclass(frozen=True)
class Settings:
    """How long the sequences are, how large the networks, how long they learn."""

    length: int = 200  # blanks between what is shown and what is asked
    steps: int = 400
    hidden: int = 96
    batch: int = 64

    @property
    def memoryless(self) -> float:
        """The loss of a network that knows when to answer, and guesses what."""
        return COPIED * math.log(ALPHABET) / (self.length + 2 * COPIED)


QUICK = Settings(length=15, steps=120, hidden=48, batch=32)


# --- the task


def make_batch(settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs, one-hot, and the answers: ``(batch, length + 20)``."""
    shape = (settings.batch, settings.length + 2 * COPIED)
    symbols = torch.randint(ALPHABET, (settings.batch, COPIED), generator=generator)
    inputs, answers = torch.full(shape, BLANK), torch.full(shape, BLANK)
    inputs[:, :COPIED] = symbols
    inputs[:, -COPIED - 1] = MARK
    answers[:, -COPIED:] = symbols
    return one_hot(inputs, ALPHABET + 2).float(), answers


def loss_and_recall(model: nn.Module, inputs: Tensor, answers: Tensor) -> tuple[Tensor, float]:
    """The mean loss of all positions, and what part of the symbols is repeated correctly."""
    logits = model(inputs)
    right = logits[:, -COPIED:].argmax(-1) == answers[:, -COPIED:]
    return cross_entropy(logits.transpose(1, 2), answers), right.float().mean().item()


# --- the networks


class RNN(nn.Module):
    """``h = modReLU(W h + U x)``: with an orthogonal W, and b = 0 as at the start, a rotation."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(ALPHABET + 2, hidden)
        self.recurrent = nn.Linear(hidden, hidden, bias=False)
        self.threshold = nn.Parameter(torch.zeros(hidden))
        self.outputs = nn.Linear(hidden, ALPHABET + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for each position."""
        h = x.new_zeros(len(x), self.threshold.numel())
        states = []
        for u in self.inputs(x).unbind(1):
            z = self.recurrent(h) + u
            h = z.sign() * relu(z.abs() + self.threshold)
            states.append(h)
        return self.outputs(torch.stack(states, 1))


class LSTM(nn.Module):
    """With half as many units: an LSTM has four matrices."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(ALPHABET + 2, hidden // 2, batch_first=True)
        self.outputs = nn.Linear(hidden // 2, ALPHABET + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for each position."""
        return self.outputs(self.lstm(x)[0])


# --- the contestants: a model and its optimizer. Learning rates: see examples/README.md.


def orthogonal(hidden: int) -> tuple[nn.Module, Optimizer]:
    """The recurrent matrix is orthogonal at every step."""
    model = RNN(hidden)
    groups = ol.param_groups(model, orthogonal="recurrent.weight", options={"lr": 1e-3})
    return model, ol.LandingAdam(ol.orthogonalize_(groups), lr=3e-3, attraction="after")


def orthogonal_start(hidden: int) -> tuple[nn.Module, Optimizer]:
    """The twin: it starts at the same orthogonal matrix, and may leave."""
    model = RNN(hidden)
    groups = ol.param_groups(model, orthogonal="recurrent.weight", options={"lr": 3e-4})
    parameters = [{**group, "orthogonal": False} for group in ol.orthogonalize_(groups)]
    return model, Adam(parameters, lr=3e-3)


def usual_start(hidden: int) -> tuple[nn.Module, Optimizer]:
    """The same network as torch would make it."""
    model = RNN(hidden)
    return model, Adam(model.parameters(), lr=1e-3)


def lstm(hidden: int) -> tuple[nn.Module, Optimizer]:
    """The usual remedy for forgetting."""
    model = LSTM(hidden)
    return model, Adam(model.parameters(), lr=1e-2)


Make = Callable[[int], tuple[nn.Module, Optimizer]]
CONTESTANTS: dict[str, Make] = {
    "orthogonal": orthogonal,
    "free, orthogonal start": orthogonal_start,
    "free, usual start": usual_start,
    "LSTM": lstm,
}


# --- learning


@dataclass(frozen=True)
class Run:
    """What a contestant did."""

    losses: list[float]  # of each training batch
    recalls: list[float]
    loss: float  # on fresh sequences, at the end
    recall: float
    error: float | None  # how far the recurrent matrix is from orthogonal, if there is one
    weights: int
    seconds: float


def learn(make: Make, settings: Settings, seed: int, tell: Tell) -> Run:
    """Train one network, then test it."""
    torch.manual_seed(seed)  # the same start for all networks of a kind
    model, optimizer = make(settings.hidden)
    data = torch.Generator().manual_seed(seed + 1)  # the same sequences for all
    losses, recalls, start = [], [], time.perf_counter()
    for _ in range(settings.steps):
        loss, recall = loss_and_recall(model, *make_batch(settings, data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        recalls.append(recall)
        tell(f"loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - start
    loss, recall = evaluate(model, settings, seed + 2)
    weights = sum(p.numel() for p in model.parameters())
    return Run(losses, recalls, loss, recall, recurrent_error(model), weights, seconds)


@torch.no_grad()
def evaluate(
    model: nn.Module, settings: Settings, seed: int, batches: int = 10
) -> tuple[float, float]:
    """Mean loss and recall on sequences that no network has seen."""
    data = torch.Generator().manual_seed(seed)
    results = [loss_and_recall(model, *make_batch(settings, data)) for _ in range(batches)]
    losses, recalls = zip(*results, strict=True)
    return torch.stack(losses).mean().item(), sum(recalls) / batches


def recurrent_error(model: nn.Module) -> float | None:
    """``||W^T W - I||`` of the recurrent matrix."""
    return ol.orthogonality_error(model.recurrent.weight) if isinstance(model, RNN) else None


def learn_all(settings: Settings, seed: int, console: Console) -> dict[str, Run]:
    """All contestants, one after the other, with a bar for each."""
    with bars(console) as bar:
        return {
            name: learn(make, settings, seed, bar(name, settings.steps))
            for name, make in CONTESTANTS.items()
        }


# --- telling and drawing


def table(runs: dict[str, Run], settings: Settings) -> Table:
    """What came out on fresh sequences."""
    title = f"Copying {COPIED} symbols over {settings.length} blanks, {settings.steps} steps"
    headings = ("network", "loss", "recalled", "‖WᵀW - I‖", "weights", "seconds")
    rows = []
    for name, run in runs.items():
        numbers = (f"{run.loss:.4f}", cell(run.recall, ".1%"), cell(run.error, ".1e"))
        rows.append((name, *numbers, f"{run.weights:,}", f"{run.seconds:.0f}"))
    guessing = f"loss {settings.memoryless:.4f}, {cell(1 / ALPHABET, '.1%')} recalled"
    return make_table(title, headings, rows, f"Without a memory: {guessing}")


def draw(runs: dict[str, Run], settings: Settings, path: Path) -> None:
    """The loss and what is recalled, against steps."""
    with two_panels(path, f"Copying {COPIED} symbols over {settings.length} blanks") as panels:
        left, right = panels
        for look, (name, run) in zip(LOOKS, runs.items(), strict=False):
            left.plot(smooth(run.losses), label=name, **look)
            right.plot([100 * recall for recall in smooth(run.recalls)], **look)
        place = dict(xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8)
        left.axhline(settings.memoryless, color="black", linewidth=0.8)
        left.annotate("without a memory", (0, settings.memoryless), xytext=(3, -9), **place)
        left.set(yscale="log", title="loss", xlabel="step")
        right.axhline(100 / ALPHABET, color="black", linewidth=0.8)
        right.annotate("guessing", (0, 100 / ALPHABET), xytext=(3, 3), **place)
        right.set(ylim=(-2, 102), title="symbols recalled, in %", xlabel="step")


def smooth(numbers: Sequence[float], window: int = 10) -> list[float]:
    """Means of each number and a few before it."""
    parts = [numbers[max(0, i + 1 - window) : i + 1] for i in range(len(numbers))]
    return [sum(part) / len(part) for part in parts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("orthogonal_rnn.png"), help="the figure")
    parser.add_argument("--length", type=int, help=f"blanks, {Settings.length} unless said")
    parser.add_argument("--steps", type=int, help=f"of training, {Settings.steps} unless said")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sequences")
    parser.add_argument("--quick", action="store_true", help="small and short: a few seconds")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else Settings()
    length, steps = options.length or settings.length, options.steps or settings.steps
    settings = replace(settings, length=length, steps=steps)
    console = Console()
    runs = learn_all(settings, options.seed, console)
    console.print(table(runs, settings))
    draw(runs, settings, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
