"""Manifolds on which lines are retractions, for the baselines in the same loop."""

from typing import Any

from ortholand.retractions import RETRACTIONS, find_retraction, retract
from ortholand.solve.arrays import Array, as_tensor, back_from_tensor
from ortholand.solve.manifolds.generalized import GeneralizedColumns
from ortholand.solve.manifolds.geometry import Geometry, Line, SquareStiefel
from ortholand.solve.manifolds.product import Product
from ortholand.solve.options import Rule

RETRACTION_RULE: dict[str, Rule] = {
    "retraction": (
        f"one of {tuple(RETRACTIONS)}, or a function (X, B) -> X",
        lambda v: callable(v) or v in tuple(RETRACTIONS),
    )
}


class Retracting:
    """A geometry that moves by a retraction, for the baselines in the same loop."""

    def __init__(self, geometry: Any, kind: Any) -> None:
        self.geometry, self.kind = geometry, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.geometry, name)

    def line(self, X: Array, D: Any, A: Array) -> "RetractedLine":  # noqa: ARG002
        """The retraction's curve."""
        if isinstance(self.geometry, SquareStiefel):
            return RetractedLine(X, A, self)
        # B with Skew(B X^H) X = A
        return RetractedLine(X, 2 * A - X @ (X.swapaxes(-1, -2).conj() @ A), self)


class RetractedLine(Line):
    """``R(X, t B)``."""

    def __init__(self, X: Array, B: Array, geometry: Retracting) -> None:
        super().__init__(X, B)
        self.geometry = geometry

    def at(self, t: float, near: float) -> tuple[Array, Any]:  # noqa: ARG002
        """The point at t."""
        moved = retract(as_tensor(self.X), t * as_tensor(self.V), self.geometry.kind)
        X = back_from_tensor(moved, self.X)
        return X, self.geometry.residual(X)


def with_retraction(geometry: Any, kind: Any) -> Any:
    """The same manifold, moving by a retraction."""
    find_retraction(kind)
    if isinstance(geometry, GeneralizedColumns):
        raise ValueError(
            "The methods 'retraction-*' need orthonormal columns, which only new variables have: "
            "use ol.GeneralizedStiefel(B, form='cholesky') with a dense B, or another method, such "
            "as 'lbfgs'."
        )
    if isinstance(geometry, Product):
        parts = [with_retraction(part, kind) for part in geometry.geometries]
        return Product(parts, geometry.packing)
    return geometry if type(geometry) is Geometry else Retracting(geometry, kind)
