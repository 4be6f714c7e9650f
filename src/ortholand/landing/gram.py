"""The Gram form of a tall step, for rows on several ranks: p x p numbers instead of n x p ones.

Every landing step is a combination of columns, ``X' = X + X a + B b``, B the generator of the
direction, and the p x p coefficients a and b depend on three sums over rows alone:

    D = X^H X - I,    W = X^H B,    T = B^H B.

A norm from Gram matrices is known up to ``sqrt(u) ||B||``, not ``u ||B||``: where the tangent part
is smaller than that, the safe step is shorter than necessary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.derivatives import multiplier_from
from ortholand.geometry.matrices import (
    add_identity,
    add_product,
    add_product_,
    frobenius_norm,
    per_matrix,
    skew,
    sum_dtype,
    sym,
)
from ortholand.safe_step import SafeStepRule, spectral_bound


class Gram(NamedTuple):
    """What the coefficients of a step depend on, per matrix, for a B without multipliers."""

    D: Tensor  # X^H X - I, (..., p, p)
    W: Tensor  # X^H B
    T: Tensor  # B^H B
    d: Tensor  # ||D||_F, (...)
    size: Tensor  # ||B||_F before any subtraction: rounding is relative to it
    roundoff: float  # relative rounding error of the products above

    @property
    def tangency_error(self) -> Tensor:
        """Bound on the rounding error in ``Sym(X^H R)``, R the tangent part of B."""
        return (1 + self.d) * self.size * self.roundoff

    @property
    def unknown(self) -> Tensor:
        """Bound on the rounding error in ``L^H L``, L a field along B."""
        return ((1 + self.d) * self.size).square() * self.roundoff

    def scaled(self, factor: Tensor) -> "Gram":
        """The same for ``factor B``, one number for each matrix."""
        W, T = times(factor, self.W), times(factor.square(), self.T)
        return self._replace(W=W, T=T, size=factor * self.size)


class Coefficients(NamedTuple):
    """A step ``X + X a + B b``, and which matrices may take it."""

    a: Tensor  # (..., p, p)
    b: Tensor
    taken: Tensor  # (...)
    limited: Tensor | None = None  # where the safe step was less than lr; None: nowhere


def gram_without_multiplier(
    D: Tensor, L: Tensor, M: Tensor, T: Tensor, roundoff: float
) -> tuple[Gram, Tensor]:
    """The Gram matrices of ``B - X K``, ``K = Sym(S^-1 X^H B)``, from those of B; and K.

    L is the Cholesky factor of S.
    """
    K, size = multiplier_from(L, M), trace(T).sqrt()
    SK = add_product(K, D, K)
    KM = K @ M
    T = sym(T - KM - KM.mH + K @ SK)
    return Gram(D, M - SK, T, frobenius_norm(D), size, roundoff), K


class FieldGram:
    """A field ``L = R + pull X D``, R the tangent part ``(B S - X W^H) / 2`` of B."""

    def __init__(self, gram: Gram, pull: float = 0.0) -> None:
        D, W, T = gram.D, gram.W, gram.T
        S = add_identity(D)
        WS = W @ S
        self.tangent = W.mH / -2, S / 2  # a and b of R = X a + B b
        # W S W^H is Hermitian, so both products with W on the left are one.
        self.square = sym(S @ (T @ S) - W @ (2 * WS - WS.mH)) / 4  # L^H L
        if pull:
            mixed = D @ (2 * skew(WS) + pull * (S @ D))
            self.square = self.square + pull * sym(mixed)
        self.unknown = gram.unknown
        self.norm = norm_from(self.square, gram)

    def bound(self, rule: SafeStepRule) -> Tensor:
        """The bound on L of the rule "frobenius", or "spectral"; others have no Gram form."""
        if not rule.spectral:
            return self.norm
        return (spectral_bound(self.square) + self.unknown).sqrt()


def norm_from(square: Tensor, gram: Gram) -> Tensor:
    """``||L||_F`` from ``L^H L``, with its possible rounding error added."""
    return (trace(square).clamp(min=0) + gram.unknown).sqrt()


def trace(T: Tensor) -> Tensor:
    """The trace of each Hermitian matrix, summed in float64 if the device has it."""
    return T.diagonal(dim1=-2, dim2=-1).real.sum(-1, dtype=sum_dtype(T))


def combine(X: Tensor, B: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``X + X a + B b``."""
    return add_product_(add_product(X, X, cast(a, X.dtype)), B, cast(b, X.dtype))


def cast(M: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices in another precision, on the device where they are."""
    return M if M.dtype == dtype else torch.empty_like(M, dtype=dtype).copy_(M)


def inner(M: Tensor, N: Tensor) -> Tensor:
    """``Re tr(M^H N)`` of each pair of matrices, summed in float64 if the device has it."""
    if M.is_complex():
        return (M.conj() * N).real.sum(dim=(-2, -1), dtype=sum_dtype(M))
    return (M * N).sum(dim=(-2, -1), dtype=sum_dtype(M))


def times(value: Tensor, M: Tensor) -> Tensor:
    """Each matrix times its own real number."""
    return per_matrix(value, M) * M
