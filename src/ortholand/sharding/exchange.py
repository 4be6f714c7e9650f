"""Messages between ranks: sums (all-reduce), and rows that change places (all-to-all).

They use ``torch.distributed``, on lists of tensors packed into one message. Where ``terms`` are
given, every rank raises if those of the ranks differ. (Only on the CPU: elsewhere, to read
anything would be a wait.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ortholand.sharding.agreement import TermsOf, check, shares
from ortholand.sharding.placement import Layout, chunk_sizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


def sums_over_ranks(
    parts: Sequence[Tensor], group: ProcessGroup, terms: TermsOf | None = None
) -> list[Tensor]:
    """The sum over all ranks of each tensor, all of one type: one all-reduce."""
    own = terms(group) if terms is not None and parts[0].is_cpu else None
    sent = [*parts] if own is None else [*parts, shares(own, group, parts[0])]
    packed = torch.cat([part.reshape(-1) for part in sent])
    dist.all_reduce(packed, group=group)
    pieces = packed.split([part.numel() for part in sent])
    if own is not None:
        check(pieces[-1], own, group)
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
    return sum_over_groups(number, weight.device_mesh.get_all_groups())


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[tuple[int, ...]]],
    like: Tensor,
    group: ProcessGroup,
    terms: TermsOf | None = None,
) -> list[list[Tensor]]:
    """Send tensors to each rank and get those of the given shapes from each: one all-to-all."""
    if terms is not None and like.is_cpu:
        own = terms(group)
        mark = like.new_tensor([own.mark])
        marked = [[*tensors, mark] for tensors in outgoing]
        received = exchange(marked, [[*shapes, (1,)] for shapes in incoming], like, group)
        check(torch.cat([tensors.pop() for tensors in received]) - own.mark, own, group)
        return received
    sent = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
    sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    sizes = [[math.prod(shape) for shape in shapes] for shapes in incoming]
    received_sizes = [sum(numbers) for numbers in sizes]
    flat = like.new_empty(sum(received_sizes))
    packed = torch.cat(sent) if sent else like.new_empty(0)
    dist.all_to_all_single(flat, packed, received_sizes, sent_sizes, group=group)
    return [
        [piece.view(shape) for piece, shape in zip(block.split(numbers), shapes, strict=True)]
        for block, numbers, shapes in zip(flat.split(received_sizes), sizes, incoming, strict=True)
    ]


class Owners(NamedTuple):
    """Matrices that are gathered on one rank each, and scattered again: an all-to-all each way.

    Matrix k has the layout ``layouts[k]`` (they differ in sizes only) and goes to ``owners[k]``.
    What belongs to it (weight, gradient, state) is a list of tensors of one shape.
    """

    layouts: Sequence[Layout]
    owners: Sequence[int]

    def owned(self, rank: int) -> list[int]:
        """The matrices of a rank."""
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def gather(
        self, parts: Sequence[Sequence[Tensor]], terms: TermsOf | None = None
    ) -> list[list[Tensor]]:
        """The matrices this rank owns, from every rank's rows ``parts[k]``."""
        layout, ranks = self.layouts[0], range(self.layouts[0].ranks)
        outgoing = [[t for k in self.owned(r) for t in parts[k]] for r in ranks]
        mine = [(k, part) for k in self.owned(layout.rank) for part in parts[k]]
        incoming = [
            [(self.layouts[k].sizes[r], *part.shape[1:]) for k, part in mine] for r in ranks
        ]
        received = exchange(outgoing, incoming, parts[0][0], layout.group, terms)
        wholes = iter([torch.cat(blocks) for blocks in zip(*received, strict=True)])
        return [[next(wholes) for _ in parts[k]] for k in self.owned(layout.rank)]

    def spread(
        self,
        wholes: Sequence[Sequence[Tensor]],
        numbers: Tensor,
        parts: Sequence[Sequence[Tensor]],
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """This rank's rows of each matrix, from those that each rank owns, and their numbers.

        ``numbers`` has a row for each matrix this rank owns; all ranks receive it. ``parts[k]`` are
        tensors of the shapes that this rank receives.
        """
        layout, ranks = self.layouts[0], range(self.layouts[0].ranks)
        mine = zip(self.owned(layout.rank), wholes, strict=True)
        split = [t.split(self.layouts[k].sizes) for k, whole in mine for t in whole]
        outgoing = [[*(rows[r] for rows in split), numbers] for r in ranks]
        incoming = [
            [
                *(tuple(part.shape) for k in self.owned(r) for part in parts[k]),
                (len(self.owned(r)), numbers.shape[1]),
            ]
            for r in ranks
        ]
        rows: dict[int, list[Tensor]] = {}
        all_numbers: dict[int, Tensor] = {}
        received = exchange(outgoing, incoming, numbers, layout.group)
        for r, (*blocks, own_numbers) in enumerate(received):
            remaining = iter(blocks)
            for k, row in zip(self.owned(r), own_numbers, strict=True):
                rows[k], all_numbers[k] = [next(remaining) for _ in parts[k]], row
        order = range(len(parts))
        return [rows[k] for k in order], [all_numbers[k] for k in order]


def rows_to_columns(
    parts: Sequence[Tensor], layouts: Sequence[Layout], terms: TermsOf | None = None
) -> list[Tensor]:
    """From this rank's rows of each matrix, its columns ``(n, columns)``. One all-to-all.

    The layouts differ in sizes only.
    """
    layout = layouts[0]
    widths = [chunk_sizes(k.shape[1], k.ranks) for k in layouts]
    split = [part.split(width, dim=1) for part, width in zip(parts, widths, strict=True)]
    incoming = [
        [(k.sizes[r], width[layout.rank]) for k, width in zip(layouts, widths, strict=True)]
        for r in range(layout.ranks)
    ]
    outgoing = list(zip(*split, strict=True))
    received = exchange(outgoing, incoming, parts[0], layout.group, terms)
    return [torch.cat(blocks) for blocks in zip(*received, strict=True)]


def columns_to_rows(parts: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """Undo :func:`rows_to_columns`. One all-to-all."""
    layout = layouts[0]
    widths = [chunk_sizes(k.shape[1], k.ranks) for k in layouts]
    split = [part.split(k.sizes) for part, k in zip(parts, layouts, strict=True)]
    incoming = [
        [(k.sizes[layout.rank], width[r]) for k, width in zip(layouts, widths, strict=True)]
        for r in range(layout.ranks)
    ]
    received = exchange(list(zip(*split, strict=True)), incoming, parts[0], layout.group)
    return [torch.cat(blocks, dim=1) for blocks in zip(*received, strict=True)]
