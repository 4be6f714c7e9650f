"""The tensors of a group as lists, where nothing must be prepared: the quick way to a step."""

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.landing.step import SKIPPED, Slot
from ortholand.optim.weights import PLAIN_TYPES

NONE_TYPE, NOTHING = type(None), {}
States = Mapping[Tensor, dict[str, Any]]


class Tensors(NamedTuple):
    """What compiled code steps."""

    moved: list[Any]  # weights, and then their state, kind by kind
    gradients: list[Tensor]
    states: list[dict[str, Any]]  # with the counts

    @classmethod
    def of(cls, slots: list[Slot], names: Iterable[str]) -> "Tensors":
        """The tensors of slots."""
        moved = [slot.weight for slot in slots]
        for name in names:
            moved += [slot.state[name] for slot in slots]
        return cls(moved, [slot.gradient for slot in slots], [slot.state for slot in slots])


def gathered(
    params: list[Tensor], states: States, names: Iterable[str], n_state: int
) -> Tensors | None:
    """The plain tensors of a group's weights, each of which has all its state; None if not so.

    This takes a fraction of a microsecond per weight, of which there may be hundreds.
    """
    gradients: list[Any] = [p.grad for p in params]
    if NONE_TYPE in map(type, gradients):
        params = [p for p, G in zip(params, gradients, strict=True) if G is not None]
        gradients = [G for G in gradients if G is not None]
    # A tensor is slow to look up. Nearly always the weights' state is in their order.
    in_order = len(states) == len(params) and all(map(is_, states, params))
    own = [*states.values()] if in_order else [states.get(p, NOTHING) for p in params]
    if not all(len(state) == n_state and SKIPPED in state for state in own):
        return None
    if any(map(torch.is_inference, params)):
        return None
    moved = [*params]
    for name in names:
        moved += [state.get(name) for state in own]
    if not PLAIN_TYPES.issuperset(map(type, moved)) or not PLAIN_TYPES.issuperset(
        map(type, gradients)
    ):
        return None
    return Tensors(moved, gradients, own)
