"""Messages between ranks: sums (all-reduce), and rows that change places (all-to-all).

Where ``terms`` are given, every rank raises if they differ; only on the CPU, which need not wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ortholand.landing.step import GramSums, MatrixStep, PendingStep
from ortholand.sharding.agreement import TermsOf, check, shares
from ortholand.sharding.placement import Layout


def sums_over_ranks(
    parts: Sequence[Tensor], group: dist.ProcessGroup, terms: TermsOf | None = None
) -> list[Tensor]:
    """The sum over all ranks of each tensor, all of one type: one all-reduce."""
    own = terms(group) if terms is not None and parts[0].is_cpu else None
    sent = parts if own is None else [*parts, shares(own, group, parts[0])]
    packed = torch.cat([*map(torch.flatten, sent)])
    dist.all_reduce(packed, group=group)
    pieces = packed.split([*map(Tensor.numel, sent)])
    if own is not None:
        check(pieces[-1], own, group)
    return [*map(Tensor.view_as, pieces, parts)]


def sum_over_groups(
    tensor: Tensor, groups: Sequence[dist.ProcessGroup], terms: TermsOf | None = None
) -> Tensor:
    """The sum of a tensor over the ranks of a mesh: one all-reduce for each of its dimensions."""
    for group in groups:
        (tensor,) = sums_over_ranks([tensor], group, terms)
    return tensor


def finished(
    steps: Sequence[MatrixStep | PendingStep], group: dist.ProcessGroup, terms: TermsOf
) -> list[MatrixStep]:
    """The steps with their sums over the ranks: one message for all, as often as any waits."""
    done: list[Any] = [*steps]
    while waiting := [k for k, step in enumerate(done) if isinstance(step, PendingStep)]:
        messages = [message_of(done[k].sums) for k in waiting]
        sums = iter(sums_over_ranks([*chain.from_iterable(messages)], group, terms))
        for k, message in zip(waiting, messages, strict=True):
            done[k] = done[k].finish(sums_of([*islice(sums, len(message))]))
    return done


def message_of(sums: GramSums) -> list[Tensor]:
    """What is sent of Gram matrices: half of each Hermitian one, and the second's diagonal."""
    D, T = sums.hermitian
    diagonal = T.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return [torch.cat([D.triu() + T.tril(-1), diagonal], dim=-2), *sums.others]


def sums_of(message: Sequence[Tensor]) -> GramSums:
    """Undo :func:`message_of`."""
    packed, *others = message
    M = packed[..., :-1, :]
    D, T = M.triu() + M.triu(1).mH, M.tril(-1)
    T = T + T.mH
    T.diagonal(dim1=-2, dim2=-1).copy_(packed[..., -1, :])
    return GramSums((D, T), tuple(others))


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[tuple[int, ...]]],
    like: Tensor,
    group: dist.ProcessGroup,
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
    packed = torch.cat([like.new_empty(0), *map(torch.flatten, chain.from_iterable(outgoing))])
    sent = [sum(map(Tensor.numel, tensors)) for tensors in outgoing]
    shapes = [*chain.from_iterable(incoming)]
    numbers = [*map(math.prod, shapes)]
    flat = like.new_empty(sum(numbers))
    sizes = [sum(map(math.prod, of_rank)) for of_rank in incoming]
    dist.all_to_all_single(flat, packed, sizes, sent, group=group)
    pieces = map(Tensor.view, flat.split(numbers), shapes)
    return [[*islice(pieces, len(of_rank))] for of_rank in incoming]


def rows_of_transposes(
    parts: Sequence[Tensor], layouts: Sequence[Layout], terms: TermsOf | None = None
) -> list[Tensor]:
    """From this rank's rows of matrices, its rows of their transposes: one all-to-all."""
    layout = layouts[0]
    both = [(part, k.sizes, k.transposed.sizes) for part, k in zip(parts, layouts, strict=True)]
    outgoing = zip(*[part.split(widths, dim=-1) for part, _, widths in both], strict=True)
    incoming = [
        [(*part.shape[:-2], heights[r], widths[layout.rank]) for part, heights, widths in both]
        for r in range(layout.ranks)
    ]
    received = exchange([*outgoing], incoming, parts[0], layout.group, terms)
    return [torch.cat(blocks, dim=-2).mT for blocks in zip(*received, strict=True)]


class Owners(NamedTuple):
    """Matrices ``k`` that are gathered on rank ``owners[k]`` each, and scattered again."""

    layouts: Sequence[Layout]
    owners: Sequence[int]

    def owned(self, rank: int) -> list[int]:
        """The matrices of a rank."""
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def shapes(self, owner: int, rank: int, fields: int) -> list[tuple[int, ...]]:
        """What a rank has of the matrices of an owner."""
        theirs = [self.layouts[k] for k in self.owned(owner)]
        return [(fields, layout.sizes[rank], layout.shape[1]) for layout in theirs]

    def gather(self, parts: Sequence[Tensor], terms: TermsOf | None = None) -> list[Tensor]:
        """The matrices that this rank owns, from every rank's rows ``parts[k]``."""
        group, me, ranks, *_ = self.layouts[0]
        outgoing = [[parts[k] for k in self.owned(r)] for r in range(ranks)]
        incoming = [self.shapes(me, r, len(parts[0])) for r in range(ranks)]
        received = exchange(outgoing, incoming, parts[0], group, terms)
        return [torch.cat(blocks, dim=1) for blocks in zip(*received, strict=True)]

    def spread(
        self, wholes: Sequence[Tensor], numbers: Tensor, fields: int
    ) -> list[tuple[Tensor, Tensor]]:
        """This rank's rows of each matrix, and its numbers, from the wholes that each rank owns."""
        group, me, ranks, *_ = self.layouts[0]
        mine = zip(wholes, self.owned(me), strict=True)
        split = [whole.split(self.layouts[k].sizes, dim=1) for whole, k in mine]
        outgoing = [[*(rows[r] for rows in split), *numbers] for r in range(ranks)]
        shapes = [self.shapes(r, me, fields) for r in range(ranks)]
        incoming = [some + [numbers.shape[1:]] * len(some) for some in shapes]
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for r, received in enumerate(exchange(outgoing, incoming, numbers, group)):
            half = len(received) // 2
            pairs = zip(received[:half], received[half:], strict=True)
            found.update(zip(self.owned(r), pairs, strict=True))
        return [found[k] for k in range(len(found))]
