"""Who computes a step: a short list of engines, asked in order and in one place.

Each engine says what it cannot step, and why (``refusal``), and takes what it can (``claim``). The
last one can step everything. ``claim`` checks everything, and nothing is done before it has run.
While torch's operations compute, autograd must be off: an engine sees to that itself, because
for compiled code of 10 microseconds even this counts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ortholand.landing.step import Slot
from ortholand.optim.engines.compiled import CompiledEngine, Tensors
from ortholand.optim.engines.reference import ReferenceEngine
from ortholand.optim.engines.sharded import ShardedEngine, split_spread
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_memory

StepPlain = Callable[..., None]
Run = Callable[[], Any]


class Engine(Protocol):
    """Computes steps of orthogonal weights."""

    name: str

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:
        """Why the engine cannot step this weight; None if it can. ``alone``: it is the only one."""

    def claim(self, slots: list[Slot], plan: Plan, *, alone: bool) -> tuple[Run | None, list[Slot]]:
        """The step of the weights it can step, checked but not done; and the other weights."""


COMPILED = CompiledEngine()
WHOLE_ENGINES: tuple[Engine, ...] = (COMPILED, ReferenceEngine())
SHARDED = ShardedEngine(lambda slots, plan: step_by_engines(slots, plan, WHOLE_ENGINES))
ENGINES: tuple[Engine, ...] = (SHARDED, *WHOLE_ENGINES)


def step_by_engines(slots: list[Slot], plan: Plan, engines: tuple[Engine, ...] = ENGINES) -> None:
    """One step of orthogonal weights, each by the first engine that can step it."""
    for run in claimed(slots, plan, engines):
        run()


def claimed(slots: list[Slot], plan: Plan, engines: tuple[Engine, ...] = ENGINES) -> list[Run]:
    """That step, checked but not done: nothing moves before all groups are checked."""
    alone = len(slots) == 1
    runs: list[Run] = []
    for engine in engines:
        if not slots:
            break
        run, slots = engine.claim(slots, plan, alone=alone)
        if run is not None:
            runs.append(run)
    return runs


def claimed_at_once(
    group: Mapping[str, Any],
    states: Mapping[Tensor, dict[str, Any]],
    plan: Plan,
    prepare: Callable[[], list[Slot]],
    *,
    only: bool,
) -> list[Run]:
    """The step of a group, checked but not done, without preparing slots if there is no need.

    If it is the only group, compiled code checks and steps in one call, all weights or none.
    """
    tensors = COMPILED.gathered(group["params"], states, plan)
    if tensors is not None and only:
        return [partial(_step_at_once, tensors, plan, prepare)]
    if tensors is not None and COMPILED.takes(tensors, plan):
        return [partial(COMPILED.step, tensors, plan)]
    return claimed(prepare(), plan)


def _step_at_once(tensors: Tensors, plan: Plan, prepare: Callable[[], list[Slot]]) -> None:
    if not COMPILED.step(tensors, plan):
        step_by_engines(prepare(), plan)


def claimed_plain(slots: list[Slot], plan: Plan, step: StepPlain) -> list[Run]:
    """One step of unconstrained weights by a function of slots, checked but not done."""
    for slot in slots:
        check_memory(slot, plan.name_of)
    return [partial(_step_plain, slots, plan, step)] if slots else []


@torch.no_grad()
def _step_plain(slots: list[Slot], plan: Plan, step: StepPlain) -> None:
    spread, whole = split_spread(slots)
    if spread:
        SHARDED.step_plain(spread, plan, step)
    step(whole)
