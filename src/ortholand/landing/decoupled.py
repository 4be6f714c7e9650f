"""An attraction that does not shrink with eta: ``X - eta R - omega X D``."""

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.derivatives import tangent_from_gram
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
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, inner, plus_square, times
from ortholand.landing.point import Direction, Point, looked_at
from ortholand.safe_step import (
    is_inside,
    largest_step_decoupled,
    share_of_tangent_move,
    trial_step,
)


class Decoupled(Attraction):
    """``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X."""

    name = "decoupled"

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Step:
        """Move along the tangent and the normal part, each with its own factor."""
        X, D, direction = point.X, point.D, direction.of_length_one()
        B = direction.B
        R = B @ X if is_square(X) else tangent_from_gram(X, B, D, W=direction.W)
        if point.may_look and is_free(X, R, D, direction, options):
            moved = moved_by_lr(X, R, float(options.lr))
            return Step(moved_by_lr(moved, X @ D, options.omega))
        d, error, XD = frobenius_norm(D), 0.0, X @ D
        if not is_square(X):
            error = tangency_bound(X.shape[-2], X.dtype, d, direction.size(frobenius_norm))

        def reached(t: Tensor) -> Tensor:
            return gram_minus_identity(moved_along(X, R, t).sub_(XD, alpha=options.omega))

        field = Field(frobenius_norm(R), D, d, error, lambda rule: rule.bound(R), reached)
        omega, (eta, taken, short) = lengths(field, frobenius_norm(XD), options)
        moved = moved_along(moved_along(X, R, eta), XD, omega)
        return Step(unless_zero(options.lr, moved, X), taken, short)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: ``Z^H Z + eta^2 R^H R`` and mixed terms, ``Z = X (I - omega D)``."""
        R, D, omega = FieldGram(gram), gram.D, options.omega
        normal = inner(D, plus_square(D)).clamp(min=0).sqrt()
        a, b = R.tangent

        def reached(t: Tensor) -> Tensor:
            # X^H R is skew, so of Z^H R only -omega D X^H R has a Hermitian part.
            mixed = D @ skew(gram.W @ (2 * b))
            DD = plus_square(D)
            Z = add_product(D - 2 * omega * DD, D, DD, alpha=omega**2)
            return Z + times(2 * omega * t, sym(mixed)) + times(t.square(), R.square)

        field = Field(R.norm, D, gram.d, gram.tangency_error, R.bound, reached, R.unknown)
        pull, (eta, taken, short) = lengths(field, normal, options)
        new_a = times(-eta, a) - times(pull, D)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        return Coefficients(new_a, times(-eta, b), taken, short)


def is_free(X: Tensor, R: Tensor, D: Tensor, direction: Direction, options: LandingOptions) -> bool:
    """Whether the free bound, read on the CPU, shows that lr is safe for all matrices."""
    lr, omega, aim = float(options.lr), options.omega, options.aim
    d, length = looked_at(D), lr * looked_at(R)
    if not (d <= aim and length < 1 and 0 < lr < LONGEST_LOOKED_AT):
        return False
    pull = omega * d * (1 + d) ** 0.5  # a bound of omega ||X D||
    free = d - 2 * omega * d * (1 - d) + (length + pull) ** 2
    if not is_square(X):
        free += 2 * lr * tangency_bound(X.shape[-2], X.dtype, d, direction.size(looked_at))
    return free <= aim and omega * d * (1 + d) <= 1 - d


def lengths(field: Field, normal: Tensor, options: LandingOptions) -> tuple[Tensor, Length]:
    """Omega for each matrix, and how far it goes along R; ``normal`` is ``||X D||_F``.

    The pull alone keeps a matrix in the spectral ball, because omega is at most 1/2. So a measured
    step is shortened along R only.
    """
    norm, D, d, error, bound, reached, unknown = field
    rule, lr, aim = options.rule, options.lr, options.aim
    omega = torch.full_like(d, options.omega)
    if rule is None:
        return omega, bounded_length(None, norm + d, d, omega, options)
    if not rule.is_measured:
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        safe = largest_step_decoupled(bound(rule), d, normal, omega, aim, error)
        return omega, bounded_length(safe, norm + d, d, omega, options)
    t = trial_step(lr, norm, D.shape[-1])
    length, astray = t * norm, 2 * t * error
    free = d - 2 * omega * d * (1 - d) + (length + omega * normal).square() + astray
    is_gentle = omega * normal.square() <= d * (1 - d)
    safe = (torch.maximum(free, d) <= aim) & is_gentle
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
