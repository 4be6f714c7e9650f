"""The paper's attraction: ``X - eta (R + lam X D)``, which shrinks with eta."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.fields import Landing, landing_from_gradient, landing_from_relative
from ortholand.geometry.matrices import (
    frobenius_norm,
    gram_minus_identity,
    is_square,
    moved_along,
)
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    Length,
    LimitedMove,
    Move,
    bound_for,
    bounded_length,
    goes,
    is_valid,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, plus_square, times
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import (
    is_inside,
    largest_step,
    share_of_pulled_move,
    trial_step,
)


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Move:
        """Move along the field, no further than is safe."""
        X = point.X
        L, D, d, error = field(point, direction, options.lam)
        norm = frobenius_norm(L)

        def bound() -> Tensor:
            assert options.rule is not None
            return options.rule.bound(L)

        def reached(t: Tensor) -> Tensor:
            return gram_minus_identity(moved_along(X, L, t))

        eta, taken, short = length_along(
            norm, D, d, error, bound, reached, options, may_look=point.may_look
        )
        return LimitedMove.of(moved_along(X, L, eta, out=L), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: a step by t leads to ``D - 2 t lam (D + D^2) + t^2 L^H L``."""
        field, D, lam = FieldGram(gram, options.lam), gram.D, options.lam

        def bound() -> Tensor:
            assert options.rule is not None
            return field.bound(options.rule)

        def reached(t: Tensor) -> Tensor:
            return D - times(2 * lam * t, plus_square(D)) + times(t.square(), field.square)

        eta, taken, short = length_along(
            field.norm,
            D,
            gram.d,
            gram.tangency_error,
            bound,
            reached,
            options,
            field.unknown,
            may_look=False,
        )
        a, b = field.tangent
        return Coefficients(times(-eta, a + lam * D), times(-eta, b), taken, short)


def field(point: Point, direction: Direction, lam: float) -> Landing:
    """The landing field: left form for square X, right form for tall X."""
    if is_square(point.X):
        return landing_from_relative(point.X, direction.generator, lam)
    B, _, W, size = direction.of_length_one
    return landing_from_gradient(point.X, B, lam, point.D, W, size)


def length_along(
    norm: Tensor,
    D: Tensor,
    d: Tensor,
    error: Tensor | float,
    bound: Callable[[], Tensor],
    reached: Callable[[Tensor], Tensor],
    options: LandingOptions,
    unknown: Tensor | None = None,
    *,
    may_look: bool,
) -> Length:
    """How far a landing field ``L = A X + lam X D`` may be followed.

    The rule "spectral" tries a step, and shortens it where neither the free bound nor the distance
    that it has reached shows that it is safe. On the CPU the free bound comes first, and if it is
    enough for all matrices, nothing is measured.

    Args:
        norm: ``||L||_F``.
        D: ``X^H X - I``, or another matrix of the same singular values.
        d: ``||D||_F``.
        error: bound of ``||Sym(X^H R)||``, R the tangent part of L, which is due to rounding.
        bound: gives the rule's bound of L.
        reached: gives ``Y^H Y - I`` after a step.
        options: how matrices land.
        unknown: bound of the error of ``L^H L`` in that; None: zero.
        may_look: whether values may be read.
    """
    rule, lr, lam, aim = options.rule, options.lr, options.lam, options.aim
    if rule is None or not rule.is_measured:
        safe = None if rule is None else largest_step(bound(), d, lam, aim, error)
        return bounded_length(safe, norm, d, lam, options)
    t = trial_step(lr, norm, D.shape[-1], 1 / (2 * lam) if lam > 0 else math.inf)
    square = (t * norm).square()
    away = torch.sub(error, d, alpha=lam) if isinstance(error, Tensor) else -lam * d
    free = torch.addcmul(d + square, t, away, value=2)
    if may_look and bool((torch.maximum(free, d) <= aim).all()):
        return Length(t, free < math.inf, t < lr)
    distance_of = bound_for(options, lam)
    distance, far = distance_of(D), distance_of(reached(t))
    far = far if unknown is None else torch.addcmul(far, unknown, t.square())
    delta = distance.clamp(max=options.eps)  # all iterates are in the ball
    pull = delta if lam == 1 else lam * delta
    if isinstance(error, Tensor):
        # Small singular values are pulled by 1 - delta of this only, delta being at most eps. The
        # error may be infinite, but its effect is no longer than the trial move.
        pull = torch.sub(pull, error, alpha=1 / (1 - options.eps))
        slope = (t * pull).clamp_(min=-1e6)
    else:
        slope = t * pull
    share = share_of_pulled_move(torch.minimum(far + delta, square), slope, aim - delta)
    # A field of zero gives 0 / 0, and may be followed by any step.
    eta = torch.where(torch.minimum(free, far) <= aim, t, torch.fmin(t, t * share))
    taken = is_inside(distance, d, square)
    if lam == 0:
        taken = taken & goes(eta, lam, lr)
    return Length(eta, is_valid(taken, lr), eta < lr)
