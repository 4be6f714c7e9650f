"""Weights whose rows are spread over ranks: who holds what, and how it is brought together.

Such a weight is a DTensor, as FSDP2's ``fully_shard`` makes it. What is communicated goes through
``torch.distributed``: sums (all-reduce), and rows that change places (all-to-all). Both work on
lists of tensors, packed into one message.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ortholand.geometry.manifold import distance, polar_projection
from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.views import View, as_matrices, as_weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether the tensor is spread over a device mesh.

    Never imports DTensors: where nobody has, there are none.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class Layout:
    """Which rows of a weight (its first dimension) are where."""

    group: ProcessGroup
    rank: int  # in the group
    sizes: tuple[int, ...]  # rows of each rank; the last ranks may have fewer, or none

    @property
    def ranks(self) -> int:
        """How many ranks share the weight."""
        return len(self.sizes)


def layout_of(weight: DTensor, name: str = "one") -> Layout | None:
    """Which rows of the weight are on which rank; None where this rank has all of them."""
    from torch.distributed.tensor import Replicate, Shard

    sharded = [i for i, placement in enumerate(weight.placements) if placement != Replicate()]
    if any(weight.placements[i] != Shard(0) for i in sharded) or len(sharded) > 1:
        raise ValueError(
            "An orthogonal DTensor must be sharded on its first dimension over one dimension of "
            f"the mesh, and replicated over the others, but {name} of shape {tuple(weight.shape)} "
            f"has placements {tuple(weight.placements)}. Leave shard_placement_fn of fully_shard "
            "at its default, or bring it there with .redistribute(placements=[Shard(0)])."
        )
    if not sharded or weight.device_mesh.size(sharded[0]) == 1:
        return None
    mesh, dim = weight.device_mesh, sharded[0]
    sizes = chunk_sizes(weight.shape[0], mesh.size(dim))
    return Layout(mesh.get_group(dim), mesh.get_local_rank(dim), sizes)


def check_layout(weight: Tensor, name: str) -> None:
    """Raise if a sharded weight is placed in a way that is not supported."""
    if is_dtensor(weight):
        layout_of(weight, name)


def chunk_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Rows per rank as :func:`torch.chunk` and DTensors have it; the last may have none."""
    chunk = math.ceil(total / ranks)
    return tuple(max(0, min(chunk, total - r * chunk)) for r in range(ranks))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds, as a plain tensor that shares memory with it."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def placed_like(local: Tensor, weight: DTensor, shape: torch.Size) -> DTensor:
    """The DTensor of that shape, placed as the weight is, of which this rank holds ``local``."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )


def restored(value: Tensor, weight: Tensor, device: torch.device) -> Tensor:
    """A copy of a saved state that belongs to the weight, placed as the weight is.

    Each rank takes its own part of a state that was saved whole; numbers are on all ranks.
    """
    if is_dtensor(value) and not is_dtensor(weight):
        raise ValueError(
            f"A state of shape {tuple(value.shape)} is a DTensor, but its parameter is not. "
            "Save the whole state: get_optimizer_state_dict(model, optimizer, "
            "options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict."
        )
    copied = value.detach().to(device, copy=True)
    return _placed(copied, weight) if is_dtensor(weight) else copied


def _placed(state: Tensor, weight: DTensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    if is_dtensor(state):
        return state.redistribute(placements=weight.placements)
    if state.ndim == 0:
        return state
    return distribute_tensor(state, weight.device_mesh, weight.placements, src_data_rank=None)


def sums_over_ranks(parts: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """The sum over all ranks of each tensor: one all-reduce for all of them, of one type."""
    packed = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(packed, group=group)
    pieces = packed.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Shape]],
    like: Tensor,
    group: ProcessGroup,
) -> list[list[Tensor]]:
    """Send tensors to each rank and get those of the given shapes from each: one all-to-all."""
    sent = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
    sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sizes = [[math.prod(shape) for shape in shapes] for shapes in incoming]
    received_sizes = [sum(numbers) for numbers in sizes]
    received = like.new_empty(sum(received_sizes))
    packed = torch.cat(sent) if sent else like.new_empty(0)
    dist.all_to_all_single(received, packed, received_sizes, sent_sizes, group=group)
    by_rank = received.split(received_sizes)
    return [
        [piece.view(shape) for piece, shape in zip(flat.split(numbers), shapes, strict=True)]
        for flat, numbers, shapes in zip(by_rank, sizes, incoming, strict=True)
    ]


@dataclass(frozen=True)
class Owners:
    """Matrices that are brought together on one rank each, and spread again.

    Matrix k has the layout ``layouts[k]`` (they differ in sizes only) and goes to ``owners[k]``.
    """

    layouts: Sequence[Layout]
    owners: Sequence[int]

    def owned(self, rank: int) -> list[int]:
        """The matrices of a rank."""
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def gather(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """From this rank's rows of each matrix, what this rank owns. One all-to-all.

        ``parts[k]`` are tensors of one shape that belong to the matrix: weight, gradient, state.
        """
        layout = self.layouts[0]
        outgoing = [[t for k in self.owned(r) for t in parts[k]] for r in range(layout.ranks)]
        mine = [(k, part) for k in self.owned(layout.rank) for part in parts[k]]
        incoming = [
            [(self.layouts[k].sizes[r], *part.shape[1:]) for k, part in mine]
            for r in range(layout.ranks)
        ]
        received = exchange(outgoing, incoming, parts[0][0], layout.group)
        wholes = iter([torch.cat(blocks) for blocks in zip(*received, strict=True)])
        return [[next(wholes) for _ in parts[k]] for k in self.owned(layout.rank)]

    def spread(
        self,
        wholes: Sequence[Sequence[Tensor]],
        numbers: Tensor,
        parts: Sequence[Sequence[Tensor]],
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Undo :meth:`gather`. One all-to-all.

        Args:
            wholes: what this rank owns.
            numbers: ``(owned, length)``: a row for each of them, which goes to all ranks.
            parts: tensors of the shapes of what this rank gets.

        Returns:
            This rank's rows of each matrix, and the numbers ``(matrices, length)`` of all.
        """
        layout, ranks = self.layouts[0], range(self.layouts[0].ranks)
        mine = [(k, t) for k, ts in zip(self.owned(layout.rank), wholes, strict=True) for t in ts]
        split = [t.split(self.layouts[k].sizes) for k, t in mine]
        outgoing = [[*(rows[r] for rows in split), numbers] for r in ranks]
        incoming: list[list[Shape]] = [[] for _ in ranks]
        for r in ranks:
            incoming[r] += [tuple(part.shape) for k in self.owned(r) for part in parts[k]]
            incoming[r].append((len(self.owned(r)), numbers.shape[1]))
        received = exchange(outgoing, incoming, numbers, layout.group)
        rows, all_numbers = {}, {}
        for r in ranks:
            blocks = iter(received[r][:-1])
            for k, row in zip(self.owned(r), received[r][-1], strict=True):
                rows[k], all_numbers[k] = [next(blocks) for _ in parts[k]], row
        order = range(len(parts))
        return [rows[k] for k in order], torch.stack([all_numbers[k] for k in order])


