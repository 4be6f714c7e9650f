"""An attraction that does not shrink with eta: ``X - eta R - omega X D``."""

import torch
from torch import Tensor

from ortholand.fields import tangent
from ortholand.geometry.matrices import per_matrix, product, subtract_scaled_
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    LimitedMove,
    Move,
    field_bounds,
    may_go,
    residual_of,
    step_length,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, squared_normal_norm, times
from ortholand.safe_step import FieldBounds, largest_step_decoupled


class Decoupled(Attraction):
    """``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X."""

    name = "decoupled"
    compiled = 1

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """Move along the tangent and the normal part, each with its own factor."""
        R, D, d, tangency_error = tangent(X, B)
        XD = product(X, D)
        normal = torch.linalg.vector_norm(XD, dim=(-2, -1)) if options.rule is not None else d
        field = field_bounds(options, R, d, tangency_error, residual_of(X, D))
        del D
        eta, omega, taken, limited = steps_and_taken(field, normal, options)
        Y = subtract_scaled_(R, X, eta)
        Y = torch.addcmul(Y, XD, per_matrix(omega, X), value=-1, out=Y)
        moved = unless_zero(options.lr, Y, X)
        return LimitedMove.of(moved, taken, limited)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form of :meth:`move`."""
        field, D, unit = FieldGram(gram), gram.D, gram.unit
        normal = squared_normal_norm(D).sqrt()
        bounds = field.bounds(unit, options.rule, options.eps)
        eta, omega, taken, limited = steps_and_taken(bounds, normal, options)
        a, b = field.tangent_coefficients
        tangent = -eta * unit
        new_a = times(tangent, a) - times(omega, D)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        return Coefficients(new_a, times(tangent, b), taken, limited)


def steps_and_taken(
    field: FieldBounds, normal: Tensor, options: LandingOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """eta, omega, which matrices may step, and which are limited. ``normal`` is ``||X D||_F``."""
    norm, d, tangency_error = field[:3]

    def pull(distance: Tensor) -> tuple[Tensor, Tensor]:
        """Omega, and ``||X D||`` in the norm of the rule."""
        if options.rule is None:
            return torch.full_like(d, options.omega), normal
        size = normal
        if options.rule.spectral:
            size = torch.minimum(normal, distance * (1 + distance).sqrt())
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this cannot.
        gentle = distance * (1 - distance) / size.square().clamp(min=torch.finfo(d.dtype).tiny)
        return gentle.clamp(min=0, max=options.omega), size

    def largest(bound: Tensor, distance: Tensor) -> Tensor:
        omega, size = pull(distance)
        return largest_step_decoupled(bound, distance, size, omega, options.aim, tangency_error)

    eta, distance, limited = step_length(options, field, largest, pull=0.0)
    omega, _ = pull(distance)
    taken = may_go(norm + d, torch.maximum(eta, omega), distance, options.omega, options)
    return eta, omega, taken, limited
