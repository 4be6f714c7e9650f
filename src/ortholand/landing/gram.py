"""The Gram form of a tall step: p x p numbers instead of n x p ones.

Every landing step is a combination of columns, ``X' = X + X a + B b``, B the generator of the
direction, and the p x p coefficients a and b depend on three Gram matrices alone:

    D = X^H X - I,    M = X^H B,    T = B^H B.

Each is a sum over rows. So a step is one pass over the rows of X and B, then coefficients, then
one pass that combines; rows may be on several ranks, which add up their Gram matrices in between.
Norms come from the same matrices: with ``S = I + D`` the tangent part ``R = (B S - X M^H) / 2`` has
``4 R^H R = S T S - M M S - (M M S)^H + M S M^H``, which for "move, then land" also says where the
moved point is.

It differs from the forms on whole matrices (``Attraction.move``) in rounding. A norm from Gram
matrices is known up to ``sqrt(u) ||B||``, not ``u ||B||``: where the tangent part is smaller than
that, the safe step is shorter than necessary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    add_product,
    add_product_,
    is_plain_cpu,
    per_matrix,
    product,
    skew,
    sym,
)
from ortholand.safe_step import (
    FROBENIUS,
    BetterBounds,
    FieldBounds,
    SafeStepRule,
    spectral_distance,
)

# Terms below this share of the rounding error are left out, with their products.
LITTLE = 0.125


class Gram(NamedTuple):
    """What the coefficients of a step depend on, per matrix.

    The generator is ``B = unit * B1``: otherwise very large gradients would overflow in T.
    """

    D: Tensor  # X^H X - I, (..., p, p)
    M: Tensor  # X^H B1
    T: Tensor  # B1^H B1
    distance: Tensor  # ||D||_F, (...)
    unit: Tensor  # (...)
    size: Tensor | float  # ||B1||_F before any subtraction: rounding is relative to it
    roundoff: float  # relative rounding error of the products above
    apart: bool = False  # whether other ranks share the matrices: then no branch reads a value

    @property
    def tangency_error(self) -> Tensor:
        """Bound on the rounding error in ``Sym(X^H R)``, R the tangent part of B."""
        return (1 + self.distance) * (self.unit * self.size) * self.roundoff

    def is_near(self, lr: float | Tensor) -> bool:
        """Whether D changes ``R^H R``, for steps up to lr, by less than rounding does.

        This is a branch, so only where it waits for no device.
        """
        if isinstance(lr, Tensor):
            return False
        return self._is_little(4 * (lr * self.unit * self.size) ** 2)

    def hides(self, W: Tensor) -> bool:
        """Whether ``D W`` is below the rounding of the identity."""
        return self._is_little(torch.linalg.vector_norm(W, dim=(-2, -1)))

    def _is_little(self, factor: Tensor) -> bool:
        """Whether D times this is negligible. A branch, so only where it waits for no device."""
        if self.apart or not is_plain_cpu(self.D):
            return False
        return bool((self.distance * factor <= LITTLE * self.roundoff).all())


class Coefficients(NamedTuple):
    """A step ``X + X a + B1 b``, and which matrices may take it."""

    a: Tensor  # (..., p, p)
    b: Tensor
    taken: Tensor  # (...)
    limited: Tensor | None = None  # where the safe step was less than lr; None: nowhere


class FieldGram:
    """A field ``L1 = share R1 + pull X D``, R1 the tangent part of B1; a ``FieldProducts``.

    ``near``: D is so small that its products with M and T are left out; their effect is
    added to bounds, as rounding errors are.
    """

    def __init__(
        self,
        gram: Gram,
        share: Tensor | float = 1.0,
        pull: Tensor | float = 0.0,
        *,
        near: bool = False,
    ) -> None:
        self.gram, self.share, self.pull, self.near = gram, share, pull, near
        self.S = gram.D.clone()
        self.S.diagonal(dim1=-2, dim2=-1).add_(1)
        self.MS, self.TS = gram.M, gram.T
        if not near:
            self.MS, self.TS = product(gram.M, self.S), product(gram.T, self.S)

    @property
    def tangent_coefficients(self) -> tuple[Tensor, Tensor]:
        """a and b of ``R1 = X a + B1 b``."""
        return self.gram.M.mH / -2, self.S / 2

    @property
    def tangent_square(self) -> Tensor:
        """``R1^H R1``."""
        # M S M^H is Hermitian: both products with M on the left in one.
        mixed = 2 * self.MS - self.MS.mH
        STS = self.TS if self.near else product(self.S, self.TS)
        return sym(add_product(STS, self.gram.M, mixed, alpha=-1)) / 4

    @property
    def square(self) -> Tensor:
        """``L1^H L1``."""
        square = scaled(self.tangent_square, self.share, 2)
        if isinstance(self.pull, float):
            return square
        D = self.gram.D
        mixed = scaled(sym(product(D, skew(self.MS))), 2 * self.share * self.pull)
        return square + mixed + scaled(sym(product(product(D, self.S), D)), self.pull, 2)

    @property
    def squared_norm(self) -> Tensor:
        """``||L1||_F^2``: the two parts are orthogonal."""
        M, MS = self.gram.M, self.MS
        size = trace(self.TS) if self.near else inner(self.S, self.TS)
        tangent = size - 2 * inner(M.mH, MS) + inner(M, MS)
        square = tangent * (0.25 * self.share * self.share)
        if isinstance(self.pull, float):
            return square
        return square + self.pull.square() * squared_normal_norm(self.gram.D)

    def bound(self, rule: SafeStepRule | None) -> Tensor:
        """The rule's bound on L1, with the possible rounding error of its square added."""
        gram, rule = self.gram, FROBENIUS if rule is None else rule
        assert rule.squared_gram_bound is not None
        unknown = (1 + gram.distance).square() * gram.roundoff
        if self.near:
            unknown = unknown + 4 * gram.distance
        error = unknown * (gram.size * gram.size) * (self.share * self.share)
        return (rule.squared_gram_bound(self).clamp(min=0) + error).sqrt()

    def bounds(self, unit: Tensor, rule: SafeStepRule | None, eps: float) -> FieldBounds:
        """What is known about the field ``unit L1``."""
        gram = self.gram

        def better(stops: bool) -> BetterBounds:
            bound, distance = unit * self.bound(rule), gram.distance
            is_spectral = rule is not None and rule.spectral
            if stops or not is_spectral:
                yield bound, distance
            if is_spectral:
                yield bound, spectral_distance(gram.D, eps).to(distance.dtype)

        norm = unit * self.bound(None)
        return FieldBounds(norm, gram.distance, gram.tangency_error, better, not gram.apart)


