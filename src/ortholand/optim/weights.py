"""A weight and its state: names, shapes, types and memory."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.matrices import real_dtype, working_dtype
from ortholand.geometry.rounding import (
    COMPENSATION,
    HALF_TYPES,
    ROUNDING_STATE,
    SEED,
    prepare_rounding,
)
from ortholand.geometry.views import View, matrices_shape
from ortholand.landing.step import COUNTS, Slot, StateKind
from ortholand.native import PLAIN_TYPES
from ortholand.sharding.exchange import same_on_all_ranks
from ortholand.sharding.placement import is_dtensor, is_here, zeros_per_matrix

State = dict[str, Any]
Group = Mapping[str, Any]
NO_BUFFERS = ("step", *COUNTS, *ROUNDING_STATE)  # in the state of an unconstrained weight
NO_DIMENSIONS = torch.Size()


def prepare_state(
    p: Tensor, state: State, kinds: Mapping[str, StateKind], view: View, group: Group
) -> None:
    """Give a weight all the state that it needs, of the right types and shapes.

    New state is zero. If the weight's type or device has changed, its state follows, as in
    torch's own optimizers; if its shape has changed, the state no longer applies.
    """
    shape, device, on_cpu = p.shape, p.device, p.is_cpu
    is_half = p.dtype in HALF_TYPES
    dtype = torch.float32 if is_half else p.dtype
    for name in (*kinds, *COUNTS):
        value, kind = state.get(name), kinds.get(name)
        if value is None:
            state[name] = zero_state(p, kind, view)
            continue
        if kind == "matrix":
            wanted_shape, wanted = shape, dtype
        elif kind == "number":
            wanted_shape = NO_DIMENSIONS if view == "matrix" else shape[:-2]
            wanted = real_dtype(dtype) if dtype.is_complex else dtype
        else:
            wanted_shape, wanted = NO_DIMENSIONS, torch.int64
        if value.shape != wanted_shape:
            raise state_error(p, view, name, value, wanted_shape, group)
        here = value.is_cpu if on_cpu else value.device == device  # devices are slow to compare
        if value.dtype is not wanted or not here:
            state[name] = value.to(device, wanted)
    if is_half or COMPENSATION in state or SEED in state:
        _prepare_rounding(p, state, group)


def prepare_plain_state(p: Tensor, state: State, group: Group) -> None:
    """Let an unconstrained weight's state follow its type; the shapes must match."""
    wanted = working_dtype(p.dtype)
    for name, value in state.items():
        if name == "step" and isinstance(value, Tensor):
            state[name] = value.to(device_of_steps(p, group))
        if not isinstance(value, Tensor) or name in NO_BUFFERS or value.ndim == 0 < p.ndim:
            continue
        if value.shape != p.shape:
            raise state_error(p, "", name, value, p.shape, group)
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
        state[SEED] = same_on_all_ranks(state[SEED], p)
    for name, dtype in ((COMPENSATION, p.dtype), (SEED, torch.int64)):
        if name in state:
            state[name] = state[name].to(p.device, dtype)


def zero_state(p: Tensor, kind: StateKind | None, view: View) -> Tensor:
    """New state of a kind, or a count: all zero."""
    if kind is None:
        return torch.zeros((), dtype=torch.int64, device=p.device)
    dtype = working_dtype(p.dtype)
    if kind == "matrix":
        return torch.zeros_like(p, dtype=dtype)
    shape = batch_shape(p.shape, view)
    if shape and is_dtensor(p) and is_here(p, view):
        return zeros_per_matrix(p, real_dtype(dtype))
    return torch.zeros(shape, dtype=real_dtype(dtype), device=p.device)


def batch_shape(shape: torch.Size, view: View) -> torch.Size:
    """The shape of a state with one number per matrix of a weight."""
    return NO_DIMENSIONS if view == "matrix" else shape[:-2]


