"""Steps of weights spread over ranks.

A weight takes one of five routes, by its shape, its view and how it is sharded:

- *here*: every matrix is whole on its rank (kernels of a convolution, replicated weights). The
  step of a single process, on the local part.
- *rows*: tall matrices. Each rank moves its own rows; one all-reduce of Gram matrices for all of a
  group (two for Muon in double precision).
- *columns*: wide matrices. An all-to-all gives each rank columns instead of rows, which are the
  rows of a tall matrix; then as above, and an all-to-all back.
- *owners*: square matrices. An all-to-all gathers each matrix on one rank, a different one
  for each, which takes the step of a single process; an all-to-all scatters it again.
- *everywhere*: weights sharded along several dimensions of a mesh (FSDP2 on top of tensor
  parallelism). Each rank gathers everything and takes the step of a single process.

Matrices sharded by columns are treated as transposes of matrices sharded by rows. Wide
ones take the route on which the busiest rank receives less. Square ones have owners: the skew
matrix that their momentum accumulates has no form local to rows. Without a Gram form all matrices
have owners; if fewer bytes are preferred, so do tall ones whenever that moves less. The costs of
each route are in :mod:`.costs` and ``docs/at_scale.md``.

State is sharded like its weight, or equal on all ranks, and has the same shape as in a single
process. Every rank must step the same parameters in the same order. Nothing here knows about
optimizers: it is given pure functions (:class:`ShardedStep`) and slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.rounding import COMPENSATION, ROUNDING_STATE, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.geometry.views import View
from ortholand.landing.batches import batches
from ortholand.landing.description import GramStep
from ortholand.landing.step import (
    COUNTS,
    LIMITED,
    SKIPPED,
    GramSums,
    MatrixStep,
    PendingStep,
    Rows,
    Slot,
    StateKind,
    count_limited,
    count_of,
    descent,
    prepare_counts,
)
from ortholand.sharding.agreement import TermsOf
from ortholand.sharding.costs import received_by_columns, received_by_owner, received_by_sum
from ortholand.sharding.exchange import (
    Owners,
    columns_to_rows,
    rows_to_columns,
    sum_over_groups,
    sums_over_ranks,
)
from ortholand.sharding.placement import (
    Layout,
    as_rows,
    from_rows,
    is_dtensor,
    is_here,
    layout_of,
    local_part,
    part_of,
    placed_like,
    rows_of,
    set_rows_,
    sharing_groups,
    whole_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

# About how many numbers a rank contributes to a message. A group with more of them steps in several
# portions, so that copies stay small: half a gigabyte of float32.
LONGEST_MESSAGE = 2**27


@dataclass(frozen=True)
class ShardedStep:
    """What to do with the matrices of a group."""

    view: View
    maximize: bool
    foreach: bool | None
    prefers_fewer_bytes: bool  # whether tall matrices have owners where that moves less
    state_kinds: Mapping[str, StateKind]
    # Step of local rows, for weights of a given scale; None: matrices must be whole.
    gram_step: Callable[[float], GramStep] | None
    scale_of: Callable[[torch.Size], float]  # of a weight of this shape
    # By that step, for a matrix with p columns of a given type.
    summed_numbers: Callable[[int, torch.dtype], int] | None
    step_whole: Callable[[list[Slot]], None]  # the step of a single process
    terms: TermsOf  # what all ranks must step with

    @property
    def buffers(self) -> list[str]:
        """Names of the state that has a weight's shape."""
        return [name for name, kind in self.state_kinds.items() if kind == "matrix"]

    @property
    def numbers(self) -> list[str]:
        """Names of the state with one number per matrix."""
        return [name for name, kind in self.state_kinds.items() if kind == "number"]

    def summed(self, member: Member) -> int:
        """Numbers that are summed for the Gram matrices of a weight."""
        if self.summed_numbers is None:
            return 0
        return self.summed_numbers(min(member.shape), member.slot.weight.dtype)


