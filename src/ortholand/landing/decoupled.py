"""An attraction that does not shrink with eta: ``X - eta R - omega X D``."""

import torch
from torch import Tensor

from ortholand.fields import tangent
from ortholand.geometry.matrices import is_finite, per_matrix, product
from ortholand.landing.attraction import Attraction, Move, is_a_step, step_size, unless_zero
from ortholand.landing.gram import (
    Coefficients,
    FieldGram,
    Gram,
    inner,
    tangent_coefficients,
    times,
)
from ortholand.landing.options import LandingOptions
from ortholand.safe_step import field_bound, largest_step_decoupled


class Decoupled(Attraction):
    """``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X."""

    name = "decoupled"
    compiled = 1

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """Tangent and normal parts, each with a factor of its own."""
        R, D, d, tangency_error = tangent(X, B)
        XD = product(X, D)
        bound = field_bound(options.rule, R)
        normal = torch.linalg.vector_norm(XD, dim=(-2, -1)) if options.rule is not None else d
        eta, omega, taken = steps_and_taken(bound, d, normal, tangency_error, options)
        Y = torch.addcmul(X, R, per_matrix(eta, X), value=-1, out=R)
        return Move(unless_zero(options.lr, Y - per_matrix(omega, X) * XD, X), taken)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The same, from Gram matrices."""
        a, b = tangent_coefficients(gram.D, gram.M)
        bound = gram.unit * FieldGram(a, b, gram).bound(options.rule)
        D, d = gram.D, gram.distance
        normal = inner(D, D + D @ D).clamp(min=0).sqrt()  # of X D
        error = gram.unit * gram.tangency_error
        eta, omega, taken = steps_and_taken(bound, d, normal, error, options)
        a = times(-eta * gram.unit, a) - times(omega, D)
        a = unless_zero(options.lr, a, torch.zeros_like(a))
        return Coefficients(a, times(-eta * gram.unit, b), taken)


def steps_and_taken(
    bound: Tensor,
    d: Tensor,
    normal: Tensor,
    tangency_error: Tensor | float,
    options: LandingOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """eta, omega, and which matrices may step. ``normal`` is ``||X D||_F``."""
    omega, safe = torch.full_like(d, options.omega), None
    if options.rule is not None:
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this one cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        safe = largest_step_decoupled(bound, d, normal, omega, options.eps, tangency_error)
    eta = step_size(options.lr, safe, bound)
    moves = is_a_step(torch.maximum(eta, omega), options.lr)
    return eta, omega, is_finite(eta * bound + omega * d) & moves
