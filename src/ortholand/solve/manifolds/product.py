"""Several blocks at once: all numbers of a point lie in one vector, and each block has its part.

So methods add, scale and multiply vectors as for one matrix, however many blocks there are.
"""

import math
from collections.abc import Sequence
from typing import Any

from ortholand.solve.arrays import Array
from ortholand.solve.manifolds.geometry import Geometry, Line
from ortholand.solve.variables import Packing


class Product(Geometry):
    """A product of manifolds, with one step length and one trust region for all."""

    def __init__(self, geometries: Sequence[Geometry], packing: Packing) -> None:
        self.geometries, self.packing = geometries, packing
        self.bounded = all(geometry.bounded for geometry in geometries)

    def _each(self, *vectors: Array) -> Any:
        return zip(self.geometries, *(self.packing.split(v) for v in vectors), strict=True)

    def columns(self, X: Array) -> float:
        return sum(geometry.columns(block) for geometry, block in self._each(X))

    def residual(self, X: Array) -> list[Any]:
        return [geometry.residual(block) for geometry, block in self._each(X)]

    def size(self, residual: Any) -> float:
        pairs = zip(self.geometries, residual, strict=True)
        return math.hypot(*(geometry.size(one) for geometry, one in pairs))

    def normal_norm(self, X: Array, multiplier: Any, size: float) -> float:  # noqa: ARG002
        blocks = zip(self._each(X), multiplier, strict=True)
        return math.hypot(*(g.normal_norm(x, m, g.size(m)) for (g, x), m in blocks))

    def feasible(self, X: Array) -> float:
        return math.hypot(*(geometry.feasible(block) for geometry, block in self._each(X)))

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, list[Any], float]:
        found = [
            geometry.differentiate(x, d, g)
            for (geometry, x, g), d in zip(self._each(X, G), D, strict=True)
        ]
        gradients, multipliers, corrections = zip(*found, strict=True)
        return self.packing.join(gradients), list(multipliers), sum(corrections)

    def _joined(self, name: str, X: Array, A: Array) -> Array:
        return self.packing.join([getattr(one, name)(x, a) for one, x, a in self._each(X, A)])

    def tangent(self, X: Array, A: Array) -> Array:
        return self._joined("tangent", X, A)

    def ambient(self, X: Array, A: Array) -> Array:
        return self._joined("ambient", X, A)

    def coordinates(self, X: Array, A: Array) -> Array:
        return self._joined("coordinates", X, A)

    def hessian(self, X: Array, multiplier: Any, A: Array, W: Array) -> Array:
        """The Hessian, block by block: what couples blocks is in W."""
        blocks = zip(self._each(X, A, W), multiplier, strict=True)
        found = [geometry.hessian(x, m, a, w) for (geometry, x, a, w), m in blocks]
        return self.packing.join(found)

    def line(self, X: Array, D: Any, A: Array) -> "ProductLine":
        blocks = zip(self._each(X, A), D, strict=True)
        return ProductLine([g.line(x, d, a) for (g, x, a), d in blocks], self.packing)

    def settle(self, X: Array) -> tuple[Array, list[Any]]:
        found = [geometry.settle(block) for geometry, block in self._each(X)]
        points, residuals = zip(*found, strict=True)
        return self.packing.join(points), list(residuals)

    def check_first(self, X: Array, G: Array) -> None:
        for geometry, x, g in self._each(X, G):
            geometry.check_first(x, g)


class ProductLine(Line):
    """The lines of all blocks, with one t."""

    def __init__(self, lines: Sequence[Line], packing: Packing) -> None:
        self.lines, self.packing = lines, packing

    def limit(self, t: float) -> float:
        for line in self.lines:
            t = line.limit(t)
        return t

    def at(self, t: float, near: float) -> tuple[Array, list[Any]]:
        points, residuals = zip(*(line.at(t, near) for line in self.lines), strict=True)
        return self.packing.join(points), list(residuals)
