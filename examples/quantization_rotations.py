"""Rotations that make a language model easier to quantise, learnt without retractions.

    python examples/quantization_rotations.py --out quantization_rotations.png
    python examples/quantization_rotations.py --times     # of an optimizer's step, by size

A small Llama learns to write Python's documentation, character by character. Then its linear layers
are quantised to 4 bits, weights and activations (W4A4). A rotation of the residual stream and one
of each layer's values change nothing without quantisation, and much with it: QuaRot (Ashkboos et
al. 2024) uses random Hadamard matrices, SpinQuant (Liu et al. 2024) learns the rotations by Cayley
SGD (Li, Li and Todorovic 2020). Here they are learnt by landing, from the same start, on the same
batches, in as many steps; then they are folded into the weights.

Needs transformers, matplotlib and rich: pip install . ./lab transformers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaForCausalLM

import ortholand as ol
from ortholand_lab.rotations import Quantization, fold_rotations_, insert_rotations
from showing import LOOKS, Tell, bars, make_table, two_panels
from small_llama import (
    QUICK_MODEL,
    USUAL_MODEL,
    ModelSettings,
    Text,
    batches,
    documentation,
    train_llama,
    validate,
)


@dataclass(frozen=True)
class Settings:
    """The model, and how long its rotations learn."""

    model: ModelSettings = USUAL_MODEL
    learning: int = 100  # steps
    bits: int = 4


QUICK = Settings(QUICK_MODEL, learning=8)


# --- the rival


class CayleySGD(Optimizer):
    """SGD on square orthogonal matrices by Cayley transforms that are iterated, not solved.

    After algorithm 1 of Li, Li and Todorovic, "Efficient Riemannian optimization on the Stiefel
    manifold via the Cayley transform" (ICLR 2020), written from the paper. (The code of SpinQuant
    makes 5 iterations where the paper makes 2.)
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.9,
        iterations: int = 2,
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, iterations=iterations))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step of each matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for X in group["params"]:
                if X.grad is not None:
                    self._turn(X, X.grad, group)

    def _turn(self, X: Tensor, G: Tensor, group: dict[str, float]) -> None:
        state = self.state[X]
        M = state.get("momentum", torch.zeros_like(X)) * group["momentum"] - G
        MX = M @ X.mT
        half = MX - 0.5 * X @ (X.mT @ MX)
        W = half - half.mT
        M = state["momentum"] = W @ X
        lr = torch.clamp(1 / (W.norm() + 1e-8), max=group["lr"])
        Y = X + lr * M
        for _ in range(int(group["iterations"])):
            Y = X + lr / 2 * W @ (X + Y)
        X.copy_(Y)


# --- contestants

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Contestant:
    """A start, and how it is learnt from there, if at all."""

    start: str
    make: Make | None = None


