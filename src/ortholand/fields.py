"""Fields that infeasible methods follow, ``X <- X - eta L``: landing, PLAM and the penalty's."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient, tangent_from_gram
from ortholand.geometry.matrices import gram_minus_identity, is_square


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
    return landing_along(X, relative_gradient(X, G) if is_square(X) else G, lam)


def plam_field(X: Tensor, G: Tensor, lam: float = 1.0) -> Tensor:
    """PLAM (Gao et al., 2019): ``G - Sym(G X^H) X + lam (X X^H - I) X``; off it, it can explode."""
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


def landing_along(
    X: Tensor, B: Tensor, lam: float, D: Tensor | None = None, W: Tensor | None = None
) -> Tensor:
    """The landing field of the direction that a generator B represents, with momentum or without.

    For square X, B is skew and the direction is ``B X``; for tall X it is ``Skew(B X^H) X``. There
    ``B X^H X`` and ``X B^H X`` nearly cancel where B is normal: the rounding that remains is
    relative to B and not tangent (:func:`tangency_bound`). D, if it is known, is ``X^H X - I`` of
    tall X, ``X X^H - I`` of square X, and W is ``X^H B``.
    """
    if is_square(X):
        D = gram_minus_identity(X.mH) if D is None else D
        return torch.add(B, D, alpha=lam) @ X
    return tangent_from_gram(X, B, gram_minus_identity(X) if D is None else D, lam, W)


def tangency_bound(n: int, dtype: torch.dtype, d: Any, gradient_norm: Any) -> Any:
    """Bound on the rounding error in ``Sym(X^H R)`` in the right form, for X with n rows."""
    roundoff = product_roundoff(n, dtype)
    if isinstance(d, Tensor):
        return torch.addcmul(gradient_norm, gradient_norm, d) * roundoff
    return (1 + d) * gradient_norm * roundoff


def product_roundoff(n: int, dtype: torch.dtype) -> float:
    """Relative rounding error of sums of n products, and of a few operations around them."""
    return (8 + math.sqrt(n)) * torch.finfo(dtype).eps / 2
