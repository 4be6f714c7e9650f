"""Steps of weights that are spread over ranks: DTensors, as FSDP2's ``fully_shard`` makes them.

A weight takes one of five ways, by its shape, its view and how it is sharded:

- *here*: every matrix is whole on its rank (kernels of a convolution, replicated weights). The
  step of a single process, on the local part.
- *rows*: tall matrices. Each rank moves its own rows; one all-reduce of Gram matrices for all of a
  group (:mod:`.rows`).
- *columns*: wide matrices. An all-to-all gives each rank columns in place of rows, which are the
  rows of a tall matrix; then as above, and an all-to-all back.
- *owners*: square ones. An all-to-all brings each matrix together on one rank, a different one
  for each, which takes the step of a single process; an all-to-all spreads it again.
- *everywhere*: what is sharded along several dimensions of a mesh (FSDP2 on top of tensor
  parallelism). Each rank gathers it all and takes the step of a single process.

Matrices that are sharded by columns are the transposes of such that are sharded by rows. Wide
ones go the way on which the busiest rank receives less. Square ones have owners: the skew matrix
that their momentum accumulates has no form that is local to rows. With the option
``sharded="owners"`` all have, with ``"auto"`` tall ones too if that moves less. What each way costs
is in ``docs/at_scale.md``.

State is sharded as its weight is, or equal on all ranks, and has the shape it has in a single
process. Every rank must step the same parameters in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.exchange import (
    Owners,
    columns_to_rows,
    rows_to_columns,
    sum_over_groups,
    sums_over_ranks,
)
from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.shards import (
    Layout,
    is_dtensor,
    is_elsewhere,
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
from ortholand.optim.base import BATCH_UP_TO, MatrixStep, OrthogonalOptimizer
from ortholand.optim.plain import SKIPPED, State, skipped_count
from ortholand.optim.rows import Rows, RowStep, summed_numbers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Group = Mapping[str, Any]
Way = Callable[[OrthogonalOptimizer, "list[Member]", Group], None]

# Numbers that a rank brings to a message, about. A group with more of them steps in several
# rounds, so that what is copied beside its weights stays small: half a gigabyte of float32.
LONGEST_MESSAGE = 2**27


class Member(NamedTuple):
    """A weight of which this rank has some rows, or columns (``layout.turned``)."""

    p: DTensor
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its matrix, seen so that it is sharded by rows."""
        rows = sum(self.layout.sizes)
        return rows, self.p.numel() // rows


class Part(NamedTuple):
    """What a rank has of a tall matrix: some of its rows."""

    X: Tensor
    G: Tensor
    state: dict[str, Tensor]
    rows: Rows


class Batch(NamedTuple):
    """Parts of matrices of one shape that step as one, ``(k, rows, p)``."""

    members: list[int]  # which parts
    X: Tensor
    G: Tensor
    state: dict[str, Tensor]
    rows: Rows


def step_sharded(optimizer: OrthogonalOptimizer, params: Sequence[DTensor], group: Group) -> None:
    """Step the DTensors of a group, those of whose mesh this rank is."""
    params = [p for p in params if not is_elsewhere(p)]
    if not group["orthogonal"]:
        step_plain(optimizer, params, group)
        return
    here: list[DTensor] = []
    scattered: list[DTensor] = []
    spread: dict[tuple[Any, ...], list[Member]] = {}
    for p in params:
        prepare_state(optimizer, p, group)
        if is_here(p, group["view"]):
            here.append(p)
        elif (layout := layout_of(p)) is None:
            scattered.append(p)
        else:
            spread.setdefault((layout.group, p.dtype, p.device), []).append(Member(p, layout))
    step_here(optimizer, here, group)
    for p in scattered:
        step_everywhere(optimizer, p, group)
    for members in spread.values():
        for step, those in ways(optimizer, members, group):
            for portion in rounds(optimizer, those, group, step is not step_owners):
                step(optimizer, portion, group)


