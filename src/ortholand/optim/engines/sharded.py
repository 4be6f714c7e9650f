"""The engine for weights spread over ranks (DTensors).

A weight takes one of five routes, by its shape, its view and how it is sharded:

- *here*: every matrix is whole on its rank, which takes the step of a single process.
- *rows*: tall matrices. Each rank moves its own rows; one all-reduce of Gram matrices for all of a
  group (two for Muon in double precision).
- *columns*: wide matrices. An all-to-all gives each rank rows of the transposes; then as above, and
  an all-to-all back.
- *owners*: square matrices, whose momentum has no form local to rows, matrices whose step has no
  Gram form, and others where that moves less (:mod:`ortholand.sharding.costs`). An all-to-all
  gathers each on one rank, a different one for each, which takes the step of a single process.
- *everywhere*: weights sharded along several dimensions of a mesh, and blocks or vectors that are
  not whole on their ranks. Each rank gathers everything.

State is sharded like its weight, or equal on all ranks, and has the same shape as in a single
process. Every rank must step the same parameters in the same order.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.rounding import COMPENSATION, HALF_TYPES, ROUNDING_STATE, exact_value, keep_
from ortholand.geometry.scales import follow, unscaled
from ortholand.geometry.views import View
from ortholand.landing.step import COUNTS, LIMITED, SKIPPED, Rows, Slot, count_of
from ortholand.optim.engines.batches import longest_batch
from ortholand.optim.plan import Plan
from ortholand.optim.weights import copy_all
from ortholand.sharding.costs import received_by_columns, received_by_owner, received_by_sum
from ortholand.sharding.exchange import Owners, finished, rows_of_transposes, sum_over_groups
from ortholand.sharding.placement import (
    Layout,
    from_rows,
    is_dtensor,
    is_here,
    layout_of,
    local_part,
    local_view,
    part_of,
    placed_like,
    rows_of,
    sharing_groups,
    whole_of,
)

# About how many numbers a rank contributes to a message, half a gigabyte of float32. A group with
# more of them steps in several portions.
LONGEST_MESSAGE = 2**27

StepWhole = Callable[[list[Slot], Plan], None]
Route = Callable[[list[Slot], Any, Plan, StepWhole], None]
Claim = tuple[Callable[[], None] | None, list[Slot]]


class ShardedEngine:
    """Steps DTensors; passes matrices that are whole in one place to the other engines."""

    name = "sharded"

    def __init__(self, step_whole: StepWhole) -> None:
        self.step_whole = step_whole

    def refusal(self, slot: Slot, plan: Plan) -> str | None:  # noqa: ARG002
        """The reason if the weight is not spread over ranks, else None."""
        return None if is_dtensor(slot.weight) else "not a DTensor"

    def claim(self, slots: list[Slot], plan: Plan) -> Claim:
        """The step of DTensors that this rank has a part of, and the weights that are not any."""
        spread = [slot for slot in slots if is_dtensor(slot.weight)]
        whole = [slot for slot in slots if not is_dtensor(slot.weight)]
        return (partial(self.step, spread, plan) if spread else None), whole

    @torch.no_grad()
    def step(self, slots: list[Slot], plan: Plan) -> None:
        """Step the weights that this rank has a part of."""
        for route, batches in routes(slots, plan):
            route(slots, batches, plan, self.step_whole)


# --- who takes which route


class Batch(NamedTuple):
    """Equal weights of which this rank has some rows, or columns (``layout.turned``)."""

    where: list[int]  # which of the slots
    layout: Layout
    scale: float
    buffers: list[str]  # names of the state that has a weight's shape
    numbers: list[str]  # and of the state with one number per matrix
    length: int  # about how many numbers of each are in a message
    longest: int  # how many may step as one batch


def routes(slots: list[Slot], plan: Plan) -> Iterable[tuple[Route, Any]]:
    """Which weights take which route: found once, and kept while nothing that matters changes."""
    weights: list[Any] = [slot.weight for slot in slots]
    meshes = [p.device_mesh for p in weights]
    kinds = [(p.placements, p.shape, p.dtype, p.device) for p in weights]
    old_meshes, old_kinds, found = plan.notes.get("routes", ((), (), ()))
    if kinds != old_kinds or not all(map(is_, meshes, old_meshes)):
        found = [*new_routes(weights, plan)]
        plan.notes["routes"] = meshes, kinds, found
    return found


def new_routes(weights: Sequence[Any], plan: Plan) -> Iterator[tuple[Route, Any]]:
    """Each route with its weights: with their positions, or in batches."""
    here: list[int] = []
    alike: dict[tuple[Any, ...], tuple[Layout, list[int]]] = {}
    for i, p in enumerate(weights):
        if is_here(p, plan.view):
            here.append(i)
        elif (layout := layout_of(p, plan.view)) is None:
            yield step_everywhere, i
        else:
            kind = (layout.group, p.dtype, p.device, p.shape, layout.turned)
            alike.setdefault(kind, (layout, []))[1].append(i)
    if here:
        yield step_here, here
    together: dict[tuple[Any, ...], list[Batch]] = {}
    for kind, (layout, where) in alike.items():
        route, batch = routed(where, layout, weights[where[0]], plan)
        together.setdefault((route, *kind[:3]), []).append(batch)
    for (route, *_), batches in together.items():
        for portion in portions(batches):
            yield route, portion


def routed(where: list[int], layout: Layout, p: Tensor, plan: Plan) -> tuple[Route, Batch]:
    """Which route weights like p take, and how their rows step."""
    kinds: Any = plan.state_kinds
    landing: Any = plan.landing
    buffers = [name for name in kinds if kinds[name] == "matrix"]
    numbers = [name for name in kinds if kinds[name] == "number"]
    (rows, columns), ranks, route, summed = layout.shape, layout.ranks, step_owners, 0
    may_be_apart = rows != columns and plan.sharded != "owners" and landing is not None
    if may_be_apart and not (landing.why_not_gram or landing.moments.why_not_apart):
        summed = landing.moments.summed_numbers(min(rows, columns), p.dtype)
        size = (rows, columns, ranks, len(where), len(buffers))
        by_owner = received_by_owner(*size)
        if rows < columns:
            route = step_columns if received_by_columns(*size, summed) < by_owner else step_owners
        elif plan.sharded != "auto" or received_by_sum(ranks, len(where) * summed) <= by_owner:
            route = step_rows
    length = (2 + len(buffers)) * math.ceil(rows * columns / ranks)
    longest = max(LONGEST_MESSAGE // length, ranks)  # which keeps all owners busy
    if route is not step_owners:
        length += summed
        longest = longest_batch(
            max(rows, columns), min(rows, columns), plan.foreach, ranks, on_device=not p.is_cpu
        )
        longest = min(longest, max(LONGEST_MESSAGE // length, 1))
    return route, Batch(where, layout, plan.scale_of(p.shape), buffers, numbers, length, longest)


def portions(batches: Sequence[Batch]) -> Iterator[list[Batch]]:
    """The weights in portions that fit a message, the same on every rank; usually one."""
    portion, room = [], LONGEST_MESSAGE
    for batch in batches:
        for first in range(0, len(batch.where), batch.longest):
            where = batch.where[first : first + batch.longest]
            if portion and len(where) * batch.length > room:
                yield portion
                portion, room = [], LONGEST_MESSAGE
            portion.append(batch._replace(where=where))
            room -= len(where) * batch.length
    yield portion


# --- the five routes


def step_here(slots: list[Slot], where: list[int], plan: Plan, step_whole: StepWhole) -> None:
    """Step weights whose matrices are all whole on this rank."""
    for process_groups, members in by_groups([slots[i] for i in where]):
        local = local_slots(members)
        for _, _, state in local:
            state.update({name: torch.zeros_like(state[name]) for name in COUNTS})
        restore = restorer(local if process_groups else [])
        alike: dict[View, list[Slot]] = {}
        for whole, here in zip(members, local, strict=True):
            if here.weight.numel():
                alike.setdefault(local_view(whole.weight, plan.view), []).append(here)
        for view, some in alike.items():
            step_whole(some, plan.seen_as(view))
        # One number for the matrices of all ranks, and both counts in it, to be summed as one.
        counts = [state[SKIPPED] + (state[LIMITED] << 32) for _, _, state in local]
        try:
            sums = sum_over_groups(torch.stack(counts), process_groups, plan.terms)
        except ValueError:  # the only message is the first to show that ranks disagree
            restore()
            raise
        for (_, _, state), both in zip(members, sums, strict=True):
            state[SKIPPED].add_(both & (2**32 - 1))
            state[LIMITED].add_(both >> 32)


def restorer(local: Sequence[Slot]) -> Callable[[], None]:
    """What undoes a step of weights on the CPU, where ranks may find out that they disagree."""
    written = [T for p, _, state in local if p.is_cpu for T in (p, *state.values())]
    return partial(copy_all, written, [T.clone() for T in written])


def step_everywhere(slots: list[Slot], i: int, plan: Plan, step_whole: StepWhole) -> None:
    """Step a weight on every rank as a single process would; each keeps its part."""
    weight, gradient, old = slots[i]
    assert is_dtensor(weight)
    names = [*plan.state_kinds, *COUNTS, *(name for name in ROUNDING_STATE if name in old)]
    X, state = whole_of(weight).clone(), {name: whole_of(old[name]).clone() for name in names}
    step_whole([Slot(X, whole_of(gradient), state)], plan)
    local_part(weight).copy_(part_of(X, weight))
    for name, new in state.items():
        is_matrix = name == COMPENSATION or plan.state_kinds.get(name) == "matrix"
        local_part(old[name]).copy_(part_of(new, weight) if is_matrix else new)


def step_rows(slots: list[Slot], batches: list[Batch], plan: Plan, _: StepWhole) -> None:
    """Step tall matrices, each rank its own rows: an all-reduce for all of them."""
    shards = [Shards.of(batch, slots) for batch in batches]
    for own, moved in zip(shards, stepped(shards, plan), strict=True):
        own.keep(moved)


def step_columns(slots: list[Slot], batches: list[Batch], plan: Plan, _: StepWhole) -> None:
    """Step wide matrices: rows to columns, step as tall ones, columns to rows."""
    shards = [Shards.of(batch, slots) for batch in batches]
    layouts = [batch.layout for batch in batches]
    columns = rows_of_transposes([torch.stack(s.matrices) for s in shards], layouts, plan.terms)
    tall = [own._replace(matrices=[*M]) for own, M in zip(shards, columns, strict=True)]
    moved = stepped(tall, plan)
    layouts = [layout.transposed for layout in layouts]
    rows = rows_of_transposes([torch.stack(matrices) for matrices, *_ in moved], layouts)
    for own, result, M in zip(shards, moved, rows, strict=True):
        own.keep(([*M], *result[1:]))


def step_owners(slots: list[Slot], batches: list[Batch], plan: Plan, step_whole: StepWhole) -> None:
    """Step each matrix on one rank, as a single process would."""
    shards = [Shards.of(batch, slots) for batch in batches]
    layouts = [batch.layout for batch in batches for _ in batch.where]
    buffers, numbers = batches[0].buffers, batches[0].numbers
    states = [slot.state for own in shards for slot in own.slots]
    here = [rows for own in shards for rows in torch.stack(own.matrices, dim=1)]
    owners = Owners(layouts, share_out(layouts))
    mine = owners.owned(layouts[0].rank)
    owned: list[Slot] = []
    for k, whole in zip(mine, owners.gather(here, plan.terms), strict=True):
        X, G, *rest = whole.mT.contiguous() if layouts[k].turned else whole
        state = {name: states[k][name].clone() for name in numbers}
        owned.append(Slot(X, G, {**state, **dict(zip(buffers, rest, strict=True))}))
        for name in COUNTS:
            count_of(name, owned[-1].state, X.device)
    step_whole(owned, plan)
    wholes: list[Tensor] = []
    own_numbers = here[0].new_empty(len(mine), len(numbers) + 1)
    for k, row, (X, _, state) in zip(mine, own_numbers, owned, strict=True):
        M = torch.stack([X, *(state[name] for name in buffers)])
        wholes.append(M.mT if layouts[k].turned else M)
        for i, name in enumerate(numbers):
            row[i] = state[name]
        row[-1] = state[SKIPPED] + 2 * state[LIMITED]  # of one matrix each: 0 or 1
    back = iter(owners.spread(wholes, own_numbers, fields=1 + len(buffers)))
    for own in shards:
        rows, values = zip(*islice(back, len(own.slots)), strict=True)
        *new, counts = torch.stack(values, dim=1).real
        both = counts.round().to(torch.int64)
        own.keep(([*torch.stack(rows, dim=1)], new, both % 2, both // 2))


def share_out(layouts: Sequence[Layout]) -> list[int]:
    """An owner for each matrix, so that all ranks have about equal work."""
    work = [math.prod(layout.shape) * min(layout.shape) for layout in layouts]
    loads, owners = [0] * layouts[0].ranks, [0] * len(layouts)
    for k in sorted(range(len(layouts)), key=lambda k: -work[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += work[k]
    return owners


# --- rows of equal weights


# Weights and buffers after a step, numbers, which steps were skipped, which limited (None: none).
Moved = tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]


class Shards(NamedTuple):
    """This rank's rows of equal weights, gradients and buffers, in the working type."""

    batch: Batch
    slots: list[Slot]  # what this rank has of the weights
    matrices: list[Tensor]  # (k, rows, columns)
    numbers: list[Tensor]  # (k,)

    @classmethod
    def of(cls, batch: Batch, slots: list[Slot]) -> "Shards":
        """The rows of some of the weights."""
        layout, here = batch.layout, local_slots([slots[i] for i in batch.where])
        W = rows_of([slot.weight for slot in here], layout)
        G = rows_of([slot.gradient for slot in here], layout)
        if W.dtype in HALF_TYPES:
            rests = [slot.state[COMPENSATION] for slot in here if COMPENSATION in slot.state]
            W = exact_value(W, {COMPENSATION: rows_of(rests, layout)} if rests else {})
            G = G.to(W.dtype)
        states = [[slot.state[name] for slot in here] for name in batch.buffers]
        numbers = [torch.stack([slot.state[name] for slot in here]) for name in batch.numbers]
        return cls(batch, here, [W, G, *(rows_of(some, layout) for some in states)], numbers)

    def keep(self, moved: Moved) -> None:
        """Store new rows and state, and which steps were skipped or limited."""
        (batch, slots, *_), (matrices, numbers, skipped, limited) = self, moved
        to, values = [slot.weight for slot in slots], []
        shape, is_half = to[0].shape, to[0].dtype in HALF_TYPES
        for name in batch.buffers:
            to += [slot.state[name] for slot in slots]
        for M in matrices:
            values += from_rows(M, shape, batch.layout)
        if is_half:
            for slot, new in zip(slots, values, strict=False):
                keep_(slot.weight, new, slot.state)
            to, values = to[len(slots) :], values[len(slots) :]
        for name, new in zip(batch.numbers, numbers, strict=True):
            to += [slot.state[name] for slot in slots]
            values += new.unbind()
        copy_all(to, values)
        for name, which in ((SKIPPED, skipped), (LIMITED, limited)):
            if which is not None:
                counts = [slot.state[name] for slot in slots]
                torch._foreach_add_(counts, which.to(torch.int64).unbind())


