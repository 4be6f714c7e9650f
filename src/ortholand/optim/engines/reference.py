"""The engine that can step everything: torch's operations, on batches of equal matrices."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import finite_matrices
from ortholand.geometry.rounding import HALF_TYPES, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.geometry.views import View
from ortholand.landing.batches import LONGEST_ON_DEVICE, longest_batch
from ortholand.landing.step import LIMITED, SKIPPED, MatrixStep, Slot, count_of
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_memory, copy_all

MOST_PADDING = 1.5  # rows of a batch, rows of zeros among them, over those that weights have


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
    """Step the weights, several as one batch if that is quicker."""
    flags: dict[torch.device, list[_Flags]] = {}
    for batch in batches(slots, plan):
        result = _step_batch(batch, plan.for_shape(batch.runs[0].shape))
        if (taken := result.taken) is not None:
            flags.setdefault(taken.device, []).append(_Flags(batch, taken, result.limited))
    for together in flags.values():
        _count(together)


class Run(NamedTuple):
    """Weights of one shape, and how matrices lie in them."""

    slots: list[Slot]
    shape: torch.Size  # of a weight
    lying: torch.Size  # of its matrices as they lie in it: (rows, columns) or (-1, rows, columns)

    @classmethod
    def of(cls, slots: list[Slot], view: View) -> "Run":
        """Weights, one or several, in that view."""
        shape = slots[0].weight.shape
        if view == "matrix":
            return cls(slots, shape, torch.Size((shape[0], shape[1:].numel())))
        return cls(slots, shape, torch.Size((-1, *shape[-2:])) if len(shape) > 2 else shape)

    @property
    def n(self) -> int:
        """The longer side of a matrix."""
        return max(self.lying[-2:])

    @property
    def each(self) -> int:
        """How many matrices a weight has."""
        return self.shape.numel() // self.lying[-2:].numel()

    @property
    def count(self) -> int:
        """How many matrices all weights have."""
        return len(self.slots) * self.each

    def upright(self, M: Tensor) -> Tensor:
        """Matrices with n >= p from those that lie as in a weight, and back."""
        return M.mT if self.lying[-2] < self.lying[-1] else M


class Batch(NamedTuple):
    """Weights that step at once: their matrices are ``(..., n, p)``, n >= p.

    Matrices with fewer rows than the first run's get rows of zeros, which stay zero, and add
    nothing to a product of columns.
    """

    runs: list[Run]

    @property
    def slots(self) -> list[Slot]:
        """The weights, in the order of their matrices."""
        return [slot for run in self.runs for slot in run.slots]

    def together(self, lists: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of the weights' shapes as matrices, for each list; several are copied."""
        run, like = self.runs[0], lists[0][0]
        if len(lists[0]) == 1:
            found = [M if M.ndim == len(run.lying) else M.reshape(run.lying) for (M,) in lists]
            return [run.upright(M.to(dtype)) for M in found]
        is_padded = any(other.n != run.n for other in self.runs)
        make, count = torch.zeros if is_padded else torch.empty, sum(r.count for r in self.runs)
        copies = make(len(lists), count, *run.lying[-2:], dtype=dtype, device=like.device)
        found = [run.upright(M) for M in copies.unbind()]
        copy_all(
            [part for M in found for part in self.apart(M)], [M for some in lists for M in some]
        )
        return found

    def numbers(self, lists: list[list[Tensor]]) -> list[Tensor]:
        """A number of each matrix, for each list of what the weights have."""
        if len(lists[0]) == 1:
            return [value.flatten() if value.ndim > 1 else value for (value,) in lists]
        values = [value for some in lists for value in some]
        is_one = not values[0].ndim
        together = torch.stack(values) if is_one else torch.cat([v.flatten() for v in values])
        return list(together.unflatten(0, (len(lists), -1)).unbind())

    def apart(self, M: Tensor) -> list[Tensor]:
        """Matrices in the shapes of the weights that they belong to."""
        if M.ndim == 2:
            M = self.runs[0].upright(M)
            return [M if M.shape == self.runs[0].shape else M.reshape(self.runs[0].shape)]
        parts, at = [], 0
        for run in self.runs:
            part = run.upright(M[at : at + run.count, : run.n])
            parts += part.reshape(len(run.slots), *run.shape).unbind()
            at += run.count
        return parts


