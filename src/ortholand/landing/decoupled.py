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
    bound_for,
    bounded_length,
    goes,
    is_valid,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, inner, plus_square, times
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import (
    is_inside,
    largest_step_decoupled,
    share_of_tangent_move,
    trial_step,
)


class Decoupled(Attraction):
    """``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X."""

    name = "decoupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Move:
        """Move along the tangent and the normal part, each with its own factor."""
        X, D, (B, _, W, size) = point.X, point.D, direction.of_length_one
        if is_square(X):
            R, d, error = product(B, X), frobenius_norm(D), 0.0
        else:
            R, _, d, error = landing_from_gradient(X, B, 0.0, D, W, size)
        norm, XD = frobenius_norm(R), product(X, D)

        def reached(t: Tensor) -> Tensor:
            return gram_minus_identity(moved_along(X, R, t).sub_(XD, alpha=options.omega))

        def bound() -> Tensor:
            assert options.rule is not None
            return options.rule.bound(R)

        normal = frobenius_norm(XD)
        omega, (eta, taken, short) = lengths(
            norm, normal, D, d, error, bound, reached, options, may_look=point.may_look
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
            return Z + times(2 * omega * t, sym(mixed)) + times(t.square(), field.square)

        def bound() -> Tensor:
            assert options.rule is not None
            return field.bound(options.rule)

        pull, (eta, taken, short) = lengths(
            field.norm,
            normal,
            D,
            gram.d,
            gram.tangency_error,
            bound,
            reached,
            options,
            field.unknown,
            may_look=False,
        )
        new_a = times(-eta, a) - times(pull, D)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        return Coefficients(new_a, times(-eta, b), taken, short)


def lengths(
    norm: Tensor,
    normal: Tensor,
    D: Tensor,
    d: Tensor,
    error: Tensor | float,
    bound: Callable[[], Tensor],
    reached: Callable[[Tensor], Tensor],
    options: LandingOptions,
    unknown: Tensor | None = None,
    *,
    may_look: bool,
) -> tuple[Tensor, Length]:
    """Omega for each matrix, and how far it goes along R.

    The pull alone keeps a matrix in the spectral ball, because omega is at most 1/2. So a measured
    step is shortened along R only. Arguments as of ``coupled.length_along``, and ``normal``, which
    is ``||X D||_F``.
    """
    rule, lr, aim = options.rule, options.lr, options.aim
    omega = torch.full_like(d, options.omega)
    if rule is None:
        return omega, bounded_length(None, norm + d, d, omega, options)
    if not rule.is_measured:
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        safe = largest_step_decoupled(bound(), d, normal, omega, aim, error)
        return omega, bounded_length(safe, norm + d, d, omega, options)
    t = trial_step(lr, norm, D.shape[-1])
    length, astray = t * norm, 2 * t * error
    free = d - 2 * omega * d * (1 - d) + (length + omega * normal).square() + astray
    is_gentle = omega * normal.square() <= d * (1 - d)
    safe = (torch.maximum(free, d) <= aim) & is_gentle
    if may_look and bool(safe.all()):
        return omega, Length(t, safe, t < lr)
    distance_of = bound_for(options, options.omega)
    distance, far = distance_of(D), distance_of(reached(t))
    far = far if unknown is None else torch.addcmul(far, unknown, t.square())
    delta = distance.clamp(max=options.eps)
    drift = 2 * omega * delta * (1 + delta).sqrt() * length + astray
    P = torch.minimum(far + delta + drift, length.square())
    share = share_of_tangent_move(P, drift, aim - delta)
    eta = torch.where(safe | (far <= aim), t, t * share)
    taken = is_inside(distance, d, length) & goes(eta, omega, lr)
    return omega, Length(eta, is_valid(taken, lr), eta < lr)
