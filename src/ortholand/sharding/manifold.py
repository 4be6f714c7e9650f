"""Distance and projection of weights spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ortholand.geometry.manifold import (
    nearest_weight,
    polar_projection,
    residual_norm,
    weight_distances,
)
from ortholand.geometry.matrices import (
    real_dtype,
    shared_gram_minus_identity,
    to_working_dtype,
    working_dtype,
)
from ortholand.geometry.scales import unscaled
from ortholand.geometry.views import View, batch_shape
from ortholand.sharding.exchange import Owners, rows_of_transposes, sums_over_ranks
from ortholand.sharding.placement import (
    Layout,
    from_rows,
    is_elsewhere,
    is_here,
    layout_of,
    local_part,
    local_view,
    part_of,
    placed_like,
    rows_of,
    whole_of,
    zeros_per_matrix,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Spread = tuple["DTensor", Layout, float]  # a weight, where its rows are, and its scale


def sharded_distances(weight: DTensor, view: View, *, spectral: bool, scale: float) -> Tensor:
    """``||X^H X - I||`` of each matrix of a weight; every rank gets all.

    A matrix sharded by rows or columns is never gathered: its Gram matrix takes one all-reduce,
    for wide ones after an all-to-all. A rank outside the weight's mesh gets zero.
    """
    if is_elsewhere(weight):
        return torch.zeros((), device=weight.device)
    if is_here(weight, view):
        here, seen = local_part(weight), local_view(weight, view)
        if here.numel():
            d = weight_distances(here, seen, spectral=spectral, scale=scale)
        else:
            kind = real_dtype(working_dtype(here.dtype))
            d = torch.zeros(batch_shape(here.shape, seen), dtype=kind, device=here.device)
        return whole_of(placed_like(d, zeros_per_matrix(weight, view, d.dtype))) if d.ndim else d
    layout = layout_of(weight, view)
    if layout is None:
        return weight_distances(whole_of(weight), view, spectral=spectral, scale=scale)
    X = unscaled(to_working_dtype(rows_of([local_part(weight)], layout)[0]), scale)
    if layout.shape[0] < layout.shape[1]:
        X, layout = rows_of_transposes([X], [layout])[0], layout.transposed
    D = shared_gram_minus_identity(X, X.shape[0] / layout.shape[0])
    return residual_norm(*sums_over_ranks([D], layout.group), spectral=spectral)


def project_sharded_(weights: Sequence[tuple[DTensor, float]], view: View) -> None:
    """Replace the matrices of weights, in place, by their scale times the nearest orthonormal ones.

    Each sharded matrix is gathered on one rank, a different one for each, and scattered again; a
    rank holds no more than one of them at a time. (If it is not sharded by rows or columns, it is
    gathered on every rank.)
    """
    spread: dict[tuple[Any, ...], list[Spread]] = {}
    for weight, scale in weights:
        if is_elsewhere(weight):
            continue
        here = local_part(weight)
        if is_here(weight, view):
            if here.numel():
                here.copy_(nearest_weight(here, local_view(weight, view), scale))
        elif (layout := layout_of(weight, view)) is None:
            here.copy_(part_of(nearest_weight(whole_of(weight), view, scale), weight))
        else:
            key = (layout.group, weight.dtype, weight.device)
            spread.setdefault(key, []).append((weight, layout, scale))
    for members in spread.values():
        ranks = members[0][1].ranks
        for i in range(0, len(members), ranks):
            some = members[i : i + ranks]
            owners = Owners([layout for _, layout, _ in some], range(len(some)))
            parts = [to_working_dtype(rows_of([local_part(w)], layout)) for w, layout, _ in some]
            wholes = [polar_projection(X) for X in owners.gather(parts)]
            rows = owners.spread(wholes, parts[0].new_empty(len(wholes), 0), fields=1)
            for (weight, layout, scale), (X, _) in zip(some, rows, strict=True):
                here = local_part(weight)
                here.copy_(from_rows(X * scale, here.shape, layout)[0])
