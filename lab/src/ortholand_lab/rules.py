"""Safe steps that experiments compare with: the paper's, and the rule "tight".

"tight" stood between the free rule "frobenius" and the rule "spectral", which took its place.
Importing this registers it.
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


def paper_step_size(
    relative_gradient_norm: Tensor, d: Tensor, *, lam: float = 1.0, eps: float = 0.5
) -> Tensor:
    """The safe step as printed in the paper, kept for comparison only: it is not safe.

    It lacks the hypothesis ``eta <= 1 / (2 lam)``; d may be N, as in its statement, or ``||D||``.
    """
    a = relative_gradient_norm
    alpha = 2 * lam * d - 2 * a * d - 2 * lam * d**2
    beta = a**2 + lam**2 * d**3 + 2 * lam * a * d**2 + a**2 * d
    return (alpha + (alpha**2 + 4 * beta * (eps - d)).sqrt()) / (2 * beta)
