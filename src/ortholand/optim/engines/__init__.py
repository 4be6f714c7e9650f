"""Who computes a step: a short list of engines, asked in order and in one place.

The last one can step everything. While torch's operations compute, autograd must be off: an engine
sees to that itself, because for compiled code of 10 microseconds even this counts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ortholand.geometry.views import check_weight
from ortholand.landing.step import Slot
from ortholand.optim.engines.compiled import CompiledEngine, Tensors
from ortholand.optim.engines.reference import ReferenceEngine
from ortholand.optim.engines.sharded import ShardedEngine, step_plain
from ortholand.optim.options import Group
from ortholand.optim.plain import sound_slots
from ortholand.optim.plan import Plan, name_of
from ortholand.optim.weights import (
    PLAIN_TYPES,
    check_memory,
    prepare_plain_state,
    prepare_state,
)
from ortholand.sharding.placement import is_elsewhere

States = Mapping[Tensor, dict[str, Any]]
Run = Callable[[], Any]


class Engine(Protocol):
    """Computes steps of orthogonal weights."""

    name: str

    def refusal(self, slot: Slot, plan: Plan) -> str | None:
        """Why the engine cannot step this weight; None if it can."""

    def claim(self, slots: list[Slot], plan: Plan) -> tuple[Run | None, list[Slot]]:
        """The step of the weights it can step, checked but not done; and the other weights."""


COMPILED = CompiledEngine()
WHOLE_ENGINES: tuple[Engine, ...] = (COMPILED, ReferenceEngine())
SHARDED = ShardedEngine(lambda slots, plan: step_by_engines(slots, plan, WHOLE_ENGINES))
ENGINES: tuple[Engine, ...] = (SHARDED, *WHOLE_ENGINES)


def claimed(group: Group, plan: Plan, states: States, *, only: bool) -> list[Run]:
    """The step of orthogonal weights, checked but not done: nothing moves before all are checked.

    If compiled code has nothing to prepare, and this is the ``only`` group, one call does both.
    """
    all_plain = PLAIN_TYPES.issuperset(map(type, group["params"]))
    if plan.fused is False and all_plain:
        return claims(slots_of(group, plan, states), plan, WHOLE_ENGINES[1:])
    tensors = COMPILED.gathered(group["params"], states, plan)
    if tensors is not None and only:
        return [partial(_step_at_once, tensors, group, plan, states)]
    if tensors is not None and COMPILED.takes(tensors, plan):
        return [partial(COMPILED.step, tensors, plan)]
    engines = WHOLE_ENGINES if all_plain else ENGINES
    return claims(slots_of(group, plan, states), plan, engines)


def _step_at_once(tensors: Tensors, group: Group, plan: Plan, states: States) -> None:
    if not COMPILED.step(tensors, plan):
        step_by_engines(slots_of(group, plan, states), plan)


def claims(slots: list[Slot], plan: Plan, engines: tuple[Engine, ...] = ENGINES) -> list[Run]:
    """What each engine takes of some weights."""
    runs = []
    for engine in engines:
        if slots:
            run, slots = engine.claim(slots, plan)
            if run is not None:
                runs.append(run)
    return runs


def step_by_engines(slots: list[Slot], plan: Plan, engines: tuple[Engine, ...] = ENGINES) -> None:
    """One step of orthogonal weights, each by the first engine that can step it."""
    for run in claims(slots, plan, engines):
        run()


def claimed_plain(group: Group, plan: Plan, states: States, step: Callable[..., None]) -> list[Run]:
    """The step of unconstrained weights by a function of slots, checked but not done."""
    if sound := sound_slots(group["params"], states, group, plan.notes):
        return [partial(step, sound, group)]
    for slot in (slots := slots_of(group, plan, states)):
        check_memory(slot, plan.name_of)
    return [partial(step_plain, slots, plan, partial(step, group=group))] if slots else []


def slots_of(group: Group, plan: Plan, states: States) -> list[Slot]:
    """The weights of a group that have gradients, with their state; checked, not yet moved."""
    slots, names = [], group.get("param_names")
    for i, p in enumerate(group["params"]):
        if (G := p.grad) is None:
            continue
        if G.layout is not torch.strided:
            raise TypeError(
                f"Gradients must be dense, got layout {G.layout} for a parameter of shape "
                f"{tuple(p.shape)}. Use sparse=False in the embedding that made it, or another "
                "optimizer for that parameter."
            )
        if G.shape != p.shape:
            raise ValueError(
                f"A gradient must have its weight's shape, but {name_of(group, i)} has shape "
                f"{tuple(p.shape)} and its gradient {tuple(G.shape)}. If you replaced the weight, "
                "compute gradients again."
            )
        if type(p) not in PLAIN_TYPES and is_elsewhere(p):
            continue
        state = states[p]
        if plan.orthogonal:
            name = repr(names[i]) if names else f"parameter {i} of the group"
            check_weight(p, name, plan.view)  # it may have been replaced
            prepare_state(p, state, plan, group)
        else:
            prepare_plain_state(p, state, group)
        slots.append(Slot(p, G, state))
    return slots
