"""Devices without float64, such as Apple's MPS: nothing there is of that type.

The meta device stands in for it: there is none on which less is known, and it has no values.
"""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ortholand as ol
from ortholand.geometry import matrices, msign
from ortholand.weights import distances, project_

WIDE = (torch.float64, torch.complex128)


class NoFloat64(TorchDispatchMode):
    """Refuses float64 on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # there is nothing to copy
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                assert tensor.dtype not in WIDE, f"{func} makes {tensor.dtype}"
        return out


class Reads(TorchFunctionMode):
    """Reads numbers as 1 and flags as True, because meta tensors have no values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        read = {"__bool__": bool, "__float__": float, "__int__": int, "item": float}
        if (name := getattr(func, "__name__", "")) in read:
            return read[name](1)
        if name == "tolist":
            return [1.0] * args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _on_such_a_device(monkeypatch):
    monkeypatch.setattr(matrices, "WITHOUT_FLOAT64", {"meta"})
    with NoFloat64(), Reads(), torch.device("meta"):
        yield


METHODS = {
    "coupled": (ol.LandingSGD, {}),
    "decoupled": (ol.LandingSGD, {"attraction": "decoupled", "momentum": 0.9}),
    "after": (ol.LandingSGD, {"attraction": "after", "momentum": 0.9, "nesterov": True}),
    "frobenius": (ol.LandingSGD, {"safe_step": "frobenius", "momentum": 0.9, "dampening": 0.1}),
    "no safe step": (ol.LandingSGD, {"safe_step": None, "weight_decay": 0.1}),
    "adam": (ol.LandingAdam, {"weight_decay": 0.1}),
    "adam decoupled": (ol.LandingAdam, {"attraction": "decoupled"}),
    "adam after": (ol.LandingAdam, {"attraction": "after"}),
    "muon": (ol.LandingMuon, {}),
    "muon after": (ol.LandingMuon, {"attraction": "after"}),
    "plam": (ol.PLAM, {"momentum": 0.9}),
    "penalty": (ol.PenaltySGD, {}),
    "riemannian": (ol.RiemannianSGD, {"momentum": 0.9}),
}
SHAPES = [(4, 4), (40, 40), (60, 20), (20, 60), (300, 40), (64, 32, 3, 3)]


each_type = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)]
)


@pytest.mark.parametrize("method", METHODS)
@each_type
@pytest.mark.parametrize("foreach", [None, False])
def test_steps(method, dtype, foreach):
    cls, options = METHODS[method]
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    kernels = nn.Parameter(torch.zeros(5, 4, 3, 3, dtype=dtype))
    grids = [nn.Parameter(torch.zeros(12, 8, dtype=dtype)) for _ in range(4)]
    constraints = [{"blocks": (3, 2)}, {"view": "rows"}, {"view": "columns"}, {"view": "vector"}]
    free = [nn.Parameter(torch.zeros(7, dtype=dtype))]
    groups = [
        {"params": weights},
        {"params": [kernels], "view": "kernel", "scale": 2.0},
        *({"params": [p], **each} for p, each in zip(grids, constraints, strict=True)),
        {"params": free, "orthogonal": False},
    ]
    optimizer = cls(groups, lr=0.1, foreach=foreach, **options)
    for _ in range(2):
        for p in (*weights, kernels, *grids, *free):
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert {t.dtype for s in optimizer.state.values() for t in s.values()}.isdisjoint(WIDE)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.skipped_steps(), optimizer.limited_steps()


@pytest.mark.parametrize("shape", SHAPES)
@each_type
def test_projections_and_distances(shape, dtype):
    weight = torch.zeros(shape, dtype=dtype)
    for view in ("matrix", (2, 1), "rows", "columns", "vector"):
        project_([(weight, 1.0), (weight, 2.0)], view)
        for spectral in (False, True):
            distances(weight, view, spectral=spectral, scale=2.0)
    if len(shape) == 2:
        msign(weight)
        ol.landing_field(weight, weight)
        for method in ("polar", "cayley", "qr", "exponential"):
            ol.retract(weight, weight, method=method)
