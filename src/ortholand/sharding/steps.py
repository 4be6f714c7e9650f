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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
    from_rows,
    is_dtensor,
    is_here,
    layout_of,
    local_part,
    part_of,
    placed_like,
    rows_of,
    sharing_groups,
    whole_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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

    @cached_property
    def buffers(self) -> list[str]:
        """Names of the state that has a weight's shape."""
        return [name for name, kind in self.state_kinds.items() if kind == "matrix"]

    @cached_property
    def numbers(self) -> list[str]:
        """Names of the state with one number per matrix."""
        return [name for name, kind in self.state_kinds.items() if kind == "number"]

    def summed(self, member: Member) -> int:
        """Numbers that are summed for the Gram matrices of a weight."""
        if self.summed_numbers is None:
            return 0
        return self.summed_numbers(min(member.layout.shape), member.slot.weight.dtype)


class Member(NamedTuple):
    """A weight of which this rank has some rows, or columns (``layout.turned``)."""

    slot: Slot  # what this rank has of it
    layout: Layout
    scale: float


Route = Callable[[list[Member], ShardedStep], None]


def step_sharded(slots: Sequence[Slot], step: ShardedStep) -> None:
    """Step the DTensors of a group; this rank is in the mesh of each."""
    here: list[Slot] = []
    alike: dict[tuple[Any, ...], list[Member]] = {}
    for slot in slots:
        weight = slot.weight
        assert is_dtensor(weight)
        if is_here(weight, step.view):
            here.append(slot)
        elif (layout := layout_of(weight)) is None:
            step_everywhere(slot, step)
        else:
            kind = (layout.group, weight.dtype, weight.device, layout.shape)
            member = Member(_local_slot(slot), layout, step.scale_of(weight.shape))
            alike.setdefault(kind, []).append(member)
    if here:
        step_here(here, step)
    together: dict[tuple[Any, ...], list[Member]] = {}
    for (*kind, _), members in alike.items():
        together.setdefault((route_of(members, step), *kind), []).extend(members)
    for (route, *_), members in together.items():
        for portion in portions(members, step, with_sums=route is not step_owners):
            route(portion, step)


def route_of(members: Sequence[Member], step: ShardedStep) -> Route:
    """Which route weights of one shape take."""
    layout, count = members[0].layout, len(members)
    rows, columns = layout.shape
    if rows == columns or step.gram_step is None:
        return step_owners
    if rows > columns and not step.prefers_fewer_bytes:
        return step_rows
    size = (rows, columns, layout.ranks, count, len(step.buffers))
    summed, by_owner = step.summed(members[0]), received_by_owner(*size)
    if rows > columns:
        by_rows = received_by_sum(layout.ranks, count * summed)
        return step_rows if by_rows <= by_owner else step_owners
    return step_columns if received_by_columns(*size, summed) < by_owner else step_owners


def portions(
    members: Sequence[Member], step: ShardedStep, *, with_sums: bool
) -> Iterator[list[Member]]:
    """The weights in portions that fit a message, the same on every rank; usually one.

    Without sums they have owners, and a portion keeps all owners busy.
    """
    ranks, tensors = members[0].layout.ranks, 2 + len(step.buffers)
    portion: list[Member] = []
    length = 0
    for member in members:
        numbers = tensors * math.ceil(math.prod(member.layout.shape) / ranks)
        if with_sums:
            numbers += step.summed(member)
        if length + numbers > LONGEST_MESSAGE and len(portion) >= (1 if with_sums else ranks):
            yield portion
            portion, length = [], 0
        portion.append(member)
        length += numbers
    yield portion


# --- the five routes


def step_here(slots: Sequence[Slot], step: ShardedStep) -> None:
    """Step weights whose matrices are all whole on this rank."""
    local = [_local_slot(slot) for slot in slots]
    for part in local:
        part.state.update({name: torch.zeros_like(part.state[name]) for name in COUNTS})
    step.step_whole([part for part in local if part.weight.numel()])
    alike: dict[tuple[ProcessGroup, ...], list[tuple[Slot, Slot]]] = {}
    for slot, part in zip(slots, local, strict=True):
        alike.setdefault(sharing_groups(slot.weight), []).append((slot, part))
    for process_groups, pairs in alike.items():  # one number for the matrices of all ranks
        # Both counts of a weight in one number, so that they are summed as one.
        counts = [part.state[SKIPPED] + (part.state[LIMITED] << 32) for _, part in pairs]
        sums = sum_over_groups(torch.stack(counts), process_groups, step.terms)
        for (slot, _), both in zip(pairs, sums, strict=True):
            slot.state[SKIPPED].add_(both & (2**32 - 1))
            slot.state[LIMITED].add_(both >> 32)


