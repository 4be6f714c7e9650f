"""A weight and its state: shapes, types and memory."""

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ortholand.geometry.matrices import real_dtype, working_dtype
from ortholand.geometry.rounding import (
    COMPENSATION,
    HALF_TYPES,
    ROUNDING_STATE,
    SEED,
    prepare_rounding,
)
from ortholand.geometry.views import View, batch_shape, described
from ortholand.landing.step import COUNTS, SKIPPED, Slot, StateKind
from ortholand.optim.options import Group
from ortholand.optim.plan import Plan, name_of, position_of
from ortholand.sharding.placement import is_dtensor, is_here, zeros_per_matrix

State = dict[str, Any]
Layout = dict[str, tuple[torch.Size, torch.dtype]]  # of a weight's state, by name
NOT_BUFFERS = frozenset(("step", *COUNTS, *ROUNDING_STATE))  # state that depends on no view
NO_DIMENSIONS = torch.Size()
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))  # subclasses may have no memory of their own


def state_layout(
    shape: torch.Size, dtype: torch.dtype, kinds: Mapping[str, StateKind], view: View
) -> Layout:
    """Shape and type of all the state of an orthogonal weight, except for its rounding."""
    dtype = working_dtype(dtype)
    per_matrix = batch_shape(shape, view), real_dtype(dtype)
    layout = {k: (shape, dtype) if kind == "matrix" else per_matrix for k, kind in kinds.items()}
    return layout | dict.fromkeys(COUNTS, (NO_DIMENSIONS, torch.int64))


def prepare_state(p: Tensor, state: State, plan: Plan, group: Group) -> None:
    """Give a weight all its state: new state is zero, old state follows its type and device."""
    layout, device, on_cpu = plan.layouts.get((p.shape, p.dtype)), p.device, p.is_cpu
    if layout is None:
        layout = state_layout(p.shape, p.dtype, plan.state_kinds, plan.view)
        plan.layouts[p.shape, p.dtype] = layout
    for name, (shape, dtype) in layout.items():
        value = state.get(name)
        if value is None:
            state[name] = zero_state(p, shape, dtype, plan.view)
            continue
        if value.shape != shape:
            raise state_error(p, plan.view, name, value, shape, group)
        here = value.is_cpu if on_cpu else value.device == device  # devices are slow to compare
        if value.dtype is not dtype or not here:
            state[name] = value.to(device, dtype)
    if p.dtype in HALF_TYPES or COMPENSATION in state or SEED in state:
        _prepare_rounding(p, state, group)


def zero_state(p: Tensor, shape: torch.Size, dtype: torch.dtype, view: View) -> Tensor:
    """New state of a weight: all zero."""
    if shape == p.shape:
        return torch.zeros_like(p, dtype=dtype)
    if shape and is_dtensor(p) and is_here(p, view):
        return zeros_per_matrix(p, view, dtype)
    return torch.zeros(shape, dtype=dtype, device=p.device)


def prepare_plain_state(p: Tensor, state: State, group: Group) -> None:
    """Let an unconstrained weight's state follow its type; the shapes must match."""
    wanted = working_dtype(p.dtype)
    for name, value in state.items():
        if name == "step" and isinstance(value, Tensor):
            state[name] = value.to(device_of_steps(p, group))
        if not isinstance(value, Tensor) or name in NOT_BUFFERS or value.ndim == 0 < p.ndim:
            continue
        if value.shape != p.shape:
            raise state_error(p, None, name, value, p.shape, group)
        if value.dtype is not wanted:
            state[name] = value.to(wanted)
    if p.dtype is not wanted or COMPENSATION in state or SEED in state:
        _prepare_rounding(p, state, group)


def device_of_steps(p: Tensor, group: Group) -> torch.device:
    """Where torch's Adam counts steps: on the host, unless it must not or need not read there."""
    on_device = group.get("capturable") or group.get("fused")
    return p.device if on_device else torch.device("cpu")


