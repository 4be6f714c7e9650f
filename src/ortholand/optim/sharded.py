"""Steps of weights that are spread over ranks: DTensors, as FSDP2's ``fully_shard`` makes them.

A weight takes one of four ways, by its shape and view:

- *here*: every matrix is whole on its rank (kernels of a convolution, replicated weights). The
  step of a single process, on the local part.
- *rows*: tall matrices. Each rank moves its own rows; one all-reduce of Gram matrices for all of a
  group (:mod:`.rows`).
- *columns*: wide matrices. An all-to-all gives each rank columns in place of rows, which are the
  rows of a tall matrix; then as above, and an all-to-all back.
- *owners*: all others. An all-to-all brings each matrix together on one rank, a different one for
  each, which takes the step of a single process; an all-to-all spreads it again.

Wide matrices go the way on which the busiest rank receives less. Square ones have owners: the
skew matrix that their momentum accumulates has no form that is local to rows.

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

from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.shards import (
    Layout,
    Owners,
    columns_to_rows,
    is_dtensor,
    is_local,
    layout_of,
    local_part,
    placed_like,
    rows_to_columns,
    sums_over_ranks,
)
from ortholand.optim.base import BATCH_UP_TO, MatrixStep, OrthogonalOptimizer
from ortholand.optim.plain import SKIPPED, State, skipped_count
from ortholand.optim.rows import Rows, RowStep, summed_numbers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Group = Mapping[str, Any]
Way = Callable[[OrthogonalOptimizer, "list[Member]", Group], None]


class Member(NamedTuple):
    """A weight of which this rank has some rows."""

    p: DTensor
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its matrix."""
        return self.p.shape[0], self.p.shape[1:].numel()


class Part(NamedTuple):
    """What a rank has of a tall matrix: some of its rows."""

    X: Tensor
    G: Tensor
    state: dict[str, Tensor]
    rows: Rows


def step_sharded(optimizer: OrthogonalOptimizer, params: Sequence[DTensor], group: Group) -> None:
    """Step the DTensors of a group."""
    if not group["orthogonal"]:
        step_plain(optimizer, params, group)
        return
    here: list[DTensor] = []
    spread: dict[tuple[Any, ...], list[Member]] = {}
    for p in params:
        layout = layout_of(p)
        prepare_state(optimizer, p, group)
        if layout is None or is_local(p, group["view"]):
            here.append(p)
        else:
            spread.setdefault((layout.group, p.dtype, p.device), []).append(Member(p, layout))
    step_here(optimizer, here, group)
    for members in spread.values():
        for step, those in ways(optimizer, members, group):
            step(optimizer, those, group)