def step_everywhere(slot: Slot, step: ShardedStep) -> None:
    """Step a weight on every rank as a single process would; each keeps its part."""
    weight = slot.weight
    assert is_dtensor(weight)
    names = [*step.state_kinds, *COUNTS, *(name for name in ROUNDING_STATE if name in slot.state)]
    X, state = (
        whole_of(weight).clone(),
        {name: whole_of(slot.state[name]).clone() for name in names},
    )
    step.step_whole([Slot(X, whole_of(slot.gradient), state)])
    local_part(weight).copy_(part_of(X, weight))
    for name, new in state.items():
        is_matrix = name in (*step.buffers, COMPENSATION)
        local_part(slot.state[name]).copy_(part_of(new, weight) if is_matrix else new)


def step_rows(members: list[Member], step: ShardedStep) -> None:
    """Step tall matrices, each rank its own rows: an all-reduce for all of them."""
    fields = [_fields(member, step) for member in members]
    for k, result in step_apart(members, fields, step).items():
        _keep(members[k], result)


def step_columns(members: list[Member], step: ShardedStep) -> None:
    """Step wide matrices: rows to columns, step as tall ones, columns to rows."""
    fields = [_fields(member, step) for member in members]
    flat = [M for matrices in fields for M in matrices]
    layouts = [member.layout for member in members for _ in fields[0]]
    columns = iter(rows_to_columns(flat, layouts, step.terms))
    fields = [[next(columns).mT for _ in matrices] for matrices in fields]
    results = step_apart(members, fields, step)
    flat = [M.mT for r in results.values() for M in (r.moved, *(r.state[k] for k in step.buffers))]
    layouts = [members[k].layout for k in results for _ in ("weight", *step.buffers)]
    rows = iter(columns_to_rows(flat, layouts))
    for k, result in results.items():
        moved = next(rows)
        state = {**result.state, **{name: next(rows) for name in step.buffers}}
        _keep(members[k], result._replace(moved=moved, state=state))


