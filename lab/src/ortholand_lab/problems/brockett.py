"""Brockett's cost, which determines not only the subspace but each eigenvector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ortholand.geometry.manifold import random_orthogonal
from ortholand.geometry.matrices import real_dtype, sym
from ortholand_lab.problems.base import (
    Problem,
    as_generator,
    check_hermitian,
    check_tensor,
    drawn_in,
    inner,
)


@dataclass(frozen=True, eq=False)
class Brockett(Problem):
    """``f(X) = Tr(X^H A X N)`` over n x p X with orthonormal columns, ``N = diag(mu)``.

    A is symmetric or Hermitian, the weights mu are positive and distinct. The minimiser holds the
    eigenvectors of the p smallest eigenvalues, the smallest one with the largest weight; it is
    unique up to the signs (phases) of its columns if these eigenvalues are distinct.

    The condition number of the problem is the ratio of the largest to the smallest product of a
    difference of eigenvalues and one of weights: with many columns it is large, and
    first-order methods are slow.

    >>> problem = Brockett.linear(6, 3, seed=0)
    >>> round(problem.optimum().item(), 6)  # 3 * 1 + 2 * 2 + 1 * 3
    10.0
    """

    A: Tensor  # (n, n)
    mu: Tensor  # (p,), real

    def __post_init__(self) -> None:
        check_tensor("A", self.A, 2, allow_complex=True)
        check_hermitian("A", self.A)
        check_tensor("mu", self.mu, 1, allow_complex=False)
        if len(self.mu) > len(self.A) or self.mu.dtype != real_dtype(self.A.dtype):
            raise ValueError(
                f"mu must have at most n = {len(self.A)} weights, of type "
                f"{real_dtype(self.A.dtype)}, got {len(self.mu)} of {self.mu.dtype}."
            )
        if bool((self.mu <= 0).any()) or len(self.mu.unique()) < len(self.mu):
            raise ValueError(
                f"mu must be positive and distinct, got {self.mu.tolist()}. "
                "With equal weights the problem is PCA(-A, p)."
            )

    @classmethod
    def linear(
        cls, n: int, p: int, *, seed: int | torch.Generator, dtype: torch.dtype = torch.float64
    ) -> Brockett:
        """Eigenvalues 1 to n, with random eigenvectors, and weights p to 1."""
        _check_sizes(n, p)
        Q = random_orthogonal(n, n, seed=seed, dtype=drawn_in(dtype))
        A = (Q * torch.arange(1, n + 1, dtype=torch.float64)) @ Q.mH
        return cls(sym(A).to(dtype), _weights(p, dtype))

    @classmethod
    def gaussian(
        cls, n: int, p: int, *, seed: int | torch.Generator, dtype: torch.dtype = torch.float64
    ) -> Brockett:
        """``A = (M + M^H) / 2`` with standard normal M, and weights p to 1."""
        _check_sizes(n, p)
        M = torch.randn(n, n, generator=as_generator(seed), dtype=drawn_in(dtype))
        return cls(sym(M).to(dtype), _weights(p, dtype))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return len(self.A), len(self.mu)

    @property
    def data(self) -> Tensor:
        """A: X has its type and lives on its device."""
        return self.A

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        return self.fun_and_grad(X)[0]

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X: ``2 A X N``."""
        return self.A @ X * (2 * self.mu)

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad` from one product ``A X``: the cost is ``<X, G> / 2``."""
        G = self.grad(X)
        return inner(X, G) / 2, G

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:  # noqa: ARG002
        """Euclidean Hessian at X applied to V: ``2 A V N``."""
        return self.grad(V)

    def solution(self) -> Tensor:
        """The minimiser: an eigenvector for each weight."""
        return self.eigenvectors[:, self.mu.argsort(descending=True).argsort()]

    @cached_property
    def eigenvectors(self) -> Tensor:
        """Eigenvectors of the p smallest eigenvalues, the smallest first."""
        return torch.linalg.eigh(self.A).eigenvectors[:, : len(self.mu)]


def _check_sizes(n: int, p: int) -> None:
    if not 0 < p <= n:
        raise ValueError(f"Brockett needs 0 < p <= n, got n={n}, p={p}.")


def _weights(p: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(p, 0, -1, dtype=real_dtype(dtype))