def ways(
    optimizer: OrthogonalOptimizer, members: Sequence[Member], group: Group
) -> list[tuple[Way, list[Member]]]:
    """Which step each of the weights takes."""
    tall: list[Member] = []
    turned: list[Member] = []
    whole: list[Member] = []
    wide: dict[tuple[int, int], list[Member]] = {}
    for member in members:
        rows, columns = member.shape
        if rows == columns or optimizer.row_step(group) is None:
            whole.append(member)
        elif rows > columns:
            tall.append(member)
        else:
            wide.setdefault(member.shape, []).append(member)
    states = len(_names(optimizer, group, "matrix"))
    for (rows, columns), alike in wide.items():
        size = (rows, columns, alike[0].layout.ranks, len(alike), states)
        by_columns = received_by_columns(*size, summed_numbers(rows, group))
        (turned if by_columns < received_by_owner(*size) else whole).extend(alike)
    all_ways = ((step_rows, tall), (step_columns, turned), (step_owners, whole))
    return [(step, those) for step, those in all_ways if those]


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

    The same comes in and goes back, and an all-reduce of ``summed`` numbers each, in a ring, lies
    between.
    """
    shard = rows * columns / ranks
    return count * ((3 + 2 * states) * shard + 2 * summed) * (ranks - 1) / ranks


# --- the four ways


def step_here(optimizer: OrthogonalOptimizer, params: Sequence[DTensor], group: Group) -> None:
    """Step weights whose matrices are all whole on this rank."""
    stand_ins = [_local_stand_in(optimizer, p, optimizer.state_kinds(group)) for p in params]
    with standing_in(optimizer, stand_ins):
        optimizer.step_whole([X for X, _ in stand_ins if X.numel()], group)
    counts: dict[ProcessGroup, list[tuple[Tensor, Tensor]]] = {}
    for p, (_, state) in zip(params, stand_ins, strict=True):
        count, layout = skipped_count(optimizer.state[p], p.device), layout_of(p)
        skipped = skipped_count(state, p.device)
        if layout is None:
            count.add_(skipped)
        else:  # the matrices of a weight are on several ranks: one number to agree on
            counts.setdefault(layout.group, []).append((count, skipped))
    for process_group, members in counts.items():
        sums = sums_over_ranks([skipped for _, skipped in members], process_group)
        for (count, _), skipped in zip(members, sums, strict=True):
            count.add_(skipped)


def step_rows(optimizer: OrthogonalOptimizer, members: list[Member], group: Group) -> None:
    """Step tall matrices, each rank its own rows: one all-reduce for all of them."""
    parts = []
    for member in members:
        X, G, *matrices = _matrices(optimizer, member.p, group)
        rows = Rows(X.shape[0], member.shape[0])
        parts.append(Part(X, G, _all_state(optimizer, member.p, matrices, group), rows))
    results = step_parts(optimizer, parts, group, members[0].layout)
    for member, (moved, taken, state) in zip(members, results, strict=True):
        _keep(optimizer, member.p, moved, state, taken.logical_not())


def step_columns(optimizer: OrthogonalOptimizer, members: list[Member], group: Group) -> None:
    """Step wide matrices: rows to columns, step as tall ones, columns to rows."""
    names = _names(optimizer, group, "matrix")
    fields = [_matrices(optimizer, member.p, group) for member in members]
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
        _keep(optimizer, member.p, moved, state, taken.logical_not())


def step_owners(optimizer: OrthogonalOptimizer, members: list[Member], group: Group) -> None:
    """Step each matrix on one rank, as a single process would."""
    layout = members[0].layout
    names, number_names = _names(optimizer, group, "matrix"), _names(optimizer, group, "number")
    owners = Owners([member.layout for member in members], share_out(members, layout.ranks))
    parts = [_fields(optimizer, member.p, group) for member in members]
    stand_ins: list[tuple[Tensor, State]] = []
    mine = owners.owned(layout.rank)
    for k, (X, G, *matrices) in zip(mine, owners.gather(parts), strict=True):
        X.grad = G
        numbers = {name: optimizer.state[members[k].p][name].clone() for name in number_names}
        stand_ins.append((X, {**dict(zip(names, matrices, strict=True)), **numbers}))
    with standing_in(optimizer, stand_ins):
        optimizer.step_whole([X for X, _ in stand_ins], group)
    wholes = [[X, *(state[name] for name in names)] for X, state in stand_ins]
    numbers = parts[0][0].new_empty(len(mine), len(number_names) + 1)
    for row, (_, state) in zip(numbers, stand_ins, strict=True):
        for i, name in enumerate((*number_names, SKIPPED)):
            row[i] = state[name]
    back, numbers = owners.spread(wholes, numbers, [[X, *state] for X, _, *state in parts])
    for member, (moved, *matrices), row in zip(members, back, numbers.real, strict=True):
        state = dict(zip((*names, *number_names), (*matrices, *row[:-1]), strict=True))
        _keep(optimizer, member.p, moved, state, row[-1].round().to(torch.int64))


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
        alike.setdefault(_sharing_groups(p), []).append(p)
    for process_groups, members in alike.items():
        stand_ins = [_local_stand_in(optimizer, p, optimizer.state[p]) for p in members]
        agree = partial(_agreed, process_groups) if process_groups else None
        with standing_in(optimizer, stand_ins):
            optimizer.plain_step([X for X, _ in stand_ins], group, agree)
        for p, (_, state) in zip(members, stand_ins, strict=True):
            for name, value in state.items():  # in one order on all ranks: so they are gathered
                if name not in optimizer.state[p]:
                    is_number = name in ("step", SKIPPED)
                    placed = value if is_number else placed_like(value, p, p.shape)
                    optimizer.state[p][name] = placed


def _agreed(process_groups: Sequence[ProcessGroup], taken: Tensor) -> Tensor:
    """Which parameters all ranks may step, from those that this one may."""
    stays = taken.logical_not().to(torch.int32)
    for process_group in process_groups:
        (stays,) = sums_over_ranks([stays], process_group)
    return stays == 0


def _sharing_groups(p: DTensor) -> tuple[ProcessGroup, ...]:
    """The ranks that have different parts of a weight, for each dimension of the mesh."""
    mesh = p.device_mesh
    split = [i for i, place in enumerate(p.placements) if not place.is_replicate()]
    return tuple(mesh.get_group(i) for i in split if mesh.size(i) > 1)


# --- what the ways share


def step_parts(
    optimizer: OrthogonalOptimizer, parts: Sequence[Part], group: Group, layout: Layout
) -> list[MatrixStep]:
    """The steps of matrices of which this rank has rows. One all-reduce for all of them."""
    row_step = optimizer.row_step(group)
    assert row_step is not None
    batches = list(_batches(parts, group["foreach"], layout.ranks))
    steps: list[RowStep] = []
    for batch in batches:
        members = [parts[k] for k in batch]
        X, G = _stack([part.X for part in members]), _stack([part.G for part in members])
        state = {name: _stack([part.state[name] for part in members]) for name in members[0].state}
        steps.append(row_step(X, G, state, group, members[0].rows))
    sent = [next(step) for step in steps]
    sums = iter(sums_over_ranks([part for tensors in sent for part in tensors], layout.group))
    results: dict[int, MatrixStep] = {}
    for batch, step, tensors in zip(batches, steps, sent, strict=True):
        result = _finish(step, [next(sums) for _ in tensors])
        for i, k in enumerate(batch):
            results[k] = _unless_skipped(parts[k], result, i)
    return [results[k] for k in range(len(parts))]


def _batches(parts: Sequence[Part], foreach: bool | None, ranks: int) -> Iterator[list[int]]:
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


def _unless_skipped(part: Part, result: MatrixStep, i: int) -> MatrixStep:
    """The i-th of the matrices as it is after the step, whether or not it was taken."""
    taken = result.taken[i]
    moved = torch.where(taken, result.moved[i], part.X)
    state = {
        name: torch.where(taken, new[i], part.state[name]) for name, new in result.state.items()
    }
    return MatrixStep(moved, taken, state)


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
    X.grad = _local_gradient(p)
    return X, {name: local_part(optimizer.state[p][name]) for name in names}


def _local_gradient(p: DTensor) -> Tensor:
    gradient = p.grad
    assert is_dtensor(gradient)
    if gradient.placements != p.placements:
        gradient = gradient.redistribute(placements=p.placements)
    return local_part(gradient)


def _names(optimizer: OrthogonalOptimizer, group: Group, kind: str) -> list[str]:
    return [name for name, this in optimizer.state_kinds(group).items() if this == kind]


def _fields(optimizer: OrthogonalOptimizer, p: DTensor, group: Group) -> list[Tensor]:
    """This rank's rows of a weight, its gradient and its buffers, in the working type."""
    buffers = [optimizer.state[p][name] for name in _names(optimizer, group, "matrix")]
    here = [local_part(p), _local_gradient(p), *(local_part(buffer) for buffer in buffers)]
    return [to_working_dtype(tensor) for tensor in here]


def _matrices(optimizer: OrthogonalOptimizer, p: DTensor, group: Group) -> list[Tensor]:
    """:func:`_fields` as matrices, the gradient with the sign of a descent."""
    X, G, *buffers = (field.flatten(1) for field in _fields(optimizer, p, group))
    return [X, -G if group["maximize"] else G, *buffers]


def _all_state(
    optimizer: OrthogonalOptimizer, p: DTensor, matrices: Sequence[Tensor], group: Group
) -> dict[str, Tensor]:
    numbers = {name: optimizer.state[p][name] for name in _names(optimizer, group, "number")}
    return {**dict(zip(_names(optimizer, group, "matrix"), matrices, strict=True)), **numbers}


def _keep(
    optimizer: OrthogonalOptimizer,
    p: DTensor,
    moved: Tensor,
    state: Mapping[str, Tensor],
    skipped: Tensor,
) -> None:
    """Write down where this rank's rows went, the new state, and whether the step was skipped."""
    for target, value in ((p, moved), *((optimizer.state[p][k], v) for k, v in state.items())):
        here = local_part(target)
        here.copy_(value.reshape(here.shape))
    skipped_count(optimizer.state[p], p.device).add_(skipped)
