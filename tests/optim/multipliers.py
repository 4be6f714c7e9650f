"""Costs that differ by ``tr(X^H X C) / 2`` only, which is constant on the manifold."""

import torch

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
ATTRACTIONS = ["coupled", "decoupled", "after"]


def gaussian(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def start(shape, distance, dtype=torch.float64):
    """Weights of a shape with ``||X^H X - I||_2`` equal to the distance."""
    n, p = max(shape[-2:]), min(shape[-2:])
    Q = ol.random_orthogonal(*shape[:-2], n, p, seed=0, dtype=dtype)
    V = ol.random_orthogonal(*shape[:-2], p, p, seed=1, dtype=dtype)
    values = (1 + distance * torch.linspace(-1, 1, p, dtype=torch.float64)).sqrt()
    X = (Q * values.to(dtype)) @ V
    return X if shape[-2] >= shape[-1] else X.mT.contiguous()


class Cost:
    """``size (<X, A X> / 2 - <X, T>) + tr(X^H X C) / 2``, X tall, of matrices of a shape."""

    def __init__(self, shape, norm, dtype=torch.float64, size=1.0):
        *batch, n, p = *shape[:-2], max(shape[-2:]), min(shape[-2:])
        A, C = (sym(gaussian(*batch, k, k, seed=k, dtype=dtype)) for k in (n, p))
        self.A = size * A / (2 * n) ** 0.5
        self.T = size * gaussian(*batch, n, p, seed=1000, dtype=dtype) / n**0.5
        self.C = norm * C / torch.linalg.matrix_norm(C, 2, keepdim=True)

    def gradient(self, W):
        X = tall(W.detach())
        G = self.A @ X - self.T + X @ self.C
        return G if W.shape[-2] >= W.shape[-1] else G.mT.contiguous()
