"""An attraction that does not shrink with eta: ``X - eta R - omega X D``."""

from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.fields import landing_from_gradient
from ortholand.geometry.matrices import (
    add_product,
    frobenius_norm,
    gram_minus_identity,
    is_square,
    moved_along,
    product,
    skew,
    sym,
)
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    Length,
    LimitedMove,
    Move,
    limited,
    may_go,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, inner, plus_square, times
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import (
    distance_inside,
    largest_step_decoupled,
    share_of_tangent_move,
    spectral_bound,
    trial_step,
)


class Decoupled(Attraction):
    """``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X."""

    name = "decoupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Move:
        """Move along the tangent and the normal part, each with its own factor."""
        X, D, B = point.X, point.D, direction.generator
        if is_square(X):
            R, error = product(B, X), 0.0
        else:
            R, _, error = landing_from_gradient(X, B, 0.0, D, direction.size)
        norm, XD = frobenius_norm(R), product(X, D)

        def reached(t: Tensor) -> Tensor:
            Y = moved_along(X, R, t).sub_(XD, alpha=options.omega)
            return spectral_bound(gram_minus_identity(Y))

        def bound() -> Tensor:
            assert options.rule is not None
            return options.rule.bound(R)

        normal = frobenius_norm(XD)
        eta, omega, taken, short = lengths(
            norm, normal, D, error, bound, reached, options, may_look=point.may_look
        )
        moved = moved_along(moved_along(X, R, eta), XD, omega)
        return LimitedMove.of(unless_zero(options.lr, moved, X), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: ``Z^H Z + eta^2 R^H R`` and mixed terms, ``Z = X (I - omega D)``."""
        field, D, omega = FieldGram(gram), gram.D, options.omega
        normal = inner(D, plus_square(D)).clamp(min=0).sqrt()
        a, b = field.tangent

        def reached(t: Tensor) -> Tensor:
            # X^H R is skew, so of Z^H R only -omega D X^H R has a Hermitian part.
            mixed = product(D, skew(product(gram.W, 2 * b)))
            DD = plus_square(D)
            Z = add_product(D - 2 * omega * DD, D, DD, alpha=omega**2)
            E = Z + times(2 * omega * t, sym(mixed)) + times(t.square(), field.square)
            return spectral_bound(E) + field.unknown * t.square()

        def bound() -> Tensor:
            assert options.rule is not None
            return field.bound(options.rule)

        eta, omega, taken, short = lengths(
            field.norm, normal, D, gram.tangency_error, bound, reached, options, may_look=False
        )
        new_a = times(-eta, a) - times(omega, D)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        return Coefficients(new_a, times(-eta, b), taken, short)


def lengths(
    norm: Tensor,
    normal: Tensor,
    D: Tensor,
    error: Tensor | float,
    bound: Callable[[], Tensor],
    reached: Callable[[Tensor], Tensor],
    options: LandingOptions,
    *,
    may_look: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """eta, omega, which matrices may step, and which are limited.

    The pull alone keeps a matrix in the spectral ball, because omega is at most 1/2. So a measured
    step is shortened along R only. Arguments as of ``coupled.length_along``, and ``normal``, which
    is ``||X D||_F``.
    """
    rule, lr, aim, d = options.rule, options.lr, options.aim, frobenius_norm(D)
    omega = torch.full_like(d, options.omega)
    if rule is None:
        eta, distance, short = torch.ones_like(norm) * lr, d, None
    elif rule.is_measured:
        eta, distance, short = _measured(norm, normal, D, error, reached, options, may_look)
    else:
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        safe = largest_step_decoupled(bound(), d, normal, omega, aim, error)
        eta, distance, short = limited(safe, d, lr)
    taken = may_go(norm + d, torch.maximum(eta, omega), distance, options.omega, options)
    return eta, omega, taken, short


def _measured(
    norm: Tensor,
    normal: Tensor,
    D: Tensor,
    error: Tensor | float,
    reached: Callable[[Tensor], Tensor],
    options: LandingOptions,
    may_look: bool,
) -> Length:
    lr, omega, aim, d = options.lr, options.omega, options.aim, frobenius_norm(D)
    t = trial_step(lr, norm, D.shape[-1])
    astray = 2 * t * error
    pulled = d - 2 * omega * d * (1 - d)
    free = pulled + (t * norm + omega * normal).square() + astray
    is_gentle = omega * normal.square() <= d * (1 - d)
    safe = (torch.maximum(free, d) <= aim) & is_gentle
    if may_look and bool(safe.all()):
        return limited(t, d, lr)
    delta, far = distance_inside(D, d, options.eps), reached(t)
    drift = 2 * t * omega * delta * (1 + delta).sqrt() * norm + astray
    share = share_of_tangent_move(far, delta, drift, aim)
    return limited(torch.where(safe | (far <= aim), t, t * share), delta, lr)
