"""Weights without a network around them, with gradients made up, on ranks and in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ortholand as ol
from tests.distributed.training import sharded


def bag(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64, scale: Any = 1.0
) -> nn.Module:
    """A module of orthogonal weights: in the view "kernel" if they have more than 2 dimensions."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        weight = ol.random_orthogonal(*shape, seed=i, dtype=dtype, scale=scale)
        module.register_parameter(f"w{i}", nn.Parameter(weight))
    return module


def set_gradients(
    module: nn.Module, seed: int, spoil: Callable[[str, Tensor], None] | None = None
) -> None:
    """The same gradients for a module, sharded or not; ``spoil`` changes the local parts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for i, (name, p) in enumerate(module.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            if spoil is not None:
                spoil(name, gradient.to_local())
        p.grad = gradient


def twins(
    shapes: list[tuple[int, ...]], make: Callable[..., Any], **options: Any
) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A module of weights in one process, and the same under FSDP2, with their optimizers."""
    dtype, scale = options.pop("dtype", torch.float64), options.get("scale", 1.0)
    single, spread = bag(shapes, dtype, scale), sharded(bag(shapes, dtype, scale))
    return single, make(by_view(single), **options), spread, make(by_view(spread), **options)


def by_view(module: nn.Module) -> list[dict[str, Any]]:
    view = {True: "kernel", False: "matrix"}
    groups = []
    for kernel in (False, True):
        members = [(n, p) for n, p in module.named_parameters() if (p.ndim > 2) == kernel]
        if members:
            groups.append({"params": members, "view": view[kernel]})
    return groups