def rows_to_columns(parts: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """From this rank's rows of each matrix, its columns ``(n, columns)``. One all-to-all.

    The layouts differ in sizes only.
    """
    layout, ranks = layouts[0], range(layouts[0].ranks)
    widths = [chunk_sizes(part.shape[1], layout.ranks) for part in parts]
    split = [part.split(width, dim=1) for part, width in zip(parts, widths, strict=True)]
    outgoing = [[columns[r] for columns in split] for r in ranks]
    mine = [width[layout.rank] for width in widths]
    incoming = [
        [(k.sizes[r], width) for k, width in zip(layouts, mine, strict=True)] for r in ranks
    ]
    received = exchange(outgoing, incoming, parts[0], layout.group)
    return [torch.cat(blocks) for blocks in zip(*received, strict=True)]


def columns_to_rows(
    parts: Sequence[Tensor], columns: Sequence[int], layouts: Sequence[Layout]
) -> list[Tensor]:
    """Undo :func:`rows_to_columns` for matrices with that many columns. One all-to-all."""
    layout, ranks = layouts[0], range(layouts[0].ranks)
    split = [part.split(k.sizes) for part, k in zip(parts, layouts, strict=True)]
    outgoing = [[rows[r] for rows in split] for r in ranks]
    widths = [chunk_sizes(total, layout.ranks) for total in columns]
    mine = [k.sizes[layout.rank] for k in layouts]
    incoming = [[(rows, w[r]) for rows, w in zip(mine, widths, strict=True)] for r in ranks]
    received = exchange(outgoing, incoming, parts[0], layout.group)
    return [torch.cat(blocks, dim=1) for blocks in zip(*received, strict=True)]


def is_local(weight: Tensor, view: View) -> bool:
    """Whether every matrix of a weight that is sharded by rows is whole on its rank."""
    return view == "kernel" and weight.ndim > 2


def distances(weight: Tensor, view: View) -> Tensor:
    """``||X^H X - I||_F`` of each matrix of a weight, sharded or not; on every rank that of all.

    Nobody gets the matrix: one all-reduce of its Gram matrix, for wide ones after an all-to-all
    from rows to columns; in the view "kernel" of convolutions one number per matrix is gathered.
    """
    if is_dtensor(weight):
        layout = layout_of(weight)
        if layout is not None:
            return _distances_apart(weight, view, layout)
    return distance(as_matrices(local_part(weight), view))


def _distances_apart(weight: DTensor, view: View, layout: Layout) -> Tensor:
    local = local_part(weight)
    if is_local(weight, view):
        d = distance(as_matrices(local, view))
        return placed_like(d, weight, weight.shape[:-2]).full_tensor()
    X = to_working_dtype(local.flatten(1))
    share = layout.sizes[layout.rank] / weight.shape[0]
    if weight.shape[0] < X.shape[1]:
        columns = X.shape[1]
        X = rows_to_columns([X], [layout])[0].mT
        share = X.shape[0] / columns
    (D,) = sums_over_ranks([shared_residual(X, share)], layout.group)
    return torch.linalg.vector_norm(D, dim=(-2, -1))


def project_(weights: Sequence[DTensor], view: View) -> None:
    """Replace the matrices of sharded weights, in place, by the nearest orthonormal ones.

    Each matrix is brought together on one rank, a different one for each, and spread again; a
    rank holds no more than one of them at a time.
    """
    spread: dict[tuple[Any, ...], list[tuple[DTensor, Layout]]] = {}
    for weight in weights:
        layout, here = layout_of(weight), local_part(weight)
        if layout is not None and not is_local(weight, view):
            key = (layout.group, weight.dtype, weight.device)
            spread.setdefault(key, []).append((weight, layout))
        elif here.numel():
            nearest = polar_projection(to_working_dtype(as_matrices(here, view)))
            here.copy_(as_weight(nearest, here, view))
    for members in spread.values():
        ranks = members[0][1].ranks
        for i in range(0, len(members), ranks):
            _project_whole(members[i : i + ranks])


def _project_whole(members: Sequence[tuple[DTensor, Layout]]) -> None:
    """Project matrices, at most one per rank, each on a rank of its own."""
    owners = Owners([layout for _, layout in members], range(len(members)))
    parts = [[to_working_dtype(local_part(weight)).flatten(1)] for weight, _ in members]
    wholes = [[polar_projection(X)] for (X,) in owners.gather(parts)]
    rows, _ = owners.spread(wholes, parts[0][0].new_empty(len(wholes), 0), parts)
    for (weight, _), (X,) in zip(members, rows, strict=True):
        here = local_part(weight)
        here.copy_(X.reshape(here.shape))


def all_finite(weight: Tensor) -> bool:
    """Whether a weight, sharded or not, has no NaN or infinite entries anywhere."""
    here = torch.isfinite(local_part(weight)).all()
    layout = layout_of(weight) if is_dtensor(weight) else None
    if layout is not None:
        (bad,) = sums_over_ranks([here.logical_not().int()], layout.group)
        here = bad == 0
    return bool(here)


def shared_residual(X: Tensor, share: float) -> Tensor:
    """This rank's part of ``X^H X - I``, from its rows of X and its share of the identity.

    The shares of all ranks add up to 1. Taken off here rather than from the sum, so that what is
    summed is small and rounding with it.
    """
    D = X.mH @ X
    D.diagonal(dim1=-2, dim2=-1).sub_(share)
    return D