def stepped(shards: Sequence[Shards], plan: Plan) -> list[Moved]:
    """The steps of tall matrices of which this rank has rows: an all-reduce for all of them."""
    states, begun, results = [], [], []
    for batch, _, (W, G, *buffers), numbers in shards:
        state = dict(zip((*batch.buffers, *batch.numbers), (*buffers, *numbers), strict=True))
        states.append(state)
        X, G = unscaled(W, batch.scale), -G if plan.maximize else G
        landing: Any = plan.at_scale(batch.scale).landing
        rows = Rows(W.shape[1], max(batch.layout.shape))
        begun.append(landing.gram_step(X, G, state, rows))
    steps = finished(begun, shards[0].batch.layout.group, plan.terms)
    for (batch, _, (W, *_), _), old, step in zip(shards, states, steps, strict=True):
        taken, new = step.taken, step.state
        whether = taken[:, None, None]
        moved = follow(W, unscaled(W, batch.scale), step.moved, batch.scale)
        matrices = [torch.where(whether, moved, W)]
        matrices += [torch.where(whether, new[name], old[name]) for name in batch.buffers]
        numbers = [torch.where(taken, new[name], old[name]) for name in batch.numbers]
        results.append((matrices, numbers, taken.logical_not(), step.limited))
    return results


