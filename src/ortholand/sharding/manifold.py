"""Distance and projection of weights that may be spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.manifold import distance, polar_projection, residual_norm
from ortholand.geometry.matrices import shared_gram_minus_identity, to_working_dtype
from ortholand.geometry.scales import unscaled
from ortholand.geometry.views import View, as_matrices, as_weight, matrices_shape
from ortholand.sharding.exchange import (
    Owners,
    rows_to_columns,
    sum_over_groups,
    sums_over_ranks,
)
from ortholand.sharding.placement import (
    Layout,
    gathered_numbers,
    is_dtensor,
    is_elsewhere,
    is_here,
    layout_of,
    local_part,
    part_of,
    rows_of,
    set_rows_,
    sharing_groups,
    whole_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def distances(weight: Tensor, view: View, *, spectral: bool = False, scale: float = 1.0) -> Tensor:
    """``||X^H X - I||_F`` of each matrix of a weight, sharded or not; every rank gets all.

    ``spectral``: use the spectral norm instead. ``scale``: the weight is this times X.

    A matrix sharded by rows or columns is never gathered: its Gram matrix takes one all-reduce,
    for wide ones after an all-to-all from rows to columns; in the view "kernel" of convolutions
    one number per matrix is gathered. A rank outside the weight's mesh gets zero.
    """
    if not is_dtensor(weight):
        return distance(unscaled(as_matrices(weight, view), scale), spectral=spectral)
    if is_elsewhere(weight):
        return torch.zeros((), device=weight.device)
    if is_here(weight, view):
        here = as_matrices(local_part(weight), view)
        d = distance(unscaled(here, scale), spectral=spectral)
        return gathered_numbers(d, weight) if d.ndim else d
    layout = layout_of(weight)
    if layout is None:
        whole = as_matrices(whole_of(weight), view)
        return distance(unscaled(whole, scale), spectral=spectral)
    rows = to_working_dtype(rows_of(weight, layout))
    D = _residual_apart(unscaled(rows, scale), layout)
    return residual_norm(D, spectral=spectral)


def _residual_apart(X: Tensor, layout: Layout) -> Tensor:
    """``X^H X - I`` of the whole matrix, of which this rank has the rows X."""
    rows, columns = sum(layout.sizes), X.shape[1]
    if rows < columns:
        X = rows_to_columns([X], [layout])[0].mT
    (D,) = sums_over_ranks(
        [shared_gram_minus_identity(X, X.shape[0] / max(rows, columns))], layout.group
    )
    return D


def apparent_scale(weight: Tensor, view: View) -> float:
    """The number c for which c times orthonormal matrices have the norm of a weight's."""
    here = to_working_dtype(local_part(weight)).abs()
    square, groups = torch.linalg.vector_norm(here).cpu().double().square(), sharing_groups(weight)
    if groups:
        square = sum_over_groups(square.to(weight.device), groups)
    *batch, _, p = matrices_shape(weight.shape, view)
    return math.sqrt(float(square) / (math.prod(batch) * p))


def project_(weights: Sequence[tuple[Tensor, float]], view: View) -> None:
    """Replace the matrices of weights, sharded or not, in place, by the nearest orthonormal ones.

    Each weight comes with its scale, the multiple of an orthonormal matrix that it becomes.

    Each sharded matrix is gathered on one rank, a different one for each, and scattered
    again; a rank holds no more than one of them at a time. (If it is not sharded by rows or
    columns, it is gathered on every rank.)
    """
    spread: dict[tuple[Any, ...], list[_Spread]] = {}
    for weight, scale in weights:
        if is_elsewhere(weight):
            continue
        here = local_part(weight)
        if is_here(weight, view):
            if here.numel():
                here.copy_(_nearest(here, view, scale))
            continue
        assert is_dtensor(weight)
        layout = layout_of(weight)
        if layout is None:
            here.copy_(part_of(_nearest(whole_of(weight), view, scale), weight))
        else:
            key = (layout.group, weight.dtype, weight.device)
            spread.setdefault(key, []).append(_Spread(weight, layout, scale))
    for members in spread.values():
        ranks = members[0].layout.ranks
        for i in range(0, len(members), ranks):
            _project_whole(members[i : i + ranks])


class _Spread(NamedTuple):
    weight: DTensor
    layout: Layout
    scale: float


def _nearest(weight: Tensor, view: View, scale: float) -> Tensor:
    X = polar_projection(to_working_dtype(as_matrices(weight, view)))
    return as_weight(X * scale if scale != 1 else X, weight, view)


def _project_whole(members: Sequence[_Spread]) -> None:
    """Project matrices, at most one per rank, each on a different rank."""
    owners = Owners([member.layout for member in members], range(len(members)))
    parts = [[to_working_dtype(rows_of(weight, layout))] for weight, layout, _ in members]
    wholes = [[polar_projection(X)] for (X,) in owners.gather(parts)]
    rows, _ = owners.spread(wholes, parts[0][0].new_empty(len(wholes), 0), parts)
    for (weight, layout, scale), (X,) in zip(members, rows, strict=True):
        set_rows_(weight, X * scale if scale != 1 else X, layout)


def all_finite(weight: Tensor) -> bool:
    """Whether a weight, sharded or not, has no NaN or infinite entries anywhere."""
    bad = torch.isfinite(local_part(weight)).all().logical_not().int()
    return bool(sum_over_groups(bad, sharing_groups(weight)) == 0)