def ways(
    optimizer: OrthogonalOptimizer, members: Sequence[Member], group: Group
) -> list[tuple[Way, list[Member]]]:
    """Which step each of the weights takes."""
    tall: list[Member] = []
    turned: list[Member] = []
    whole: list[Member] = []
    states = len(_names(optimizer, group, "matrix"))
    for (rows, columns), alike in by_shape(members).items():
        size = (rows, columns, alike[0].layout.ranks, len(alike))
        if rows == columns or optimizer.row_step(group) is None:
            whole.extend(alike)
            continue
        by_owner = received_by_owner(*size, states)
        summed = summed_numbers(min(rows, columns), group)
        if rows < columns:
            by_columns = received_by_columns(*size, states, summed)
            (turned if by_columns < by_owner else whole).extend(alike)
        else:
            by_rows = received_by_sum(alike[0].layout.ranks, len(alike) * summed)
            fewer = by_owner < by_rows and group["sharded"] == "auto"
            (whole if fewer else tall).extend(alike)
    all_ways = ((step_rows, tall), (step_columns, turned), (step_owners, whole))
    return [(step, those) for step, those in all_ways if those]


def by_shape(members: Sequence[Member]) -> dict[tuple[int, int], list[Member]]:
    """The weights whose matrices are alike."""
    alike: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        alike.setdefault(member.shape, []).append(member)
    return alike


def rounds(
    optimizer: OrthogonalOptimizer, members: Sequence[Member], group: Group, with_sums: bool
) -> Iterator[list[Member]]:
    """The weights in portions that a message can hold, the same on every rank: mostly one.

    Without sums they have owners, of which a portion keeps all busy.
    """
    tensors, ranks = 2 + len(_names(optimizer, group, "matrix")), members[0].layout.ranks
    portion: list[Member] = []
    length = 0
    for member in members:
        numbers = tensors * math.ceil(math.prod(member.shape) / ranks)
        if with_sums:
            numbers += summed_numbers(min(member.shape), group)
        too_long = length + numbers > LONGEST_MESSAGE
        if too_long and len(portion) >= (1 if with_sums else ranks):
            yield portion
            portion, length = [], 0
        portion.append(member)
        length += numbers
    yield portion


def received_by_owner(rows: int, columns: int, ranks: int, count: int, states: int) -> float:
    """Numbers that the busiest rank receives when ``count`` matrices have owners.

    Weight, gradient and ``states`` buffers come in, and all but the gradient go back.
    """
    owned = math.ceil(count / ranks)
    shard = rows * columns / ranks
    return (owned * (2 + states) * (ranks - 1) + (count - owned) * (1 + states)) * shard


def received_by_columns(
    rows: int, columns: int, ranks: int, count: int, states: int, summed: int
) -> float:
    """Numbers that a rank receives when ``count`` matrices are turned from rows to columns.

    The same comes in and goes back, and a sum of ``summed`` numbers each lies between.
    """
    turned = count * (3 + 2 * states) * rows * columns / ranks
    return turned * (ranks - 1) / ranks + received_by_sum(ranks, count * summed)


def received_by_sum(ranks: int, numbers: int) -> float:
    """Numbers that a rank receives when as many are summed over ranks, in a ring."""
    return 2 * numbers * (ranks - 1) / ranks


# --- the five ways


def step_here(optimizer: OrthogonalOptimizer, params: Sequence[DTensor], group: Group) -> None:
    """Step weights whose matrices are all whole on this rank."""
    stand_ins = [_local_stand_in(optimizer, p, optimizer.state_kinds(group)) for p in params]
    with standing_in(optimizer, stand_ins):
        optimizer.step_whole([X for X, _ in stand_ins if X.numel()], group)
    alike: dict[tuple[ProcessGroup, ...], list[tuple[Tensor, Tensor]]] = {}
    for p, (_, state) in zip(params, stand_ins, strict=True):
        count, skipped = (skipped_count(s, p.device) for s in (optimizer.state[p], state))
        alike.setdefault(sharing_groups(p), []).append((count, skipped))
    for process_groups, counts in alike.items():  # one number for the matrices of all ranks
        skipped = torch.stack([skipped for _, skipped in counts])
        skipped = sum_over_groups(skipped, process_groups)
        for (count, _), number in zip(counts, skipped, strict=True):
            count.add_(number)


