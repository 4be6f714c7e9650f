"""Polar factors by products only: msign, and roots of Gram matrices.

``msign(M) = U V^H`` for ``M = U diag(s) V^H``: every singular value becomes 1, and zero stays zero.
An odd polynomial of M acts on its singular values, so compositions of odd quintics that map
[l, 1] to 1 compute it with three products each.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    add_identity,
    add_product,
    frobenius_norm,
    gram_matrix,
    is_plain_cpu,
    is_square,
    is_tracked,
    max_abs,
    per_matrix,
    product,
    skew,
    tall,
    to_working_dtype,
)
from ortholand.geometry.precision import without_autocast


class Level(NamedTuple):
    """An odd quintic ``a x + b x^3 + c x^5`` that maps [low, 1] into the level below's [low, 1]."""

    low: float
    a: float
    b: float
    c: float


# The first level maps [low, 1] to 1 within 1e-6, and never above 1; each other one maps its own
# interval into that of the level before, less 1/256 at the upper end, where the next quintic is
# steep and rounding must not overshoot. Each is the best approximation of 1, computed by
# tools/polar_levels.py; that their compositions are the best of all was shown by Amsel, Persson,
# Musco and Gower (2025). Theirs go on to lower and lower intervals, for a slope of 4.24 instead of
# 4.04, and take large singular values to tiny ones on the way, which magnifies rounding a
# thousandfold. So here the last level is repeated: it leads to at least 0.2.
LEVELS = (
    Level(0.9816, 1.8924965893582677, -1.2852389397804085, 0.39274235042214083),
    Level(0.6314, 2.341056326883348, -2.388692203307979, 1.0437448258409734),
    Level(0.1974, 3.4701429581465812, -7.1570466903343477, 4.6830126816041089),
    Level(0.04914, 4.0439626334277336, -11.007522204514154, 7.9596685205027628),
)
PADE = Level(1.0, 15 / 8, -10 / 8, 3 / 8)  # from 1e-6 to 1e-18: msign in double precision
MOST_STEPS = 11
STEPS = 7
MARGIN = 1 / 256


def msign(M: Tensor, steps: int = STEPS) -> Tensor:
    """The polar factor ``U V^H`` of each matrix ``M = U diag(s) V^H``, by products only.

    Args:
        M: matrices ``(..., n, p)`` of any shape, rank and scale. Half precision is computed in
            float32.
        steps: quintic steps, of three products each, from 1 to 11. Singular values of at least
            ``low`` times the largest become 1 within 1e-6 (in double precision, 1e-15); smaller
            ones end between 0 and 1, never above. ``low`` is 0.05 with 4 steps, 8e-4 with 7, and
            a quarter as large with each further one, while it exceeds the type's rounding. (The
            largest is known by a bound, which may be too large by ``p^(1/8)``.)

    Returns:
        Matrices of M's shape and type. Zero gives zero, a matrix with NaN or infinite entries gives
        NaN, and a skew matrix gives one that is skew to the last bit.

    >>> import torch
    >>> msign(torch.tensor([[0.0, -3.0], [3.0, 0.0]])).round(decimals=4)
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """
    check_steps(steps)
    if not isinstance(M, Tensor) or not (M.is_floating_point() or M.is_complex()):
        kind = M.dtype if isinstance(M, Tensor) else type(M).__name__
        raise TypeError(f"msign takes a floating or complex tensor, got {kind}: use M.float().")
    if M.ndim < 2:
        raise ValueError(f"msign takes matrices (..., n, p), got shape {tuple(M.shape)}.")
    if M.numel() == 0:
        return M.clone()
    with without_autocast([M]):
        working = to_working_dtype(M)
        P = polar_factor(tall(working), steps, exact=True)
        P = P if P.shape == M.shape else P.mT
        if is_square(M):
            was_skew = (working == -working.mH).all(dim=-1).all(dim=-1)[..., None, None]
            P = torch.where(was_skew, skew(P), P)
        return P.to(M.dtype)


def check_steps(steps: int) -> None:
    """Raise unless there are quintics for that many steps."""
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise TypeError(f"steps must be an integer, got {steps!r}.")
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(
            f"steps must be from 1 to {MOST_STEPS}, got {steps}: {STEPS} reach singular values of "
            f"{lowest(STEPS):.0e} times the largest, {MOST_STEPS} what float32 can hold."
        )


def lowest(steps: int) -> float:
    """The smallest share of the largest singular value that this many steps take to 1."""
    last = LEVELS[-1]
    more = steps - len(LEVELS)
    return LEVELS[steps - 1].low if more <= 0 else last.low / last.a**more


