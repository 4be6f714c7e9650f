"""Matrices X with what a step computes of them, and directions as generators represent them.

A *generator* represents a direction: for square X a skew matrix A, meaning ``A X``; for tall X an
n x p matrix B, meaning ``Skew(B X^H) X``, which is tangent for any B at any X.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.derivatives import gram_factor, multiplier_from
from ortholand.geometry.matrices import (
    add_product,
    add_product_,
    frobenius_norm,
    gram_minus_identity,
    is_plain_cpu,
    is_square,
    per_matrix,
    sym,
)

LANDED = 16  # units of rounding within which X counts as on the manifold
# Norms that are read are summed in the matrix's own type, up to so many entries.
INEXACT, SUMMED_AS_IT_IS = 1.001, 2**20


class Point:
    """Matrices X ``(..., n, p)``, n >= p, with what a step computes of them, each once."""

    def __init__(self, X: Tensor, *, may_look: bool = False) -> None:
        self.X = X
        self.may_look = may_look and is_plain_cpu(X)  # whether a step may read values
        self._D: Tensor | None = None
        self._factor: Tensor | None = None
        self._is_landed: bool | None = None

    @property
    def D(self) -> Tensor:
        """``X^H X - I``."""
        if self._D is None:
            self._D = gram_minus_identity(self.X)
        return self._D

    @property
    def is_landed(self) -> bool:
        """Whether X is on the manifold up to rounding, so that ``S = X^H X`` is the identity.

        It comes from ``D v`` for one vector v. It is no wherever values must not be read.
        """
        if self._is_landed is None:
            rounding = LANDED * torch.finfo(self.X.dtype).eps * math.sqrt(self.X.shape[-1])
            self._is_landed = self.may_look and looked_at(probed(self.X)) <= rounding
        return self._is_landed

    @property
    def factor(self) -> Tensor:
        """The Cholesky factor of ``S = X^H X``."""
        if self._factor is None:
            self._factor = gram_factor(self.D)
        return self._factor

    def multiplier(self, M: Tensor) -> Tensor:
        """``K = Sym(S^-1 M)``, for ``M = X^H B`` of tall X."""
        return sym(M) if self.is_landed else multiplier_from(self.factor, M)

    def norm(self, M: Tensor) -> Tensor:
        """The Frobenius norm of each matrix, in float64; quicker where it may be read."""
        if self.may_look and M.ndim == 2 and M.numel() <= SUMMED_AS_IT_IS:
            norm = torch.linalg.vector_norm(M)
            if 1e-12 < float(norm) < 1e18:  # squares neither overflow nor vanish
                return norm.double()
        return frobenius_norm(M)

    def cleaned(self, B: Tensor) -> "Direction":
        """``B - X K``, ``K = Sym(S^-1 X^H B)``, in B's memory; X is tall.

        It represents the same direction, and contains nothing of ``X C``, C Hermitian.
        """
        M = self.X.mH @ B
        K = self.multiplier(M)
        W = M - K if self.is_landed else add_product_(M - K, self.D, K, alpha=-1)
        return Direction(add_product_(B, self.X, K, alpha=-1), None, W, K)


class Direction(NamedTuple):
    """The direction that the generator ``length (B + X V)`` represents."""

    B: Tensor
    length: Tensor | float | None = None  # a number for each matrix, or of one; None: 1
    W: Tensor | None = None  # X^H (B + X V), if that is known to be without multipliers
    K: Tensor | None = None  # the multiplier that has been taken from B, if so
    V: Tensor | None = None  # p x p; None: 0

    def of_length_one(self, X: Tensor) -> "Direction":
        """The same direction by a generator whose length is 1 and that has no V."""
        if self.V is not None:
            return Direction(add_product(self.B, X, self.V), W=self.W)
        if self.length is None:
            return self
        length = self.length
        return Direction(
            self.B * (length if isinstance(length, float) else per_matrix(length, self.B))
        )

    def tangency_error(self, X: Tensor, d: Any, norm: Callable[[Tensor], Any]) -> Any:
        """Bound of ``||Sym(X^H R)||``, which is rounding relative to B before K was taken."""
        if is_square(X):
            return torch.zeros_like(d) if isinstance(d, Tensor) else 0.0
        size = norm(self.B)
        for M in (self.K, self.V):
            size = size if M is None else size + 2**0.5 * norm(M)
        return tangency_bound(X.shape[-2], X.dtype, d, size)


def looked_at(M: Tensor) -> float:
    """The largest Frobenius norm of some matrices, read, and rounded up; NaN if one is NaN."""
    norm = torch.linalg.vector_norm(M, dim=(-2, -1))
    return INEXACT * float(norm.max() if norm.ndim else norm)


def probed(X: Tensor) -> Tensor:
    """``D v`` for one generic vector v, about as long as ``||D||_F``."""
    p = X.shape[-1]
    v = torch.linspace(1, 2, p, dtype=X.dtype, device=X.device)[:, None]
    return X.mH @ (X @ v) - v