def step_everywhere(optimizer: OrthogonalOptimizer, p: DTensor, group: Group) -> None:
    """Step a weight on every rank as a single process would; each keeps its part."""
    assert p.grad is not None
    X = whole_of(p).clone()
    X.grad = whole_of(p.grad)
    kinds = optimizer.state_kinds(group)
    state = {name: whole_of(optimizer.state[p][name]).clone() for name in kinds}
    with standing_in(optimizer, [(X, state)]):
        optimizer.step_whole([X], group)
    local_part(p).copy_(part_of(X, p))
    for name, kind in kinds.items():
        new = part_of(state[name], p) if kind == "matrix" else state[name]
        local_part(optimizer.state[p][name]).copy_(new)
    skipped_count(optimizer.state[p], p.device).add_(skipped_count(state, p.device))


def step_rows(optimizer: OrthogonalOptimizer, members: list[Member], group: Group) -> None:
    """Step tall matrices, each rank its own rows: one all-reduce for all of them."""
    parts = []
    for member in members:
        X, G, *matrices = _matrices(optimizer, member, group)
        rows = Rows(X.shape[0], member.shape[0])
        parts.append(Part(X, G, _all_state(optimizer, member.p, matrices, group), rows))
    results = step_parts(optimizer, parts, group, members[0].layout)
    for member, (moved, taken, state) in zip(members, results, strict=True):
        _keep(optimizer, member, moved, state, taken.logical_not())


def step_columns(optimizer: OrthogonalOptimizer, members: list[Member], group: Group) -> None:
    """Step wide matrices: rows to columns, step as tall ones, columns to rows."""
    names = _names(optimizer, group, "matrix")
    fields = [_matrices(optimizer, member, group) for member in members]
    layouts = [k.layout for k, matrices in zip(members, fields, strict=True) for _ in matrices]
    blocks = iter(rows_to_columns([M for matrices in fields for M in matrices], layouts))
    parts = []
    for member, matrices in zip(members, fields, strict=True):
        X, G, *others = (next(blocks).mT for _ in matrices)
        state = _all_state(optimizer, member.p, others, group)
        parts.append(Part(X, G, state, Rows(X.shape[0], member.shape[1])))
    results = step_parts(optimizer, parts, group, members[0].layout)
    columns = [M.mT for moved, _, state in results for M in (moved, *(state[k] for k in names))]
    back = [member for member in members for _ in range(1 + len(names))]
    rows = iter(columns_to_rows(columns, [k.shape[1] for k in back], [k.layout for k in back]))
    for member, (_, taken, state) in zip(members, results, strict=True):
        moved = next(rows)
        state.update({name: next(rows) for name in names})
        _keep(optimizer, member, moved, state, taken.logical_not())


def step_owners(optimizer: OrthogonalOptimizer, members: list[Member], group: Group) -> None:
    """Step each matrix on one rank, as a single process would."""
    layout = members[0].layout
    names, number_names = _names(optimizer, group, "matrix"), _names(optimizer, group, "number")
    owners = Owners([member.layout for member in members], share_out(members, layout.ranks))
    parts = [_fields(optimizer, member, group) for member in members]
    stand_ins: list[tuple[Tensor, State]] = []
    mine = owners.owned(layout.rank)
    for k, gathered in zip(mine, owners.gather(parts), strict=True):
        X, G, *matrices = (_turned(M, members[k]) for M in gathered)
        X.grad = G
        numbers = {name: optimizer.state[members[k].p][name].clone() for name in number_names}
        stand_ins.append((X, {**dict(zip(names, matrices, strict=True)), **numbers}))
    with standing_in(optimizer, stand_ins):
        optimizer.step_whole([X for X, _ in stand_ins], group)
    wholes = [
        [_turned(M, members[k]) for M in (X, *(state[name] for name in names))]
        for k, (X, state) in zip(mine, stand_ins, strict=True)
    ]
    numbers = parts[0][0].new_empty(len(mine), len(number_names) + 1)
    for row, (_, state) in zip(numbers, stand_ins, strict=True):
        for i, name in enumerate((*number_names, SKIPPED)):
            row[i] = state[name]
    back, numbers = owners.spread(wholes, numbers, [[X, *state] for X, _, *state in parts])
    for member, (moved, *matrices), row in zip(members, back, numbers.real, strict=True):
        state = dict(zip((*names, *number_names), (*matrices, *row[:-1]), strict=True))
        _keep(optimizer, member, moved, state, row[-1].round().to(torch.int64))


