"""An attraction and a safe-step rule that the library does not know, and steps with them."""

from typing import Any

import torch

import ortholand as ol
from ortholand.geometry.matrices import frobenius_norm
from ortholand.landing import ATTRACTIONS, Attraction, Coefficients, Move, register
from ortholand.landing.gram import FieldGram, times
from ortholand.safe_step import RULES, SafeStepRule
from tests.distributed.counting import counted


class Lazy(Attraction):
    """Half a step along the landing field, with nothing but the reference form."""

    name = "lazy"

    def move(self, X, B, options):
        moved, taken = ATTRACTIONS["coupled"].move(X, B, options)
        return Move((X + moved) / 2, taken)


class TangentOnly(Attraction):
    """A tangent move of length lr, with a Gram form."""

    name = "tangent only"

    def move(self, X, B, options):
        R = ol.landing_field(X, B @ X if X.shape[-1] == X.shape[-2] else B, lam=0.0)
        size = frobenius_norm(R)
        eta = (options.lr / size)[..., None, None].to(X.real.dtype)
        return Move(X - eta * R, torch.isfinite(size))

    def coefficients(self, gram, options):
        field = FieldGram(gram)
        size = field.norm
        a, b = field.tangent
        eta = -options.lr / size
        return Coefficients(times(eta, a), times(eta, b), torch.isfinite(size))


class Cautious(SafeStepRule):
    """Three times the norm: steps a third as long."""

    name = "cautious"

    def bound(self, L):
        return 3 * frobenius_norm(L)


def register_toys() -> None:
    """One line each."""
    register(Lazy())
    register(TangentOnly())
    RULES["cautious"] = Cautious()


def toys_counted(cases: list[tuple[Any, ...]]) -> list[dict]:
    """Steps with them on ranks and in one process."""
    register_toys()
    return [counted(shapes, ol.LandingSGD, **options) for shapes, options in cases]
