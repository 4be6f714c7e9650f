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
    limited,
    may_go,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, plus_square, times
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import (
    distance_inside,
    largest_step,
    share_of_pulled_move,
    spectral_bound,
    trial_step,
)


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Move:
        """Move along the field, no further than is safe."""
        X = point.X
        L, D, error = field(point, direction, options.lam)
        norm = frobenius_norm(L)

        def bound() -> Tensor:
            assert options.rule is not None
            return options.rule.bound(L)

        def reached(t: Tensor) -> Tensor:
            return spectral_bound(gram_minus_identity(moved_along(X, L, t)))

        eta, distance, short = length_along(
            norm, D, error, bound, reached, options, may_look=point.may_look
        )
        taken = may_go(norm, eta, distance, options.lam, options)
        return LimitedMove.of(moved_along(X, L, eta, out=L), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: a step by t leads to ``D - 2 t lam (D + D^2) + t^2 L^H L``."""
        field, D, lam = FieldGram(gram, options.lam), gram.D, options.lam

        def bound() -> Tensor:
            assert options.rule is not None
            return field.bound(options.rule)

        def reached(t: Tensor) -> Tensor:
            E = D - times(2 * lam * t, plus_square(D)) + times(t.square(), field.square)
            return spectral_bound(E) + field.unknown * t.square()

        eta, distance, short = length_along(
            field.norm, D, gram.tangency_error, bound, reached, options, may_look=False
        )
        taken = may_go(field.norm, eta, distance, lam, options)
        a, b = field.tangent
        return Coefficients(times(-eta, a + lam * D), times(-eta, b), taken, short)


def field(point: Point, direction: Direction, lam: float) -> Landing:
    """The landing field: left form for square X, right form for tall X."""
    if is_square(point.X):
        return landing_from_relative(point.X, direction.generator, lam)
    return landing_from_gradient(point.X, direction.generator, lam, point.D, direction.size)


def length_along(
    norm: Tensor,
    D: Tensor,
    error: Tensor | float,
    bound: Callable[[], Tensor],
    reached: Callable[[Tensor], Tensor],
    options: LandingOptions,
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
        error: bound of ``||Sym(X^H R)||``, R the tangent part of L, which is due to rounding.
        bound: gives the rule's bound of L.
        reached: gives a bound of the distance after a step.
        options: how matrices land.
        may_look: whether values may be read.
    """
    rule, lr, lam, aim = options.rule, options.lr, options.lam, options.aim
    d = frobenius_norm(D)
    if rule is None:
        return Length(torch.ones_like(norm) * lr, d, None)
    if not rule.is_measured:
        return limited(largest_step(bound(), d, lam, aim, error), d, lr)
    t = trial_step(lr, norm, D.shape[-1], 1 / (2 * lam) if lam > 0 else math.inf)
    length, astray = t * length_of(norm, d, options), 2 * t * error
    free = torch.addcmul(d, length, length).addcmul_(t, d, value=-2 * lam) + astray
    safe = torch.maximum(free, d) <= aim
    if may_look and bool(safe.all()):
        return limited(t, d, lr)
    delta, far = distance_inside(D, d, options.eps), reached(t)
    share = share_of_pulled_move(far, delta, lam * t * delta, aim - delta - astray)
    return limited(torch.where(safe | (far <= aim), t, t * share), delta, lr)


def length_of(norm: Tensor, d: Tensor, options: LandingOptions) -> Tensor:
    """``||L||_F``, or ``(turn + lam delta) ||X||_2`` if directions have a bound by construction."""
    if options.turn is None:
        return norm
    d = d.clamp(max=options.eps)
    return torch.minimum(norm, (options.turn + options.lam * d) * (1 + d).sqrt())
