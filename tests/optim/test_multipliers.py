"""What is constant on the manifold moves no iterate: f and ``f + tr(X^H X C) / 2`` step alike."""


import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry.matrices import sym, tall

NORM = 1000.0  # of C

SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.4},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"momentum": 0.9, "maximize": True},
}
METHODS = {f"SGD-{name}": (ol.LandingSGD, {"lr": 0.1, **o}) for name, o in SGD.items()}
METHODS |= {
    "Adam": (ol.LandingAdam, {"lr": 0.02}),
    "Muon": (ol.LandingMuon, {"lr": 0.02}),
    "Muon-heavy": (ol.LandingMuon, {"lr": 0.02, "nesterov": False}),
    "Muon-plain": (ol.LandingMuon, {"lr": 0.02, "momentum": 0.0}),
}
SHAPES = [(6, 6), (9, 4), (40, 4), (4, 9), (5, 60), (30, 12), (96, 10), (5, 2, 9, 4), (3, 4, 4)]
each_method = pytest.mark.parametrize("method", METHODS)
each_attraction = pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
each_distance = pytest.mark.parametrize("distance", [0.0, 0.3])


def gaussian(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def start(shape, distance, dtype=torch.float64):
    """Matrices with ``||X^H X - I||_2`` equal to the distance, X tall."""
    n, p = max(shape[-2:]), min(shape[-2:])
    Q = ol.random_orthogonal(*shape[:-2], n, p, seed=0, dtype=dtype)
    V = ol.random_orthogonal(*shape[:-2], p, p, seed=1, dtype=dtype)
    values = (1 + distance * torch.linspace(-1, 1, p, dtype=torch.float64)).sqrt()
    X = (Q * values.to(dtype)) @ V
    return X if shape[-2] >= shape[-1] else X.mT


class Cost:
    """``<X, A X> / 2 - <X, T>``, X tall, and a multiplier; only its gradient is needed."""

    def __init__(self, shape, norm, dtype=torch.float64):
        n, p = max(shape[-2:]), min(shape[-2:])
        batch = shape[:-2]
        A = sym(gaussian(*batch, n, n, seed=2, dtype=dtype))
        self.A = A / torch.linalg.matrix_norm(A, 2, keepdim=True)
        self.T = gaussian(*batch, n, p, seed=3, dtype=dtype) / n**0.5
        C = sym(gaussian(*batch, p, p, seed=4, dtype=dtype))
        self.C = norm * C / torch.linalg.matrix_norm(C, 2, keepdim=True)

    def gradient(self, W):
        X = tall(W.detach())
        G = self.A @ X - self.T + X @ self.C
        return G if W.shape[-2] >= W.shape[-1] else G.mT


def iterates(method, shape, norm, *, distance, dtype=torch.float64, steps=25, **options):
    make, own = METHODS[method]
    W = nn.Parameter(start(shape, distance, dtype))
    optimizer = make([W], **{**own, **options, "view": "kernel"})
    cost, points = Cost(shape, norm, dtype), []
    for _ in range(steps):
        W.grad = cost.gradient(W)
        optimizer.step()
        points.append(W.detach().clone())
    assert optimizer.skipped_steps() == 0
    return torch.stack(points)


def difference(method, shape, **options):
    without, with_C = (iterates(method, shape, norm, **options) for norm in (0.0, NORM))
    return (without - with_C).abs().max()
