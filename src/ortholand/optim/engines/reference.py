"""The engine that can step everything: torch's operations, on batches of equal matrices."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import finite_matrices
from ortholand.geometry.rounding import HALF_TYPES, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.geometry.views import View
from ortholand.landing.batches import longest_batch
from ortholand.landing.step import LIMITED, SKIPPED, MatrixStep, Slot, count_of
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
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Slot]] = {}
    for slot in slots:
        weight = slot.weight
        alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(slot)
    flags: dict[torch.device, list[_Flags]] = {}
    for (shape, _, device), members in alike.items():
        frame = Frame.of(shape, plan.view)
        longest = longest_batch(
            frame.rows, frame.columns, plan.foreach, on_device=device.type != "cpu"
        )
        scaled = plan.at_scale(plan.scale_of(shape))
        for first in range(0, len(members), longest):
            batch = members[first : first + longest]
            result = _step_batch(batch, frame, scaled)
            if result.taken is not None:
                flags.setdefault(device, []).append(_Flags(batch, result.taken, result.limited))
    for batches in flags.values():
        _count(batches)


class Frame(NamedTuple):
    """How weights of one shape, one or several of them, become a batch of matrices, and back."""

    shape: torch.Size  # of a weight
    rows: int  # of a matrix as it lies in the weight
    columns: int
    is_batch: bool  # whether a weight has several matrices

    @classmethod
    def of(cls, shape: torch.Size, view: View) -> "Frame":
        """The frame of weights of that shape."""
        if view == "matrix":
            return cls(shape, shape[0], shape[1:].numel(), is_batch=False)
        return cls(shape, shape[-2], shape[-1], is_batch=len(shape) > 2)

    def together(self, tensors: list[Tensor]) -> Tensor:
        """Tensors of the weights' shape as matrices ``(..., n, p)``, n >= p."""
        M = tensors[0] if len(tensors) == 1 else torch.stack(tensors)
        if self.is_batch or M.ndim != 2 + (len(tensors) > 1):
            several = (-1,) if self.is_batch or len(tensors) > 1 else ()
            M = M.reshape(*several, self.rows, self.columns)
        return M.mT if self.rows < self.columns else M

    def apart(self, M: Tensor, several: bool) -> list[Tensor]:
        """Undo :meth:`together`."""
        M = M.mT if self.rows < self.columns else M
        if several:
            return list(M.reshape(-1, *self.shape).unbind())
        return [M if M.shape == self.shape else M.reshape(self.shape)]

    def numbers(self, values: list[Tensor]) -> Tensor:
        """Numbers of the weights' matrices, ``(...)``."""
        value = values[0] if len(values) == 1 else torch.stack(values)
        return value.reshape(-1) if value.ndim > 1 else value


def _step_batch(slots: list[Slot], frame: Frame, plan: Plan) -> MatrixStep:
    """Step weights of one shape, type, device and scale as one batch."""
    W, G, state = _read(slots, frame, plan)
    X, dtype = unscaled(W, plan.scale), slots[0].weight.dtype
    step = plan.matrix_step if plan.landing is None else plan.landing
    result = MatrixStep(*step(X, G, state))
    moved, taken = follow(W, X, result.moved, plan.scale), result.taken
    if not _is_surely_finite(dtype, plan):
        taken = _finite(result._replace(moved=moved.to(dtype)), plan)
    new_state = dict(result.state)
    if taken is not None:
        mask = taken[..., None, None] if X.ndim > 2 else taken
        moved = torch.where(mask, moved, W)
        for name, new in new_state.items():
            whether = mask if plan.state_kinds[name] == "matrix" else taken
            new_state[name] = torch.where(whether, new, state[name])
    _write(slots, frame, moved, new_state, plan)
    return MatrixStep(moved, taken, {}, result.limited)


def _read(slots: list[Slot], frame: Frame, plan: Plan) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights, gradients to descend along, and state, as batches of matrices or numbers."""
    weights, gradients, state = [], [], {}
    for slot in slots:
        weights.append(exact_value(slot.weight, slot.state))
        gradients.append(slot.gradient)
    for name, kind in plan.state_kinds.items():
        tensors = [slot.state[name] for slot in slots]
        state[name] = frame.together(tensors) if kind == "matrix" else frame.numbers(tensors)
    W = frame.together(weights)
    G = frame.together(gradients).to(W.dtype)
    return W, -G if plan.maximize else G, state


def _write(
    slots: list[Slot], frame: Frame, moved: Tensor, state: dict[str, Tensor], plan: Plan
) -> None:
    """Store weights and state, all matrices at once."""
    several, to, values = len(slots) > 1, [], []
    for name, new in state.items():
        tensors = [slot.state[name] for slot in slots]
        if plan.state_kinds[name] == "matrix":
            to += tensors
            values += frame.apart(new, several)
        else:
            _copy_numbers(tensors, new)
    parts = frame.apart(moved, several)
    if slots[0].weight.dtype in HALF_TYPES:
        for slot, part in zip(slots, parts, strict=True):
            keep_(slot.weight, part, slot.state)
    else:
        to += [slot.weight for slot in slots]
        values += parts
    _copy(to, values)


def _is_surely_finite(dtype: torch.dtype, plan: Plan) -> bool:
    """Whether what a step takes can be stored.

    A landing step with a safe step ends in the ball, and is not taken if its direction is not
    finite.
    """
    landing = plan.landing
    stored = dtype not in HALF_TYPES and plan.scale == 1
    return landing is not None and landing.ends_in_ball and landing.moments.shows_state and stored


def _finite(step: MatrixStep, plan: Plan) -> Tensor:
    """Which steps are taken and finite as they would be stored."""
    taken = finite_matrices(step.moved)
    taken = taken if step.taken is None else taken & step.taken
    for name, new in step.state.items():
        is_matrix = plan.state_kinds[name] == "matrix"
        taken = taken & (finite_matrices(new) if is_matrix else torch.isfinite(new))
    return taken


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    # In lists, torch does not write to negated views.
    if not torch.compiler.is_compiling() and any(map(Tensor.is_neg, to)):
        for tensor, value in zip(to, values, strict=True):
            tensor.copy_(value)
    elif to:
        torch._foreach_copy_(to, values)


def _copy_numbers(to: list[Tensor], values: Tensor) -> None:
    # As vectors: torch.compile loses what is written to a single float64 number.
    parts = values.reshape(len(to), 1, *to[0].shape).unbind()
    torch._foreach_copy_([number.unsqueeze(0) for number in to], list(parts))


class _Flags(NamedTuple):
    """Which matrices of some weights did not step, or stepped less than lr."""

    slots: list[Slot]
    taken: Tensor
    limited: Tensor | None


def _count(batches: list[_Flags]) -> None:
    """Add the matrices that did not step, or stepped less than lr, to the counts of weights."""
    skipped = torch.cat([batch.taken.reshape(-1) for batch in batches]).logical_not()
    short = [batch for batch in batches if batch.limited is not None]
    marks = torch.cat([skipped, *(batch.limited.reshape(-1) for batch in short)]).to(torch.int64)
    sizes: list[int] = []
    counts: list[Tensor] = []
    for name, some in ((SKIPPED, batches), (LIMITED, short)):
        for slots, taken, _ in some:
            sizes += [taken.numel() // len(slots)] * len(slots)
            counts += [count_of(name, slot.state, marks.device) for slot in slots]
    parts = marks.split(sizes)
    torch._foreach_add_(
        counts, [part.sum() if part.numel() > 1 else part.reshape(()) for part in parts]
    )
