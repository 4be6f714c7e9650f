"""Move, then land: a Newton-Schulz step at the point that the tangent move has reached."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    add_identity,
    add_product,
    add_product_,
    finite_matrices,
    frobenius_norm,
    gram_matrix,
    identity_like,
    is_square,
    max_abs,
    moved_along,
    per_matrix,
    skew,
    squared_column_norms,
    sym,
)
from ortholand.landing.attraction import (
    LONGEST_LOOKED_AT,
    Attraction,
    LandingOptions,
    Step,
    at_most,
    is_valid,
    moved_by_lr,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, Gram, norm_from, times, trace
from ortholand.landing.point import Direction, Point, looked_at
from ortholand.safe_step import (
    FARTHEST,
    largest_root,
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
        X, rule, landings = point.X, options.rule, options.landings
        lr = options.lr if direction.length is None else direction.length * options.lr
        B, Z, W = direction.B, None, None
        if not is_square(X):
            Z, W = without_multiplier(point, direction)
        R = None if X.ndim == 2 else tangent(X, B, Z)
        if point.may_look and 0 < options.lr < LONGEST_LOOKED_AT:
            Y = moved_at_once(X, B, Z, float(lr)) if R is None else moved_by_lr(X, R, lr)
            C, q = centred_gram(Y)
            if looked_at(C) + float(q.max()) <= 1 + options.limit:
                return Step(landed(Y, C, q, landings))
        R = tangent(X, B, Z) if R is None else R
        start = Start(lr, frobenius_norm(R), options)
        if rule is not None:
            d = frobenius_norm(point.D)
            error = 0.0 if W is None else direction.tangency_error(X, d, frobenius_norm)
            start = start._replace(D=point.D, d=d, W=W, error=error)
        t = start.trial(start.norm if rule is None or rule.is_measured else rule.bound(R))
        Y = moved_along(X, R, t, out=R)
        share, shrink, F, taken, limited = start.settle(t, *centred_gram(Y))
        Y = Y if share is None else torch.lerp(X, Y, share, out=Y)
        Y = add_product(Y.mul_(shrink), Y, landing_of(F, landings), alpha=-0.5)
        return Step(unless_zero(options.lr, Y, X), taken, limited)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form, with E derived; what rounding adds to it appears in the next step's D."""
        D, W = gram.D, gram.W
        square = sym(gram.T - W @ (2 * W - add_identity(D) @ W.mH)) / 4  # R^H R
        norm = norm_from(square, gram)
        start = Start(options.lr, norm, options, D, gram.d, W, gram.tangency_error, gram.unknown)
        t = start.trial(norm)
        E = D + times(t, sym(W @ D)) + times(t.square(), square)
        q = (1 + trace(E) / D.shape[-1]).clamp(min=1)
        E.diagonal(dim1=-2, dim2=-1).sub_((q - 1)[..., None])
        share, shrink, F, taken, limited = start.settle(t, E, q)
        t = per_matrix(t, D) if share is None else per_matrix(t, D) * share
        N = landing_of(F, options.landings) * (shrink / -2)
        N = N + (shrink - 1) * identity_like(D)  # the landed point is Y (I + N)
        a = W.mH * (t / 2)
        a = unless_zero(options.lr, add_product(a + N, a, N), torch.zeros_like(a))
        b = add_identity(N) * (t / -2)
        return Coefficients(a, b, taken & finite_matrices(N), limited)


def without_multiplier(point: Point, direction: Direction) -> tuple[Tensor, Tensor]:
    """Z for which ``R = (B - X Z^H) / 2``, and W, for tall X.

    With B's multiplier K, ``B - X K - X W^H`` is ``B - X Z^H``, where ``Z = M - D K``,
    ``M = X^H B`` and ``W = Z - K``. What is known as ``B + X V`` has ``Z = W - V^H``.
    """
    W, V = direction.W, direction.V
    if W is not None:
        return W if V is None else W - V.mH, W
    M = point.X.mH @ direction.B
    if point.is_landed:
        return M, skew(M)
    K = point.multiplier(M)
    Z = add_product(M, point.D, K, alpha=-1)
    return Z, Z - K


def tangent(X: Tensor, B: Tensor, Z: Tensor | None) -> Tensor:
    """The tangent direction R of a generator B; Z is None for square X."""
    return B @ X if Z is None else add_product(B, X, Z.mH, beta=0.5, alpha=-0.5)


def moved_at_once(X: Tensor, B: Tensor, Z: Tensor | None, lr: float) -> Tensor:
    """``X - lr R`` for one matrix, without R itself: in one pass less than by :func:`tangent`."""
    if Z is None:
        return add_product(X, B, X, alpha=-lr)
    return add_product_(torch.sub(X, B, alpha=lr / 2), X, Z.mH, alpha=lr / 2)


