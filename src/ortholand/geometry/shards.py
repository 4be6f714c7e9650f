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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ortholand.geometry.manifold import distance
from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.views import View, as_matrices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


def is_dtensor(tensor: object) -> bool:
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


def chunk_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Rows per rank as :func:`torch.chunk` and DTensors have it; the last may have none."""
    chunk = math.ceil(total / ranks)
    return tuple(max(0, min(chunk, total - r * chunk)) for r in range(ranks))


def local_part(tensor: DTensor) -> Tensor:
    """What this rank holds, as a plain tensor that shares memory with it."""
    return tensor.to_local().detach()


def placed_like(local: Tensor, weight: DTensor) -> DTensor:
    """The DTensor, sharded as the weight is, of which this rank holds ``local``."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((weight.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )


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


def rows_to_columns(parts: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """From this rank's rows of each matrix, its columns ``(n, columns)``. One all-to-all."""
    widths = [chunk_sizes(part.shape[1], layout.ranks) for part in parts]
    split = [part.split(width, dim=1) for part, width in zip(parts, widths, strict=True)]
    outgoing = [[columns[r] for columns in split] for r in range(layout.ranks)]
    incoming = [[(size, width[layout.rank]) for width in widths] for size in layout.sizes]
    received = exchange(outgoing, incoming, parts[0], layout.group)
    return [torch.cat(blocks) for blocks in zip(*received, strict=True)]


def columns_to_rows(parts: Sequence[Tensor], columns: int, layout: Layout) -> list[Tensor]:
    """Undo :func:`rows_to_columns` for matrices with that many columns. One all-to-all."""
    split = [part.split(layout.sizes) for part in parts]
    outgoing = [[rows[r] for rows in split] for r in range(layout.ranks)]
    mine = layout.sizes[layout.rank]
    widths = chunk_sizes(columns, layout.ranks)
    incoming = [[(mine, width)] * len(parts) for width in widths]
    received = exchange(outgoing, incoming, parts[0], layout.group)
    return [torch.cat(blocks, dim=1) for blocks in zip(*received, strict=True)]


def is_local(weight: DTensor, view: View, layout: Layout | None) -> bool:
    """Whether every matrix of the weight is on one rank."""
    return layout is None or (view == "kernel" and weight.ndim > 2)


def distances(weight: Tensor, view: View) -> Tensor:
    """``||X^H X - I||_F`` of each matrix of a weight, sharded or not; on every rank that of all.

    Nobody gets the matrix: one all-reduce of its Gram matrix, for wide ones after an all-to-all
    from rows to columns; in the view "kernel" of convolutions one number per matrix is gathered.
    """
    if not is_dtensor(weight):
        return distance(as_matrices(weight, view))
    layout, local = layout_of(weight), local_part(weight)
    if is_local(weight, view, layout):
        d = distance(as_matrices(local, view))
        return d if layout is None else placed_like(d, weight).full_tensor()
    X = to_working_dtype(local.flatten(1))
    share = layout.sizes[layout.rank] / weight.shape[0]
    if weight.shape[0] < X.shape[1]:
        columns = X.shape[1]
        X = rows_to_columns([X], layout)[0].mT
        share = X.shape[0] / columns
    (D,) = sums_over_ranks([shared_residual(X, share)], layout.group)
    return torch.linalg.vector_norm(D, dim=(-2, -1))


def shared_residual(X: Tensor, share: float) -> Tensor:
    """This rank's part of ``X^H X - I``, from its rows of X and its share of the identity.

    The shares of all ranks add up to 1. Taken off here rather than from the sum, so that what is
    summed is small and rounding with it.
    """
    D = X.mH @ X
    D.diagonal(dim1=-2, dim2=-1).sub_(share)
    return D