class Member(NamedTuple):
    """A weight of which this rank has some rows, or columns (``layout.turned``)."""

    slot: Slot
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its matrix, viewed as sharded by rows."""
        rows = sum(self.layout.sizes)
        return rows, self.slot.weight.numel() // rows


class Part(NamedTuple):
    """What a rank has of tall matrices of one shape: some of their rows, ``(k, rows, p)``."""

    W: Tensor
    G: Tensor
    state: dict[str, Tensor]
    rows: Rows
    scale: float


Route = Callable[[list[Member], ShardedStep], None]


def step_sharded(slots: Sequence[Slot], step: ShardedStep) -> None:
    """Step the DTensors of a group; this rank is in the mesh of each."""
    here: list[Slot] = []
    scattered: list[Slot] = []
    spread: dict[tuple[Any, ...], list[Member]] = {}
    for slot in slots:
        weight = slot.weight
        assert is_dtensor(weight)
        if is_here(weight, step.view):
            here.append(slot)
        elif (layout := layout_of(weight)) is None:
            scattered.append(slot)
        else:
            key = (layout.group, weight.dtype, weight.device)
            spread.setdefault(key, []).append(Member(slot, layout))
    step_here(here, step)
    for slot in scattered:
        step_everywhere(slot, step)
    for members in spread.values():
        for route, those in routes(members, step):
            for portion in portions(those, step, route is not step_owners):
                route(portion, step)


def routes(members: Sequence[Member], step: ShardedStep) -> list[tuple[Route, list[Member]]]:
    """Which route each of the weights takes."""
    tall: list[Member] = []
    turned: list[Member] = []
    whole: list[Member] = []
    states = len(step.buffers)
    for (rows, columns), alike in by_shape(members).items():
        size = (rows, columns, alike[0].layout.ranks, len(alike))
        if rows == columns or step.gram_step is None:
            whole.extend(alike)
            continue
        by_owner = received_by_owner(*size, states)
        summed = step.summed(alike[0])
        if rows < columns:
            by_columns = received_by_columns(*size, states, summed)
            (turned if by_columns < by_owner else whole).extend(alike)
        else:
            by_rows = received_by_sum(alike[0].layout.ranks, len(alike) * summed)
            fewer = by_owner < by_rows and step.prefers_fewer_bytes
            (whole if fewer else tall).extend(alike)
    all_routes = ((step_rows, tall), (step_columns, turned), (step_owners, whole))
    return [(route, those) for route, those in all_routes if those]


def by_shape(members: Sequence[Member]) -> dict[tuple[int, int], list[Member]]:
    """The weights by the shape of their matrices."""
    alike: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        alike.setdefault(member.shape, []).append(member)
    return alike


def portions(
    members: Sequence[Member], step: ShardedStep, with_sums: bool
) -> Iterator[list[Member]]:
    """The weights in portions that fit a message, the same on every rank; usually one.

    Without sums they have owners, and a portion keeps all owners busy.
    """
    tensors, ranks = 2 + len(step.buffers), members[0].layout.ranks
    portion: list[Member] = []
    length = 0
    for member in members:
        numbers = tensors * math.ceil(math.prod(member.shape) / ranks)
        if with_sums:
            numbers += step.summed(member)
        too_long = length + numbers > LONGEST_MESSAGE
        if too_long and len(portion) >= (1 if with_sums else ranks):
            yield portion
            portion, length = [], 0
        portion.append(member)
        length += numbers
    yield portion


# --- the five routes


def step_here(slots: Sequence[Slot], step: ShardedStep) -> None:
    """Step weights whose matrices are all whole on this rank."""
    local = [_local_slot(slot, _kept_names(slot, step)) for slot in slots]
    for part in local:
        prepare_counts(part.state, part.weight.device)
    step.step_whole([part for part in local if part.weight.numel()])
    alike: dict[tuple[ProcessGroup, ...], list[tuple[Slot, Tensor]]] = {}
    for slot, part in zip(slots, local, strict=True):
        both = _packed_counts(part.state)
        alike.setdefault(sharing_groups(slot.weight), []).append((slot, both))
    for process_groups, counts in alike.items():  # one number for the matrices of all ranks
        all_counts = torch.stack([both for _, both in counts])
        sums = sum_over_groups(all_counts, process_groups, step.terms)
        for (slot, _), both in zip(counts, sums, strict=True):
            _add_counts(slot, both)


def _packed_counts(state: Mapping[str, Any]) -> Tensor:
    """Both counts of a step in one number, so that they are summed as one."""
    return state[SKIPPED] + (state[LIMITED] << 32)


def _add_counts(slot: Slot, both: Tensor) -> None:
    """Add the result of :func:`_packed_counts`, or a sum of such results."""
    device = slot.weight.device
    count_of(SKIPPED, slot.state, device).add_(both & (2**32 - 1))
    count_of(LIMITED, slot.state, device).add_(both >> 32)


def step_everywhere(slot: Slot, step: ShardedStep) -> None:
    """Step a weight on every rank as a single process would; each keeps its part."""
    weight = slot.weight
    assert is_dtensor(weight)
    names = _kept_names(slot, step)
    state = {name: whole_of(slot.state[name]).clone() for name in names}
    prepare_counts(state, weight.device)
    X = whole_of(weight).clone()
    step.step_whole([Slot(X, whole_of(slot.gradient), state)])
    local_part(weight).copy_(part_of(X, weight))
    for name in names:
        is_matrix = name in (*step.buffers, COMPENSATION)
        new = part_of(state[name], weight) if is_matrix else state[name]
        local_part(slot.state[name]).copy_(new)
    for name in COUNTS:
        count_of(name, slot.state, weight.device).add_(state[name])


def step_rows(members: list[Member], step: ShardedStep) -> None:
    """Step tall matrices, each rank its own rows: an all-reduce for all of them."""
    parts = []
    for member in members:
        W, G, *buffers = _descent_fields(member, step)
        rows = Rows(W.shape[0], member.shape[0])
        parts.append(_part(member, W, G, buffers, rows, step))
    results = step_parts(parts, step, members[0].layout)
    for member, (moved, taken, state, limited) in zip(members, results, strict=True):
        _keep(member, moved, state, taken.logical_not())
        count_limited(member.slot.state, limited)


def step_columns(members: list[Member], step: ShardedStep) -> None:
    """Step wide matrices: rows to columns, step as tall ones, columns to rows."""
    names = step.buffers
    fields = [_descent_fields(member, step) for member in members]
    layouts = [k.layout for k, matrices in zip(members, fields, strict=True) for _ in matrices]
    flat = [M for matrices in fields for M in matrices]
    blocks = iter(rows_to_columns(flat, layouts, step.terms))
    parts = []
    for member, matrices in zip(members, fields, strict=True):
        W, G, *buffers = (next(blocks).mT for _ in matrices)
        rows = Rows(W.shape[0], member.shape[1])
        parts.append(_part(member, W, G, buffers, rows, step))
    results = step_parts(parts, step, members[0].layout)
    columns = [M.mT for r in results for M in (r.moved, *(r.state[k] for k in names))]
    back = [member for member in members for _ in range(1 + len(names))]
    rows_back = columns_to_rows(columns, [k.shape[1] for k in back], [k.layout for k in back])
    blocks = iter(rows_back)
    for member, (_, taken, state, limited) in zip(members, results, strict=True):
        moved = next(blocks)
        state.update({name: next(blocks) for name in names})
        _keep(member, moved, state, taken.logical_not())
        count_limited(member.slot.state, limited)


def step_owners(members: list[Member], step: ShardedStep) -> None:
    """Step each matrix on one rank, as a single process would."""
    layout = members[0].layout
    owners = Owners([member.layout for member in members], share_out(members, layout.ranks))
    parts = [_fields(member, step) for member in members]
    mine = owners.owned(layout.rank)
    owned: list[Slot] = []
    for k, gathered in zip(mine, owners.gather(parts, step.terms), strict=True):
        X, G, *buffers = (_turned(M, members[k]) for M in gathered)
        numbers = {name: members[k].slot.state[name].clone() for name in step.numbers}
        state = {**dict(zip(step.buffers, buffers, strict=True)), **numbers}
        prepare_counts(state, X.device)
        owned.append(Slot(X, G, state))
    step.step_whole(owned)
    wholes = [
        [_turned(M, members[k]) for M in (X, *(state[name] for name in step.buffers))]
        for k, (X, _, state) in zip(mine, owned, strict=True)
    ]
    numbers = parts[0][0].new_empty(len(mine), len(step.numbers) + 1)
    for row, slot in zip(numbers, owned, strict=True):
        for i, name in enumerate(step.numbers):
            row[i] = slot.state[name]
        row[-1] = slot.state[SKIPPED] + 2 * slot.state[LIMITED]  # of one matrix each: 0 or 1
    back, numbers = owners.spread(wholes, numbers, [[X, *state] for X, _, *state in parts])
    for member, (moved, *buffers), row in zip(members, back, numbers.real, strict=True):
        names = (*step.buffers, *step.numbers)
        state = dict(zip(names, (*buffers, *row[:-1]), strict=True))
        both = row[-1].round().to(torch.int64)
        _keep(member, moved, state, both % 2)
        count_limited(member.slot.state, both // 2)


def share_out(members: Sequence[Member], ranks: int) -> list[int]:
    """An owner for each matrix, so that all ranks have about equal work."""
    work = [math.prod(member.shape) * min(member.shape) for member in members]
    loads, owners = [0] * ranks, [0] * len(members)
    for k in sorted(range(len(members)), key=lambda k: -work[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += work[k]
    return owners


# --- unconstrained weights


def step_plain(slots: Sequence[Slot], step: Callable[..., None], terms: TermsOf) -> None:
    """torch's own step on the local parts; a parameter that one rank must skip, all skip."""
    alike: dict[tuple[ProcessGroup, ...], list[Slot]] = {}
    for slot in slots:
        alike.setdefault(sharing_groups(slot.weight), []).append(slot)
    for process_groups, members in alike.items():
        local = [_local_slot(slot, slot.state) for slot in members]
        step(local, agree=partial(_agreed, process_groups, terms) if process_groups else None)
        for slot, part in zip(members, local, strict=True):
            assert is_dtensor(slot.weight)
            for (
                name,
                value,
            ) in part.state.items():  # in one order on all ranks: so they are gathered
                if name not in slot.state:
                    is_number = name in ("step", SKIPPED)
                    slot.state[name] = value if is_number else placed_like(value, slot.weight)


