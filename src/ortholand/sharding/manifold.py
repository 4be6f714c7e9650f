"""Distance and projection of weights that may be spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ortholand.geometry.manifold import distance, polar_projection, residual_norm
from ortholand.geometry.matrices import shared_gram_minus_identity, to_working_dtype
from ortholand.geometry.views import View, as_matrices, as_weight
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


def distances(weight: Tensor, view: View, *, spectral: bool = False) -> Tensor:
    """``||X^H X - I||_F`` of each matrix of a weight, sharded or not; on every rank that of all.

    ``spectral``: in the spectral norm instead.

    Nobody gets the matrix if it is sharded by rows or columns: one all-reduce of its Gram matrix,
    for wide ones after an all-to-all from rows to columns; in the view "kernel" of convolutions
    one number per matrix is gathered. A rank outside of the weight's mesh gets zero.
    """
    if not is_dtensor(weight):
        return distance(as_matrices(weight, view), spectral=spectral)
    if is_elsewhere(weight):
        return torch.zeros((), device=weight.device)
    if is_here(weight, view):
        d = distance(as_matrices(local_part(weight), view), spectral=spectral)
        return gathered_numbers(d, weight) if d.ndim else d
    layout = layout_of(weight)
    if layout is None:
        return distance(as_matrices(whole_of(weight), view), spectral=spectral)
    D = _residual_apart(to_working_dtype(rows_of(weight, layout)), layout)
    return residual_norm(D, spectral=spectral)


def _residual_apart(X: Tensor, layout: Layout) -> Tensor:
    """``X^H X - I`` of the matrix of which this rank has the rows X."""
    rows, columns = sum(layout.sizes), X.shape[1]
    if rows < columns:
        X = rows_to_columns([X], [layout])[0].mT
    (D,) = sums_over_ranks(
        [shared_gram_minus_identity(X, X.shape[0] / max(rows, columns))], layout.group
    )
    return D


def project_(weights: Sequence[Tensor], view: View) -> None:
    """Replace the matrices of weights, sharded or not, in place, by the nearest orthonormal ones.

    Each sharded matrix is brought together on one rank, a different one for each, and spread
    again; a rank holds no more than one of them at a time. (Sharded otherwise than by rows or
    columns, it is brought together on every rank.)
    """
    spread: dict[tuple[Any, ...], list[tuple[DTensor, Layout]]] = {}
    for weight in weights:
        if is_elsewhere(weight):
            continue
        here = local_part(weight)
        if is_here(weight, view):
            if here.numel():
                here.copy_(_nearest(here, view))
            continue
        assert is_dtensor(weight)
        layout = layout_of(weight)
        if layout is None:
            here.copy_(part_of(_nearest(whole_of(weight), view), weight))
        else:
            key = (layout.group, weight.dtype, weight.device)
            spread.setdefault(key, []).append((weight, layout))
    for members in spread.values():
        ranks = members[0][1].ranks
        for i in range(0, len(members), ranks):
            _project_whole(members[i : i + ranks])


def _nearest(weight: Tensor, view: View) -> Tensor:
    return as_weight(polar_projection(to_working_dtype(as_matrices(weight, view))), weight, view)


def _project_whole(members: Sequence[tuple[DTensor, Layout]]) -> None:
    """Project matrices, at most one per rank, each on a rank of its own."""
    owners = Owners([layout for _, layout in members], range(len(members)))
    parts = [[to_working_dtype(rows_of(weight, layout))] for weight, layout in members]
    wholes = [[polar_projection(X)] for (X,) in owners.gather(parts)]
    rows, _ = owners.spread(wholes, parts[0][0].new_empty(len(wholes), 0), parts)
    for (weight, layout), (X,) in zip(members, rows, strict=True):
        set_rows_(weight, X, layout)


def all_finite(weight: Tensor) -> bool:
    """Whether a weight, sharded or not, has no NaN or infinite entries anywhere."""
    bad = torch.isfinite(local_part(weight)).all().logical_not().int()
    return bool(sum_over_groups(bad, sharing_groups(weight)) == 0)
