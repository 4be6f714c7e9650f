"""The engine that can step everything: torch's operations, on batches of equal matrices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import finite_matrices, is_plain_cpu
from ortholand.geometry.rounding import HALF_TYPES, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.geometry.views import View, as_matrices, as_weight
from ortholand.landing.batches import batches
from ortholand.landing.step import LIMITED, SKIPPED, Slot, StateKind, count_of, descent
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_memory, number_of_matrices


class ReferenceEngine:
    """Steps any weight on any device."""

    name = "reference"

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:  # noqa: ARG002
        """None: this engine refuses nothing."""
        return None

    def claim(
        self,
        slots: list[Slot],
        plan: Plan,
        *,
        alone: bool,  # noqa: ARG002
    ) -> tuple[Callable[[], None], list[Slot]]:
        """The step of all weights."""
        for slot in slots:
            check_memory(slot, plan.name_of)
        return partial(_step, slots, plan), []


class _Flags(NamedTuple):
    """Which matrices of some weights did not step, or stepped less than lr."""

    slots: list[Slot]
    taken: Tensor
    limited: Tensor | None


@torch.no_grad()
def _step(slots: list[Slot], plan: Plan) -> None:
    """Step the weights, those of one shape as a batch if that is quicker."""
    kinds = [_kind_of(slot, plan) for slot in slots]
    on_device = not slots[0].weight.is_cpu
    flags = [
        _step_batch([slots[k] for k in members], plan.at_scale(kinds[members[0]][-1]))
        for members in batches(kinds, plan.foreach, on_device=on_device)
    ]
    for device in {batch.taken.device for batch in flags}:
        _count([batch for batch in flags if batch.taken.device == device], plan)


def _kind_of(slot: Slot, plan: Plan) -> tuple[int, int, torch.dtype, torch.device, float]:
    weight = slot.weight
    n, p = as_matrices(weight, plan.view).shape[-2:]
    return n, p, weight.dtype, weight.device, plan.scale_of(weight.shape)


def _step_batch(slots: list[Slot], plan: Plan) -> _Flags:
    """Step weights of one matrix shape, type, device and scale as one batch."""
    view, scale, kinds = plan.view, plan.scale, plan.state_kinds
    W = _together([as_matrices(exact_value(slot.weight, slot.state), view) for slot in slots])
    X = unscaled(W, scale)
    G = _together([as_matrices(slot.gradient, view) for slot in slots]).to(X.dtype)
    state = {
        name: _together([_as_batch(slot.state[name], kind, view) for slot in slots], kind)
        for name, kind in kinds.items()
    }
    step = plan.matrix_step if plan.landing is None else plan.landing
    result = step(X, descent(G, plan.maximize), state)
    (moved, taken, new_state), limited = result[:3], getattr(result, "limited", None)
    moved = follow(W, X, moved, scale)
    taken = _finite(taken, moved, new_state, slots[0].weight.dtype, plan)
    mask = taken[..., None, None] if X.ndim > 2 else taken
    all_go = _may_look(taken, plan) and bool(taken.all())
    shapes = [as_matrices(slot.weight, view).shape[:-2] for slot in slots]
    _keep_weights(slots, _apart(moved if all_go else torch.where(mask, moved, W), shapes), view)
    for name, new in new_state.items():
        is_matrix = kinds[name] == "matrix"
        kept = new if all_go else torch.where(mask if is_matrix else taken, new, state[name])
        parts = _apart(kept, shapes)
        if is_matrix:
            parts = _as_weights(parts, slots, view)
        # As vectors: torch.compile loses what is written to a single float64 number.
        _copy(
            [slot.state[name].unsqueeze(0) for slot in slots], [part.unsqueeze(0) for part in parts]
        )
    return _Flags(slots, taken, limited)


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    # In lists, torch does not write to negated views.
    if not torch.compiler.is_compiling() and any(tensor.is_neg() for tensor in to):
        for tensor, value in zip(to, values, strict=True):
            tensor.copy_(value)
    else:
        torch._foreach_copy_(to, values)


def _finite(
    taken: Tensor, moved: Tensor, state: dict[str, Tensor], dtype: torch.dtype, plan: Plan
) -> Tensor:
    """Which steps are taken and finite as they would be stored.

    A landing step with a safe step ends in the ball, and is not taken if its direction is not
    finite.
    """
    landing = plan.landing
    in_ball = landing is not None and landing.ends_in_ball
    if not in_ball or dtype in HALF_TYPES or plan.scale != 1:
        taken = taken & finite_matrices(moved.to(dtype))
    if landing is not None and in_ball and landing.moments.shows_state:
        return taken
    for name, new in state.items():
        is_matrix = plan.state_kinds[name] == "matrix"
        taken = taken & (finite_matrices(new) if is_matrix else torch.isfinite(new))
    return taken


def _may_look(taken: Tensor, plan: Plan) -> bool:
    return plan.landing is not None and plan.landing.options.may_look and is_plain_cpu(taken)


def _keep_weights(slots: list[Slot], parts: list[Tensor], view: View) -> None:
    values = _as_weights(parts, slots, view)
    if slots[0].weight.dtype not in HALF_TYPES:
        _copy([slot.weight for slot in slots], values)
        return
    for slot, value in zip(slots, values, strict=True):
        keep_(slot.weight, value, slot.state)


def _count(batches: Sequence[_Flags], plan: Plan) -> None:
    """Add the matrices that did not step, or stepped less than lr, to the counts of weights."""
    skipped = torch.cat([batch.taken.reshape(-1) for batch in batches]).logical_not()
    short = [(batch.slots, batch.limited) for batch in batches if batch.limited is not None]
    owners = [(SKIPPED, slot) for batch in batches for slot in batch.slots]
    owners += [(LIMITED, slot) for slots, _ in short for slot in slots]
    marks = torch.cat([skipped, *(limited.reshape(-1) for _, limited in short)]).to(torch.int64)
    if _may_look(marks, plan) and not bool(marks.any()):
        return
    parts = marks.split([number_of_matrices(slot.weight, plan.view) for _, slot in owners])
    counts = [count_of(name, slot.state, marks.device) for name, slot in owners]
    sums = [part.sum() if part.numel() > 1 else part.reshape(()) for part in parts]
    torch._foreach_add_(counts, sums)


def _as_weights(parts: list[Tensor], slots: list[Slot], view: View) -> list[Tensor]:
    return [as_weight(part, slot.weight, view) for part, slot in zip(parts, slots, strict=True)]


def _as_batch(state: Tensor, kind: StateKind, view: View) -> Tensor:
    return as_matrices(state, view) if kind == "matrix" else state


def _together(parts: list[Tensor], kind: StateKind = "matrix") -> Tensor:
    """One batch of all the matrices, or their numbers; a single member is returned as is."""
    if len(parts) == 1:
        return parts[0]
    inner = parts[0].shape[-2:] if kind == "matrix" else ()
    return torch.cat([part.reshape(-1, *inner) for part in parts])


def _apart(batch: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """The parts of a batch made by :func:`_together` that belong to each weight."""
    if len(shapes) == 1:
        return [batch]
    parts = batch.split([shape.numel() for shape in shapes])
    return [part.reshape(s + batch.shape[1:]) for part, s in zip(parts, shapes, strict=True)]
