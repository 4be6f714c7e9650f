"""An optional approximation of the inverse Hessian, given by the user as (X, V) -> V."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ortholand.solve.points import Point, Terrain, inner, norm

Preconditioner = Callable[[Any, Any], Any]


def precondition(
    preconditioner: Preconditioner | None, terrain: Terrain, point: Point, gradient: Tensor
) -> Tensor:
    """Apply it to coordinates of a tangent vector: out of the door and in again."""
    if preconditioner is None:
        return gradient
    door, frame = terrain.objective.door, terrain.frame
    V = frame.ambient(point.X, gradient)
    W = preconditioner(door.outward(point.X), door.outward(V))
    scaled = frame.coordinates(point.X, door.inward(W, "preconditioner"))
    cosine = inner(gradient, scaled)
    if not (cosine > 0 or norm(gradient) == 0):
        raise ValueError(
            "preconditioner(X, V) must be positive definite, <V, preconditioner(X, V)> > 0, got "
            f"{cosine:.1e}. Shift or clip its eigenvalues."
        )
    return scaled