def _agreed(process_groups: Sequence[ProcessGroup], terms: TermsOf, taken: Tensor) -> Tensor:
    """Which parameters all ranks may step, from those that this rank may."""
    return sum_over_groups(taken.logical_not().to(torch.int32), process_groups, terms) == 0


# --- what the routes share


def step_parts(parts: Sequence[Part], step: ShardedStep, layout: Layout) -> list[MatrixStep]:
    """The steps of matrices of which this rank has rows: an all-reduce for all of them."""
    kinds = [(part.rows.total, part.W.shape[1], part.scale) for part in parts]
    members = list(batches(kinds, step.foreach, layout.ranks))
    joined = [_joined([parts[k] for k in those]) for those in members]
    assert step.gram_step is not None
    X = [unscaled(part.W, part.scale) for part in joined]
    pending = [
        step.gram_step(part.scale)(Z, part.G, part.state, part.rows)
        for Z, part in zip(X, joined, strict=True)
    ]
    results: dict[int, MatrixStep] = {}
    done = zip(members, joined, X, finished(pending, layout.group, step.terms), strict=True)
    for those, part, Z, result in done:
        moved, taken, state, limited = _unless_skipped(part, Z, result)
        for i, k in enumerate(those):
            new = {name: value[i] for name, value in state.items()}
            held_back = None if limited is None else limited[i]
            results[k] = MatrixStep(moved[i], taken[i], new, held_back)
    return [results[k] for k in range(len(parts))]


