"""Shared parts of the landing optimizers, and of those whose plain groups take Adam's step."""

import math
from typing import Any

from torch import Tensor

from ortholand.landing import LandingOptions, find_attraction
from ortholand.landing.description import LandingStep
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.options import ADAM, LANDING, Group, plain_betas, scalar_lr
from ortholand.safe_step import find_rule

SMALLEST_EPS = 1e-4  # Adam's own eps is smaller, and so small a ball allows no useful step


class LandingOptimizer(OrthogonalOptimizer):
    """Moves by an attraction, inside the ball of a safe step."""

    further_options = LANDING

    keeps_generators = True

    def landing_step(self, group: Group) -> LandingStep:
        """Moments, then the attraction's move."""
        return LandingStep(self.moments(group), self.how_it_lands(group))

    def how_it_lands(self, group: Group) -> LandingOptions:
        """The group's landing options."""
        safe_step = group["safe_step"]
        return LandingOptions(
            lr=scalar_lr(group["lr"]),
            attraction=find_attraction(group["attraction"]),
            rule=None if safe_step is None else find_rule(safe_step),
            lam=group["lam"],
            eps=group["eps"],
            omega=group["omega"],
        )

    def start_radius(self, group: Group) -> float:
        """The radius of the ball, outside which no safe step holds; infinite without one."""
        return math.inf if group["safe_step"] is None else group["eps"]

    def move(self, X: Tensor, B: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The landing step."""
        options = self.how_it_lands(group)
        return options.attraction.move(X, B, options)


class LandingWithAdam(LandingOptimizer):
    """Unconstrained groups take the step of ``torch.optim.AdamW`` (or Adam)."""

    further_options = ADAM

    @classmethod
    def converted(cls, name: str, value: Any) -> Any:
        """An option as it is kept: betas become a tuple."""
        return plain_betas(value) if name == "betas" else super().converted(name, value)

    def check_options(self, options: Group) -> None:
        """Check Adam's conditions."""
        if options["eps"] < SMALLEST_EPS:
            raise ValueError(
                f"eps is the radius of the ball ||X^T X - I|| <= eps, at least {SMALLEST_EPS}, "
                f"got {options['eps']}. Adam's own eps is adam_eps here."
            )