# Rates: the best of a grid by factors of 3, on a seed of its own (100).
CONTESTANTS = {
    "no rotation": Contestant("identity"),
    "random Hadamard": Contestant("hadamard"),
    "Cayley SGD": Contestant("hadamard", lambda R: CayleySGD(R, lr=3.0)),
    "LandingSGD": Contestant(
        "hadamard", lambda R: ol.LandingSGD(R, lr=0.3, momentum=0.9, attraction="after")
    ),
    "LandingMuon": Contestant("hadamard", lambda R: ol.LandingMuon(R, lr=0.01)),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a contestant."""

    losses: list[float]  # while learning, of the quantised model
    loss: float  # of the quantised model, in the end
    error: float  # of the rotations
    folding: float  # how far logits are from the original model's, in the largest of them
    seconds: float  # of the optimizer, per step


def compete(
    model: LlamaForCausalLM,
    contestant: Contestant,
    text: Text,
    settings: Settings,
    seed: int,
    tell: Tell,
) -> Outcome:
    """Learn rotations of a copy of the model."""
    turned = copy.deepcopy(model)
    rotations = insert_rotations(
        turned,
        start=contestant.start,
        seed=seed,
        quantization=Quantization(settings.bits, settings.bits),
    )
    losses, seconds = [], 0.0
    if contestant.make is not None:
        optimizer = contestant.make(rotations.parameters())
        scheduler = LinearLR(optimizer, 1, 1 / settings.learning, settings.learning)
        for tokens in batches(text.train, settings.model, settings.learning, 1000 + seed):
            optimizer.zero_grad()
            loss = turned(input_ids=tokens, labels=tokens).loss
            loss.backward()
            start = time.process_time()
            optimizer.step()
            seconds += (time.process_time() - start) / settings.learning
            scheduler.step()
            losses.append(loss.item())
            tell(f"loss {loss.item():.3f}")
    loss = validate(turned, text, settings.model)
    error = max(float(ol.distance(R.detach().double())) for R in rotations.parameters())
    folded = fold_rotations_(turned)
    tokens = next(iter(batches(text.validation, settings.model, 1, seed)))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        difference = (folded(input_ids=tokens).logits - logits).abs().max() / logits.abs().max()
    return Outcome(losses, loss, error, float(difference), seconds)


Outcomes = dict[str, list[Outcome]]


def compete_all(
    text: Text, settings: Settings, seeds: Sequence[int], console: Console
) -> tuple[list[float], Outcomes]:
    """Losses without quantisation, and all outcomes."""
    losses, outcomes = [], {name: [] for name in CONTESTANTS}
    with bars(console) as bar:
        for seed in seeds:
            model = train_llama(
                text, settings.model, seed, bar(f"model {seed}", settings.model.steps)
            )
            losses.append(validate(model, text, settings.model))
            for name, contestant in CONTESTANTS.items():
                learnt = contestant.make is not None
                tell = bar(f"{name} {seed}", settings.learning) if learnt else lambda _: None
                outcomes[name].append(compete(model, contestant, text, settings, seed, tell))
    return losses, outcomes


# --- shown


def show(whole: list[float], outcomes: Outcomes, settings: Settings, console: Console) -> None:
    """A table."""
    rows = [
        (
            name,
            *(f"{run.loss:.3f}" for run in runs),
            f"{max(run.error for run in runs):.1e}",
            f"{max(run.folding for run in runs):.1e}",
            f"{1e3 * statistics.median(run.seconds for run in runs):.2f}",
        )
        for name, runs in outcomes.items()
    ]
    rows.insert(0, ("not quantised", *(f"{loss:.3f}" for loss in whole), "-", "-", "-"))
    seeds = [f"seed {i}" for i in range(len(whole))]
    headings = ("loss, nats", *seeds, "‖RᵀR − I‖", "folded", "ms a step")
    title = f"W{settings.bits}A{settings.bits}, validation"
    console.print(make_table(title, headings, rows))


def draw(whole: list[float], outcomes: Outcomes, settings: Settings, path: Path) -> None:
    """Losses while learning, and in the end."""
    with two_panels(path, f"Rotations for W{settings.bits}A{settings.bits}") as (left, right):
        learnt = [name for name, contestant in CONTESTANTS.items() if contestant.make is not None]
        for name, look in zip(learnt, LOOKS, strict=False):
            means = [
                statistics.mean(each)
                for each in zip(*(r.losses for r in outcomes[name]), strict=True)
            ]
            smooth = [statistics.mean(means[max(0, i - 9) : i + 1]) for i in range(len(means))]
            left.plot(range(1, len(smooth) + 1), smooth, label=name, **look)
        left.set(xlabel="step", ylabel="loss of a batch, mean of ten and of seeds")
        names = list(outcomes)
        for i, name in enumerate(names):
            values = [run.loss for run in outcomes[name]]
            right.plot(values, [i] * len(values), "o", color="#0072B2", alpha=0.7)
        right.axvline(
            statistics.mean(whole), color="#7F7F7F", linestyle="--", label="not quantised"
        )
        right.set(xlabel="validation loss, each seed", yticks=range(len(names)), yticklabels=names)


# --- how long a step takes


def time_steps(sizes: Sequence[int], repetitions: int, console: Console) -> None:
    """Steps of one square matrix by a fixed gradient, in turn; medians of processor time."""
    makers: dict[str, Make] = {
        "Cayley SGD, 2 iterations": lambda R: CayleySGD(R, lr=0.01),
        "Cayley SGD, 5 iterations": lambda R: CayleySGD(R, lr=0.01, iterations=5),
        "LandingSGD": lambda R: ol.LandingSGD(R, lr=0.01, momentum=0.9),
        "LandingSGD, after": lambda R: ol.LandingSGD(R, 0.01, 0.9, attraction="after"),
        "LandingMuon": lambda R: ol.LandingMuon(R, lr=0.01),
    }
    times: dict[str, list[float]] = {name: [] for name in makers}
    for n in sizes:
        start = ol.random_orthogonal(n, n, seed=0)
        generator = torch.Generator().manual_seed(1)
        G = torch.randn(n, n, generator=generator) / n
        optimizers = {}
        for name, make in makers.items():
            R = nn.Parameter(start.clone())
            R.grad = G
            optimizers[name] = make([R])
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(repetitions + 1):
            for name, optimizer in optimizers.items():
                begin = time.process_time()
                optimizer.step()
                seconds[name].append(time.process_time() - begin)
        for name, each in seconds.items():
            times[name].append(statistics.median(each[1:]))
    rows = [
        (
            name,
            *(
                f"{1e3 * t:.1f} ({t / r:.2f})"
                for t, r in zip(each, times["Cayley SGD, 2 iterations"], strict=True)
            ),
        )
        for name, each in times.items()
    ]
    headings = ("ms (in Cayley SGD's)", *(f"{n} x {n}" for n in sizes))
    console.print(make_table("One step, 1 thread, float32", headings, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, turn, quantise, show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("quantization_rotations.png"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning", type=int, help="steps of the rotations")
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument("--times", action="store_true", help="time steps of optimizers only")
    parser.add_argument("--sizes", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--repetitions", type=int, default=7, help="of a step that is timed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    if options.times:
        time_steps(options.sizes, options.repetitions, console)
        return 0
    settings = QUICK if options.quick else Settings()
    if options.learning:
        settings = replace(settings, learning=options.learning)
    whole, outcomes = compete_all(documentation(), settings, range(options.seeds), console)
    show(whole, outcomes, settings, console)
    draw(whole, outcomes, settings, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