def finished(steps: Sequence[PendingStep], group: ProcessGroup, terms: TermsOf) -> list[MatrixStep]:
    """The steps with their sums over the ranks: one message for all, as often as any waits."""
    done: list[MatrixStep | PendingStep] = list(steps)
    while waiting := [(k, step) for k, step in enumerate(done) if isinstance(step, PendingStep)]:
        sent = [message_of(step.sums) for _, step in waiting]
        tensors = [tensor for message in sent for tensor in message]
        sums = iter(sums_over_ranks(tensors, group, terms))
        for (k, step), message in zip(waiting, sent, strict=True):
            done[k] = step.finish(sums_of([next(sums) for _ in message]))
    return [step for step in done if isinstance(step, MatrixStep)]


def message_of(sums: GramSums) -> list[Tensor]:
    """What is sent of Gram matrices: only half of the Hermitian ones."""
    return [pack(*sums.hermitian), *sums.others]


def sums_of(message: Sequence[Tensor]) -> GramSums:
    """Undo :func:`message_of`."""
    return GramSums(unpack(message[0]), tuple(message[1:]))


def pack(D: Tensor, T: Tensor) -> Tensor:
    """Two Hermitian matrices in the memory of one, and a row for the second diagonal."""
    diagonal = T.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return torch.cat([D.triu() + T.tril(-1), diagonal], dim=-2)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Undo :func:`pack`."""
    M = packed[..., :-1, :]
    D, T = M.triu() + M.triu(1).mH, M.tril(-1)
    T = T + T.mH
    T.diagonal(dim1=-2, dim2=-1).copy_(packed[..., -1, :])
    return D, T


def _joined(parts: Sequence[Part]) -> Part:
    W, G = _stack([part.W for part in parts]), _stack([part.G for part in parts])
    state = {name: _stack([part.state[name] for part in parts]) for name in parts[0].state}
    return Part(W, G, state, parts[0].rows, parts[0].scale)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _unless_skipped(part: Part, X: Tensor, result: MatrixStep) -> MatrixStep:
    """The matrices after the step from X, whether or not it was taken."""
    moved, taken, state, limited = result
    moved = follow(part.W, X, moved, part.scale)
    whether = taken[:, None, None]
    kept = {
        name: torch.where(whether if new.ndim == 3 else taken, new, part.state[name])
        for name, new in state.items()
    }
    return MatrixStep(torch.where(whether, moved, part.W), taken, kept, limited)


def _kept_names(slot: Slot, step: ShardedStep) -> list[str]:
    """The state of a weight that a step of a single process reads and writes."""
    return [*step.state_kinds, *(name for name in ROUNDING_STATE if name in slot.state)]


def _local_slot(slot: Slot, names: Iterable[str]) -> Slot:
    """What this rank has of a weight, its gradient and its state; memory is shared."""
    state = {name: local_part(slot.state[name]) for name in names}
    if SKIPPED not in state:
        count_of(SKIPPED, state, slot.weight.device)
    return Slot(local_part(slot.weight), local_part(_placed_gradient(slot)), state)


def _placed_gradient(slot: Slot) -> DTensor:
    """The gradient of a weight, placed like the weight."""
    weight, gradient = slot.weight, slot.gradient
    assert is_dtensor(weight)
    assert is_dtensor(gradient)
    if gradient.placements != weight.placements:
        gradient = gradient.redistribute(placements=weight.placements)
    return gradient


def _fields(member: Member, step: ShardedStep) -> list[Tensor]:
    """This rank's rows of a weight, its gradient and its buffers, in the working type."""
    slot, layout = member
    X = as_rows(exact_value(local_part(slot.weight), _local_rounding(slot)), layout)
    others = [_placed_gradient(slot), *(slot.state[name] for name in step.buffers)]
    return [X, *(to_working_dtype(rows_of(tensor, layout)) for tensor in others)]


