"""The options of a landing step, typed and checked."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ortholand.safe_step import SafeStepRule

if TYPE_CHECKING:
    from ortholand.landing.attraction import Attraction


@dataclass(frozen=True)
class LandingOptions:
    """How a matrix lands, whatever made the direction. The optimizers make it from a group."""

    lr: float | Tensor
    attraction: "Attraction"
    rule: SafeStepRule | None  # of the safe step; None: no safeguard
    lam: float = 1.0
    eps: float = 0.5
    omega: float = 0.5

    @property
    def start_radius(self) -> float:
        """How far from the manifold a matrix may start: the safe step holds in the ball only."""
        return math.inf if self.rule is None else self.eps
