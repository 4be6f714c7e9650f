"""Weights that are grids of blocks, in several placements."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ortholand as ol
from tests.distributed.training import everything
from tests.distributed.weights import set_gradients


def starts(shapes: list[tuple[int, ...]], constraint: dict[str, Any]) -> nn.Module:
    """A module of weights that meet a constraint."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(77 + i)  # not that of a gradient
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        module.register_parameter(f"w{i}", nn.Parameter(ol.orthogonalize_(weight, **constraint)))
    return module


def stepped_as_placed(
    make: Callable[..., Any],
    options: dict[str, Any],
    shapes: list[tuple[int, ...]],
    constraint: dict[str, Any],
) -> dict:
    """Steps of such weights in several placements, with a resume, and in one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    places = {
        "alone": None,
        "replicated": (line, [Replicate()]),
        "rows": (line, [Shard(0)]),
        "rows, replicated": (mesh, [Replicate(), Shard(0)]),
        "columns": (line, [Shard(1)]),
        "rows and columns": (mesh, [Shard(0), Shard(1)]),
    }
    results = {}
    for name, placed in places.items():
        module = starts(shapes, constraint)
        for key, p in list(module.named_parameters()) if placed else ():
            weight = distribute_tensor(p.data, *placed, src_data_rank=None)
            setattr(module, key, nn.Parameter(weight))
        optimizer = make(module.named_parameters(), **options, **constraint)
        for k in range(4):
            set_gradients(module, k)
            if k == 1:
                module.w0.grad.fill_(float("nan"))
            optimizer.step()
            if k == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make(module.named_parameters(), **options, **constraint)
                optimizer.load_state_dict(saved)
        error = ol.orthogonality_error(optimizer, reduce="mean", spectral=True)
        ol.explain(optimizer)
        ol.orthogonalize_(optimizer.param_groups)
        results[name] = {"error": error, **everything(module, optimizer)}
    return results