def local_slots(slots: Iterable[Any]) -> list[Slot]:
    """What this rank has of weights, of their gradients and state; memory is shared."""
    from torch.distributed.tensor import DTensor  # which has been imported, as weights are DTensors

    found = []
    for p, G, state in slots:
        if G.placements != p.placements:
            G = G.redistribute(placements=p.placements)
        here = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}
        found.append(Slot(p.to_local(), G.to_local(), here))
    return found


def by_groups(slots: Iterable[Slot]) -> Iterable[tuple[Any, list[Slot]]]:
    """The weights of which the same ranks have different parts, for each of these groups."""
    found: dict[Any, list[Slot]] = {}
    for slot in slots:
        found.setdefault(sharing_groups(slot.weight), []).append(slot)
    return found.items()


# --- unconstrained weights


@torch.no_grad()
def step_plain(slots: list[Slot], plan: Plan, step: Callable[..., None]) -> None:
    """Step unconstrained weights, DTensors by local parts; what one rank must skip, all skip."""
    for process_groups, members in by_groups(slot for slot in slots if is_dtensor(slot.weight)):
        local = local_slots(members)
        for part in local:
            count_of(SKIPPED, part.state, part.weight.device)
        step(local, agree=partial(_agreed, process_groups, plan) if process_groups else None)
        for (weight, _, state), part in zip(members, local, strict=True):
            for name, value in part.state.items():  # in one order on all ranks, as collectives
                if name not in state:
                    is_number = name in ("step", SKIPPED)
                    state[name] = value if is_number else placed_like(value, weight)
    step([slot for slot in slots if not is_dtensor(slot.weight)])


def _agreed(process_groups: Sequence[Any], plan: Plan, taken: Tensor) -> Tensor:
    """Which parameters all ranks may step, from those that this rank may."""
    refused = taken.logical_not().to(torch.int32)
    return sum_over_groups(refused, process_groups, plan.terms) == 0
