"""Electrons in one dimension: a simplified Kohn-Sham energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ortholand_lab.problems.base import Problem, inner


@dataclass(frozen=True, eq=False)
class KohnSham(Problem):
    """``f(X) = Tr(X^H L X) / 2 + (alpha / 4) rho^T L^-1 rho``, ``rho = diag(X X^H)``.

    L is the second difference on a line of n points, the columns of X are p orbitals, and rho is
    the charge density. The cost depends only on the span of X. Neither L nor its inverse is
    formed: both are applied in O(n).

    >>> problem = KohnSham(20, 3)
    >>> X = problem.start(seed=0)
    >>> bool(problem.fun(X) > 0)
    True
    """

    n: int
    p: int
    alpha: float = 1.0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if not 0 < self.p <= self.n:
            raise ValueError(f"KohnSham needs 0 < p <= n orbitals, got p={self.p}, n={self.n}.")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return self.n, self.p

    @property
    def data(self) -> Tensor:
        """A tensor of X's type."""
        return torch.zeros(1, dtype=self.dtype)

    def fun(self, X: Tensor) -> Tensor:
        """Energy of X."""
        rho = density(X)
        return inner(X, laplacian(X)) / 2 + self.alpha / 4 * (rho * potential(rho)).sum(-1)

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X."""
        return laplacian(X) + self.alpha * potential(density(X))[..., None] * X

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad`, with the potential computed once."""
        rho, LX = density(X), laplacian(X)
        u = potential(rho)
        value = inner(X, LX) / 2 + self.alpha / 4 * (rho * u).sum(-1)
        return value, LX + self.alpha * u[..., None] * X

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        """Euclidean Hessian at X applied to V."""
        here, change = potential(density(X)), potential(2 * (X.conj() * V).real.sum(-1))
        return laplacian(V) + self.alpha * (here[..., None] * V + change[..., None] * X)

    def solution(self) -> Tensor:
        """Unknown, except for ``alpha = 0``: then the lowest modes of the line."""
        if self.alpha:
            raise NotImplementedError("The ground state is known for alpha = 0 only.")
        place = torch.arange(1, self.n + 1, dtype=torch.float64)[:, None]
        mode = torch.arange(1, self.p + 1, dtype=torch.float64)
        X = torch.sin(torch.pi * place * mode / (self.n + 1)) * (2 / (self.n + 1)) ** 0.5
        return X.to(self.dtype)


def density(X: Tensor) -> Tensor:
    """``diag(X X^H)``."""
    return (X.conj() * X).real.sum(-1)


def laplacian(X: Tensor) -> Tensor:
    """``L X``: minus the second differences, zero beyond both ends."""
    zero = torch.zeros_like(X[..., :1, :])
    padded = torch.cat([zero, X, zero], -2)
    return 2 * X - padded[..., :-2, :] - padded[..., 2:, :]


def potential(rho: Tensor) -> Tensor:
    """``L^-1 rho``, by summing twice."""
    n = rho.shape[-1]
    # sum over k < i of (i - k) rho_k has second differences rho_i.
    twice = torch.cat([torch.zeros_like(rho[..., :1]), rho.cumsum(-1).cumsum(-1)], -1)
    share = torch.arange(1, n + 1, dtype=rho.dtype, device=rho.device) / (n + 1)
    return share * twice[..., -1:] - twice[..., :-1]
