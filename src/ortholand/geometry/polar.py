"""Polar factors by products only: ``msign(M) = U V^H`` for ``M = U diag(s) V^H``.

An odd polynomial of M acts on its singular values, so compositions of odd polynomials that map
[l, 1] to 1 compute it. With three products each, they have degree 5, or 7 if M is skew.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    add_product,
    adjoint,
    frobenius_norm,
    gram_matrix,
    is_plain_cpu,
    is_square,
    max_abs,
    per_matrix,
    skew,
    tall,
    to_working_dtype,
    without_autocast,
)


class Level(NamedTuple):
    """An odd quintic ``a x + b x^3 + c x^5`` that maps [low, 1] into the level below's [low, 1]."""

    low: float
    a: float
    b: float
    c: float


class SkewLevel(NamedTuple):
    """``x (x^2 + m) (i + d x^2 (x^2 + e))``, of degree 7, in place of :class:`Level`'s quintic."""

    low: float
    m: float
    e: float
    i: float
    d: float


AnyLevel = TypeVar("AnyLevel", Level, SkewLevel)

# The first level maps [low, 1] to 1 within 1e-6, and never above 1; each other one maps its own
# interval into that of the level before, less 1/256 at the upper end, where rounding must not
# overshoot. Each is the best approximation of 1 (tools/polar_levels.py); their compositions are the
# best of all (Amsel, Persson, Musco and Gower, 2025). Theirs go on to lower intervals, for a slope
# of 4.24 instead of 4.04, but magnify rounding a thousandfold on the way. So here the last level is
# repeated: it leads to at least 0.2.
LEVELS = (
    Level(0.9816, 1.8924965893582677, -1.2852389397804085, 0.39274235042214083),
    Level(0.6314, 2.341056326883348, -2.388692203307979, 1.0437448258409734),
    Level(0.1974, 3.4701429581465812, -7.1570466903343477, 4.6830126816041089),
    Level(0.04914, 4.0439626334277336, -11.007522204514154, 7.9596685205027628),
)
SKEW_LEVELS = (
    SkewLevel(
        0.94, -2.3778704968680986, -1.5767435707001912, -0.9488834950178896, -0.386873163681033
    ),
    SkewLevel(
        0.3611, -1.3148069696190856, -0.944305192727782, -2.714751570370362, -4.8703772423542565
    ),
    SkewLevel(
        0.06909, -1.0379215665476658, -0.8253223832329883, -5.15658388321684, -24.993908143874626
    ),
    SkewLevel(
        0.0119, -1.0057465138148314, -0.8148313634788547, -5.77880510844405, -33.72446544577894
    ),
)
PADE = Level(1.0, 15 / 8, -10 / 8, 3 / 8)  # from 1e-6 to 1e-18: msign in double precision
MOST_STEPS = 11
STEPS = 7  # of msign
SKEW_STEPS = 4  # of the polar factors of skew matrices
MARGIN = 1 / 256
HALF_FROM = 192  # columns from which products in bfloat16 make up for the conversion
# Without these tiles bfloat16 is no faster on a CPU. Older versions of torch do not name them.
HAS_TILES = bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))


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
        P = polar_factor(in_range(tall(working)), steps, exact=True)
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


def lowest(steps: int, table: Sequence[Level | SkewLevel] = LEVELS) -> float:
    """The smallest share of the largest singular value that this many steps take to 1."""
    last, more = table[-1], steps - len(table)
    slope = last.a if isinstance(last, Level) else last.m * last.i
    return table[steps - 1].low if more <= 0 else last.low / slope**more


def levels(steps: int, table: tuple[AnyLevel, ...]) -> tuple[AnyLevel, ...]:
    """The polynomials of this many steps, in order of application."""
    return (table[-1],) * (steps - len(table)) + table[:steps][::-1]


