"""The paper's attraction: ``X - eta (R + lam X D)``, which shrinks with eta."""

import math

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.derivatives import tangent_from_gram
from ortholand.geometry.matrices import (
    frobenius_norm,
    gram_minus_identity,
    is_square,
    moved_along,
)
from ortholand.landing.attraction import (
    LONGEST_LOOKED_AT,
    Attraction,
    Field,
    LandingOptions,
    Length,
    Step,
    bound_for,
    bounded_length,
    goes,
    is_valid,
    moved_by_lr,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, plus_square, times
from ortholand.landing.point import Direction, Point, looked_at
from ortholand.safe_step import is_inside, largest_step, share_of_pulled_move, trial_step


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Step:
        """Move along the field, no further than is safe."""
        X, lam, direction = point.X, options.lam, direction.of_length_one()
        if is_square(X):  # (A + lam (X X^H - I)) X
            D = gram_minus_identity(X.mH)
            L = torch.add(direction.B, D, alpha=lam) @ X
        else:
            D = point.D
            L = tangent_from_gram(X, direction.B, D, lam, direction.W)
        if point.may_look and is_free(X, L, D, direction, options):
            return Step(moved_by_lr(X, L, float(options.lr)))
        d, error = frobenius_norm(D), 0.0
        if not is_square(X):
            error = tangency_bound(X.shape[-2], X.dtype, d, direction.size(frobenius_norm))

        def reached(t: Tensor) -> Tensor:
            return gram_minus_identity(moved_along(X, L, t))

        field = Field(frobenius_norm(L), D, d, error, lambda rule: rule.bound(L), reached)
        eta, taken, short = length_along(field, options)
        return Step(moved_along(X, L, eta, out=L), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: a step by t leads to ``D - 2 t lam (D + D^2) + t^2 L^H L``."""
        L, D, lam = FieldGram(gram, options.lam), gram.D, options.lam

        def reached(t: Tensor) -> Tensor:
            return D - times(2 * lam * t, plus_square(D)) + times(t.square(), L.square)

        field = Field(L.norm, D, gram.d, gram.tangency_error, L.bound, reached, L.unknown)
        eta, taken, short = length_along(field, options)
        a, b = L.tangent
        return Coefficients(times(-eta, a + lam * D), times(-eta, b), taken, short)


def is_free(X: Tensor, L: Tensor, D: Tensor, direction: Direction, options: LandingOptions) -> bool:
    """Whether the free bound, read on the CPU, shows that lr is safe for all matrices."""
    lr, lam, aim = float(options.lr), options.lam, options.aim
    d, length = looked_at(D), lr * looked_at(L)
    if not (d <= aim and length < 1 and 2 * lam * lr <= 1 and lr < LONGEST_LOOKED_AT):
        return False
    free = d - 2 * lam * lr * d + length**2
    if not is_square(X):
        free += 2 * lr * tangency_bound(X.shape[-2], X.dtype, d, direction.size(looked_at))
    return free <= aim


def length_along(field: Field, options: LandingOptions) -> Length:
    """How far a landing field ``L = A X + lam X D`` may be followed.

    The rule "spectral" tries a step, and shortens it where neither the free bound nor the distance
    that it has reached shows that it is safe.
    """
    norm, D, d, error, bound, reached, unknown = field
    rule, lr, lam, aim = options.rule, options.lr, options.lam, options.aim
    if rule is None or not rule.is_measured:
        safe = None if rule is None else largest_step(bound(rule), d, lam, aim, error)
        return bounded_length(safe, norm, d, lam, options)
    t = trial_step(lr, norm, D.shape[-1], 1 / (2 * lam) if lam > 0 else math.inf)
    square = (t * norm).square()
    away = torch.sub(error, d, alpha=lam) if isinstance(error, Tensor) else -lam * d
    free = torch.addcmul(d + square, t, away, value=2)
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
