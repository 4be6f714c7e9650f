"""A weight with its gradient and state, as the engines step it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.matrices import real_dtype, working_dtype
from ortholand.geometry.rounding import COMPENSATION, ROUNDING_STATE, SEED, prepare_rounding
from ortholand.geometry.scales import FAN, check_scale_fits, scale_of
from ortholand.geometry.views import View, matrices_shape
from ortholand.landing.step import COUNTS, Slot, StateKind, prepare_counts
from ortholand.native import PLAIN_TYPES
from ortholand.sharding.exchange import same_on_all_ranks
from ortholand.sharding.placement import is_dtensor, is_here, zeros_per_matrix
from ortholand.weights import apparent_scale, distances

State = dict[str, Any]
NO_BUFFERS = ("step", *COUNTS, *ROUNDING_STATE)  # in the state of an unconstrained weight
Group = Mapping[str, Any]
LOOKS_ORTHONORMAL = 0.1  # a distance not reached by chance, except with few columns


def prepare_state(
    p: Tensor, state: State, kinds: Mapping[str, StateKind], view: View, group: Group
) -> None:
    """Give a weight all the state that it needs, of the right types and shapes.

    New state is zero. If the weight's type or device has changed, its state follows, as in
    torch's own optimizers; if its shape has changed, the state no longer applies.
    """
    shape, dtype, device, on_cpu = p.shape, working_dtype(p.dtype), p.device, p.is_cpu
    number_shape = batch_shape(shape, view)
    number_dtype = real_dtype(dtype)
    for name, kind in kinds.items():
        value = state.get(name)
        if value is None:
            state[name] = zero_state(p, kind, view)
            continue
        is_matrix = kind == "matrix"
        wanted_shape, wanted = (shape, dtype) if is_matrix else (number_shape, number_dtype)
        if value.shape != wanted_shape:
            raise state_error(p, view, name, value, wanted_shape, group)
        here = value.is_cpu if on_cpu else value.device == device  # devices are slow to compare
        if value.dtype is not wanted or not here:
            state[name] = value.to(device, wanted)
    prepare_counts(state, device)
    if p.dtype is not dtype or COMPENSATION in state or SEED in state:
        _prepare_rounding(p, state, group)


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


def check_memory(slot: Slot, name: Callable[[Tensor], str]) -> None:
    """Raise if a tensor's memory was freed or truncated (``untyped_storage().resize_(0)``).

    torch would crash, or read and write beyond it. It refuses to write to entries that share
    memory, so raise for these too, before any weight has moved.
    """
    p = slot.weight
    if torch.compiler.is_compiling() or type(p) not in PLAIN_TYPES:
        return
    for tensor in (p, slot.gradient, *slot.state.values()):
        if type(tensor) in PLAIN_TYPES and not tensor.is_meta and not _has_memory(tensor):
            raise ValueError(
                "A weight, its gradient and its state must have memory, but one of those of "
                f"{name(p)}, shape {tuple(p.shape)}, was freed or cut. "
                "Set the gradient again, or remove the state: optimizer.state.pop(weight)."
            )
    for tensor in (p, *slot.state.values()):
        if type(tensor) in PLAIN_TYPES:
            check_entries_apart(tensor, lambda: f"{name(p)} or its state")


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


def _has_memory(tensor: Tensor) -> bool:
    span = tensor.numel()
    if not span or tensor.layout is not torch.strided:
        return True
    if not tensor.is_contiguous():  # from the first entry to the last
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in sizes)
    end = (tensor.storage_offset() + span) * tensor.itemsize
    return tensor.untyped_storage().nbytes() >= end and tensor.data_ptr() != 0


def prepare_plain_state(p: Tensor, state: State, group: Group) -> None:
    """Let an unconstrained weight's state follow its type; the shapes must match."""
    wanted = working_dtype(p.dtype)
    for name, value in state.items():
        if not isinstance(value, Tensor) or name in NO_BUFFERS or value.ndim == 0 < p.ndim:
            continue
        if value.shape != p.shape:
            raise state_error(p, "", name, value, p.shape, group)
        if value.dtype is not wanted:
            state[name] = value.to(wanted)
    if p.dtype is not wanted or COMPENSATION in state or SEED in state:
        _prepare_rounding(p, state, group)


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