def polar_factor(M: Tensor, steps: int, *, exact: bool = False) -> Tensor:
    """:func:`msign` of matrices with n >= p and norm 1; ``exact``: a step more in float64."""
    E = gram_matrix(M)
    F = E @ E
    scale = inverse_bound(F)  # the products of the first step bound M for free
    M, E, F = (P * per_matrix(scale**k, P) for k, P in ((1, M), (2, E), (4, F)))
    first, *others = levels(steps, LEVELS)
    if exact and torch.finfo(M.dtype).bits > 32:
        others.append(PADE)
    M = add_product(M, M, first.b * E + first.c * F, beta=first.a)
    for _, a, b, c in others:
        E = gram_matrix(M)
        M = add_product(M, M, add_product(E, E, E, beta=b, alpha=c), beta=a)
    return M


def skew_polar_factor(
    M: Tensor,
    steps: int,
    columns: int | None = None,
    *,
    half: bool | None = None,
    may_look: bool = False,
) -> Tensor:
    """:func:`msign` of skew matrices, or its first columns, by polynomials of degree 7.

    Even powers of M are Hermitian, odd ones skew. So one product yields an even and an odd
    polynomial, and three products yield degree 7. ``half`` (None: where it is fast) takes quintic
    steps in bfloat16 instead; what they leave, singular values within 0.01 of 1, is made skew in
    M's own type, where the last step ``(3 M - M^3) / 2`` is.
    """
    M = in_range(M, may_look=may_look)
    if half is None and (half := M.dtype == torch.float32 and M.shape[-1] >= HALF_FROM):
        has_tensor_cores = M.is_cuda and torch.cuda.get_device_capability(M.device) >= (8, 0)
        half = has_tensor_cores or (HAS_TILES and M.is_cpu)
    if half:
        M = skew(polar_factor(M.bfloat16(), steps + 1).to(M.dtype))
        first = M[..., :columns]
        return add_product(first, M, M @ first, beta=1.5, alpha=0.5)
    powers = _powers(M)
    scale = per_matrix(inverse_bound(powers[-1] / 2), M)
    square = scale * scale
    factors = (scale, square, square * scale, square * square)
    powers = [P * factor for P, factor in zip(powers, factors, strict=True)]
    *others, last = levels(steps, SKEW_LEVELS)
    for level in others:
        part = _applied(level, powers, 0.5)
        powers = _powers(part - adjoint(part))
    return _applied(last, powers, columns=columns)


def _powers(M: Tensor) -> list[Tensor]:
    """``M, E, 2 M E, 2 E^2`` of skew M, with ``E = M^H M``, by two products."""
    E = gram_matrix(M)
    both = E @ (E + M)
    other = adjoint(both)
    return [M, E, both - other, both + other]


def _applied(
    level: SkewLevel, powers: list[Tensor], factor: float = 1.0, columns: int | None = None
) -> Tensor:
    """A polynomial of M times a factor, or some columns of it, from the powers of M."""
    M, E, ME, F = powers
    odd = torch.add(ME, M, alpha=2 * level.m)
    even = torch.add(F, E, alpha=2 * level.e)[..., :columns]
    beta, alpha = factor * level.i / 2, factor * level.d / 4
    return add_product(odd[..., :columns], odd, even, beta=beta, alpha=alpha)


def in_range(M: Tensor, *, may_look: bool = False) -> Tensor:
    """Each matrix divided by a number to have Frobenius norm about 1; zero stays zero."""
    if may_look and M.ndim == 2 and is_plain_cpu(M):
        norm = torch.linalg.vector_norm(M)
        if 1e-12 < float(norm) < 1e18:  # squares neither overflow nor vanish
            return M / norm
    tiny = torch.finfo(M.dtype).tiny
    # Moduli may overflow where real and imaginary parts do not.
    largest = torch.maximum(max_abs(M.real), max_abs(M.imag)) if M.is_complex() else max_abs(M)
    M = M / per_matrix(largest.clamp(min=tiny), M)
    return M / per_matrix(frobenius_norm(M).clamp(min=tiny), M)


def inverse_bound(F: Tensor) -> Tensor:
    """A factor that takes M below norm 1: ``||M||_2 <= ||F||_F^(1/4)``, ``F = (M^H M)^2``."""
    bound = torch.linalg.vector_norm(F, dim=(-2, -1)).sqrt().sqrt() * (1 + MARGIN)
    return 1 / bound.clamp(min=1e-3)  # p^(-3/8) at least, but for matrices of zeros
