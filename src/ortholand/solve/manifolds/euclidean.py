"""Arrays without a constraint, for products."""

import math
from typing import Any

from ortholand.solve.arrays import Array, combine


class Flat:
    """The whole space: every array is a point, and its own tangent vector."""

    bounded = False

    def columns(self, X: Array) -> int:
        """The number of entries."""
        return math.prod(X.shape)

    def residual(self, X: Array) -> None:
        """None: there is no constraint."""

    def size(self, residual: Any) -> float:  # noqa: ARG002
        """Zero: there is no residual."""
        return 0.0

    def normal_norm(self, X: Array, multiplier: Any, size: float) -> float:  # noqa: ARG002
        """Zero: there are no normal vectors."""
        return 0.0

    def feasible(self, X: Array) -> float:  # noqa: ARG002
        """Zero: every point is feasible."""
        return 0.0

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, None, float]:  # noqa: ARG002
        """G itself."""
        return G, None, 0.0

    def tangent(self, X: Array, A: Array) -> Array:  # noqa: ARG002
        """A itself."""
        return A

    ambient = coordinates = tangent

    def hessian(self, X: Array, multiplier: Any, A: Array, W: Array) -> Array:  # noqa: ARG002
        """W itself."""
        return W

    def line(self, X: Array, D: Any, A: Array) -> "Straight":  # noqa: ARG002
        """The straight line along A."""
        return Straight(X, A)

    def settle(self, X: Array) -> tuple[Array, None]:
        """X itself."""
        return X, None

    def check_first(self, X: Array, G: Array) -> None:
        """Accept any cost."""


class Straight:
    """``X + t V``."""

    def __init__(self, X: Array, V: Array) -> None:
        self.X, self.V = X, V

    def limit(self, t: float) -> float:
        """t itself: there is no limit."""
        return t

    def at(self, t: float, near: float) -> tuple[Array, None]:  # noqa: ARG002
        """The point at t."""
        return combine(self.X, t, self.V), None
