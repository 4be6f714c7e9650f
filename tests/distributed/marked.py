"""Marked weights of a model on ranks, which an optimizer finds in plain parameters."""

import torch
import torch.distributed as dist

import ortholand as ol
from tests.distributed.training import new_model, sharded, train, whole

MARKED = {"tall": 1.0, "tall_twin": 1.0, "square": 2.0, "wide": 1.0, "very_wide": 1.0}


def differences(kind: str, steps: int) -> list[float]:
    """Between runs with plain parameters, named ones, decay groups, and ``param_groups``."""
    runs = []
    for way in (ol.param_groups, plain, named, split):
        model = new_model(torch.float32)
        for name, scale in MARKED.items():
            ol.orthogonal(model.get_submodule(name), scale=scale)
        ol.orthogonal(model.kernels, view="kernel")
        model = sharded(model, kind)
        optimizer = ol.LandingAdam(way(model), lr=0.01, attraction="after")
        constrained = [p for g in optimizer.param_groups if g["orthogonal"] for p in g["params"]]
        assert len(constrained) == 6
        train(model, optimizer, steps)
        runs.append(whole(model))
    dist.barrier()
    pairs = [zip(runs[0], other, strict=True) for other in runs[1:]]
    return [max(float((p - q).abs().max()) for p, q in pair) for pair in pairs]


def plain(model):
    return model.parameters()


def named(model):
    return model.named_parameters()


def split(model):
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in parameters if p.ndim == 1]}]
