"""Move, then land: a Newton-Schulz step at the point that the tangent move has reached."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import (
    add_product,
    finite_matrices,
    frobenius_norm,
    gram_matrix,
    is_finite,
    is_square,
    max_abs,
    moved_along,
    per_matrix,
    product,
    skew,
    squared_column_norms,
    sym,
)
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    LimitedMove,
    Move,
    is_valid,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, Gram, plus_identity, times, trace
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import (
    FARTHEST,
    farthest_before_landing,
    largest_step_before_landing,
    share_of_tangent_move,
    spectral_bound,
    trial_step,
)


class After(Attraction):
    """The move to ``Y = X - t R``, then a Newton-Schulz step from a multiple of Y.

    The direction is ``R = A X`` for square X, and ``R = (B - X W^H) / 2`` for tall X and a B
    without multipliers, ``W = X^H B``. So ``E = Y^H Y - I`` is ``D + t Q + t^2 R^H R``, with
    ``Q = Sym(W D)`` for tall X, which is rounding where X is landed. E is measured, because landing
    needs it.

    A tangent move makes all singular values larger. So Y is first divided by ``(1 + m)^(1/2)``, m
    the mean eigenvalue of E, and the residual becomes ``F = (E - m I) / (1 + m)``. A Newton-Schulz
    step maps an eigenvalue f of it to ``-3/4 f^2 + 1/4 f^3``: the error is of order t^4. If
    ``||E||_2 <= ||E - m I|| + m`` is at most e_max, ``3/4 e_max^2 + 1/4 e_max^3 = eps``, the step
    ends in the ball; else a share of the move does, and its residual follows from D, Q and E. With
    ``landings = 2`` another Newton-Schulz step follows.
    """

    name = "after"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Move:
        """As the class says."""
        X = point.X
        R, start = tangent(point, direction)
        lr = options.lr if direction.length is None else direction.length * options.lr
        norm = frobenius_norm(R)
        t = _trial(lr, norm, R, start, options)
        Y = moved_along(X, R, t, out=R)
        C, q = centred_gram(Y)
        stop = settle(t, norm, C, q, start, lr, options, may_look=point.may_look)
        if stop.share is not None:
            Y = torch.lerp(X, Y, share_of(stop.share, X))
        Y = Y.mul_(per_matrix(stop.q.rsqrt(), X))
        Y = add_product(Y, Y, landing_of(stop, options.landings), alpha=-0.5)
        return LimitedMove.of(unless_zero(options.lr, Y, X), stop.taken, stop.limited)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form, with E derived; what rounding adds to it appears in the next step's D."""
        D, W = gram.D, gram.W
        square = sym(gram.T - product(W, 2 * W - product(plus_identity(D), W.mH))) / 4  # R^H R
        norm = (trace(square).clamp(min=0) + gram.unknown).sqrt()
        start = Start(lambda: D, lambda: W, lambda: gram.tangency_error)
        t = _trial(options.lr, norm, None, start, options)
        E = D + times(t, sym(product(W, D))) + times(t.square(), square)
        q = (1 + trace(E) / D.shape[-1]).clamp(min=1)
        E.diagonal(dim1=-2, dim2=-1).sub_((q - 1)[..., None])
        unknown = t.square() * gram.unknown
        stop = settle(t, norm, E, q, start, options.lr, options, unknown, may_look=False)
        t = t if stop.share is None else t * stop.share
        c = stop.q.rsqrt()
        N = times(-c / 2, landing_of(stop, options.landings))
        N.diagonal(dim1=-2, dim2=-1).add_((c - 1)[..., None])  # the landed point is Y (I + N)
        a = times(t / 2, W.mH)
        a = unless_zero(options.lr, add_product(a + N, a, N), torch.zeros_like(a))
        b = times(-t / 2, plus_identity(N))
        return Coefficients(a, b, stop.taken & finite_matrices(N), stop.limited)


class Start(NamedTuple):
    """Where a tangent move starts: a share theta of it reaches ``D + theta Q + theta^2 P``."""

    D: Callable[[], Tensor]
    W: Callable[[], Tensor] | None = None  # Q = t Sym(W D); None: zero, for square X
    error: Callable[[], Tensor] | None = None  # bound of ||Sym(X^H R)|| that is due to rounding

    def drift(self, t: Tensor, D: Tensor) -> Tensor | None:
        """Q, for a move by t; None: zero."""
        return None if self.W is None else times(t, sym(product(self.W(), D)))

    def tilt(self, t: Tensor) -> Tensor | float:
        """Bound of what rounding adds to Q."""
        return 0.0 if self.error is None else 2 * t * self.error()


def tangent(point: Point, direction: Direction) -> tuple[Tensor, Start]:
    """The tangent direction R of a generator B, and where the move starts."""
    X, B = point.X, direction.B
    if is_square(X):
        return product(B, X), Start(lambda: point.D)

    def error() -> Tensor:
        size = frobenius_norm(B) if direction.size is None else direction.size
        return tangency_bound(X.shape[-2], X.dtype, frobenius_norm(point.D), size)

    if direction.W is not None:
        R = add_product(B, X, direction.W.mH, beta=0.5, alpha=-0.5)
        return R, Start(lambda: point.D, lambda: direction.W, error)
    # Without B's multiplier K: B - X K - X W^H is B - X Z^H, with Z = M - D K and W = Z - K.
    M = product(X.mH, B)
    if point.is_landed:
        Z, W = M, lambda: skew(M)
    else:
        K = point.multiplier(M)
        Z = add_product(M, point.D, K, alpha=-1)
        W = lambda: Z - K  # noqa: E731
    R = add_product(B, X, Z.mH, beta=0.5, alpha=-0.5)
    return R, Start(lambda: point.D, W, error)