def levels(steps: int) -> tuple[Level, ...]:
    """The quintics of this many steps, in order of application."""
    more = max(0, steps - len(LEVELS))
    return (LEVELS[-1],) * more + LEVELS[:steps][::-1]


def polar_factor(
    M: Tensor, steps: int, *, exact: bool = False, columns: int | None = None
) -> Tensor:
    """:func:`msign` of matrices with n >= p in a type suitable for computation.

    ``exact``: take one more step in double precision. Without it, all types share one function.
    ``columns``: how many columns to compute, if not all; the last step computes no others.
    """
    M = in_range(M)
    E = gram_matrix(M)
    F = product(E, E)
    scale = inverse_bound(F)  # the products of the first step bound M for free
    M, E, F = M * per_matrix(scale, M), _times(E, scale, 2), _times(F, scale, 4)
    first, *others = levels(steps)
    if exact and torch.finfo(M.dtype).bits > 32:
        others.append(PADE)
    M = add_product(M, M, first.b * E + first.c * F, beta=first.a)
    for i, (_, a, b, c) in enumerate(others):
        E = gram_matrix(M)
        few = slice(columns if i == len(others) - 1 else None)
        q = add_product(E[..., few], E, E[..., few], beta=b, alpha=c)
        M = add_product(M[..., few], M, q, beta=a)
    return M[..., :columns]


def in_range(M: Tensor) -> Tensor:
    """Each matrix divided by a number to have Frobenius norm about 1; zero stays zero."""
    tiny = torch.finfo(M.dtype).tiny
    # Moduli may overflow where real and imaginary parts do not.
    largest = torch.maximum(max_abs(M.real), max_abs(M.imag)) if M.is_complex() else max_abs(M)
    M = M / per_matrix(largest.clamp(min=tiny), M)
    norm = per_matrix(frobenius_norm(M).clamp(min=tiny), M)
    # New memory costs more than the division.
    return M.div_(norm) if is_plain_cpu(M) and not is_tracked(M) else M / norm


def inverse_bound(F: Tensor) -> Tensor:
    """A factor that takes M below norm 1, from ``F = (M^H M)^2``, for M of Frobenius norm 1.

    ``||M||_2 <= ||F||_F^(1/4) <= p^(1/8) ||M||_2``.
    """
    bound = frobenius_norm(F).sqrt().sqrt() * (1 + MARGIN)
    return 1 / bound.clamp(min=1e-3)  # p^(-3/8) at least, but for matrices of zeros


def _times(E: Tensor, scale: Tensor, power: int) -> Tensor:
    return E * per_matrix(scale**power, E)


def gram_roots(D: Tensor, farthest: float) -> tuple[Tensor, Tensor]:
    """``S^(1/2)`` and ``S^(-1/2)`` of ``S = I + D``, Hermitian, by coupled Newton-Schulz steps.

    Args:
        D: residuals ``X^H X - I``.
        farthest: the largest ``||D||_2`` expected, below 1; it decides how many steps are taken.
            Larger D give a finite result too.
    """
    # Steps converge only from below 3. Divided by more than necessary, S would need more of them.
    scale = ((1 + _norm_bound(D)) / 2).clamp(min=1)
    root = add_identity(D) / per_matrix(scale, D)
    inverse = step = _halfway(root)
    root = product(root, step)
    for _ in range(_root_steps(farthest, D.dtype) - 1):
        step = _halfway(product(inverse, root))
        root, inverse = product(root, step), product(step, inverse)
    factor = scale.sqrt()
    return root * per_matrix(factor, D), inverse / per_matrix(factor, D)


def _norm_bound(D: Tensor) -> Tensor:
    """``||D^4||_F^(1/4)``, which exceeds ``||D||_2`` by a factor of ``p^(1/8)`` at most."""
    d = torch.linalg.vector_norm(D, dim=(-2, -1)).clamp(min=torch.finfo(D.dtype).tiny)
    D = D / per_matrix(d, D)
    D = product(D, D)
    return d * torch.linalg.vector_norm(product(D, D), dim=(-2, -1)).sqrt().sqrt()


def _halfway(S: Tensor) -> Tensor:
    """``(3 I - S) / 2``."""
    return add_identity(S / -2, 1.5)


def _root_steps(e: float, dtype: torch.dtype) -> int:
    """Newton-Schulz steps from ``||D||_2 <= e`` to rounding: each takes e to 3/4 e^2 + 1/4 e^3."""
    steps = 0
    while e > torch.finfo(dtype).eps / 4 or steps == 0:
        e, steps = 0.75 * e**2 + 0.25 * e**3, steps + 1
    return steps