def _prepare_rounding(p: Tensor, state: State, group: Group) -> None:
    """Give a half-precision weight the state that its group's rounding needs, on its device."""
    rest = state.get(COMPENSATION)
    if rest is not None and rest.shape != p.shape:
        del state[COMPENSATION]  # of a former weight: what is lost is below rounding
    is_new = SEED not in state
    prepare_rounding(p, state, group.get("rounding"))
    if is_new and SEED in state and is_dtensor(p):
        from ortholand.sharding.exchange import sum_over_groups  # not before a DTensor

        state[SEED] = sum_over_groups(state[SEED], p.device_mesh.get_all_groups())
    for name, dtype in ((COMPENSATION, p.dtype), (SEED, torch.int64)):
        if name in state:
            state[name] = state[name].to(p.device, dtype)


def number_of_matrices(p: Tensor, view: View) -> int:
    """How many matrices a weight holds."""
    return batch_shape(p.shape, view).numel()


def state_error(
    p: Tensor, view: View | None, name: str, value: Tensor, shape: torch.Size, group: Group
) -> ValueError:
    """The error for a state that does not fit its weight."""
    seen = f", view {described(view)!r}," if view else ""
    return ValueError(
        "The state of a weight must fit its shape, but "
        f"{name_of(group, position_of(p, group))} has shape {tuple(p.shape)}{seen} and its "
        f"{name!r} has shape {tuple(value.shape)} where {tuple(shape)} was expected. If you "
        "replaced the weight, or changed its view, remove its state: optimizer.state.pop(weight)."
    )


def copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value to its tensor, all at once."""
    # In lists, torch does not write to negated or conjugated views.
    is_run = not torch.compiler.is_compiling()
    if is_run and (any(map(Tensor.is_neg, to)) or any(map(Tensor.is_conj, to))):
        for tensor, value in zip(to, values, strict=True):
            tensor.copy_(value)
    elif to:
        torch._foreach_copy_(to, values)


def check_memory(slot: Slot, name: Callable[[Tensor], str]) -> None:
    """Raise if memory was freed or cut (``untyped_storage().resize_(0)``), or is shared."""
    p, G, state = slot
    if torch.compiler.is_compiling() or type(p) not in PLAIN_TYPES:
        return
    for tensor in (p, G, *state.values()):
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            continue
        is_contiguous, span = tensor.is_contiguous(), tensor.numel()
        if span and not tensor.is_meta:
            if not is_contiguous:  # from the first entry to the last
                sizes = zip(tensor.shape, tensor.stride(), strict=True)
                span = 1 + sum([(size - 1) * stride for size, stride in sizes])
            end = (tensor.storage_offset() + span) * tensor.itemsize
            if tensor.untyped_storage().nbytes() < end or not tensor.data_ptr():
                raise ValueError(
                    "A weight, its gradient and its state must have memory, but one of those of "
                    f"{name(p)}, shape {tuple(p.shape)}, was freed or cut. "
                    "Set the gradient again, or remove the state: optimizer.state.pop(weight)."
                )
        if not is_contiguous and tensor is not G:
            check_entries_apart(tensor, lambda: f"{name(p)} or its state")


def check_entries_apart(tensor: Tensor, name: Callable[[], str]) -> None:
    """Raise if two entries of a tensor share memory, as in ``torch.eye(3).expand(4, 3, 3)``."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return
    reach = 0  # from the first entry to the last, along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return
    places = np.zeros(1, dtype=np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = np.unique(np.add.outer(places, stride * np.arange(size)))
    if places.size < tensor.numel():
        raise ValueError(
            "Each entry of a weight and its state must have memory of its own, but entries of "
            f"{name()}, shape {tuple(tensor.shape)} with strides {tensor.stride()}, share some. "
            "Use tensor.clone() or tensor.contiguous()."
        )


# --- the tensors of a group as lists, where nothing must be prepared: the quick way to a step

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
