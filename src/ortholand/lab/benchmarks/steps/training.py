"""Whole training iterations of LeNet-5 at batch size 4: forward, backward and step."""

from collections.abc import Callable

import torch
from torch import nn

from ortholand.lab.benchmarks.steps.actions import Action
from ortholand.lab.models import LeNet5
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.parameters import orthogonalize_, param_groups

KERNELS = "conv*"  # the orthogonal weights: every slice of every convolution


def lenet_iterations() -> dict[str, Action]:
    """An iteration with each optimizer, on the same batch."""
    return {
        "torch SGD, unconstrained": _iteration(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)),
        "LandingSGD": _iteration(lambda m: LandingSGD(_groups(m), lr=1e-3)),
        "LandingSGD, after": _iteration(
            lambda m: LandingSGD(_groups(m), lr=1e-3, attraction="after")
        ),
        "LandingSGD, not compiled": _iteration(
            lambda m: LandingSGD(_groups(m), lr=1e-3, fused=False)
        ),
        "RiemannianSGD, cayley": _iteration(lambda m: RiemannianSGD(_groups(m), lr=1e-3)),
    }


def _groups(model: nn.Module) -> list[dict]:
    return orthogonalize_(param_groups(model, orthogonal=KERNELS, view="kernel"))


def _iteration(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Action:
    model = LeNet5(seed=0)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (4,), generator=generator)

    def iterate() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return iterate
