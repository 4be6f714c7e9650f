"""How many matrices step as one batch."""

import sys

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


def longest_batch(
    n: int, p: int, foreach: bool | None, parts: int = 1, *, on_device: bool = False
) -> int:
    """The largest number of n x p matrices, n >= p, that step as one batch.

    Args:
        n: rows.
        p: columns.
        foreach: True: any number; False: one; None: whichever is quicker.
        parts: the number of parts over which the rows of a matrix are spread.
        on_device: whether they are not in CPU memory, so that launches cost more than copies.
    """
    entries = n * p // parts
    if foreach or (foreach is None and entries <= BATCH_UP_TO):
        return sys.maxsize
    if foreach is None and on_device:
        return max(1, LONGEST_ON_DEVICE // entries)
    is_overhead = parts > 1 or (n > p and p <= FEW_COLUMNS and entries <= BATCH_OF_FEW_UP_TO)
    return max(1, LONGEST_BATCH // max(entries, p * p)) if foreach is None and is_overhead else 1
