"""Move, then land: a Newton-Schulz step at the point that the tangent move has reached."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import (
    add_product,
    add_product_,
    finite_matrices,
    frobenius_norm,
    gram_matrix,
    is_finite,
    is_square,
    max_abs,
    moved_along,
    per_matrix,
    squared_column_norms,
    sym,
)
from ortholand.landing.attraction import (
    LONGEST_LOOKED_AT,
    Attraction,
    LandingOptions,
    Step,
    is_valid,
    moved_by_lr,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, Gram, plus_identity, times, trace
from ortholand.landing.point import Direction, Point, looked_at
from ortholand.safe_step import (
    FARTHEST,
    SafeStepRule,
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

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Step:
        """As the class says."""
        X = point.X
        M = None if is_square(X) or direction.W is not None else X.mH @ direction.B
        lr = options.lr if direction.length is None else direction.length * options.lr
        found = None if X.ndim == 2 else tangent(point, direction, M)
        if point.may_look and 0 < options.lr < LONGEST_LOOKED_AT:
            if found is None:
                Y = _moved_by_lr(point, direction, M, float(lr))
            elif isinstance(lr, Tensor):
                Y = moved_along(X, found[0], lr)
            else:
                Y = moved_by_lr(X, found[0], lr)
            C, q = centred_gram(Y)
            if looked_at(C) + float(q.max()) <= 1 + options.limit:
                q = q if q.ndim or options.landings > 1 else float(q)
                return Step(landed(Y, C, q, options.landings))
        R, W = found or tangent(point, direction, M)

        def start() -> tuple[Tensor, Tensor | None, Tensor | float]:
            if W is None:
                return point.D, None, 0.0
            d, size = frobenius_norm(point.D), direction.size(frobenius_norm)
            return point.D, W, tangency_bound(X.shape[-2], X.dtype, d, size)

        norm = frobenius_norm(R)
        t = _trial(lr, norm, X.shape[-1], options, lambda rule: rule.bound(R), start)
        Y = moved_along(X, R, t, out=R)
        stop = settle(t, norm, *centred_gram(Y), start, lr, options)
        if stop.share is not None:
            Y = torch.lerp(X, Y, share_of(stop.share, X))
        Y = landed(Y, stop.C, stop.q, options.landings)
        return Step(unless_zero(options.lr, Y, X), stop.taken, stop.limited)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form, with E derived; what rounding adds to it appears in the next step's D."""
        D, W = gram.D, gram.W
        square = sym(gram.T - W @ (2 * W - plus_identity(D) @ W.mH)) / 4  # R^H R
        norm = (trace(square).clamp(min=0) + gram.unknown).sqrt()

        def start() -> tuple[Tensor, Tensor | None, Tensor | float]:
            return D, W, gram.tangency_error

        t = _trial(options.lr, norm, D.shape[-1], options, lambda _: norm, start)
        E = D + times(t, sym(W @ D)) + times(t.square(), square)
        q = (1 + trace(E) / D.shape[-1]).clamp(min=1)
        E.diagonal(dim1=-2, dim2=-1).sub_((q - 1)[..., None])
        unknown = t.square() * gram.unknown
        stop = settle(t, norm, E, q, start, options.lr, options, unknown)
        t = t if stop.share is None else t * stop.share
        c = stop.q.rsqrt()
        N = times(-c / 2, landing_of(stop.C, stop.q, options.landings))
        N.diagonal(dim1=-2, dim2=-1).add_((c - 1)[..., None])  # the landed point is Y (I + N)
        a = times(t / 2, W.mH)
        a = unless_zero(options.lr, add_product(a + N, a, N), torch.zeros_like(a))
        b = times(-t / 2, plus_identity(N))
        return Coefficients(a, b, stop.taken & finite_matrices(N), stop.limited)


Start = Callable[[], tuple[Tensor, Tensor | None, Tensor | float]]


