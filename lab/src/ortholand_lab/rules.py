"""The rule "tight" of the safe step, which experiments compare with: importing this registers it.

It stood between the free rule "frobenius" and the rule "spectral", which took its place.
"""

import torch
from torch import Tensor

from ortholand.geometry.matrices import frobenius_norm, gram_matrix, per_matrix
from ortholand.safe_step import RULES, SafeStepRule


class Tight(SafeStepRule):
    """``q = ||L^H L||_F``: one product, and steps larger by about ``(p / 2)^(1/4)``."""

    name = "tight"

    def bound(self, L: Tensor) -> Tensor:
        """``||L^H L||_F^(1/2)``, scaled against overflow."""
        norm = frobenius_norm(L)
        unit = norm.clamp(min=torch.finfo(L.dtype).tiny)
        return norm * frobenius_norm(gram_matrix(L / per_matrix(unit, L))).sqrt()


RULES["tight"] = Tight()
