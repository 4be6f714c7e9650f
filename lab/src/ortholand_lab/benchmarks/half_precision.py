"""Training in half precision, by how weights are rounded, compared with float32.

A layer (64 x 32 or 48 x 48) with an orthogonal weight and a bias learns a teacher's noisy outputs,
from all data in every step or from minibatches. The forward and backward passes are in
the weight's type too. Loss and error are computed in float32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ortholand.geometry import random_orthogonal
from ortholand.optim import LandingAdam, LandingSGD
from ortholand.parameters import orthogonality_error, param_groups
from ortholand_lab.study.records import MissingRecordError, Records, Result
from ortholand_lab.study.spec import Claim, Context, Finding, Study, TableSpec, Unit

SAMPLES = 512
SHAPES = {"tall": (64, 32), "square": (48, 48)}
BATCHES = {"all-data": SAMPLES, "minibatches": 32}
FULL, TYPES = "float32", ("bfloat16", "float16")
ROUNDINGS = ("nearest", "stochastic", "compensated")
METHODS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LandingAdam, lr 1e-3": partial(LandingAdam, lr=1e-3),
    "LandingSGD, lr 0.01": partial(LandingSGD, lr=0.01),
    "LandingSGD, lr 0.01, momentum 0.9": partial(LandingSGD, lr=0.01, momentum=0.9),
}
CLOSE = 0.05  # how far a loss may be from float32's, relatively


class Teaching(NamedTuple):
    """Inputs and targets, and where training starts."""

    x: Tensor
    y: Tensor
    start: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], seed: int) -> "Teaching":
        """Targets of a teacher, shifted and noisy, so that the loss does not go to zero."""
        generator = torch.Generator().manual_seed(seed)
        teacher, start = (random_orthogonal(*shape, seed=generator) for _ in range(2))
        x = torch.randn(SAMPLES, shape[1], generator=generator)
        noise = torch.randn(SAMPLES, shape[0], generator=generator)
        shift = torch.randn(shape[0], generator=generator)
        return cls(x, x @ teacher.mT + 0.3 * noise + 0.3 * shift, start)


@dataclass(frozen=True)
class HalfPrecisionSettings:
    """How long to train, and how often."""

    steps: int = 500
    seeds: int = 3


@dataclass(frozen=True)
class HalfPrecisionTask:
    """Training runs of both layers, with both kinds of batches."""

    method: str
    type: str
    rounding: str  # has no effect in float32
    settings: HalfPrecisionSettings


def plan(settings: HalfPrecisionSettings) -> list[Unit[HalfPrecisionTask]]:
    """A unit for each method, type and way of rounding."""
    kinds = [(FULL, "nearest"), *((t, rounding) for t in TYPES for rounding in ROUNDINGS)]
    tasks = [HalfPrecisionTask(m, *kind, settings) for m in METHODS for kind in kinds]
    runs = len(SHAPES) * len(BATCHES) * settings.seeds
    return [Unit(unit_name(t.method, t.type, t.rounding), t, runs) for t in tasks]


def unit_name(method: str, dtype: str, rounding: str) -> str:
    """Name of the unit of a method, type and way of rounding."""
    words = f"{method} {dtype}" + ("" if dtype == FULL else f" {rounding}")
    return words.lower().replace(",", "").replace(" ", "-")


def run(task: HalfPrecisionTask, context: Context) -> Result:
    """Losses, largest error, and bytes per entry."""
    dtype, losses, errors, stored = getattr(torch, task.type), {}, [], 0.0
    first = context.seed * task.settings.seeds
    for layer, shape in SHAPES.items():
        for batches, batch in BATCHES.items():
            for seed in range(first, first + task.settings.seeds):
                outcome = train(
                    Teaching.of(shape, seed),
                    partial(METHODS[task.method], rounding=task.rounding),
                    dtype,
                    batch=batch,
                    seed=seed,
                    steps=task.settings.steps,
                )
                losses[f"loss {layer} {batches} {seed}"] = outcome.loss
                errors.append(outcome.error)
                stored = outcome.bytes
                context.tick(1)
    return Result({}, {**losses, "error": max(errors), "bytes": stored})


class Outcome(NamedTuple):
    """How a training run ended."""

    loss: float
    error: float  # ||X^T X - I||_F of the weights as they are stored
    bytes: float  # per entry of the orthogonal weight, with its state, without its gradient


def train(
    teaching: Teaching,
    make: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    *,
    batch: int = SAMPLES,
    seed: int = 0,
    steps: int = 500,
) -> Outcome:
    """Train from the start, with minibatches that depend only on the seed."""
    outputs, inputs = teaching.start.shape
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(teaching.start)
        layer.bias.zero_()
    layer.to(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # of stochastic rounding
        optimizer = make(param_groups(layer, orthogonal="weight"))
        for rows in minibatches(batch, steps, seed):
            optimizer.zero_grad()
            x, y = teaching.x[rows].to(dtype), teaching.y[rows].to(dtype)
            loss_of(layer, x, y).backward()
            optimizer.step()
    error, stored = orthogonality_error(optimizer), bytes_per_entry(layer.weight, optimizer)
    loss = loss_of(layer.float(), teaching.x, teaching.y).detach()
    return Outcome(float(loss), error, stored)


def loss_of(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared distance of outputs and targets: its gradients are of size one."""
    return (layer(x) - y).square().sum(1).mean() / 2


