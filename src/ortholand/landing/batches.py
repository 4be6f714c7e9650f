"""Which matrices step as one batch."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Up to this many entries a matrix is mostly overhead, and a batch of such matrices steps faster as
# one: 2 to 5 times up to 64 x 64, even at 100 x 100, slower at 256 x 256 (make bench).
BATCH_UP_TO = 100 * 100
# More for matrices with few columns, which are all overhead and passes over memory. A batch is a
# copy, so such batches are limited to what still fits a cache.
FEW_COLUMNS, BATCH_OF_FEW_UP_TO, LONGEST_BATCH = 32, 2**16, 2**19
# On a device all matrices of a kind are one batch, as long as its temporaries stay moderate.
LONGEST_ON_DEVICE = 2**25


def batches(
    kinds: Sequence[tuple[Any, ...]],
    foreach: bool | None,
    parts: int = 1,
    *,
    on_device: bool = False,
) -> Iterator[list[int]]:
    """Lists of the weights that step as one batch: small ones of the same kind.

    Args:
        kinds: for each, ``(n, p, ...)``: the shape of its matrices, n >= p, and whatever else must
            agree.
        foreach: True: all of a kind together; False: each alone; None: whichever is quicker.
        parts: the number of parts over which the rows of a matrix are spread.
        on_device: whether they are not in CPU memory, so that launches cost more than copies.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for k, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(k)
    for (n, p, *_), members in alike.items():
        longest = longest_batch(n, p, foreach, parts, on_device=on_device)
        for first in range(0, len(members), longest):
            yield members[first : first + longest]


def longest_batch(
    n: int, p: int, foreach: bool | None, parts: int = 1, *, on_device: bool = False
) -> int:
    """The largest number of n x p matrices that step as one batch."""
    entries = n * p // parts
    if foreach or (foreach is None and entries <= BATCH_UP_TO):
        return sys.maxsize
    if foreach is None and on_device:
        return max(1, LONGEST_ON_DEVICE // entries)
    if foreach is None and n > p and p <= FEW_COLUMNS and entries <= BATCH_OF_FEW_UP_TO:
        return max(1, LONGEST_BATCH // entries)
    return 1
