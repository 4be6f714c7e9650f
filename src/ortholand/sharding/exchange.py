"""Messages between ranks: sums (all-reduce), and rows that change places (all-to-all).

They use ``torch.distributed``, on lists of tensors packed into one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ortholand.sharding.agreement import TermsOf, check_marks, check_sums, shares
from ortholand.sharding.placement import Layout, chunk_sizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


def sums_over_ranks(
    parts: Sequence[Tensor], group: ProcessGroup, terms: TermsOf | None = None
) -> list[Tensor]:
    """The sum over all ranks of each tensor, all of one type: one all-reduce.

    ``terms``: raise, on every rank, if those of the ranks differ. (Only on the CPU: elsewhere, to
    read anything would be a wait.)
    """
    own = terms(group) if terms is not None and parts[0].is_cpu else None
    sent = list(parts) if own is None else [*parts, shares(own, group, parts[0])]
    packed = torch.cat([part.reshape(-1) for part in sent])
    dist.all_reduce(packed, group=group)
    pieces = packed.split([part.numel() for part in sent])
    if own is not None:
        check_sums(pieces[-1], own, group)
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=False)]


def sum_over_groups(
    tensor: Tensor, groups: Sequence[ProcessGroup], terms: TermsOf | None = None
) -> Tensor:
    """The sum of a tensor over the ranks of a mesh: one all-reduce for each of its dimensions."""
    for group in groups:
        (tensor,) = sums_over_ranks([tensor], group, terms)
    return tensor


def same_on_all_ranks(number: Tensor, weight: DTensor) -> Tensor:
    """An integer that all ranks of the weight's mesh agree on, from one drawn by each."""
    mesh = weight.device_mesh
    return sum_over_groups(number, [mesh.get_group(i) for i in range(mesh.ndim)])


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Shape]],
    like: Tensor,
    group: ProcessGroup,
    terms: TermsOf | None = None,
) -> list[list[Tensor]]:
    """Send tensors to each rank and get those of the given shapes from each: one all-to-all.

    ``terms``: as for :func:`sums_over_ranks`.
    """
    if terms is not None and like.is_cpu:
        own = terms(group)
        mark = like.new_tensor([own.mark])
        marked = [[*tensors, mark] for tensors in outgoing]
        received = exchange(marked, [[*shapes, (1,)] for shapes in incoming], like, group)
        check_marks([tensors.pop() for tensors in received], own, group)
        return received
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
    """Matrices that are gathered on one rank each, and scattered again.

    Matrix k has the layout ``layouts[k]`` (they differ in sizes only) and goes to ``owners[k]``.
    """

    layouts: Sequence[Layout]
    owners: Sequence[int]

    def owned(self, rank: int) -> list[int]:
        """The matrices of a rank."""
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def gather(
        self, parts: Sequence[Sequence[Tensor]], terms: TermsOf | None = None
    ) -> list[list[Tensor]]:
        """The matrices this rank owns, from every rank's rows. One all-to-all.

        ``parts[k]`` are tensors of one shape that belong to the matrix: weight, gradient, state.
        """
        layout = self.layouts[0]
        outgoing = [[t for k in self.owned(r) for t in parts[k]] for r in range(layout.ranks)]
        mine = [(k, part) for k in self.owned(layout.rank) for part in parts[k]]
        incoming = [
            [(self.layouts[k].sizes[r], *part.shape[1:]) for k, part in mine]
            for r in range(layout.ranks)
        ]
        received = exchange(outgoing, incoming, parts[0][0], layout.group, terms)
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
            wholes: the matrices this rank owns.
            numbers: ``(owned, length)``: a row for each of them, which goes to all ranks.
            parts: tensors of the shapes that this rank receives.

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


def rows_to_columns(
    parts: Sequence[Tensor], layouts: Sequence[Layout], terms: TermsOf | None = None
) -> list[Tensor]:
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
    received = exchange(outgoing, incoming, parts[0], layout.group, terms)
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
