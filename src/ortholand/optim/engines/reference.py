"""The engine that can step everything: torch's operations, on batches of equal matrices.

Tall and wide weights step in the Gram form if the step has one and it pays; all others by the
optimizer's own ``matrix_step``.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ortholand.geometry.matrices import PART, finite_matrices, finite_sums, is_plain_cpu
from ortholand.geometry.rounding import HALF_TYPES, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.geometry.views import View, as_matrices, as_weight, matrices_shape
from ortholand.landing.batches import batches
from ortholand.landing.description import GramStep
from ortholand.landing.step import (
    MatrixStep,
    Rows,
    Slot,
    StateKind,
    count_limited,
    count_skipped,
    descent,
)
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_memory


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


@torch.no_grad()
def _step(slots: list[Slot], plan: Plan) -> None:
    """Step the weights, those of one shape as a batch if that is quicker."""
    scales = [plan.scale_of(slot.weight.shape) for slot in slots]
    if len(slots) == 1:
        _step_batch(slots, plan.at_scale(scales[0]))
        return
    kinds = zip((_kind_of(slot, plan.view) for slot in slots), scales, strict=True)
    for members in batches([(*kind, scale) for kind, scale in kinds], plan.foreach):
        _step_batch([slots[k] for k in members], plan.at_scale(scales[members[0]]))


def _kind_of(slot: Slot, view: View) -> tuple[int, int, torch.dtype, torch.device]:
    n, p = as_matrices(slot.weight, view).shape[-2:]
    return n, p, slot.weight.dtype, slot.weight.device


def form_of(slot: Slot, plan: Plan) -> str:
    """The name of the form in which this engine steps a weight."""
    n, p = matrices_shape(slot.weight.shape, plan.view)[-2:]
    return "Gram form" if _gram_step(n, p, plan) is not None else "matrix_step"


def _gram_step(n: int, p: int, plan: Plan) -> GramStep | None:
    """The Gram form of n x p matrices, if there is one and it is quicker."""
    landing = plan.landing
    if n == p or landing is None or not landing.gram_pays(n, p):
        return None
    return landing.gram_step


def _step_batch(slots: list[Slot], plan: Plan) -> None:
    """Step weights of one matrix shape, type, device and scale as one batch."""
    view, scale = plan.view, plan.scale
    W = _together([as_matrices(exact_value(slot.weight, slot.state), view) for slot in slots])
    X = unscaled(W, scale)
    G = _together([descent_gradient(slot, plan, X.dtype) for slot in slots])
    state = {
        name: _together([_as_batch(slot.state[name], kind, view) for slot in slots], kind)
        for name, kind in plan.state_kinds.items()
    }
    result = matrix_step(X, G, state, plan)
    (moved, taken, new_state), limited = result[:3], getattr(result, "limited", None)
    moved = follow(W, X, moved, scale)
    dtype = slots[0].weight.dtype
    bounded = plan.landing is not None and plan.landing.stays_finite
    if not bounded or dtype in HALF_TYPES or scale != 1:  # what is stored may not be finite
        taken = taken & finite_matrices(moved.to(dtype))
    if not bounded or X.shape[-2] != X.shape[-1]:  # what is projected may overflow
        for name, new in new_state.items():
            is_matrix = plan.state_kinds[name] == "matrix"
            taken = taken & (finite_sums(new) if is_matrix else torch.isfinite(new))
    shapes = [as_matrices(slot.weight, view).shape[:-2] for slot in slots]
    mask = taken[..., None, None] if X.ndim > 2 else taken
    # Memory of a large batch is saved by a branch on the CPU; elsewhere that would be a wait.
    all_go = X.numel() > PART and is_plain_cpu(taken) and bool(taken.all())
    reached = moved if all_go else torch.where(mask, moved, W)
    parts = zip(slots, _apart(reached, shapes), _apart(taken, shapes), strict=True)
    for slot, part, ok in parts:
        keep_(slot.weight, as_weight(part, slot.weight, view), slot.state)
        count_skipped(slot.state, ok)
    if limited is not None:
        for slot, part in zip(slots, _apart(limited, shapes), strict=True):
            count_limited(slot.state, part)
    for name, new in new_state.items():
        is_matrix = plan.state_kinds[name] == "matrix"
        kept = new if all_go else torch.where(mask if is_matrix else taken, new, state[name])
        for slot, part in zip(slots, _apart(kept, shapes), strict=True):
            # As a vector: torch.compile loses what is written to a single float64 number.
            target = slot.state[name].unsqueeze(0)
            target.copy_(as_weight(part, slot.weight, view) if is_matrix else part)


def matrix_step(X: Tensor, G: Tensor, state: dict[str, Tensor], plan: Plan) -> MatrixStep:
    """The step of a batch of matrices, in the Gram form if they are tall and there is one."""
    n, p = X.shape[-2:]
    gram_step = _gram_step(n, p, plan)
    if gram_step is None:
        return plan.matrix_step(X, G, state)
    return gram_step(X, G, state, Rows(n, n)).alone()


def descent_gradient(slot: Slot, plan: Plan, dtype: torch.dtype) -> Tensor:
    """The gradient as matrices, with its sign flipped if the step should ascend."""
    return descent(as_matrices(slot.gradient, plan.view).to(dtype), plan.maximize)


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
