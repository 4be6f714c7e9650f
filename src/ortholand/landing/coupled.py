"""The paper's attraction: ``X - eta (R + lam X D)``, which shrinks with eta."""

import math

import torch
from torch import Tensor

from ortholand.fields import landing_along
from ortholand.geometry.matrices import frobenius_norm, gram_minus_identity, is_square, moved_along
from ortholand.landing.attraction import (
    Attraction,
    Field,
    LandingOptions,
    Length,
    Step,
    bounded_length,
    is_free,
    moved_by_lr,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, times
from ortholand.landing.point import Direction, Point
from ortholand.safe_step import largest_step, share_of_pulled_move, trial_step


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Step:
        """Move along the field, no further than is safe."""
        X, lam = point.X, options.lam
        direction = direction.of_length_one(X)
        D = gram_minus_identity(X.mH) if is_square(X) else point.D
        L = landing_along(X, direction.B, lam, D, direction.W)
        if point.may_look and 2 * lam * options.lr <= 1:
            pulled = 1 - 2 * lam * float(options.lr)
            if is_free(X, L, D, direction, options, lambda d, length: pulled * d + length**2):
                return Step(moved_by_lr(X, L, float(options.lr)))
        d = frobenius_norm(D)

        def reached(t: Tensor) -> Tensor:
            return gram_minus_identity(moved_along(X, L, t))

        error = direction.tangency_error(X, d, frobenius_norm)
        field = Field(frobenius_norm(L), D, d, error, lambda rule: rule.bound(L), reached)
        eta, taken, short = length_along(field, options)
        return Step(moved_along(X, L, eta, out=L), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: a step by t leads to ``D - 2 t lam (D + D^2) + t^2 L^H L``."""
        L, D, lam = FieldGram(gram, options.lam), gram.D, options.lam

        def reached(t: Tensor) -> Tensor:
            return D - times(2 * lam * t, D + D @ D) + times(t.square(), L.square)

        field = Field(L.norm, D, gram.d, gram.tangency_error, L.bound, reached, gram.unknown)
        eta, taken, short = length_along(field, options)
        a, b = L.tangent
        return Coefficients(times(-eta, a + lam * D), times(-eta, b), taken, short)


def length_along(field: Field, options: LandingOptions) -> Length:
    """How far a landing field ``L = A X + lam X D`` may be followed."""
    norm, D, d, error, bound, *_ = field
    rule, lam, aim = options.rule, options.lam, options.aim
    if rule is None or not rule.is_measured:
        safe = None if rule is None else largest_step(bound(rule), d, lam, aim, error)
        return bounded_length(safe, norm, d, lam, options)
    t = trial_step(options.lr, norm, D.shape[-1], 1 / (2 * lam) if lam > 0 else math.inf)
    square, away = (t * norm).square(), torch.sub(error, d, alpha=lam)

    def share(delta: Tensor, after: Tensor) -> Tensor:
        # Small singular values are pulled by 1 - delta of this only, delta being at most eps. The
        # error may be infinite, but its effect is no longer than the trial move.
        pull = delta if lam == 1 else lam * delta
        pull = torch.sub(pull, error, alpha=1 / (1 - options.eps))
        P, slope = torch.minimum(after + delta, square), (t * pull).clamp_(min=-1e6)
        return share_of_pulled_move(P, slope, aim - delta)

    free = torch.addcmul(d + square, t, away, value=2)
    return field.measured(t, free, share, lam, options)
