"""The paper's attraction: ``X - eta (R + lam X D)``, which shrinks with eta."""

import torch
from torch import Tensor

from ortholand.fields import landing
from ortholand.geometry.matrices import gram_minus_identity, subtract_scaled_
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    LimitedMove,
    Move,
    field_bounds,
    may_go,
    step_length,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, times
from ortholand.safe_step import FieldBounds, largest_step


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"
    compiled = 0

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """Move along the field, no further than is safe."""
        return self.along(X, *landing(X, B, options.lam), options)

    def along(
        self,
        X: Tensor,
        L: Tensor,
        d: Tensor,
        tangency_error: Tensor | float,
        options: LandingOptions,
    ) -> Move:
        """Move along a field L, which is not needed afterwards, from distance d."""
        field = field_bounds(options, L, d, tangency_error, lambda: gram_minus_identity(X))
        eta, taken, limited = step_and_taken(field, options)
        return LimitedMove.of(subtract_scaled_(L, X, eta), taken, limited)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form: ``L = nu L1`` with an L1 that neither over- nor underflows."""
        nu = gram.unit.clamp(min=max(options.lam, torch.finfo(gram.D.dtype).tiny))
        field = FieldGram(gram, gram.unit / nu, options.lam / nu)
        bounds = field.bounds(nu, options.rule, options.eps)
        eta, taken, limited = step_and_taken(bounds, options)
        a, b = field.tangent_coefficients
        tangent = -eta * gram.unit
        new_a = times(tangent, a) - times(eta * options.lam, gram.D)
        return Coefficients(new_a, times(tangent, b), taken, limited)

    def field_coefficients(
        self, D: Tensor, M: Tensor, options: LandingOptions
    ) -> tuple[Tensor, Tensor]:
        """a and b of ``L = X a + B b``: those of the tangent part, with ``lam D`` added to a."""
        b = D / 2
        b.diagonal(dim1=-2, dim2=-1).add_(0.5)
        pull = D if options.lam == 1 else options.lam * D
        return torch.add(pull, M.mH, alpha=-0.5), b


def step_and_taken(
    field: FieldBounds, options: LandingOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """eta for a field, which matrices may step, and which are limited."""

    def largest(bound: Tensor, distance: Tensor) -> Tensor:
        return largest_step(bound, distance, options.lam, options.aim, field.tangency_error)

    eta, distance, limited = step_length(options, field, largest, pull=options.lam)
    return eta, may_go(field.norm, eta, distance, options.lam, options), limited
