"""An attraction that does not shrink with eta: ``X - eta R - omega X D``."""

import math

import torch
from torch import Tensor

from ortholand.fields import landing_along
from ortholand.geometry.matrices import (
    add_product,
    frobenius_norm,
    gram_minus_identity,
    is_square,
    moved_along,
    skew,
    sym,
)
from ortholand.landing.attraction import (
    Attraction,
    Field,
    LandingOptions,
    Length,
    Step,
    bounded_length,
    is_free,
    moved_by_lr,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, inner, times
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import largest_root, share_of_tangent_move, trial_step


class Decoupled(Attraction):
    """``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X."""

    name = "decoupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Step:
        """Move along the tangent and the normal part, each with its own factor."""
        X, D, omega = point.X, point.D, options.omega
        direction = direction.of_length_one(X)
        R = direction.B @ X if is_square(X) else landing_along(X, direction.B, 0.0, D, direction.W)

        def free(d: float, length: float) -> float:
            pull = omega * d * (1 + d) ** 0.5  # a bound of omega ||X D||
            overshoots = omega * d * (1 + d) > 1 - d
            return math.inf if overshoots else d - 2 * omega * d * (1 - d) + (length + pull) ** 2

        if point.may_look and options.lr > 0 and is_free(X, R, D, direction, options, free):
            moved = moved_by_lr(X, R, float(options.lr))
            return Step(moved_by_lr(moved, X @ D, omega))
        d, XD = frobenius_norm(D), X @ D

        def reached(t: Tensor) -> Tensor:
            return gram_minus_identity(moved_along(X, R, t).sub_(XD, alpha=omega))

        error = direction.tangency_error(X, d, frobenius_norm)
        field = Field(frobenius_norm(R), D, d, error, lambda rule: rule.bound(R), reached)
        pull, (eta, taken, short) = lengths(field, frobenius_norm(XD), options)
        moved = moved_along(moved_along(X, R, eta), XD, pull)
        return Step(unless_zero(options.lr, moved, X), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: ``Z^H Z + eta^2 R^H R`` and mixed terms, ``Z = X (I - omega D)``."""
        R, D, omega = FieldGram(gram), gram.D, options.omega
        (a, b), DD = R.tangent, add_product(D, D, D)

        def reached(t: Tensor) -> Tensor:
            # X^H R is skew, so of Z^H R only -omega D X^H R has a Hermitian part.
            mixed = D @ skew(gram.W @ (2 * b))
            Z = add_product(D - 2 * omega * DD, D, DD, alpha=omega**2)
            return Z + times(2 * omega * t, sym(mixed)) + times(t.square(), R.square)

        normal = inner(D, DD).clamp(min=0).sqrt()
        field = Field(R.norm, D, gram.d, gram.tangency_error, R.bound, reached, gram.unknown)
        pull, (eta, taken, short) = lengths(field, normal, options)
        new_a = times(-eta, a) - times(pull, D)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        return Coefficients(new_a, times(-eta, b), taken, short)


def lengths(field: Field, normal: Tensor, options: LandingOptions) -> tuple[Tensor, Length]:
    """Omega for each matrix, and how far it goes along R; ``normal`` is ``||X D||_F``.

    The pull alone keeps a matrix in the ball, so a measured step is shortened along R only.
    """
    norm, D, d, error, bound, *_ = field
    rule, aim, omega = options.rule, options.aim, torch.full_like(d, options.omega)
    if rule is None:
        return omega, bounded_length(None, norm + d, d, omega, options)
    if not rule.is_measured:
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        # ||eta R + omega X D||_S4 <= eta ||R||_S4 + omega ||X D||_F in the Schatten 4 norm, whose
        # square is ||L^H L||_F; so d' <= d - 2 omega d (1 - d) + (eta bound + omega normal)^2.
        pull, bounded = omega * normal, bound(rule)
        room = aim - d + 2 * omega * d * (1 - d) - pull.square()
        safe = largest_root(bounded, -pull * bounded - error, room)
        return omega, bounded_length(safe, norm + d, d, omega, options)
    t = trial_step(options.lr, norm, D.shape[-1])
    length, astray = t * norm, 2 * t * error
    free = d - 2 * omega * d * (1 - d) + (length + omega * normal).square() + astray
    overshoots = omega * normal.square() > d * (1 - d)

    def share(delta: Tensor, after: Tensor) -> Tensor:
        drift = 2 * omega * delta * (1 + delta).sqrt() * length + astray
        P = torch.minimum(after + delta + drift, length.square())
        return share_of_tangent_move(P, drift, aim - delta)

    free = torch.maximum(free, d).masked_fill(overshoots, math.inf)
    return omega, field.measured(t, free, share, options.omega, options)
