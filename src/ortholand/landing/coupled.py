"""The paper's attraction: ``X - eta (R + lam X D)``, which shrinks with eta."""

import torch
from torch import Tensor

from ortholand.fields import landing
from ortholand.geometry.matrices import is_finite, per_matrix
from ortholand.landing.attraction import Attraction, Move, is_a_step, step_size
from ortholand.landing.gram import Coefficients, FieldGram, Gram, tangent_coefficients, times
from ortholand.landing.options import LandingOptions
from ortholand.safe_step import field_bound, largest_step


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"
    compiled = 0

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """Along the field, no further than is safe."""
        L, d, tangency_error = landing(X, B, options.lam)
        bound = field_bound(options.rule, L)
        eta, taken = step_and_taken(bound, d, tangency_error, options)
        return Move(torch.addcmul(X, L, per_matrix(eta, X), value=-1, out=L), taken)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The same, from Gram matrices. ``L = nu L1`` with an L1 that neither over- nor underflows."""
        a, b = tangent_coefficients(gram.D, gram.M)
        nu = gram.unit.clamp(min=max(options.lam, torch.finfo(gram.D.dtype).tiny))
        share = gram.unit / nu
        a = times(share, a) + times(options.lam / nu, gram.D)
        b = times(share, b)
        bound = nu * FieldGram(a, b, gram).bound(options.rule, share)
        error = gram.unit * gram.tangency_error
        eta, taken = step_and_taken(bound, gram.distance, error, options)
        return Coefficients(times(-eta * nu, a), times(-eta * nu, b), taken)

    def field_coefficients(
        self, D: Tensor, M: Tensor, options: LandingOptions
    ) -> tuple[Tensor, Tensor]:
        """a and b of ``L = X a + B b``."""
        a, b = tangent_coefficients(D, M)
        return a.add_(D, alpha=options.lam), b


def step_and_taken(
    bound: Tensor, d: Tensor, tangency_error: Tensor | float, options: LandingOptions
) -> tuple[Tensor, Tensor]:
    """eta for a field of at most this size, and which matrices may step."""
    safe = None
    if options.rule is not None:
        safe = largest_step(bound, d, options.lam, options.eps, tangency_error)
    eta = step_size(options.lr, safe, bound)
    return eta, is_finite(eta * bound) & is_a_step(eta, options.lr)
