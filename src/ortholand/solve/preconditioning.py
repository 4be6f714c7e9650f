"""An optional approximation of the inverse Hessian, given by the user as (X, V) -> V."""

from collections.abc import Callable
from typing import Any

from ortholand.solve.arrays import inner, norm
from ortholand.solve.manifold_cost import ManifoldCost, Point

Preconditioner = Callable[[Any, Any], Any]


def precondition(
    preconditioner: Preconditioner | None, cost: ManifoldCost, point: Point, gradient: Any
) -> Any:
    """Apply the preconditioner, in the user's variables, to coordinates of a tangent vector."""
    if preconditioner is None:
        return gradient
    variables, geometry = cost.objective.variables, cost.geometry
    V = geometry.ambient(point.X, gradient)
    W = preconditioner(variables.outward(point.X), variables.outward_gradient(V))
    scaled = geometry.coordinates(point.X, variables.inward_vector(W, "preconditioner"))
    cosine = inner(gradient, scaled)
    if not (cosine > 0 or norm(gradient) == 0):
        raise ValueError(
            "preconditioner(X, V) must be positive definite, <V, preconditioner(X, V)> > 0, got "
            f"{cosine:.1e}. Shift or clip its eigenvalues."
        )
    return scaled
