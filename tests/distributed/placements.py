"""Weights that are sharded in other ways than by rows."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ortholand as ol
from tests.distributed.training import everything
from tests.distributed.weights import bag, set_gradients


def placed(shapes: list[tuple[int, ...]], mesh: Any, placements: list, view: str) -> nn.Module:
    """A module of orthogonal DTensors, in a view, placed as asked."""
    from torch.distributed.tensor import distribute_tensor

    module = bag(shapes) if view == "kernel" else nn.Module()
    for i, shape in enumerate(shapes if view == "matrix" else ()):
        weight = ol.random_orthogonal(shape[0], math.prod(shape[1:]), seed=i, dtype=torch.float64)
        module.register_parameter(f"w{i}", nn.Parameter(weight.view(shape)))
    for name, p in list(module.named_parameters()):
        weight = distribute_tensor(p.data, mesh, placements, src_data_rank=None)
        setattr(module, name, nn.Parameter(weight))
    return module


def stepped_as_placed(
    make: Callable[..., Any], options: dict[str, Any], shapes: list[tuple[int, ...]], view: str
) -> dict:
    """Three steps of weights in every placement on a mesh of 2 x 2, and in one process."""
    from torch.distributed.tensor import Replicate, Shard

    line = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    places = {
        "replicated": (line, [Replicate()]),
        "columns": (line, [Shard(1)]),
        "columns, replicated": (mesh, [Replicate(), Shard(1)]),
        "rows twice": (mesh, [Shard(0), Shard(0)]),
        "rows and columns": (mesh, [Shard(0), Shard(1)]),
        "columns and rows": (mesh, [Shard(1), Shard(0)]),
    }
    if view == "kernel":
        places["columns of kernels"] = (line, [Shard(len(shapes[0]) - 1)])
    results = {}
    for name, (where, placements) in {"alone": (line, [Replicate()]), **places}.items():
        module = placed(shapes, where, placements, view)
        if name == "alone":
            for key, p in list(module.named_parameters()):
                setattr(module, key, nn.Parameter(p.to_local().detach()))
        optimizer = make(module.named_parameters(), view=view, **options)
        for k in range(3):
            set_gradients(module, k)
            if k == 1:
                module.w0.grad.fill_(float("nan"))
            optimizer.step()
        error = ol.orthogonality_error(optimizer, reduce="mean")
        ol.orthogonalize_(optimizer.param_groups)
        results[name] = {"error": error, **everything(module, optimizer)}
    return results