def minibatches(size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Indices of samples for each step."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        yield torch.randperm(SAMPLES, generator=generator)[:size]


def bytes_per_entry(weight: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Memory of a weight and of its state."""
    state = [value for value in optimizer.state[weight].values() if value.shape == weight.shape]
    return float(sum(tensor.element_size() for tensor in (weight, *state)))


# Claims and the table.


def worst_ratio(records: Records, method: str, dtype: str, rounding: str) -> float:
    """The loss furthest from float32's, relative to it."""
    full = records[unit_name(method, FULL, "")].result.values
    half = records[unit_name(method, dtype, rounding)].result.values
    ratios = [half[name] / full[name] for name in full if name.startswith("loss")]
    return max(ratios, key=lambda ratio: abs(ratio - 1) if math.isfinite(ratio) else math.inf)


def compensated_is_close(dtype: str, records: Records) -> Finding:
    """Whether losses are close to float32's with every method, task and seed."""
    ratios = {m: worst_ratio(records, m, dtype, "compensated") for m in METHODS}
    words = "; ".join(f"{method}: {ratio:.3f}" for method, ratio in ratios.items())
    close = all(abs(ratio - 1) <= CLOSE for ratio in ratios.values())
    return Finding.of(f"loss in float32's, the worst: {words}", close)


def make_table(records: Records) -> list[list[str]]:
    """Worst ratio of losses, largest error, bytes per entry."""
    if not records:
        raise MissingRecordError("nothing is recorded")
    rows = [["method", "float32", "type", *ROUNDINGS]]
    for method in METHODS:
        for dtype in TYPES:
            cells = [_cell(records, method, FULL, "", 1.0)]
            for way in ROUNDINGS:
                ratio = worst_ratio(records, method, dtype, way)
                cells.append(_cell(records, method, dtype, way, ratio))
            rows.append([method, cells[0], dtype, *cells[1:]])
    return rows


def _cell(records: Records, method: str, dtype: str, rounding: str, ratio: float) -> str:
    record = records[unit_name(method, dtype, rounding)]
    return f"{ratio:.3f}, {record.value('error'):.1e}, {record.value('bytes'):.0f}"


HALF_PRECISION = Study(
    name="half-precision",
    title="Training in half precision, by how weights are rounded",
    summary=(
        "A teacher's outputs with noise are learnt by a layer of 64 x 32 or 48 x 48 with "
        "orthogonal weight and a bias, from all 512 samples in every step or from 32. Per cell: "
        "the loss in units of the same training in float32, the worst of the tasks and seeds; "
        "the largest ||X^T X - I||_F of the stored weight; bytes per entry, state included."
    ),
    settings={
        "smoke": HalfPrecisionSettings(steps=10, seeds=1),
        "quick": HalfPrecisionSettings(seeds=1),
        "full": HalfPrecisionSettings(),
    },
    plan=plan,
    run=run,
    claims=tuple(
        Claim.beyond(
            f"{dtype} weights, compensated (the default), train as float32 ones do: every loss "
            f"within {CLOSE:.0%} of float32's.",
            partial(compensated_is_close, dtype),
        )
        for dtype in TYPES
    ),
    tables=(TableSpec("half-precision", "Losses, errors, bytes", make_table),),
    seconds={"smoke": 5, "quick": 150, "full": 450},
)