class Start(NamedTuple):
    """From where a move starts. All but the first three are for the safe step."""

    lr: float | Tensor  # the length that is asked for
    norm: Tensor  # ||R||_F
    options: LandingOptions
    D: Any = None  # X^H X - I
    d: Any = None  # ||D||_F
    W: Tensor | None = None  # X^H B, B without multipliers; None for square X
    error: Any = None  # bound of ||Sym(X^H R)||, which is due to rounding
    unknown: Tensor | None = None  # bound of the error of R^H R; None: zero

    def trial(self, bound: Tensor) -> Tensor:
        """The step to try; if the rule bounds it before the move, a safe one already."""
        if self.d is None:
            return torch.ones_like(self.norm) * self.lr
        if self.options.is_measured:
            return trial_step(self.lr, self.norm, self.D.shape[-1])
        safe = largest_root(bound, -self.error, self.options.limit - self.d)
        return at_most(self.lr, safe)

    def settle(self, t: Tensor, C: Tensor, q: Tensor) -> tuple[Any, ...]:
        """How much of a trial move by t is taken, from the residual that it has reached.

        That is its share (None: all), ``q^(-1/2)``, ``F = Y^H Y / q - I`` where it ends, which
        matrices may go there, and where that is less than lr.

        If only a share theta is, the residual is ``D + theta Q + theta^2 P``, ``Q = t Sym(W D)``
        (zero for square X), and the mean that is taken off before landing is theta^2 times that
        of the trial move. ``C`` is ``Y^H Y - q I`` after it, whose memory is used, and q the mean
        squared singular value of Y, at least 1.
        """
        (lr, norm, options, D, d, W, error, unknown) = self
        length = t * norm
        if not options.is_measured:
            taken = length < math.inf if d is None else (length < math.inf) & (d < FARTHEST)
            shrink, scale = cast_together(C, q.rsqrt(), q)
            limited = None if d is None else t < lr
            return None, shrink, C.div_(scale), is_valid(taken, options.lr), limited
        reached, below, added = spectral_bound(C) + (q - 1), max_abs(D), length.square()
        if unknown is not None:
            reached = torch.addcmul(reached, t.square(), unknown)
        delta = torch.maximum(d.clamp(max=options.eps), below)
        P, S, drift, limit = reached + delta, None, None, options.limit
        if W is not None:
            S = sym(W @ D)
            drift = t * torch.add(frobenius_norm(S), error, alpha=2 * (1 + 2 / limit))
            P = P + drift
        share = share_of_tangent_move(torch.minimum(P, added), drift, limit - delta)
        share = share.masked_fill_(reached <= limit, 1.0)
        taken = torch.addcmul(below, share, added, value=0) < FARTHEST  # 0 times infinity is NaN
        square = share.square()
        q = torch.addcmul(1 - square, square, q)
        numbers = [share, square, q.rsqrt(), q] + ([] if S is None else [(share - square) * t])
        part, part_squared, shrink, scale, *along = cast_together(C, *numbers)
        C = torch.lerp(D, C, part_squared, out=C)
        if S is not None:
            C.addcmul_(S, *along)
        return part, shrink, C.div_(scale), is_valid(taken, options.lr), t * share < lr


def centred_gram(Y: Tensor) -> tuple[Tensor, Tensor]:
    """``Y^H Y - q I`` and q, the mean squared singular value of Y, but at least 1.

    In float32 its diagonal would make up half of the rounding error in it at p = 100.
    """
    C, s = gram_matrix(Y), squared_column_norms(Y)
    q = s.mean(-1).clamp(min=1)
    C.diagonal(dim1=-2, dim2=-1).copy_(s - q[..., None])
    return C, q


def cast_together(M: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Some numbers of each matrix, in the matrices' type and shaped to multiply them."""
    return torch.stack(numbers).to(M.dtype)[..., None, None].unbind()


def landed(Y: Tensor, C: Tensor, q: Tensor, landings: int) -> Tensor:
    """Newton-Schulz steps from ``Y q^(-1/2)``, in Y's memory; ``C = Y^H Y - q I``."""
    if not q.ndim and landings == 1:  # one matrix: in one call
        scale = float(q)
        return add_product(Y, Y, C, beta=scale**-0.5, alpha=-0.5 * scale**-1.5)
    shrink, scale = cast_together(C, q.rsqrt(), q)
    return add_product(Y.mul_(shrink), Y, landing_of(C / scale, landings), alpha=-0.5)


def landing_of(F: Tensor, landings: int) -> Tensor:
    """V for which ``Y - Y V / 2`` is Y, of residual F, after one or two Newton-Schulz steps.

    ``1 + f`` becomes ``(1 + f) (1 - f / 2)^2``, so the second's factor is
    ``1 + 3/8 f^2 - 1/8 f^3``.
    """
    if landings == 1:
        return F
    square = F @ F
    return add_product(F - 0.75 * square, square, 0.625 * F - 0.125 * square)