def number_of_matrices(p: Tensor, view: View) -> int:
    """How many matrices a weight holds."""
    return matrices_shape(p.shape, view)[:-2].numel()


def name_of(group: Group, i: int | None) -> str:
    """The name of a weight of a group, for messages."""
    if i is None:
        return "a part of a weight"
    names = group.get("param_names")
    return repr(names[i]) if names else f"parameter {i} of the group"


def position_of(p: Tensor, group: Group) -> int | None:
    """The index of a weight in its group; None if it is a rank's part of one."""
    return next((i for i, other in enumerate(group["params"]) if other is p), None)


def gradient_error(p: Tensor, G: Tensor, name: str) -> TypeError | ValueError:
    """The error for a gradient that is not dense, or not of its parameter's shape."""
    if G.layout is not torch.strided:
        return TypeError(
            f"Gradients must be dense, got layout {G.layout} for a parameter of shape "
            f"{tuple(p.shape)}. Use sparse=False in the embedding that made it, or another "
            "optimizer for that parameter."
        )
    return ValueError(
        f"A gradient must have its weight's shape, but {name} has shape {tuple(p.shape)} and its "
        f"gradient {tuple(G.shape)}. If you replaced the weight, compute gradients again."
    )


def state_error(
    p: Tensor, view: str, name: str, value: Tensor, shape: torch.Size, group: Group
) -> ValueError:
    """The error for a state that does not fit its weight."""
    seen = f", view {view!r}," if view else ""
    return ValueError(
        "The state of a weight must fit its shape, but "
        f"{name_of(group, position_of(p, group))} has shape {tuple(p.shape)}{seen} and its "
        f"{name!r} has shape {tuple(value.shape)} where {tuple(shape)} was expected. If you "
        "replaced the weight, or changed its view, remove its state: optimizer.state.pop(weight)."
    )


def check_memory(slot: Slot, name: Callable[[Tensor], str]) -> None:
    """Raise if a tensor's memory was freed or truncated (``untyped_storage().resize_(0)``).

    torch would crash, or read and write beyond it. It refuses to write to entries that share
    memory, so raise for these too, before any weight has moved.
    """
    p, G, state = slot
    if torch.compiler.is_compiling() or type(p) not in PLAIN_TYPES:
        return
    for tensor in (p, G, *state.values()):
        if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            continue
        is_contiguous, span = tensor.is_contiguous(), tensor.numel()
        if span and not tensor.is_meta:
            if not is_contiguous:
                span = _span(tensor)
            end = (tensor.storage_offset() + span) * tensor.itemsize
            if tensor.untyped_storage().nbytes() < end or not tensor.data_ptr():
                raise ValueError(
                    "A weight, its gradient and its state must have memory, but one of those of "
                    f"{name(p)}, shape {tuple(p.shape)}, was freed or cut. "
                    "Set the gradient again, or remove the state: optimizer.state.pop(weight)."
                )
        if not is_contiguous and tensor is not G:
            check_entries_apart(tensor, lambda: f"{name(p)} or its state")


def _span(tensor: Tensor) -> int:
    """How far the last entry is from before the first, in entries."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def check_entries_apart(tensor: Tensor, name: Callable[[], str]) -> None:
    """Raise if two entries of a tensor share memory, as in ``torch.eye(3).expand(4, 3, 3)``."""
    if tensor.layout is torch.strided and not tensor.is_contiguous() and _overlaps(tensor):
        raise ValueError(
            "Each entry of a weight and its state must have memory of its own, but entries of "
            f"{name()}, shape {tuple(tensor.shape)} with strides {tensor.stride()}, share some. "
            "Use tensor.clone() or tensor.contiguous()."
        )


def _overlaps(tensor: Tensor) -> bool:
    """Whether two entries of a tensor share memory."""
    reach = 0  # from the first entry to the last, along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    places = np.zeros(1, dtype=np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = np.unique(np.add.outer(places, stride * np.arange(size)))
    return places.size < tensor.numel()
