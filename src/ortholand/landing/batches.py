"""Which matrices step as one batch."""

from collections.abc import Iterator, Sequence
from typing import Any

# Up to this many entries a matrix is mostly overhead, and a batch of such matrices steps faster as
# one: 2 to 5 times up to 64 x 64, even at 100 x 100, slower at 256 x 256 (make bench).
BATCH_UP_TO = 100 * 100


def batches(
    kinds: Sequence[tuple[Any, ...]], foreach: bool | None, parts: int = 1
) -> Iterator[list[int]]:
    """Lists of those that step as one: of one kind, if they are small.

    Args:
        kinds: of each, ``(n, p, ...)``: the shape of its matrices, and whatever else must agree.
        foreach: True: all of a kind together; False: each alone; None: what is quicker.
        parts: into how many parts the rows of a matrix are spread.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for k, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(k)
    for (n, p, *_), members in alike.items():
        if foreach or (foreach is None and n * p <= BATCH_UP_TO * parts):
            yield members
        else:
            yield from ([k] for k in members)