def _trial(
    lr: float | Tensor, norm: Tensor, R: Tensor | None, start: Start, options: LandingOptions
) -> Tensor:
    """The step to try; a safe one already if the rule bounds it before the move."""
    rule = options.rule
    if rule is None:
        return torch.ones_like(norm) * lr
    if rule.is_measured:
        return trial_step(lr, norm, start.D().shape[-1] if R is None else R.shape[-1])
    bound = norm if R is None else rule.bound(R)
    error = 0.0 if start.error is None else start.error()
    aim = rule.aim(options.eps)
    safe = largest_step_before_landing(bound, frobenius_norm(start.D()), aim, error)
    return torch.minimum(safe, lr) if isinstance(lr, Tensor) else safe.clamp(max=lr)


def centred_gram(Y: Tensor) -> tuple[Tensor, Tensor]:
    """``Y^H Y - q I`` and q, the mean squared singular value of Y, but at least 1.

    The diagonal is summed in float64: in float32 it would make up half of the rounding error in
    ``||Y^H Y - I||`` at p = 100.
    """
    C, s = gram_matrix(Y), squared_column_norms(Y)
    q = s.mean(-1).clamp(min=1)
    C.diagonal(dim1=-2, dim2=-1).copy_(s - q[..., None])
    return C, q


class Stop(NamedTuple):
    """Where a move stops, and from where it lands."""

    share: Tensor | None  # of the trial move, (...); None: all of it
    q: Tensor  # Y is divided by q^(1/2)
    C: Tensor  # Y^H Y - q I
    taken: Tensor
    limited: Tensor | None


def settle(
    t: Tensor,
    norm: Tensor,
    C: Tensor,
    q: Tensor,
    start: Start,
    lr: float | Tensor,
    options: LandingOptions,
    unknown: Tensor | float = 0.0,
    *,
    may_look: bool,
) -> Stop:
    """How much of a trial move is taken, from the residual that it has reached.

    If only a share theta is, the residual is ``D + theta Q + theta^2 P``, and the mean that is
    taken off before landing is theta^2 times that of the trial move.

    Args:
        t: the length of the trial move ``X - t R``.
        norm: ``||R||_F``.
        C: ``Y^H Y - q I`` after it.
        q: the mean squared singular value of Y, at least 1.
        start: gives D and Q, which are needed only where the move is too long.
        lr: the length that was asked for.
        options: how matrices land.
        unknown: bound of an error of C.
        may_look: whether values may be read. If all moves are safe, D is then never formed.
    """
    rule, limit = options.rule, farthest_before_landing(options.aim)
    if rule is None or not rule.is_measured:
        taken, limited = is_valid(is_finite(t * norm), options.lr), None
        if rule is not None:
            taken, limited = taken & (frobenius_norm(start.D()) < FARTHEST), t < lr
        return Stop(None, q, C, taken, limited)
    if may_look:
        far = torch.add(frobenius_norm(C) + (q + unknown), norm, alpha=0)  # NaN if norm is infinite
        if bool((far <= 1 + limit).all()):
            return Stop(None, q, C, far < math.inf, t < lr)
    reached = spectral_bound(C) + (q - 1) + unknown
    D = start.D()
    Q, below = start.drift(t, D), max_abs(D)
    delta = torch.maximum(frobenius_norm(D).clamp(max=options.eps), below)
    drift, P = None, reached + delta
    if Q is not None:
        drift = frobenius_norm(Q) + (1 + 2 / limit) * start.tilt(t)
        P = P + drift
    added = (t * norm).square()
    share = share_of_tangent_move(torch.minimum(P, added), drift, limit - delta)
    share = share.masked_fill_(reached <= limit, 1.0)
    square = share.square()
    C = torch.lerp(D, C, share_of(square, C))
    if Q is not None:
        C = torch.addcmul(C, Q, per_matrix(share - square, C))
    q = torch.addcmul(1 - square, square, q)
    taken = torch.addcmul(below, share, added, value=0) < FARTHEST  # 0 times infinity is NaN
    return Stop(share, q, C, is_valid(taken, options.lr), t * share < lr)


def share_of(value: Tensor, M: Tensor) -> Tensor:
    """A share for each matrix, in the matrices' own type, as ``torch.lerp`` wants it."""
    return value.to(M.dtype)[..., None, None]


def landing_of(stop: Stop, landings: int) -> Tensor:
    """V for which ``Y - Y V / 2`` is Y, of residual F, after one or two Newton-Schulz steps.

    A step maps ``1 + f`` to ``(1 + f) (1 - f / 2)^2``, so the second's factor is
    ``1 + 3/8 f^2 - 1/8 f^3``.
    """
    F = stop.C / per_matrix(stop.q, stop.C)
    if landings == 1:
        return F
    square = product(F, F)
    return add_product(F - 0.75 * square, square, 0.625 * F - 0.125 * square)
