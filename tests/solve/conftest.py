"""Costs with known optima, functions that count their calls, and an independent look at results."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ortholand import random_orthogonal
from ortholand.geometry import riemannian_gradient


@dataclass
class Cost:
    """``Tr(X^H A X N)``, eigenvalues 1 to n of A, weights p to 1; of the transpose if X is wide."""

    A: Tensor
    mu: Tensor
    shape: tuple[int, int]

    def _tall(self, X: Tensor) -> Tensor:
        return X.mT if self.shape[0] < self.shape[1] else X

    def fun(self, X: Tensor) -> Tensor:
        Y = self._tall(X)
        return (Y.conj() * (self.A @ Y) * self.mu).sum().real

    def jac(self, X: Tensor) -> Tensor:
        return self._tall(2 * self.A @ self._tall(X) * self.mu)

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        return self.jac(V)

    def both(self, X: Tensor) -> tuple[Tensor, Tensor]:
        return self.fun(X), self.jac(X)

    @property
    def start(self) -> Tensor:
        return random_orthogonal(*self.shape, seed=7, dtype=self.A.dtype)

    @property
    def optimum(self) -> float:
        eigenvalues = torch.linalg.eigvalsh(self.A.to(torch.complex128))
        return float((eigenvalues[: len(self.mu)] * self.mu.double()).sum())

    def solution(self) -> Tensor:
        return self._tall(torch.linalg.eigh(self.A).eigenvectors[:, : len(self.mu)])


@pytest.fixture
def brockett() -> Callable[..., Cost]:
    """``brockett(shape, dtype, seed)``: a Hermitian cost without spurious minima."""

    def make(
        shape: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> Cost:
        n, p = max(shape), min(shape)
        double = torch.complex128 if dtype.is_complex else torch.float64
        Q = random_orthogonal(n, n, seed=seed, dtype=double)
        A = (Q * torch.arange(1, n + 1, dtype=torch.float64)) @ Q.mH
        A = ((A + A.mH) / 2).to(dtype)
        return Cost(A, torch.arange(p, 0, -1).to(A.real.dtype), shape)

    return make


@pytest.fixture
def numpy_version() -> Callable[..., Any]:
    """``numpy_version(function)``: the same torch arithmetic behind NumPy arguments and results."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arrays: np.ndarray) -> Any:
            # Copies with the same strides: rounding may depend on them.
            result = function(*(torch.from_numpy(a.copy(order="K")) for a in arrays))
            return tuple(r.numpy() for r in result) if isinstance(result, tuple) else result.numpy()

        return wrapped

    return wrap


@pytest.fixture
def at_distance_of() -> Callable[[float, Tensor], Tensor]:
    """``at_distance_of(d, X)``: a matrix with ``||X^H X - I||_F = d`` near X on the manifold."""

    def move(d: float, X: Tensor) -> Tensor:
        p = min(X.shape)
        e = torch.linspace(-1, 1.5, p, dtype=torch.float64) if p > 1 else torch.ones(1)
        e = (1 + d * e / torch.linalg.vector_norm(e)).sqrt().to(X.dtype)
        return X * (e[:, None] if X.shape[0] < X.shape[1] else e)

    return move


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


@pytest.fixture
def counted() -> type[Counted]:
    return Counted


@pytest.fixture
def distance() -> Callable[[Any], float]:
    """``distance(x)``: ||X^H X - I||_F, in double precision; rows if X is wide, NumPy or torch."""

    def measure(x: Any) -> float:
        X = torch.as_tensor(x)
        X = X.to(torch.complex128 if X.is_complex() else torch.float64)
        X = X.mT if X.shape[0] < X.shape[1] else X
        return float(torch.linalg.matrix_norm(X.mH @ X - torch.eye(X.shape[1])))

    return measure


def scaled_norm(M: Tensor) -> float:
    """Frobenius norm, in double precision and with no square that over- or underflows."""
    largest = float(M.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(M.abs().double() / largest))


@pytest.fixture
def norm() -> Callable[[Tensor], float]:
    return scaled_norm


@pytest.fixture
def roundings() -> Callable[[Any], float]:
    """``roundings(x)``: 100 eps sqrt(p), how far from the manifold a result may be."""

    def limit(x: Any) -> float:
        X = torch.as_tensor(x)
        return 100 * torch.finfo(X.dtype).eps * math.sqrt(min(X.shape))

    return limit


@pytest.fixture
def verified(distance, roundings) -> Callable[..., bool]:
    """``verified(result, fun, jac, gtol=, atol=)``: True if success is claimed, and then rightly.

    fun and jac are asked once more, at ``result.x`` only; the first gradient is the history's,
    for which 0.3 of the Euclidean one counts if the start was nearly stationary.
    A gradient that is rounding beside the Euclidean one counts as zero, whatever gtol is.
    """

    def verify(result, fun, jac, *, gtol: float | None = None, atol: float = 0.0) -> bool:
        X = torch.as_tensor(result.x)
        assert distance(X) < roundings(X), result.message
        assert result.distance < roundings(X)
        assert result.success == (result.status == 0)
        assert {len(values) for values in result.history.values()} == {result.nit + 1}
        if not result.success:
            return False
        eps = torch.finfo(X.dtype).eps
        G = torch.as_tensor(jac(X)).detach()
        assert bool(G.isfinite().all())
        assert math.isfinite(float(fun(X)))
        norm, scale = scaled_norm(riemannian_gradient(X, G)), scaled_norm(G)
        first = result.history["grad_norm"][0]
        first = first if first > 0.01 * scale else 0.3 * scale
        goal = max((eps**0.5 if gtol is None else gtol) * first, atol)
        # 8 eps of it are the solver's rule, the rest is rounding here.
        assert norm <= max(1.001 * goal, 50 * eps * scale), (norm, goal, result.message)
        return True

    return verify
