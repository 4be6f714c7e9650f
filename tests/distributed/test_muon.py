"""Muon on ranks takes the step of one process to the last digits, however small singular values."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ortholand as ol
from tests.distributed.ranks import run
from tests.distributed.training import whole
from tests.distributed.weights import twins

# Tall ones, one of which leaves a rank without rows, and a wide one that is turned.
SHAPES = [(60, 20), (5, 3), (24, 8), (4, 64)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def ill_conditioned(shape: tuple[int, ...], seed: int, dtype: torch.dtype, cond: float) -> Tensor:
    """A matrix with singular values from 1 down to ``1 / cond``."""
    p = min(shape)
    U, V = (ol.random_orthogonal(n, p, seed=seed + i, dtype=dtype) for i, n in enumerate(shape))
    return (U * torch.logspace(0, -math.log10(cond), p, dtype=dtype)) @ V.mT


def differences(
    dtype: torch.dtype, cond: float, steps: int, options: dict[str, Any]
) -> list[float]:
    """How far weights on ranks are from those of one process."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    gradients = [
        [ill_conditioned(shape, 10 * i + k, dtype, cond) for i, shape in enumerate(SHAPES)]
        for k in range(3)
    ]
    single, alone, spread, optimizer = twins(SHAPES, ol.LandingMuon, dtype=dtype, **options)
    for k in range(steps):
        for module, stepped in ((single, alone), (spread, optimizer)):
            for p, G in zip(module.parameters(), gradients[k % 3], strict=True):
                placed = G
                if isinstance(p, DTensor):
                    placed = distribute_tensor(G, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = placed + p.detach()  # with a normal part
            stepped.step()
    pairs = zip(whole(spread), whole(single), strict=True)
    return [(a - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize(
    ("ranks", "dtype", "cond", "options"),
    [
        (4, torch.float64, 1e6, {"lr": 0.02}),
        pytest.param(4, torch.float32, 1e2, {"lr": 0.02}, marks=pytest.mark.slow_distributed),
        pytest.param(2, torch.float64, 1e6, {"lr": 0.02}, marks=pytest.mark.slow_distributed),
        pytest.param(
            4,
            torch.float64,
            1e6,
            {"lr": 0.02, "nesterov": False, "attraction": "coupled", "foreach": False},
            marks=pytest.mark.slow_distributed,
        ),
    ],
)
def test_small_singular_values_turn_on_ranks_as_in_one_process(ranks, dtype, cond, options):
    for result in run(differences, ranks, dtype, cond, 100, options):
        assert max(result) < TOLERANCE[dtype], dict(zip(SHAPES, result, strict=True))
