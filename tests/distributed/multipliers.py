"""Costs that differ by a constant on the manifold, on ranks."""

from typing import Any

import torch
from torch import nn

from tests.distributed.training import sharded, whole
from tests.optim.multipliers import METHODS, Cost, start


def difference(
    method: str, attraction: str, shapes: list[tuple[int, ...]], norm: float, steps: int
) -> float:
    """The largest difference of the iterates without a multiplier and with one of this norm."""
    pairs = zip(
        _iterates(method, attraction, shapes, 0.0, steps),
        _iterates(method, attraction, shapes, norm, steps),
        strict=True,
    )
    return max((a - b).abs().max().item() for a, b in pairs)


def differences(
    cases: list[tuple[str, str, float]], shapes: list[tuple[int, ...]], steps: int
) -> list[float]:
    """:func:`difference` of methods, attractions and norms."""
    return [difference(method, name, shapes, norm, steps) for method, name, norm in cases]


def _iterates(
    method: str, attraction: str, shapes: list[tuple[int, ...]], norm: float, steps: int
) -> list[Any]:
    from torch.distributed.tensor import distribute_tensor

    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"w{i}", nn.Parameter(start(shape, 0.3)))
    module, points = sharded(module), []
    make, options = METHODS[method]
    optimizer = make(module.parameters(), attraction=attraction, **options)
    costs = [Cost(shape, norm) for shape in shapes]
    for _ in range(steps):
        for p, W, cost in zip(module.parameters(), whole(module), costs, strict=True):
            G = cost.gradient(W)
            p.grad = distribute_tensor(G, p.device_mesh, p.placements, src_data_rank=None)
        optimizer.step()
        points += [W.clone() for W in whole(module)]
    assert optimizer.skipped_steps() == 0
    assert all(torch.isfinite(W).all() for W in points)
    return points