def trace(T: Tensor) -> Tensor:
    """The trace of each Hermitian matrix, summed in float64 if the device has it."""
    dtype = None if T.device.type == "mps" else torch.float64
    return T.diagonal(dim1=-2, dim2=-1).real.sum(-1, dtype=dtype)


def squared_normal_norm(D: Tensor) -> Tensor:
    """``||X D||_F^2``."""
    return inner(D, D + product(D, D)).clamp(min=0)


def combine(X: Tensor, B: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``X + X a + B b``."""
    return add_product_(add_product(X, X, cast(a, X.dtype)), B, cast(b, X.dtype))


def cast(M: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices in another precision, on the device where they are."""
    return M if M.dtype == dtype else torch.empty_like(M, dtype=dtype).copy_(M)


def inner(M: Tensor, N: Tensor) -> Tensor:
    """``Re tr(M^H N)`` of each pair of matrices, summed in float64 if the device has it."""
    dtype = None if M.device.type == "mps" else torch.float64
    if M.is_complex():
        return (M.conj() * N).real.sum(dim=(-2, -1), dtype=dtype)
    return (M * N).sum(dim=(-2, -1), dtype=dtype)


def times(value: Tensor, M: Tensor) -> Tensor:
    """Each matrix times its own real number."""
    return per_matrix(value, M) * M


def scaled(M: Tensor, factor: Tensor | float, power: int = 1) -> Tensor:
    """Each matrix times a power of its own number, or of one number for all."""
    if isinstance(factor, float):
        return M if factor == 1 else M * factor**power
    return times(factor**power, M)