def _local_rounding(slot: Slot) -> dict[str, Tensor]:
    """What this rank has of a weight's rounding state; memory is shared."""
    return {name: local_part(slot.state[name]) for name in ROUNDING_STATE if name in slot.state}


def _descent_fields(member: Member, step: ShardedStep) -> list[Tensor]:
    """:func:`_fields`, with the gradient's sign flipped if the step should ascend."""
    X, G, *buffers = _fields(member, step)
    return [X, descent(G, step.maximize), *buffers]


def _turned(M: Tensor, member: Member) -> Tensor:
    """From the matrix as it is sharded to the weight's own orientation, and back."""
    return M.mT.contiguous() if member.layout.turned else M


def _part(
    member: Member,
    W: Tensor,
    G: Tensor,
    buffers: Sequence[Tensor],
    rows: Rows,
    step: ShardedStep,
) -> Part:
    scale = step.scale_of(member.slot.weight.shape)
    return Part(W, G, _all_state(member, buffers, step), rows, scale)


def _all_state(member: Member, buffers: Sequence[Tensor], step: ShardedStep) -> dict[str, Tensor]:
    numbers = {name: member.slot.state[name] for name in step.numbers}
    return {**dict(zip(step.buffers, buffers, strict=True)), **numbers}


def _keep(member: Member, moved: Tensor, state: Mapping[str, Tensor], skipped: Tensor) -> None:
    """Store this rank's new rows, the new state, and whether the step was skipped."""
    slot, layout = member
    here = local_part(slot.weight)
    keep_(here, from_rows(moved, here.shape, layout), _local_rounding(slot))
    for name, new in state.items():
        kept = slot.state[name]
        if new.ndim:
            set_rows_(kept, new, layout)
        else:
            kept.copy_(new)
    count_of(SKIPPED, slot.state, slot.weight.device).add_(skipped)
