"""Shared parts of the landing optimizers, and of those whose plain groups take Adam's step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ortholand.landing import LandingOptions, find_attraction
from ortholand.landing.step import Slot
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.checks import check_adam_options, check_landing_options, plain_betas, scalar_lr
from ortholand.optim.options import ADAM, LANDING
from ortholand.optim.plain import Agreement, plain_adam_step
from ortholand.safe_step import find_rule

SMALLEST_EPS = 1e-4  # Adam's own eps is smaller, and so small a ball allows no useful step


class LandingOptimizer(OrthogonalOptimizer):
    """Moves by an attraction, inside the ball of a safe step."""

    further_options = LANDING

    def how_it_lands(self, group: Mapping[str, Any]) -> LandingOptions:
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

    def start_radius(self, group: Mapping[str, Any]) -> float:
        """The radius of the ball, outside which no safe step holds; infinite without one."""
        return self.how_it_lands(group).start_radius

    def is_ball_spectral(self, group: Mapping[str, Any]) -> bool:
        """Whether the safe-step rule uses the spectral norm."""
        return self.how_it_lands(group).is_ball_spectral

    def move(self, X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The landing step."""
        options = self.how_it_lands(group)
        return options.attraction.move(X, B, options)


class LandingWithAdam(LandingOptimizer):
    """Unconstrained groups take the step of ``torch.optim.AdamW`` (or Adam)."""

    further_options = ADAM

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its betas become a tuple."""
        if "betas" in param_group:
            param_group["betas"] = plain_betas(param_group["betas"])
        super().add_param_group(param_group)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check Adam's and landing's conditions."""
        check_adam_options(options)
        check_landing_options(options)
        if options["eps"] < SMALLEST_EPS:
            raise ValueError(
                f"eps is the radius of the ball ||X^T X - I|| <= eps, at least {SMALLEST_EPS}, "
                f"got {options['eps']}. Adam's own eps is adam_eps here."
            )

    def plain_step(
        self, slots: list[Slot], group: Mapping[str, Any], agree: Agreement | None = None
    ) -> None:
        """The step of ``torch.optim.AdamW`` (or Adam)."""
        plain_adam_step(slots, group, agree)
