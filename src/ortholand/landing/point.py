"""Matrices X with what a step computes of them, and directions as generators represent them.

A *generator* represents a direction: for square X a skew matrix A, meaning ``A X``; for tall X an
n x p matrix B, meaning ``Skew(B X^H) X``, which is tangent for any B at any X.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.derivatives import multiplier
from ortholand.geometry.matrices import (
    gram_minus_identity,
    is_plain_cpu,
    per_matrix,
    product,
    subtract_product_,
    sym,
)

LANDED = 16  # units of rounding within which X counts as on the manifold


class Point:
    """Matrices X ``(..., n, p)``, n >= p, with what a step computes of them, each once."""

    def __init__(self, X: Tensor, radius: float = 0.5, *, may_look: bool = False) -> None:
        self.X, self.radius = X, radius  # of the ball
        self.may_look = may_look and is_plain_cpu(X)  # whether a step may read values
        self._D: Tensor | None = None
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

        The answer comes from ``D v`` for one vector v: two passes over X in place of a product. It
        is a branch, so it is no wherever values must not be read.
        """
        if self._is_landed is None:
            rounding = LANDED * torch.finfo(self.X.dtype).eps
            self._is_landed = self.may_look and bool((probed(self.X) <= rounding).all())
        return self._is_landed

    def multiplier(self, M: Tensor) -> Tensor:
        """``K = Sym(S^-1 M)``, for ``M = X^H B`` of tall X."""
        return sym(M) if self.is_landed else multiplier(self.D, M)

    def without_multiplier(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """``K = Sym(S^-1 M)`` and ``W = M - S K``, for ``M = X^H B`` of tall X.

        ``B - X K`` represents the same direction as B, and contains nothing of what a function
        that is constant on the manifold adds to B: for ``B = X C``, C Hermitian, it is zero
        wherever X is. ``X^H (B - X K)`` is W.
        """
        K = self.multiplier(M)
        W = M - K
        return K, W if self.is_landed else subtract_product_(W, self.D, K)


class Direction(NamedTuple):
    """The direction that the generator ``length B`` represents."""

    B: Tensor
    length: Tensor | None = None  # a number for each matrix; None: 1
    W: Tensor | None = None  # X^H B, if B is known to be without multipliers
    size: Tensor | None = None  # the norm that rounding in B is relative to, if not B's own

    @property
    def generator(self) -> Tensor:
        """``length B``."""
        return self.B if self.length is None else self.B * per_matrix(self.length, self.B)

    @property
    def of_length_one(self) -> "Direction":
        """The same direction by a generator whose length is 1."""
        if self.length is None:
            return self
        W = None if self.W is None else self.W * per_matrix(self.length, self.W)
        return Direction(
            self.generator, None, W, None if self.size is None else self.length * self.size
        )


def cleaned(point: Point, B: Tensor) -> tuple[Tensor, Tensor]:
    """B without its multipliers, in B's memory, and ``W = X^H B`` of that; X is tall."""
    K, W = point.without_multiplier(product(point.X.mH, B))
    return subtract_product_(B, point.X, K), W


def probed(X: Tensor) -> Tensor:
    """About ``||D||_F / sqrt(p)``: the length of ``D v`` for one generic vector v."""
    p = X.shape[-1]
    v = torch.linspace(1, 2, p, dtype=X.dtype, device=X.device)[:, None]
    return torch.linalg.vector_norm(X.mH @ (X @ v) - v, dim=(-2, -1)) / math.sqrt(p)
