"""How the matrices of a weight lie in memory, for compiled code that takes strides.

Weight, gradient and state of one parameter have the same layout: any that differs is copied first.
A dense layout is described by the strides of a matrix and of a stack in up to two levels:
contiguous, column-major (as from ``torch.linalg.qr``), channels last.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """``rows x columns`` matrices, rows >= columns: wide ones are transposed."""

    rows: int
    columns: int
    count: int
    row_stride: int
    column_stride: int
    inner: int  # matrices are in groups of so many,
    inner_stride: int  # so far from each other in a group,
    outer_stride: int  # and from group to group


def layout_of(shape: Sequence[int], strides: Sequence[int], view: str) -> Layout | None:
    """The layout of a weight; None if its memory has gaps, or an order strides cannot describe."""
    if not is_dense(shape, strides):
        return None
    if view == "matrix" and len(shape) > 2:
        return _flattened(shape, strides)
    batch = _two_levels(shape[:-2], strides[:-2])
    if batch is None:
        return None
    return _tall(shape[-2], shape[-1], strides[-2], strides[-1], *batch)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's numbers are without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(_longer_than_one(shape, strides)):
        if stride != expected:
            return False
        expected *= size
    return True


def are_alike(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two tensors of one shape have the same layout; size-1 dimensions are ignored."""
    return all(a == b for size, a, b in zip(shape, strides, others, strict=True) if size != 1)


def _flattened(shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
    """One matrix, (first dimension) x (all others), the latter contiguous in any order.

    That order only permutes the columns; a step does not depend on it, as long as gradient and
    state have the same.
    """
    rows, columns = shape[0], 1
    for size in shape[1:]:
        columns *= size
    strides_of_others = [stride for stride, _ in _longer_than_one(shape[1:], strides[1:])]
    first = min(strides_of_others, default=1)
    if first == 1 and (rows == 1 or strides[0] == columns):
        return _tall(rows, columns, columns, 1, 1, 1, 0, 0)
    if first == rows and strides[0] == 1:
        return _tall(rows, columns, 1, rows, 1, 1, 0, 0)
    return None


def _two_levels(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Count, inner, inner stride and outer stride of a stack; None if it has more levels."""
    levels: list[tuple[int, int]] = []  # size, stride; from the innermost
    for stride, size in reversed(_longer_than_one(shape, strides)):
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    inner, inner_stride = levels[0] if levels else (1, 0)
    outer, outer_stride = levels[1] if len(levels) == 2 else (1, inner * inner_stride)
    return inner * outer, inner, inner_stride, outer_stride


def _tall(
    rows: int,
    columns: int,
    row_stride: int,
    column_stride: int,
    count: int,
    inner: int,
    inner_stride: int,
    outer_stride: int,
) -> Layout:
    if rows < columns:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    if columns == 1:  # its stride means nothing
        column_stride = 1
    return Layout(
        rows, columns, count, row_stride, column_stride, inner, inner_stride, outer_stride
    )


def _longer_than_one(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    return [(stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1]
