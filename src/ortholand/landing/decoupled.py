"""An attraction that does not shrink with eta: ``X - eta R - omega X D``."""

import torch
from torch import Tensor

from ortholand.fields import tangent
from ortholand.geometry.matrices import per_matrix, product
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    Move,
    may_go,
    step_size,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, squared_normal_norm, times
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
        field, D = FieldGram(gram), gram.D
        bound = gram.unit * field.bound(options.rule)
        normal = squared_normal_norm(D).sqrt()
        eta, omega, taken = steps_and_taken(
            bound, gram.distance, normal, gram.tangency_error, options
        )
        a, b = field.tangent_coefficients
        tangent = -eta * gram.unit
        new_a = times(tangent, a) - times(omega, D)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        return Coefficients(new_a, times(tangent, b), taken)


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
    return eta, omega, may_go(bound + d, torch.maximum(eta, omega), d, options.omega, options)