def step_owners(members: list[Member], step: ShardedStep) -> None:
    """Step each matrix on one rank, as a single process would."""
    layout = members[0].layout
    owners = Owners([member.layout for member in members], share_out(members, layout.ranks))
    parts = [_fields(member, step) for member in members]
    mine = [members[k] for k in owners.owned(layout.rank)]
    owned: list[Slot] = []
    for member, gathered in zip(mine, owners.gather(parts, step.terms), strict=True):
        X, G, *buffers = (_turned(M, member) for M in gathered)
        state = dict(zip(step.buffers, buffers, strict=True))
        state |= {name: member.slot.state[name].clone() for name in step.numbers}
        prepare_counts(state, X.device)
        owned.append(Slot(X, G, state))
    step.step_whole(owned)
    wholes = [
        [_turned(M, member) for M in (X, *(state[name] for name in step.buffers))]
        for member, (X, _, state) in zip(mine, owned, strict=True)
    ]
    numbers = parts[0][0].new_empty(len(mine), len(step.numbers) + 1)
    for row, (_, _, state) in zip(numbers, owned, strict=True):
        for i, name in enumerate(step.numbers):
            row[i] = state[name]
        row[-1] = state[SKIPPED] + 2 * state[LIMITED]  # of one matrix each: 0 or 1
    back, all_numbers = owners.spread(wholes, numbers, [[X, *state] for X, _, *state in parts])
    for member, (moved, *buffers), row in zip(members, back, all_numbers, strict=True):
        names = (*step.buffers, *step.numbers)
        state = dict(zip(names, (*buffers, *row.real[:-1]), strict=True))
        both = row.real[-1].round().to(torch.int64)
        _keep(member, MatrixStep(moved, both % 2 == 0, state, both // 2))


def share_out(members: Sequence[Member], ranks: int) -> list[int]:
    """An owner for each matrix, so that all ranks have about equal work."""
    work = [math.prod(member.layout.shape) * min(member.layout.shape) for member in members]
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
        local = [_local_slot(slot) for slot in members]
        for part in local:
            count_of(SKIPPED, part.state, part.weight.device)
        step(local, agree=partial(_agreed, process_groups, terms) if process_groups else None)
        for slot, part in zip(members, local, strict=True):
            assert is_dtensor(slot.weight)
            for name, value in part.state.items():  # in one order on all ranks, as collectives
                if name not in slot.state:
                    is_number = name in ("step", SKIPPED)
                    slot.state[name] = value if is_number else placed_like(value, slot.weight)


def _agreed(process_groups: Sequence[ProcessGroup], terms: TermsOf, taken: Tensor) -> Tensor:
    """Which parameters all ranks may step, from those that this rank may."""
    return sum_over_groups(taken.logical_not().to(torch.int32), process_groups, terms) == 0


# --- rows of tall matrices


class Batch(NamedTuple):
    """Steps of tall matrices of one shape and scale that wait for sums over ranks."""

    members: list[int]
    W: Tensor  # this rank's rows of them, (k, rows, p)
    X: Tensor  # W / scale
    scale: float
    state: dict[str, Tensor]
    pending: PendingStep


def step_apart(
    members: Sequence[Member], fields: Sequence[Sequence[Tensor]], step: ShardedStep
) -> dict[int, MatrixStep]:
    """The steps of tall matrices of which this rank has rows: an all-reduce for all of them.

    ``fields``: the rows of weight, gradient and buffers.
    """
    layout = members[0].layout
    kinds = [(max(k.layout.shape), min(k.layout.shape), k.scale) for k in members]
    begun = [
        _begin(those, members, fields, kinds[those[0]], step)
        for those in batches(kinds, step.foreach, layout.ranks)
    ]
    results: dict[int, MatrixStep] = {}
    sums = finished([batch.pending for batch in begun], layout.group, step.terms)
    for batch, result in zip(begun, sums, strict=True):
        moved, taken, state, limited = _unless_skipped(batch, result)
        for i, k in enumerate(batch.members):
            new = {name: value[i] for name, value in state.items()}
            held_back = None if limited is None else limited[i]
            results[k] = MatrixStep(moved[i], taken[i], new, held_back)
    return results


def _begin(
    those: list[int],
    members: Sequence[Member],
    fields: Sequence[Sequence[Tensor]],
    kind: tuple[int, int, float],
    step: ShardedStep,
) -> Batch:
    """The step of some of the matrices as one batch, up to the first sums."""
    total, _, scale = kind
    W, G, *buffers = map(_stack, zip(*[fields[k] for k in those], strict=True))
    state = dict(zip(step.buffers, buffers, strict=True))
    for name, kind_of_state in step.state_kinds.items():
        if kind_of_state == "number":
            state[name] = _stack([members[k].slot.state[name] for k in those])
    X, rows = unscaled(W, scale), Rows(W.shape[1], total)
    assert step.gram_step is not None
    pending = step.gram_step(scale)(X, descent(G, step.maximize), state, rows)
    return Batch(those, W, X, scale, state, pending)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _unless_skipped(batch: Batch, result: MatrixStep) -> MatrixStep:
    """The matrices after the step, whether or not it was taken."""
    whether = result.taken[:, None, None]
    moved = follow(batch.W, batch.X, result.moved, batch.scale)
    kept = {
        name: torch.where(whether if new.ndim == 3 else result.taken, new, batch.state[name])
        for name, new in result.state.items()
    }
    return result._replace(moved=torch.where(whether, moved, batch.W), state=kept)


def finished(steps: Sequence[PendingStep], group: ProcessGroup, terms: TermsOf) -> list[MatrixStep]:
    """The steps with their sums over the ranks: one message for all, as often as any waits."""
    done: dict[int, MatrixStep] = {}
    waiting = dict(enumerate(steps))
    while waiting:
        sent = {k: message_of(step.sums) for k, step in waiting.items()}
        sums = iter(
            sums_over_ranks([t for message in sent.values() for t in message], group, terms)
        )
        for k, message in sent.items():
            step = waiting.pop(k).finish(sums_of([next(sums) for _ in message]))
            if isinstance(step, PendingStep):
                waiting[k] = step
            else:
                done[k] = step
    return [done[k] for k in range(len(steps))]


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


# --- what the routes share


def _local_slot(slot: Slot) -> Slot:
    """What this rank has of a weight, its gradient and its state; memory is shared."""
    weight, gradient = slot.weight, slot.gradient
    assert is_dtensor(weight)
    assert is_dtensor(gradient)
    if gradient.placements != weight.placements:
        gradient = gradient.redistribute(placements=weight.placements)
    state = {k: v if type(v) is Tensor else local_part(v) for k, v in slot.state.items()}
    return Slot(weight.to_local().detach(), gradient.to_local().detach(), state)


def _fields(member: Member, step: ShardedStep) -> list[Tensor]:
    """This rank's rows of a weight, its gradient and its buffers, in the working type."""
    (weight, gradient, state), layout, _ = member
    fields = [rows_of(exact_value(weight, state), layout)]
    fields.append(to_working_dtype(rows_of(gradient, layout)))
    for name in step.buffers:
        fields.append(to_working_dtype(rows_of(state[name], layout)))
    return fields


def _turned(M: Tensor, member: Member) -> Tensor:
    """From the matrix as it is sharded to the weight's own orientation, and back."""
    return M.mT.contiguous() if member.layout.turned else M


def _keep(member: Member, result: MatrixStep) -> None:
    """Store this rank's new rows and state, and whether the step was skipped or limited."""
    (weight, _, state), layout, _ = member
    keep_(weight, from_rows(result.moved, weight, layout), state)
    for name, new in result.state.items():
        state[name].copy_(from_rows(new, state[name], layout) if new.ndim else new)
    state[SKIPPED].add_(result.taken.logical_not())
    if result.limited is not None:
        state[LIMITED].add_(result.limited)
