"""What steps of sharded weights send: used to choose routes, and to estimate costs."""

import math


def received_by_owner(rows: int, columns: int, ranks: int, count: int, states: int) -> float:
    """Numbers that the busiest rank receives when ``count`` matrices have owners."""
    owned = math.ceil(count / ranks)
    shard = rows * columns / ranks
    return (owned * (2 + states) * (ranks - 1) + (count - owned) * (1 + states)) * shard


def received_by_columns(
    rows: int, columns: int, ranks: int, count: int, states: int, summed: int
) -> float:
    """Numbers that a rank receives when ``count`` matrices go from rows to columns and back."""
    turned = count * (3 + 2 * states) * rows * columns / ranks
    return turned * (ranks - 1) / ranks + received_by_sum(ranks, count * summed)


def received_by_sum(ranks: int, numbers: int) -> float:
    """Numbers that a rank receives when this many are summed over ranks, in a ring."""
    return 2 * numbers * (ranks - 1) / ranks
