"""How far a weight is from the manifold, and how it gets there: whole, or spread over ranks.

Only weights that are spread over ranks (DTensors) import the room for them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ortholand.geometry.manifold import nearest_weight, random_orthogonal, weight_distances
from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.views import View, as_weight, matrices_shape
from ortholand.sharding.placement import is_dtensor, local_part, part_of, sharing_groups


def distances(weight: Tensor, view: View, *, spectral: bool = False, scale: float = 1.0) -> Tensor:
    """``||X^H X - I||_F`` of each matrix of a weight; every rank gets all.

    ``spectral``: use the spectral norm instead. ``scale``: the weight is this times X.
    """
    if is_dtensor(weight):
        from ortholand.sharding.manifold import sharded_distances

        return sharded_distances(weight, view, spectral=spectral, scale=scale)
    return weight_distances(weight, view, spectral=spectral, scale=scale)


def project_(weights: Sequence[tuple[Tensor, float]], view: View) -> None:
    """Replace the matrices of weights, in place, by the nearest orthonormal ones.

    Each weight comes with its scale, the multiple of an orthonormal matrix that it becomes.
    """
    for weight, scale in weights:
        if not is_dtensor(weight):
            weight.copy_(nearest_weight(weight, view, scale))
    if spread := [(weight, scale) for weight, scale in weights if is_dtensor(weight)]:
        from ortholand.sharding.manifold import project_sharded_

        project_sharded_(spread, view)


def randomize_(weight: Tensor, seed: int | torch.Generator, view: View, scale: float) -> None:
    """Draw a new weight; if it is sharded, every rank draws all of it and keeps its part."""
    shape = matrices_shape(weight.shape, view)
    X = random_orthogonal(*shape, seed=seed, dtype=weight.dtype, device=weight.device, scale=scale)
    drawn = as_weight(X, weight, view)
    local_part(weight).copy_(part_of(drawn, weight) if is_dtensor(weight) else drawn)


def apparent_scale(weight: Tensor, view: View) -> float:
    """The number c for which c times orthonormal matrices have the norm of a weight's."""
    here = to_working_dtype(local_part(weight)).abs()
    square = torch.linalg.vector_norm(here).cpu().double().square()
    *batch, _, p = matrices_shape(weight.shape, view)
    return math.sqrt(float(_summed(square, weight)) / (math.prod(batch) * p))


def all_finite(weight: Tensor) -> bool:
    """Whether a weight has no NaN or infinite entries anywhere."""
    bad = torch.isfinite(local_part(weight)).all().logical_not().int()
    return bool(_summed(bad, weight) == 0)


def _summed(number: Tensor, weight: Tensor) -> Tensor:
    """The sum of a number over the ranks that have parts of a weight."""
    if groups := sharing_groups(weight):
        from ortholand.sharding.exchange import sum_over_groups

        return sum_over_groups(number.to(weight.device), groups)
    return number
