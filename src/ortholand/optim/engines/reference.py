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
        for batch in frame.batches(members, plan.foreach, device):
            result = _step_batch(batch, frame, plan.for_shape(shape))
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

    def batches(
        self, slots: list[Slot], foreach: bool | None, device: torch.device
    ) -> list[list[Slot]]:
        """Those that step as one batch."""
        if len(slots) == 1:
            return [slots]
        n, p = max(self.rows, self.columns), min(self.rows, self.columns)
        longest = longest_batch(n, p, foreach, on_device=device.type != "cpu")
        return [slots[i : i + longest] for i in range(0, len(slots), longest)]

    def together(self, lists: list[list[Tensor]]) -> list[Tensor]:
        """Tensors of the weights' shape as matrices ``(..., n, p)``, n >= p, for each list."""
        found, several = stacked(lists)
        if self.is_batch or found[0].ndim != 2 + several:
            batch = (-1,) if self.is_batch or several else ()
            found = [M.reshape(*batch, self.rows, self.columns) for M in found]
        return [M.mT for M in found] if self.rows < self.columns else found

    def apart(self, M: Tensor, weights: int) -> list[Tensor]:
        """Undo :meth:`together`."""
        M = M.mT if self.rows < self.columns else M
        if weights > 1:
            return list(M.reshape(-1, *self.shape).unbind())
        return [M if M.shape == self.shape else M.reshape(self.shape)]


def stacked(lists: list[list[Tensor]]) -> tuple[list[Tensor], bool]:
    """The tensors of each list, stacked if there are several; and whether there are."""
    if len(lists[0]) == 1:
        return [tensors[0] for tensors in lists], False
    together = torch.stack([tensor for tensors in lists for tensor in tensors])
    return list(together.unflatten(0, (len(lists), -1)).unbind()), True


def _step_batch(slots: list[Slot], frame: Frame, plan: Plan) -> MatrixStep:
    """Step weights of one shape, type, device and scale as one batch."""
    W, G, kept, state = _read(slots, frame, plan)
    X, dtype = W if plan.scale == 1 else unscaled(W, plan.scale), slots[0].weight.dtype
    step = plan.matrix_step if plan.landing is None else plan.landing
    moved, taken, new_state, limited = MatrixStep(*step(X, G, state))
    if plan.scale != 1:
        moved = follow(W, X, moved, plan.scale)
    if not _is_surely_finite(dtype, plan):
        taken = _finite(moved.to(dtype), taken, new_state, plan)
    if taken is not None:
        mask = taken[..., None, None] if X.ndim > 2 else taken
        moved = torch.where(mask, moved, W)
        new_state = {
            name: torch.where(mask if new.ndim == X.ndim else taken, new, state[name])
            for name, new in new_state.items()
        }
    _write(slots, frame, moved, kept, new_state)
    return MatrixStep(moved, taken, {}, limited)


def _read(
    slots: list[Slot], frame: Frame, plan: Plan
) -> tuple[Tensor, Tensor, dict[str, list[Tensor]], dict[str, Tensor]]:
    """Weights, gradients to descend along, and state, also as batches of matrices or numbers."""
    weights, gradients = [], []
    for slot in slots:
        weights.append(slot.weight)
        gradients.append(slot.gradient)
    if weights[0].dtype in HALF_TYPES:
        weights = [exact_value(slot.weight, slot.state) for slot in slots]
    kept, state = {}, {}
    matrices, numbers = [weights, gradients], []
    for name, kind in plan.state_kinds.items():
        kept[name] = [slot.state[name] for slot in slots]
        (matrices if kind == "matrix" else numbers).append(kept[name])
    W, G, *of_matrices = frame.together(matrices)
    of_numbers = stacked(numbers)[0] if numbers else []
    for name, kind in plan.state_kinds.items():
        if kind == "matrix":
            state[name] = of_matrices.pop(0)
        else:
            value = of_numbers.pop(0)
            state[name] = value.flatten() if value.ndim > 1 else value
    G = G.to(W.dtype)
    return W, -G if plan.maximize else G, kept, state


def _write(
    slots: list[Slot],
    frame: Frame,
    moved: Tensor,
    kept: dict[str, list[Tensor]],
    state: dict[str, Tensor],
) -> None:
    """Store weights and state, all matrices at once."""
    to, values = [], []
    for name, new in state.items():
        if new.ndim == moved.ndim:
            to += kept[name]
            values += frame.apart(new, len(slots))
        else:
            # As vectors: torch.compile loses what is written to a single float64 number.
            to += [number.unsqueeze(0) for number in kept[name]]
            values += new.reshape(len(slots), 1, *kept[name][0].shape).unbind()
    parts = frame.apart(moved, len(slots))
    if slots[0].weight.dtype in HALF_TYPES:
        for slot, part in zip(slots, parts, strict=True):
            keep_(slot.weight, part, slot.state)
    else:
        to += [slot.weight for slot in slots]
        values += parts
    # In lists, torch does not write to negated views.
    if not torch.compiler.is_compiling() and any(map(Tensor.is_neg, to)):
        for tensor, value in zip(to, values, strict=True):
            tensor.copy_(value)
    elif to:
        torch._foreach_copy_(to, values)


def _is_surely_finite(dtype: torch.dtype, plan: Plan) -> bool:
    """Whether what a step takes can be stored.

    A landing step with a safe step ends in the ball, and is not taken if its direction is not
    finite.
    """
    landing = plan.landing
    stored = dtype not in HALF_TYPES and plan.scale == 1
    return landing is not None and landing.ends_in_ball and landing.moments.shows_state and stored


def _finite(moved: Tensor, taken: Tensor | None, state: dict[str, Tensor], plan: Plan) -> Tensor:
    """Which steps are taken and finite as they would be stored."""
    finite = finite_matrices(moved)
    taken = finite if taken is None else taken & finite
    for name, new in state.items():
        is_matrix = plan.state_kinds[name] == "matrix"
        taken = taken & (finite_matrices(new) if is_matrix else torch.isfinite(new))
    return taken


class _Flags(NamedTuple):
    """Which matrices of some weights did not step, or stepped less than lr."""

    slots: list[Slot]
    taken: Tensor
    limited: Tensor | None


def _count(batches: list[_Flags]) -> None:
    """Add the matrices that did not step, or stepped less than lr, to the counts of weights."""
    taken = joined([batch.taken for batch in batches])
    skipped = torch.logical_not(taken, out=torch.empty_like(taken, dtype=torch.int64))
    short = [batch for batch in batches if batch.limited is not None]
    marks = joined([skipped, *(batch.limited for batch in batches if batch.limited is not None)])
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


def joined(flags: list[Tensor]) -> Tensor:
    """Flags of some batches as one vector."""
    return (
        torch.cat([flag.reshape(-1) for flag in flags]) if len(flags) > 1 else flags[0].reshape(-1)
    )
