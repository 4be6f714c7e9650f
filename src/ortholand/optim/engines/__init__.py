"""Who computes a step: a short list, asked in order; one place asks.

Each engine says what it cannot step, and why (``refusal``). The last one can step everything.
Where torch's operations compute, autograd must not look on: an engine sees to that itself, because
for compiled code of 10 microseconds even this counts.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from ortholand.landing.step import Slot
from ortholand.optim.engines.compiled import CompiledEngine
from ortholand.optim.engines.reference import ReferenceEngine
from ortholand.optim.engines.sharded import ShardedEngine
from ortholand.optim.plan import Plan

StepPlain = Callable[..., None]


class Engine(Protocol):
    """What computes steps of orthogonal weights."""

    name: str

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:
        """Why the engine cannot step this weight; None if it can. ``alone``: no other steps too."""

    def step(self, slots: list[Slot], plan: Plan) -> None:
        """Step the weights."""


WHOLE_ENGINES: tuple[Engine, ...] = (CompiledEngine(), ReferenceEngine())
SHARDED = ShardedEngine(lambda slots, plan: step_by_engines(slots, plan, WHOLE_ENGINES))
ENGINES: tuple[Engine, ...] = (SHARDED, *WHOLE_ENGINES)


def step_by_engines(slots: list[Slot], plan: Plan, engines: tuple[Engine, ...] = ENGINES) -> None:
    """One step of orthogonal weights, each by the first engine that can step it."""
    alone = len(slots) == 1
    for engine in engines:
        if not slots:
            return
        taken, slots = split(engine, slots, plan, alone=alone)
        if taken:
            engine.step(taken, plan)


@torch.no_grad()
def step_plain(slots: list[Slot], plan: Plan, step: StepPlain) -> None:
    """One step of unconstrained weights by a function of slots."""
    spread, whole = split(SHARDED, slots, plan, alone=False)
    if spread:
        SHARDED.step_plain(spread, step)
    step(whole)


def split(
    engine: Engine, slots: list[Slot], plan: Plan, *, alone: bool
) -> tuple[list[Slot], list[Slot]]:
    """Which of the weights an engine steps, and which it does not."""
    taken: list[Slot] = []
    refused: list[Slot] = []
    for slot in slots:
        (refused if engine.refusal(slot, plan, alone=alone) else taken).append(slot)
    return taken, refused
