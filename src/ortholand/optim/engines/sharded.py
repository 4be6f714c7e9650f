"""The engine for weights spread over ranks (DTensors): see :mod:`ortholand.sharding`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ortholand.landing.step import Slot
from ortholand.optim.plan import Plan
from ortholand.sharding.placement import is_dtensor


class ShardedEngine:
    """Steps DTensors; passes matrices that are whole in one place to the other engines."""

    name = "sharded"

    def __init__(self, step_whole: Callable[[list[Slot], Plan], None]) -> None:
        self.step_whole = step_whole

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:  # noqa: ARG002
        """That the weight is not spread over ranks; None if it is."""
        return None if is_dtensor(slot.weight) else "not a DTensor"

    def claim(
        self,
        slots: list[Slot],
        plan: Plan,
        *,
        alone: bool,  # noqa: ARG002
    ) -> tuple[Callable[[], None] | None, list[Slot]]:
        """The step of DTensors that this rank has a part of, and the weights that are not any."""
        spread, whole = split_spread(slots)
        return (partial(self.step, spread, plan) if spread else None), whole

    @torch.no_grad()
    def step(self, slots: list[Slot], plan: Plan) -> None:
        """Step the weights that this rank has a part of."""
        from ortholand.sharding.steps import ShardedStep, step_sharded  # not before a DTensor

        def gram_step(scale: float) -> Any:
            return plan.at_scale(scale).landing.gram_step  # pyrefly: ignore[missing-attribute]

        landing = plan.landing
        by_rows = (
            landing is not None
            and landing.gram_step is not None
            and plan.sharded != "owners"
            and not landing.moments.why_not_apart
        )
        step = ShardedStep(
            view=plan.view,
            maximize=plan.maximize,
            foreach=plan.foreach,
            prefers_fewer_bytes=plan.sharded == "auto",
            state_kinds=plan.state_kinds,
            gram_step=gram_step if by_rows else None,
            scale_of=plan.scale_of,
            summed_numbers=landing.moments.summed_numbers if landing is not None else None,
            step_whole=lambda whole: self.step_whole(whole, plan),
            terms=plan.terms,
        )
        step_sharded(slots, step)


def split_spread(slots: list[Slot]) -> tuple[list[Slot], list[Slot]]:
    """Which weights are spread over ranks, and which are not."""
    spread = [slot for slot in slots if is_dtensor(slot.weight)]
    return spread, [slot for slot in slots if not is_dtensor(slot.weight)]


@torch.no_grad()
def step_plain(slots: list[Slot], plan: Plan, step: Callable[..., None]) -> None:
    """Step unconstrained weights by a function of slots."""
    spread, whole = split_spread(slots)
    if spread:
        from ortholand.sharding.steps import step_plain

        step_plain(spread, step, plan.terms)
    step(whole)
