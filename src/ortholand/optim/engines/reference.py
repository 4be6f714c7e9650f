"""The engine that can step everything: torch's operations, on batches of equal matrices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.matrices import finite_matrices
from ortholand.geometry.rounding import HALF_TYPES, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.landing.step import LIMITED, SKIPPED, MatrixStep, Slot, count_of
from ortholand.optim.engines.batches import Batch, batches
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_memory, copy_all

Claim = tuple[Callable[[], None], list[Slot]]
# Of a batch: which of its matrices step, and which less than lr (None: none).
Flags = tuple[Batch, Tensor, Tensor | None]


class ReferenceEngine:
    """Steps any weight on any device."""

    name = "reference"

    def refusal(self, slot: Slot, plan: Plan) -> str | None:  # noqa: ARG002
        """None: this engine refuses nothing."""
        return None

    def claim(self, slots: list[Slot], plan: Plan) -> Claim:
        """The step of all weights."""
        for slot in slots:
            check_memory(slot, plan.name_of)
        return partial(_step, slots, plan), []


@torch.no_grad()
def _step(slots: list[Slot], plan: Plan) -> None:
    """Step the weights, several as one batch if that is quicker."""
    flags: dict[torch.device, list[Flags]] = {}
    for batch in batches(slots, plan):
        result = _step_batch(batch, plan.at_scale(plan.scale_of(batch.runs[0].shape)))
        if (taken := result.taken) is not None:
            flags.setdefault(taken.device, []).append((batch, taken, result.limited))
    for together in flags.values():
        _count(together)


def _step_batch(batch: Batch, plan: Plan) -> MatrixStep:
    """Step weights of one type, device and scale as one batch."""
    W, G, kept, state = _read(batch, plan)
    X, dtype = unscaled(W, plan.scale), batch.runs[0].slots[0].weight.dtype
    step = plan.matrix_step if plan.landing is None else plan.landing
    moved, taken, new_state, limited = MatrixStep(*step(X, G, state))
    moved = follow(W, X, moved, plan.scale)
    ours: Any = plan.landing if plan.landing is not None and plan.landing.is_ours else None
    # A landing step with a safe step ends in the ball, and is not taken if its direction is not
    # finite.
    ends_in_ball = ours is not None and ours.options.rule is not None and ours.moments.shows_state
    if not ends_in_ball or plan.scale != 1 or dtype in HALF_TYPES:
        taken = _finite(moved.to(dtype), taken, new_state, plan)
    if taken is not None:
        mask = taken[..., None, None] if X.ndim > 2 else taken
        in_place = ours is not None and not torch.compiler.is_compiling()  # in memory of its own

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(mask, new, old, out=new) if in_place else torch.where(mask, new, old)

        moved = choose(moved, W)
        for name, new in new_state.items():
            if new.ndim == X.ndim:
                new_state[name] = choose(new, state[name])
            else:
                new_state[name] = torch.where(taken, new, state[name])
    _write(batch, moved, kept, new_state)
    return MatrixStep(moved, taken, {}, limited)


def _read(
    batch: Batch, plan: Plan
) -> tuple[Tensor, Tensor, dict[str, list[Tensor]], dict[str, Tensor]]:
    """Weights, gradients to descend along, and state, also as batches of matrices or numbers."""
    weights, gradients, kept = [], [], {name: [] for name in plan.state_kinds}
    for slot in batch.slots:
        is_half = slot.weight.dtype in HALF_TYPES
        weights.append(exact_value(slot.weight, slot.state) if is_half else slot.weight)
        gradients.append(slot.gradient)
        for name, values in kept.items():
            values.append(slot.state[name])
    matrices, numbers = [], []
    for name, kind in plan.state_kinds.items():
        (matrices if kind == "matrix" else numbers).append(name)
    lists = [weights, gradients, *map(kept.__getitem__, matrices)]
    W, G, *buffers = batch.together(lists, weights[0].dtype)
    state = dict(zip(matrices, buffers, strict=True))
    if numbers:
        state |= zip(numbers, batch.numbers([*map(kept.__getitem__, numbers)]), strict=True)
    return W, -G if plan.maximize else G, kept, state


def _write(
    batch: Batch, moved: Tensor, kept: dict[str, list[Tensor]], state: dict[str, Tensor]
) -> None:
    """Store weights and state, all matrices at once."""
    to, values, parts = [], [], batch.apart(moved)
    for slot, part in zip(batch.slots, parts, strict=True):
        if slot.weight.dtype in HALF_TYPES:
            keep_(slot.weight, part, slot.state)
        else:
            to.append(slot.weight)
            values.append(part)
    for name, new in state.items():
        if new.ndim == moved.ndim:
            to += kept[name]
            values += batch.apart(new)
            continue
        sizes = []
        for number in kept[name]:
            to.append(number.view(-1))  # torch.compile loses what is written to a float64 number
            sizes.append(number.numel())
        values += new.reshape(-1).split(sizes)
    copy_all(to, values)


def _finite(moved: Tensor, taken: Tensor | None, state: dict[str, Tensor], plan: Plan) -> Tensor:
    """Which steps are taken and finite as they would be stored."""
    finite = finite_matrices(moved)
    taken = finite if taken is None else taken & finite
    for name, new in state.items():
        is_matrix = plan.state_kinds[name] == "matrix"
        taken = taken & (finite_matrices(new) if is_matrix else torch.isfinite(new))
    return taken


def _count(flags: list[Flags]) -> None:
    """Add the matrices that did not step, or stepped less than lr, to the counts of weights."""
    taken = joined([taken for _, taken, _ in flags])
    skipped = torch.logical_not(taken, out=torch.empty_like(taken, dtype=torch.int64))
    short = [(batch, limited) for batch, _, limited in flags if limited is not None]
    marks = joined([skipped, *(limited for _, limited in short)])
    sizes: list[int] = []
    counts: list[Tensor] = []
    for name, those in ((SKIPPED, flags), (LIMITED, short)):
        for run in [run for batch, *_ in those for run in batch.runs]:
            sizes += [run.each] * len(run.slots)
            counts += [count_of(name, slot.state, marks.device) for slot in run.slots]
    parts = marks.split(sizes)
    torch._foreach_add_(counts, [P.sum() if P.numel() > 1 else P.reshape(()) for P in parts])


def joined(flags: list[Tensor]) -> Tensor:
    """Flags of some batches as one vector."""
    flags = [flag.reshape(-1) for flag in flags]
    return torch.cat(flags) if len(flags) > 1 else flags[0]
