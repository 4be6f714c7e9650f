"""Which weights step as one batch, and how their matrices lie in them."""

import sys
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.views import Grid, View
from ortholand.landing.step import Slot
from ortholand.optim.plan import Plan
from ortholand.optim.weights import copy_all

# Up to this many entries a matrix is mostly overhead, and a batch of such matrices steps faster as
# one: 2 to 5 times up to 64 x 64, even at 100 x 100, slower at 256 x 256 (make bench).
BATCH_UP_TO = 100 * 100
# More for matrices with few columns, which are all overhead and passes over memory, and for rows on
# several ranks, which take more calls. A batch is a copy, so such batches are limited to what still
# fits a cache: four of 1024 x 256 rows take 1.06 times as long as one after the other, four of
# 512 x 64 rows 0.7 times.
FEW_COLUMNS, BATCH_OF_FEW_UP_TO, LONGEST_BATCH = 32, 2**16, 2**19
# On a device all matrices of a kind are one batch, as long as its temporaries stay moderate.
LONGEST_ON_DEVICE = 2**25
MOST_PADDING = 1.5  # rows of a batch, rows of zeros among them, over those that weights have


def longest_batch(
    n: int, p: int, foreach: bool | None, parts: int = 1, *, on_device: bool = False
) -> int:
    """The largest number of n x p matrices, n >= p, with rows in some parts, that step as one."""
    entries = n * p // parts
    if foreach or (foreach is None and entries <= BATCH_UP_TO):
        return sys.maxsize
    if foreach is None and on_device:
        return max(1, LONGEST_ON_DEVICE // entries)
    is_overhead = parts > 1 or (n > p and p <= FEW_COLUMNS and entries <= BATCH_OF_FEW_UP_TO)
    return max(1, LONGEST_BATCH // max(entries, p * p)) if foreach is None and is_overhead else 1


class Run(NamedTuple):
    """Weights of one shape, and how matrices lie in them."""

    slots: list[Slot]
    shape: torch.Size  # of a weight
    grid: Grid  # of its matrices
    lying: (
        torch.Size
    )  # of these together, as they lie in it: (rows, columns) or (-1, rows, columns)

    @classmethod
    def of(cls, slots: list[Slot], view: View) -> "Run":
        """Weights, one or several, in that view."""
        shape = slots[0].weight.shape
        grid = Grid.of(shape, view)
        is_one = view in ("matrix", "vector") or (view == "kernel" and len(shape) == 2)
        return cls(slots, shape, grid, torch.Size(grid[2:] if is_one else (-1, *grid[2:])))

    @property
    def n(self) -> int:
        """The longer side of a matrix."""
        return max(self.lying[-2:])

    @property
    def each(self) -> int:
        """How many matrices a weight has."""
        return self.grid.r * self.grid.c

    @property
    def total(self) -> int:
        """How many matrices all weights have."""
        return len(self.slots) * self.each


class Batch(NamedTuple):
    """Weights that step at once: their matrices are ``(..., n, p)``, n >= p.

    Matrices with fewer rows than the first run's get rows of zeros, which stay zero.
    """

    slots: list[Slot]  # in the order of their matrices
    runs: list[Run]

    def together(self, lists: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of the weights' shapes as matrices, for each list; several are copied."""
        run, like = self.runs[0], lists[0][0]
        if len(lists[0]) == 1:
            found = [run.grid.blocks(M) if run.grid.c > 1 else M for (M,) in lists]
            is_so = (found[0].ndim, found[0].shape[-2:]) == (len(run.lying), run.lying[-2:])
            found = found if is_so else [M.reshape(run.lying) for M in found]
            return [run.grid.upright(M.to(dtype)) for M in found]
        is_padded = any(other.n != run.n for other in self.runs)
        make, count = torch.zeros if is_padded else torch.empty, sum(r.total for r in self.runs)
        copies = make(len(lists), count, *run.lying[-2:], dtype=dtype, device=like.device)
        found = [run.grid.upright(M) for M in copies.unbind()]
        values = [*chain.from_iterable(lists)]
        if not is_padded and all(r.grid.c == 1 for r in self.runs):
            parts = [part for M in found for part in self.apart(M)]
        else:  # where blocks of a weight are apart, it is none of their views
            grids = [run.grid for run in self.runs for _ in run.slots] * len(lists)
            values = [grid.blocks(M) for grid, M in zip(grids, values, strict=True)]
            parts = [part for M in found for _, blocks in self.pieces(M) for part in blocks]
        copy_all(parts, values)
        return found

    def numbers(self, lists: list[list[Tensor]]) -> list[Tensor]:
        """A number of each matrix, for each list of what the weights have."""
        if len(lists[0]) == 1:
            return [value.flatten() if value.ndim > 1 else value for (value,) in lists]
        values = [*chain.from_iterable(lists)]
        is_one = not values[0].ndim
        together = torch.stack(values) if is_one else torch.cat([v.flatten() for v in values])
        return list(together.unflatten(0, (len(lists), -1)).unbind())

    def apart(self, M: Tensor) -> list[Tensor]:
        """Matrices in the shapes of the weights that they belong to."""
        if M.ndim == 2:
            M = self.runs[0].grid.upright(M)
            return [M if M.shape == self.runs[0].shape else M.reshape(self.runs[0].shape)]
        parts = []
        for run, blocks in self.pieces(M):
            parts += blocks.transpose(2, 3).reshape(len(run.slots), *run.shape).unbind()
        return parts

    def pieces(self, M: Tensor) -> Iterator[tuple[Run, Tensor]]:
        """The matrices of each run as blocks ``(slots, r, c, a, b)``."""
        at = 0
        for run in self.runs:
            part = run.grid.upright(M[at : at + run.total, : run.n])
            yield run, part.reshape(len(run.slots), *run.grid)
            at += run.total


def batches(slots: list[Slot], plan: Plan) -> Iterator[Batch]:
    """Weights that step at once: of one shape or, on a device, of one width."""
    if len(slots) == 1:
        yield Batch(slots, [Run.of(slots, plan.view)])
        return
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Slot]] = {}
    for slot in slots:
        weight = slot.weight
        alike.setdefault((weight.shape, weight.dtype, weight.device), []).append(slot)
    padded: dict[tuple[int, float, torch.dtype, torch.device], list[Run]] = {}
    may_pad = plan.landing is not None and plan.landing.is_ours
    for (shape, dtype, device), members in alike.items():
        run, on_device = Run.of(members, plan.view), device.type != "cpu"
        p = min(run.lying[-2:])
        longest = longest_batch(run.n, p, plan.foreach, on_device=on_device)
        firsts = range(0, len(members), longest)
        pieces = [run._replace(slots=members[i : i + longest]) for i in firsts]
        if may_pad and run.n > p and (on_device if plan.foreach is None else plan.foreach):
            key = (p, plan.scale_of(shape), dtype, device)
            padded.setdefault(key, []).extend(pieces)
        else:
            yield from (Batch(piece.slots, [piece]) for piece in pieces)
    for (p, *_), runs in padded.items():
        yield from batches_with_zeros(sorted(runs, key=lambda run: -run.n), p)


def batches_with_zeros(runs: list[Run], p: int) -> Iterator[Batch]:
    """Runs of matrices with p columns, the longest first, in batches with few rows of zeros."""
    batch = Batch([], [])
    rows = count = 0
    for run in runs:
        rows, count = rows + run.total * run.n, count + run.total
        size = count * (batch.runs or runs)[0].n
        if batch.runs and size > min(MOST_PADDING * rows, LONGEST_ON_DEVICE // p):
            yield batch
            batch, rows, count = Batch([], []), run.total * run.n, run.total
        batch.runs.append(run)
        batch.slots.extend(run.slots)
    yield batch