def batches(slots: list[Slot], plan: Plan) -> Iterator[Batch]:
    """The weights that step at once."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Slot]] = {}
    for slot in slots:
        weight = slot.weight
        alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(slot)
    padded: dict[tuple[int, float, torch.dtype, torch.device], list[Run]] = {}
    may_pad = plan.landing is not None and plan.landing.is_ours and len(alike) > 1
    for (shape, dtype, device), members in alike.items():
        run, on_device = Run.of(members, plan.view), device.type != "cpu"
        p = min(run.lying[-2:])
        longest = longest_batch(run.n, p, plan.foreach, on_device=on_device)
        firsts = range(0, len(members), longest)
        pieces = [run._replace(slots=members[i : i + longest]) for i in firsts]
        if may_pad and run.n > p and (on_device if plan.foreach is None else plan.foreach):
            key = (p, plan.scale_of(shape), dtype, device)
            padded.setdefault(key, []).extend(pieces)
        else:
            yield from (Batch([piece]) for piece in pieces)
    for (p, *_), runs in padded.items():
        yield from batches_with_zeros(sorted(runs, key=lambda run: -run.n), p)


def batches_with_zeros(runs: list[Run], p: int) -> Iterator[Batch]:
    """Runs of matrices with p columns, the longest first, in batches with few rows of zeros."""
    batch: list[Run] = []
    rows = count = 0
    for run in runs:
        rows, count = rows + run.count * run.n, count + run.count
        size = count * (batch or runs)[0].n
        if batch and size > min(MOST_PADDING * rows, LONGEST_ON_DEVICE // p):
            yield Batch(batch)
            batch, rows, count = [], run.count * run.n, run.count
        batch.append(run)
    yield Batch(batch)


def _step_batch(batch: Batch, plan: Plan) -> MatrixStep:
    """Step weights of one type, device and scale as one batch."""
    W, G, kept, state = _read(batch, plan)
    X, dtype = (
        W if plan.scale == 1 else unscaled(W, plan.scale),
        batch.runs[0].slots[0].weight.dtype,
    )
    step = plan.matrix_step if plan.landing is None else plan.landing
    moved, taken, new_state, limited = MatrixStep(*step(X, G, state))
    if plan.scale != 1:
        moved = follow(W, X, moved, plan.scale)
    if not _is_surely_finite(dtype, plan):
        taken = _finite(moved.to(dtype), taken, new_state, plan)
    if taken is not None:
        mask = taken[..., None, None] if X.ndim > 2 else taken
        ours = plan.landing is not None and plan.landing.is_ours
        choose = _chosen if ours and not torch.compiler.is_compiling() else torch.where
        moved = choose(mask, moved, W)
        new_state = {
            name: choose(mask, new, state[name])
            if new.ndim == X.ndim
            else torch.where(taken, new, state[name])
            for name, new in new_state.items()
        }
    _write(batch, moved, kept, new_state)
    return MatrixStep(moved, taken, {}, limited)


def _chosen(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """What is new where the mask is, in the memory of what is old."""
    return torch.where(mask, new, old, out=old)


def _read(
    batch: Batch, plan: Plan
) -> tuple[Tensor, Tensor, dict[str, list[Tensor]], dict[str, Tensor]]:
    """Weights, gradients to descend along, and state, also as batches of matrices or numbers."""
    slots = batch.slots
    weights = [slot.weight for slot in slots]
    if weights[0].dtype in HALF_TYPES:
        weights = [exact_value(slot.weight, slot.state) for slot in slots]
    kept = {name: [slot.state[name] for slot in slots] for name in plan.state_kinds}
    matrices = [name for name, kind in plan.state_kinds.items() if kind == "matrix"]
    lists = [weights, [slot.gradient for slot in slots], *(kept[name] for name in matrices)]
    W, G, *buffers = batch.together(lists, weights[0].dtype)
    state = dict(zip(matrices, buffers, strict=True))
    numbers = [name for name in kept if name not in state]
    if numbers:
        found = batch.numbers([kept[name] for name in numbers])
        state |= zip(numbers, found, strict=True)
    return W, -G if plan.maximize else G, kept, state


def _write(
    batch: Batch, moved: Tensor, kept: dict[str, list[Tensor]], state: dict[str, Tensor]
) -> None:
    """Store weights and state, all matrices at once."""
    to, values, weights = [], [], [slot.weight for slot in batch.slots]
    for name, new in state.items():
        if new.ndim == moved.ndim:
            to += kept[name]
            values += batch.apart(new)
        else:
            # As vectors: torch.compile loses what is written to a single float64 number.
            to += [number.view(-1) for number in kept[name]]
            values += new.reshape(-1).split([number.numel() for number in kept[name]])
    parts = batch.apart(moved)
    if weights[0].dtype in HALF_TYPES:
        for slot, part in zip(batch.slots, parts, strict=True):
            keep_(slot.weight, part, slot.state)
    else:
        to += weights
        values += parts
    copy_all(to, values)


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

    batch: Batch
    taken: Tensor
    limited: Tensor | None


def _count(flags: list[_Flags]) -> None:
    """Add the matrices that did not step, or stepped less than lr, to the counts of weights."""
    taken = joined([some.taken for some in flags])
    skipped = torch.logical_not(taken, out=torch.empty_like(taken, dtype=torch.int64))
    short = [some for some in flags if some.limited is not None]
    marks = joined([skipped, *(some.limited for some in flags if some.limited is not None)])
    sizes: list[int] = []
    counts: list[Tensor] = []
    for name, those in ((SKIPPED, flags), (LIMITED, short)):
        for run in [run for some in those for run in some.batch.runs]:
            sizes += [run.each] * len(run.slots)
            counts += [count_of(name, slot.state, marks.device) for slot in run.slots]
    parts = marks.split(sizes)
    torch._foreach_add_(
        counts, [part.sum() if part.numel() > 1 else part.reshape(()) for part in parts]
    )


def joined(flags: list[Tensor]) -> Tensor:
    """Flags of some batches as one vector."""
    return (
        torch.cat([flag.reshape(-1) for flag in flags]) if len(flags) > 1 else flags[0].reshape(-1)
    )