def tangent(point: Point, direction: Direction, M: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tangent direction R of a generator B, and its W, None for square X.

    ``M = X^H B`` is given unless W is known.
    """
    X, B = point.X, direction.B
    if is_square(X):
        return B @ X, None
    Z = W = direction.W
    if M is not None:
        # Without B's multiplier K: B - X K - X W^H is B - X Z^H, with Z = M - D K and W = Z - K.
        K = point.multiplier(M)
        Z = M if point.is_landed else add_product(M, point.D, K, alpha=-1)
        W = Z - K
    assert Z is not None
    return add_product(B, X, Z.mH, beta=0.5, alpha=-0.5), W


def _moved_by_lr(point: Point, direction: Direction, M: Tensor | None, lr: float) -> Tensor:
    """``X - lr R`` for one matrix, without R itself: in one pass less than by :func:`tangent`."""
    X, (B, _, Z, _) = point.X, direction
    if is_square(X):
        return add_product(X, B, X, alpha=-lr)
    if M is not None:
        Z = M if point.is_landed else add_product(M, point.D, point.multiplier(M), alpha=-1)
    assert Z is not None
    return add_product_(torch.sub(X, B, alpha=lr / 2), X, Z.mH, alpha=lr / 2)


def _trial(
    lr: float | Tensor,
    norm: Tensor,
    p: int,
    options: LandingOptions,
    bound: Callable[[SafeStepRule], Tensor],
    start: Start,
) -> Tensor:
    """The step to try; a safe one already if the rule bounds it before the move."""
    rule = options.rule
    if rule is None:
        return torch.ones_like(norm) * lr
    if rule.is_measured:
        return trial_step(lr, norm, p)
    D, _, error = start()
    safe = largest_step_before_landing(bound(rule), frobenius_norm(D), options.aim, error)
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
) -> Stop:
    """How much of a trial move is taken, from the residual that it has reached.

    If only a share theta is, the residual is ``D + theta Q + theta^2 P``, and the mean that is
    taken off before landing is theta^2 times that of the trial move.

    Args:
        t: the length of the trial move ``X - t R``.
        norm: ``||R||_F``.
        C: ``Y^H Y - q I`` after it.
        q: the mean squared singular value of Y, at least 1.
        start: gives D, W (``Q = t Sym(W D)``; None: zero, for square X), and a bound of
            ``||Sym(X^H R)||`` that is due to rounding.
        lr: the length that was asked for.
        options: how matrices land.
        unknown: bound of an error of C.
    """
    rule, limit = options.rule, options.limit
    if rule is None:
        return Stop(None, q, C, is_valid(is_finite(t * norm), options.lr), None)
    D, W, error = start()
    if not rule.is_measured:
        taken = is_finite(t * norm) & (frobenius_norm(D) < FARTHEST)
        return Stop(None, q, C, is_valid(taken, options.lr), t < lr)
    reached, below = spectral_bound(C) + (q - 1) + unknown, max_abs(D)
    delta = torch.maximum(frobenius_norm(D).clamp(max=options.eps), below)
    Q, drift, P = None, None, reached + delta
    if W is not None:
        Q = times(t, sym(W @ D))
        drift = frobenius_norm(Q) + (1 + 2 / limit) * 2 * t * error
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


def landed(Y: Tensor, C: Tensor, q: Tensor | float, landings: int) -> Tensor:
    """Newton-Schulz steps from ``Y q^(-1/2)``, in Y's memory; ``C = Y^H Y - q I``."""
    if not isinstance(q, Tensor):  # one landing of one matrix, in one call
        return add_product(Y, Y, C, beta=q**-0.5, alpha=-0.5 * q**-1.5)
    Y = Y.mul_(per_matrix(q.rsqrt(), Y))
    return add_product(Y, Y, landing_of(C, q, landings), alpha=-0.5)


def landing_of(C: Tensor, q: Tensor, landings: int) -> Tensor:
    """V for which ``Y - Y V / 2`` is Y, of residual F, after one or two Newton-Schulz steps.

    A step maps ``1 + f`` to ``(1 + f) (1 - f / 2)^2``, so the second's factor is
    ``1 + 3/8 f^2 - 1/8 f^3``.
    """
    F = C / per_matrix(q, C)
    if landings == 1:
        return F
    square = F @ F
    return add_product(F - 0.75 * square, square, 0.625 * F - 0.125 * square)
