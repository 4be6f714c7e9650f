"""The paper's attraction: ``X - eta (R + lam X D)``, which shrinks with eta."""

import torch
from torch import Tensor

from ortholand.fields import landing
from ortholand.geometry.matrices import per_matrix
from ortholand.landing.attraction import Attraction, LandingOptions, Move, may_go, step_size
from ortholand.landing.gram import Coefficients, FieldGram, Gram, times
from ortholand.safe_step import field_bound, largest_step


class Coupled(Attraction):
    """``X - eta L`` with the landing field ``L = R + lam X D``."""

    name = "coupled"
    compiled = 0

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """Along the field, no further than is safe."""
        return self.along(X, *landing(X, B, options.lam), options)

    def along(
        self,
        X: Tensor,
        L: Tensor,
        d: Tensor,
        tangency_error: Tensor | float,
        options: LandingOptions,
    ) -> Move:
        """Along a field L that is not needed afterwards, from distance d."""
        bound = field_bound(options.rule, L)
        eta, taken = step_and_taken(bound, d, tangency_error, options)
        return Move(torch.addcmul(X, L, per_matrix(eta, X), value=-1, out=L), taken)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """From Gram matrices. ``L = nu L1`` with an L1 that neither over- nor underflows."""
        nu = gram.unit.clamp(min=max(options.lam, torch.finfo(gram.D.dtype).tiny))
        field = FieldGram(gram, gram.unit / nu, options.lam / nu)
        bound = nu * field.bound(options.rule)
        eta, taken = step_and_taken(bound, gram.distance, gram.tangency_error, options)
        a, b = field.tangent_coefficients
        tangent = -eta * gram.unit
        return Coefficients(
            times(tangent, a) - times(eta * options.lam, gram.D), times(tangent, b), taken
        )

    def field_coefficients(
        self, D: Tensor, M: Tensor, options: LandingOptions
    ) -> tuple[Tensor, Tensor]:
        """a and b of ``L = X a + B b``: the tangent part's, and ``lam D`` more in a."""
        b = D / 2
        b.diagonal(dim1=-2, dim2=-1).add_(0.5)
        pull = D if options.lam == 1 else options.lam * D
        return torch.add(pull, M.mH, alpha=-0.5), b


def step_and_taken(
    bound: Tensor, d: Tensor, tangency_error: Tensor | float, options: LandingOptions
) -> tuple[Tensor, Tensor]:
    """eta for a field of at most this size, and which matrices may step."""
    safe = None
    if options.rule is not None:
        safe = largest_step(bound, d, options.lam, options.eps, tangency_error)
    eta = step_size(options.lr, safe, bound)
    return eta, may_go(bound, eta, d, options.lam, options)
