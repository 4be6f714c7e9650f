"""The Gram form of a tall step: p x p numbers in place of n x p ones.

Every landing step is a combination of columns, ``X' = X + X a + B b``, B the generator of the
direction, and the p x p coefficients a and b depend on three Gram matrices alone:

    D = X^H X - I,    M = X^H B,    T = B^H B.

Each is a sum over rows. So a step is one pass over the rows of X and B, then coefficients, then
one pass that combines; rows may be on several ranks, which add up their Gram matrices in between.
Norms come from the same matrices: with ``L = X a + B b``,
``L^H L = a^H (S a + M b) + b^H (M^H a + T b)``, ``S = I + D``, which for "move, then land" also
says where the moved point is.

What differs from the forms on whole matrices (``Attraction.move``) is rounding. A norm from Gram
matrices is known up to ``sqrt(u) ||B||``, not ``u ||B||``: where the tangent part is smaller than
that, the safe step is shorter than it would be.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import add_product, per_matrix, product, sym
from ortholand.safe_step import FROBENIUS, SafeStepRule


class Gram(NamedTuple):
    """What the coefficients of a step depend on, per matrix.

    The generator is ``B = unit * B1``: large and small gradients would overflow in T otherwise.
    """

    D: Tensor  # X^H X - I, (..., p, p)
    M: Tensor  # X^H B1
    T: Tensor  # B1^H B1
    unit: Tensor  # (...)
    size: Tensor  # ||B1||_F before anything was taken from it: what rounding is relative to, (...)
    n: int  # rows of the whole matrix
    dtype: torch.dtype  # of X and B1: what they were rounded to

    @property
    def distance(self) -> Tensor:
        """``||D||_F``."""
        return torch.linalg.vector_norm(self.D, dim=(-2, -1))

    @property
    def tangency_error(self) -> Tensor:
        """Bound of what rounding leaves of ``Sym(X^H R1)``, R1 the tangent part of B1."""
        return self.rounding(self.size)

    def rounding(self, size: Tensor) -> Tensor:
        """Bound of the rounding error in products of this size."""
        return tangency_bound(self.n, self.dtype, self.distance, size)


class Coefficients(NamedTuple):
    """A step ``X + X a + B1 b``, and which matrices may take it."""

    a: Tensor  # (..., p, p)
    b: Tensor
    taken: Tensor  # (...)


class FieldGram:
    """A field ``L = X a + B1 b``, known by its coefficients; a ``safe_step.FieldProducts``."""

    def __init__(self, a: Tensor, b: Tensor, gram: Gram) -> None:
        self.a, self.b, self.gram = a, b, gram
        D, M, T = gram.D, gram.M, gram.T
        self.with_X = a + add_product(product(M, b), D, a)  # X^H L
        self.with_B = add_product(product(M.mH, a), T, b)  # B1^H L
        self._square: Tensor | None = None

    @property
    def square(self) -> Tensor:
        """``L^H L``."""
        if self._square is None:
            half = product(self.a.mH, self.with_X)
            self._square = sym(add_product(half, self.b.mH, self.with_B))
        return self._square

    @property
    def squared_norm(self) -> Tensor:
        """``||L||_F^2``."""
        return inner(self.a, self.with_X) + inner(self.b, self.with_B)

    def bound(self, rule: SafeStepRule | None, share: Tensor | float = 1.0) -> Tensor:
        """The rule's bound of L, with what rounding may have eaten of its square added again.

        ``share``: how much of B1 is in L.
        """
        gram, rule = self.gram, FROBENIUS if rule is None else rule
        assert rule.squared_gram_bound is not None
        error = 4 * (1 + gram.distance) * gram.rounding((gram.size * share).square())
        return (rule.squared_gram_bound(self).clamp(min=0) + error).sqrt()


def tangent_coefficients(D: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of ``R = X a + B b = (B S - X B^H X) / 2``, from ``D = S - I`` and ``M = X^H B``."""
    b = D / 2
    b.diagonal(dim1=-2, dim2=-1).add_(0.5)
    return M.mH / -2, b


def combine(X: Tensor, B: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``X + X a + B b``."""
    return add_product(add_product(X, X, cast(a, X.dtype)), B, cast(b, X.dtype))


def cast(M: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices in another precision, on the device where they are."""
    return M if M.dtype == dtype else torch.empty_like(M, dtype=dtype).copy_(M)


def inner(M: Tensor, N: Tensor) -> Tensor:
    """``Re tr(M^H N)`` of each pair of matrices, summed in float64 where there is one."""
    dtype = None if M.device.type == "mps" else torch.float64
    return (M.conj() * N).real.sum(dim=(-2, -1), dtype=dtype)


def times(value: Tensor, M: Tensor) -> Tensor:
    """Each matrix times its own real number."""
    return per_matrix(value, M) * M