def zero_state(p: Tensor, kind: StateKind, view: View) -> Tensor:
    """New state, all zero."""
    dtype = working_dtype(p.dtype)
    if kind == "matrix":
        return torch.zeros_like(p, dtype=dtype)
    shape = batch_shape(p.shape, view)
    if shape and is_dtensor(p) and is_here(p, view):
        return zeros_per_matrix(p, real_dtype(dtype))
    return torch.zeros(shape, dtype=real_dtype(dtype), device=p.device)


def batch_shape(shape: torch.Size, view: View) -> torch.Size:
    """The shape of a state with one number per matrix of a weight."""
    return torch.Size() if view == "matrix" else shape[:-2]


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


@torch.no_grad()
def check_start(
    p: Tensor, name: str, view: View, radius: float, *, spectral: bool, scale: float = 1.0
) -> None:
    """Raise if a matrix of the weight is outside the ball, or not finite.

    It may be slightly outside, by the rounding of the weight's own type over many steps.
    ``scale``: the matrix that must be in the ball is the weight divided by this.
    """
    check_scale_fits(scale, p.dtype, name)
    columns = matrices_shape(p.shape, view)[-1]
    limit = 1.0001 * radius + 16 * torch.finfo(p.dtype).eps * columns**0.5
    d = float(distances(p, view, scale=scale).max())
    if d <= limit:
        return
    if spectral:  # eigenvalues only where the free bound does not decide
        d = float(distances(p, view, spectral=True, scale=scale).max())
        if d <= limit:
            return
    norm = "||X^T X - I||_2" if spectral else "||X^T X - I||_F"
    if scale != 1:
        norm += f" of X = weight / {scale:.4g}"
    raise ValueError(
        f"An orthogonal parameter must start within {radius} of the manifold "
        f"({norm}; eps, where that is an option), but {name} of shape {tuple(p.shape)}, "
        f"view {view!r}, is at distance {d:.4g}. {_all_advice(p, view, radius, scale)}"
    )


def _all_advice(p: Tensor, view: View, radius: float, scale: float) -> str:
    of_scale, other = _scale_advice(p, view, scale), _advice(p, view, radius, scale)
    return f"{of_scale} Else, {other[0].lower()}{other[1:]}" if of_scale else other


def _scale_advice(p: Tensor, view: View, scale: float) -> str:
    """Advice on a scale that would fit, if there is one."""
    found = apparent_scale(p, view)
    if not torch.finfo(p.dtype).tiny <= found < torch.inf:  # nothing to divide by
        return ""
    if not float(distances(p, view, spectral=True, scale=found).max()) <= LOOKS_ORTHONORMAL:
        return ""
    fan = scale_of(FAN, p.shape, view)
    said = f"scale={found:.4g}"
    if abs(found / fan - 1) < 1e-2 and fan != 1:
        said += f' or scale="{FAN}"'
    return (
        f"It looks like {found:.4g} times orthonormal, not {scale:.4g} times: if that is meant, "
        f"say {said} in its group."
    )


def _advice(p: Tensor, view: View, radius: float, scale: float) -> str:
    project = (
        "Project it first with ortholand.orthogonalize_(...), which takes a tensor, groups or a "
        "model."
    )
    if scale != 1:
        project += f" For a tensor or a model, say scale={scale:.4g} there, too."
    if p.ndim < 3:
        return project
    other: View = "kernel" if view == "matrix" else "matrix"
    if float(distances(p, other, scale=scale).max()) <= radius:
        return f"In the view {other!r} it is within: say view={other!r} in its group."
    return (
        f"If the view {other!r} is meant, say view={other!r} in its group: "
        f"{_WHAT_VIEWS_SEE} Else project it in the view that is meant, with "
        "ortholand.orthogonalize_(weight, view=...)."
        + (f" Say scale={scale:.4g} there, too." if scale != 1 else "")
    )


_WHAT_VIEWS_SEE = (
    "'matrix' sees one matrix (size of the first dimension) x (all others), 'kernel' a stack of "
    "matrices, the last two dimensions."
)
