"""Which matrices step as one batch."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Up to this many entries a matrix is mostly overhead, and a batch of such matrices steps faster as
# one: 2 to 5 times up to 64 x 64, even at 100 x 100, slower at 256 x 256 (make bench).
BATCH_UP_TO = 100 * 100
# Of matrices with few columns more: they are all overhead and passes over memory. A batch is a
# copy, so such batches have an end, where they still fit a cache.
FEW_COLUMNS, BATCH_OF_FEW_UP_TO, LONGEST_BATCH = 32, 2**16, 2**19


def batches(
    kinds: Sequence[tuple[Any, ...]], foreach: bool | None, parts: int = 1
) -> Iterator[list[int]]:
    """Lists of those that step as one: of one kind, if they are small.

    Args:
        kinds: of each, ``(n, p, ...)``: the shape of its matrices, n >= p, and whatever else must
            agree.
        foreach: True: all of a kind together; False: each alone; None: what is quicker.
        parts: into how many parts the rows of a matrix are spread.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for k, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(k)
    for (n, p, *_), members in alike.items():
        longest = _longest_batch(n, p, foreach, parts)
        for first in range(0, len(members), longest):
            yield members[first : first + longest]


def _longest_batch(n: int, p: int, foreach: bool | None, parts: int) -> int:
    """How many matrices n x p step as one at the most."""
    entries = n * p // parts
    if foreach or (foreach is None and entries <= BATCH_UP_TO):
        return sys.maxsize
    if foreach is None and n > p and p <= FEW_COLUMNS and entries <= BATCH_OF_FEW_UP_TO:
        return max(1, LONGEST_BATCH // entries)
    return 1