def share_out(members: Sequence[Member], ranks: int) -> list[int]:
    """An owner for each matrix, so that all ranks have about as much to compute."""
    work = [math.prod(member.shape) * min(member.shape) for member in members]
    loads, owners = [0] * ranks, [0] * len(members)
    for k in sorted(range(len(members)), key=lambda k: -work[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += work[k]
    return owners


# --- unconstrained weights


def step_plain(optimizer: OrthogonalOptimizer, params: Sequence[DTensor], group: Group) -> None:
    """torch's own step on the local parts; what one rank must leave alone, all leave alone."""
    alike: dict[tuple[ProcessGroup, ...], list[DTensor]] = {}
    for p in params:
        alike.setdefault(sharing_groups(p), []).append(p)
    for process_groups, members in alike.items():
        stand_ins = [_local_stand_in(optimizer, p, optimizer.state[p]) for p in members]
        agree = partial(_agreed, process_groups) if process_groups else None
        with standing_in(optimizer, stand_ins):
            optimizer.plain_step([X for X, _ in stand_ins], group, agree)
        for p, (_, state) in zip(members, stand_ins, strict=True):
            for name, value in state.items():  # in one order on all ranks: so they are gathered
                if name not in optimizer.state[p]:
                    is_number = name in ("step", SKIPPED)
                    placed = value if is_number else placed_like(value, p)
                    optimizer.state[p][name] = placed


def _agreed(process_groups: Sequence[ProcessGroup], taken: Tensor) -> Tensor:
    """Which parameters all ranks may step, from those that this one may."""
    return sum_over_groups(taken.logical_not().to(torch.int32), process_groups) == 0


# --- what the ways share


def step_parts(
    optimizer: OrthogonalOptimizer, parts: Sequence[Part], group: Group, layout: Layout
) -> list[MatrixStep]:
    """The steps of matrices of which this rank has rows. One all-reduce for all of them."""
    row_step = optimizer.row_step(group)
    assert row_step is not None
    batches = [
        _batch([parts[k] for k in members], members)
        for members in _alike(parts, group["foreach"], layout.ranks)
    ]
    steps = [row_step(b.X, b.G, b.state, group, b.rows) for b in batches]
    sent = [next(step) for step in steps]
    sums = iter(sums_over_ranks([part for tensors in sent for part in tensors], layout.group))
    results: dict[int, MatrixStep] = {}
    for batch, step, tensors in zip(batches, steps, sent, strict=True):
        moved, taken, state = _unless_skipped(batch, _finish(step, [next(sums) for _ in tensors]))
        for i, k in enumerate(batch.members):
            results[k] = MatrixStep(
                moved[i], taken[i], {name: new[i] for name, new in state.items()}
            )
    return [results[k] for k in range(len(parts))]


def _batch(parts: Sequence[Part], members: list[int]) -> Batch:
    X, G = _stack([part.X for part in parts]), _stack([part.G for part in parts])
    state = {name: _stack([part.state[name] for part in parts]) for name in parts[0].state}
    return Batch(members, X, G, state, parts[0].rows)


def _alike(parts: Sequence[Part], foreach: bool | None, ranks: int) -> Iterator[list[int]]:
    """Which parts step as one: small ones of one shape. The same on every rank."""
    alike: dict[tuple[int, int], list[int]] = {}
    for k, part in enumerate(parts):
        alike.setdefault((part.rows.total, part.X.shape[1]), []).append(k)
    for (rows, columns), members in alike.items():
        small = rows * columns <= BATCH_UP_TO * ranks
        if foreach or (foreach is None and small):
            yield members
        else:
            yield from ([k] for k in members)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _finish(step: RowStep, sums: list[Tensor]) -> MatrixStep:
    try:
        step.send(sums)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("A step over rows asks for sums once.")


def _unless_skipped(batch: Batch, result: MatrixStep) -> MatrixStep:
    """The matrices as they are after the step, whether or not it was taken."""
    moved, taken, state = result
    whether = taken[:, None, None]
    kept = {
        name: torch.where(whether if new.ndim == 3 else taken, new, batch.state[name])
        for name, new in state.items()
    }
    return MatrixStep(torch.where(whether, moved, batch.X), taken, kept)


def prepare_state(optimizer: OrthogonalOptimizer, p: DTensor, group: Group) -> None:
    """Make the state of a new parameter: on every rank, whether or not it has rows."""
    for name in optimizer.state_kinds(group):
        optimizer.load(p, name, group)
    skipped_count(optimizer.state[p], p.device)


@contextmanager
def standing_in(
    optimizer: OrthogonalOptimizer, stand_ins: Sequence[tuple[Tensor, State]]
) -> Iterator[None]:
    """Plain tensors with gradients and state, as parameters of the optimizer for a while."""
    for X, state in stand_ins:
        optimizer.state[X] = state
    try:
        yield
    finally:
        for X, _ in stand_ins:
            del optimizer.state[X]


def _local_stand_in(
    optimizer: OrthogonalOptimizer, p: DTensor, names: Iterable[str]
) -> tuple[Tensor, State]:
    """What this rank has of a weight, its gradient and its state; memory is shared."""
    X = local_part(p)
    X.grad = local_part(_placed_gradient(p))
    return X, {name: local_part(optimizer.state[p][name]) for name in names}


def _placed_gradient(p: DTensor) -> DTensor:
    """The gradient of a weight, placed as the weight is."""
    gradient = p.grad
    assert is_dtensor(gradient)
    if gradient.placements != p.placements:
        gradient = gradient.redistribute(placements=p.placements)
    return gradient


def _names(optimizer: OrthogonalOptimizer, group: Group, kind: str) -> list[str]:
    return [name for name, this in optimizer.state_kinds(group).items() if this == kind]


def _fields(optimizer: OrthogonalOptimizer, member: Member, group: Group) -> list[Tensor]:
    """This rank's rows of a weight, its gradient and its buffers, in the working type."""
    p, layout = member
    buffers = [optimizer.state[p][name] for name in _names(optimizer, group, "matrix")]
    fields = [rows_of(tensor, layout) for tensor in (p, _placed_gradient(p), *buffers)]
    return [to_working_dtype(rows) for rows in fields]


def _matrices(optimizer: OrthogonalOptimizer, member: Member, group: Group) -> list[Tensor]:
    """:func:`_fields`, the gradient with the sign of a descent."""
    X, G, *buffers = _fields(optimizer, member, group)
    return [X, -G if group["maximize"] else G, *buffers]


def _turned(M: Tensor, member: Member) -> Tensor:
    """From the matrix as it is sharded to the one that the weight is, and back."""
    return M.mT.contiguous() if member.layout.turned else M


def _all_state(
    optimizer: OrthogonalOptimizer, p: DTensor, matrices: Sequence[Tensor], group: Group
) -> dict[str, Tensor]:
    numbers = {name: optimizer.state[p][name] for name in _names(optimizer, group, "number")}
    return {**dict(zip(_names(optimizer, group, "matrix"), matrices, strict=True)), **numbers}


def _keep(
    optimizer: OrthogonalOptimizer,
    member: Member,
    moved: Tensor,
    state: Mapping[str, Tensor],
    skipped: Tensor,
) -> None:
    """Write down where this rank's rows went, the new state, and whether the step was skipped."""
    p, layout = member
    set_rows_(p, moved, layout)
    for name, new in state.items():
        kept = optimizer.state[p][name]
        if new.ndim:
            set_rows_(kept, new, layout)
        else:
            kept.copy_(new)
    skipped_count(optimizer.state[p], p.device).add_(skipped)
