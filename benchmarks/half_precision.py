"""Training in half precision, by how weights are rounded, beside the same training in float32.

A teacher's outputs with noise are learnt by a layer (64 x 32 or 48 x 48) with orthogonal weight
and a bias, from all data in every step or from minibatches. The forward and backward passes are in
the weight's type too. Loss and error are computed in float32.
Run: ``python benchmarks/half_precision.py``
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ortholand as ol

SEEDS = (0, 1, 2)
STEPS = 500
SAMPLES = 512
SHAPES = {"tall": (64, 32), "square": (48, 48)}
BATCHES = {"all data": SAMPLES, "minibatches": 32}
TYPES = (torch.bfloat16, torch.float16)
ROUNDINGS = ("nearest", "stochastic", "compensated")
METHODS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LandingAdam, lr 1e-3": lambda groups, **o: ol.LandingAdam(groups, lr=1e-3, **o),
    "LandingSGD, lr 0.01": lambda groups, **o: ol.LandingSGD(groups, lr=0.01, **o),
    "LandingSGD, lr 0.01, momentum 0.9": lambda groups, **o: ol.LandingSGD(
        groups, lr=0.01, momentum=0.9, **o
    ),
}


class Outcome(NamedTuple):
    """How a run has ended."""

    loss: float
    error: float  # ||X^T X - I||_F of the weights as they are stored
    bytes: float  # per entry of the orthogonal weight, with its state, without its gradient


class Task(NamedTuple):
    """Inputs and targets, and where training starts."""

    x: Tensor
    y: Tensor
    start: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], seed: int) -> "Task":
        """Targets of a teacher, shifted, with noise: the loss does not go to zero."""
        generator = torch.Generator().manual_seed(seed)
        teacher, start = (ol.random_orthogonal(*shape, seed=generator) for _ in range(2))
        x = torch.randn(SAMPLES, shape[1], generator=generator)
        noise = torch.randn(SAMPLES, shape[0], generator=generator)
        shift = torch.randn(shape[0], generator=generator)
        return cls(x, x @ teacher.mT + 0.3 * noise + 0.3 * shift, start)


def train(
    task: Task,
    method: str,
    dtype: torch.dtype,
    *,
    batch: int = SAMPLES,
    seed: int = 0,
    steps: int = STEPS,
    **options: Any,
) -> Outcome:
    """Train from the task's start, with minibatches that depend on the seed only."""
    torch.manual_seed(seed)
    layer = nn.Linear(*reversed(task.start.shape))
    with torch.no_grad():
        layer.weight.copy_(task.start)
        layer.bias.zero_()
    layer.to(dtype)
    optimizer = METHODS[method](ol.param_groups(layer, orthogonal="weight"), **options)
    for rows in minibatches(batch, steps, seed):
        optimizer.zero_grad()
        x, y = task.x[rows].to(dtype), task.y[rows].to(dtype)
        loss_of(layer, x, y).backward()
        optimizer.step()
    error, stored = ol.orthogonality_error(optimizer), bytes_per_entry(layer.weight, optimizer)
    loss = loss_of(layer.float(), task.x, task.y).detach()
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


def table() -> Iterator[str]:
    """The table, line by line: the worst of all tasks and seeds."""
    yield "| method | float32 | type | " + " | ".join(ROUNDINGS) + " |"
    yield "| --- " * (3 + len(ROUNDINGS)) + "|"
    for method in METHODS:
        full = runs(method, torch.float32)
        twin = f"1, {max(run.error for run in full):.1e}, {full[0].bytes:.0f}"
        for dtype in TYPES:
            cells = [cell(runs(method, dtype, rounding=way), full) for way in ROUNDINGS]
            name = str(dtype).removeprefix("torch.")
            yield f"| {method} | {twin} | {name} | {' | '.join(cells)} |"


def runs(method: str, dtype: torch.dtype, **options: Any) -> list[Outcome]:
    """Runs on every task from every seed."""
    return [
        train(Task.of(shape, seed), method, dtype, batch=batch, seed=seed, **options)
        for shape in SHAPES.values()
        for batch in BATCHES.values()
        for seed in SEEDS
    ]


def cell(half: list[Outcome], full: list[Outcome]) -> str:
    """Loss by that of float32, orthogonality error, bytes."""
    ratios = [one.loss / other.loss for one, other in zip(half, full, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return f"{worst:.3f}, {max(run.error for run in half):.1e}, {half[0].bytes:.0f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in table():
        print(line, flush=True)
