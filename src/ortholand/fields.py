"""The fields that infeasible methods follow: landing, and the two it is compared with.

Each takes X ``(..., n, p)`` and the Euclidean gradient G, and returns the direction L of the update
``X <- X - eta L``. Wide matrices are transposed internally.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient, tangent_from_gram
from ortholand.geometry.matrices import (
    frobenius_norm,
    gram_minus_identity,
    is_square,
    product,
)


def landing_field(X: Tensor, G: Tensor, lam: float = 1.0) -> Tensor:
    """The landing field ``Skew(G X^H) X + lam (X X^H - I) X`` (the paper's boxed equation).

    Args:
        X: matrices ``(..., n, p)``; tall, square or wide.
        G: Euclidean gradient at X, of the same shape.
        lam: strength of the attraction to the manifold.

    The first term is tangent, the second normal, and they are orthogonal at every X. The field
    vanishes exactly where X is on the manifold and critical (for X of full rank).

    >>> import torch
    >>> landing_field(torch.eye(2), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    tensor([[ 0.,  1.],
            [-1.,  0.]])
    """
    if X.shape[-2] < X.shape[-1]:
        return landing_field(X.mT, G.mT, lam).mT
    if is_square(X):
        return landing_from_relative(X, relative_gradient(X, G), lam).field
    return landing_from_gradient(X, G, lam).field


def plam_field(X: Tensor, G: Tensor, lam: float = 1.0) -> Tensor:
    """PLAM (Gao et al., 2019): ``G - Sym(G X^H) X + lam (X X^H - I) X``.

    It equals the landing field on the manifold only; off it, it has spurious zeros and can explode.
    """
    if X.shape[-2] < X.shape[-1]:
        return plam_field(X.mT, G.mT, lam).mT
    D = gram_minus_identity(X)
    symmetric_part = (G + G @ D + X @ (G.mH @ X)) / 2
    return G - symmetric_part + lam * (X @ D)


def penalty_field(X: Tensor, G: Tensor, lam: float = 1.0) -> Tensor:
    """Gradient ``G + lam (X X^H - I) X`` of ``f + lam N``. Its zeros are not on the manifold."""
    if X.shape[-2] < X.shape[-1]:
        return penalty_field(X.mT, G.mT, lam).mT
    return G + lam * (X @ gram_minus_identity(X))


Field = Callable[[Tensor, Tensor, float], Tensor]
FIELDS: dict[str, Field] = {"landing": landing_field, "plam": plam_field, "penalty": penalty_field}


class Landing(NamedTuple):
    """A landing field, and quantities for the safe step that its products give for free."""

    field: Tensor  # L, (..., n, p)
    residual: Tensor  # D = X^H X - I, or X X^H - I of square X
    distance: Tensor  # ||D||_F, (...)
    tangency_error: Tensor | float  # bound of ||Sym(X^H R)||, zero but for rounding, (...)


def landing_from_relative(X: Tensor, A: Tensor, lam: float) -> Landing:
    """``(A + lam (X X^H - I)) X`` for square X and skew A: three products, counting A's own.

    A is skew to the last bit, so ``A X`` is tangent up to rounding relative to itself.
    """
    D = gram_minus_identity(X.mH)
    return Landing(product(torch.add(A, D, alpha=lam), X), D, frobenius_norm(D), 0.0)


def landing_from_gradient(
    X: Tensor,
    G: Tensor,
    lam: float,
    D: Tensor | None = None,
    W: Tensor | None = None,
    size: Tensor | None = None,
) -> Landing:
    """``Skew(G X^H) X + lam X (X^H X - I)`` for tall X: four n x p x p products, nothing n x n.

    ``G X^H X`` and ``X G^H X`` nearly cancel where G is normal, and the rounding that remains is
    relative to G and not tangent: it is reported, so that the safe step can allow for it.

    Args:
        X: matrices ``(..., n, p)``, n > p.
        G: a generator of the tangent part.
        lam: strength of the attraction.
        D: ``X^H X - I``, if it is known.
        W: ``X^H G``, if it is known.
        size: the norm of what G was computed from, if rounding in G is relative to that.
    """
    D = gram_minus_identity(X) if D is None else D
    d, size = frobenius_norm(D), frobenius_norm(G) if size is None else size
    error = tangency_bound(X.shape[-2], X.dtype, d, size)
    return Landing(tangent_from_gram(X, G, D, lam, W), D, d, error)


def tangency_bound(n: int, dtype: torch.dtype, d: Any, gradient_norm: Any) -> Any:
    """Bound on the rounding error in ``Sym(X^H R)`` in the right form, for X with n rows."""
    roundoff = product_roundoff(n, dtype)
    if isinstance(d, Tensor):
        return torch.addcmul(gradient_norm, gradient_norm, d) * roundoff
    return (1 + d) * gradient_norm * roundoff


def product_roundoff(n: int, dtype: torch.dtype) -> float:
    """Relative rounding error of sums of n products, and of a few operations around them."""
    return (8 + math.sqrt(n)) * torch.finfo(dtype).eps / 2
