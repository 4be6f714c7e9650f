"""The cost on its manifold: points with all that is known there, and moves between them."""

import math
from typing import Any

from ortholand.retractions import find_retraction, retract
from ortholand.solve.arrays import Array, as_tensor, back_from_tensor, norm
from ortholand.solve.manifolds import Geometry, Product
from ortholand.solve.manifolds.euclidean import Flat
from ortholand.solve.manifolds.generalized import GeneralizedColumns
from ortholand.solve.manifolds.geometry import NEAR, Line
from ortholand.solve.manifolds.stiefel import SquareStiefel
from ortholand.solve.objective import Objective


class Point:
    """A point near the manifold with all that was computed there.

    Attributes:
        X: the point.
        D: the residual, by which X misses the constraint.
        value: f.
        euclidean: the Euclidean gradient G.
        gradient: coordinates of the Riemannian gradient.
        multiplier: ``Sym(X^H G)``, ``Sym(G X^H)`` if square: ``G = X multiplier`` at critical X.
        multiplier_norm: its norm.
        normal_norm: norm of G's normal part; the same if columns are orthonormal.
        distance: norm of D.
        correction: ``<multiplier, D> / 2``.
        gradient_norm: norm of the Riemannian gradient.
        euclidean_norm: norm of G, up to the distance: its two parts are orthogonal.
        finite: whether everything here is finite.
        measured: whether D was measured at X; if not, it was derived, without the rounding of X.
    """

    __slots__ = (
        "D",
        "X",
        "correction",
        "distance",
        "euclidean",
        "euclidean_norm",
        "finite",
        "gradient",
        "gradient_norm",
        "measured",
        "multiplier",
        "multiplier_norm",
        "normal_norm",
        "value",
    )

    def __init__(
        self,
        X: Any,
        D: Any,
        value: float,
        euclidean: Any,
        gradient: Any,
        multiplier: Any,
        multiplier_norm: float,
        distance: float,
        correction: float,
        measured: bool,
        normal_norm: float,
    ) -> None:
        self.X, self.D, self.value, self.euclidean = X, D, value, euclidean
        self.gradient, self.multiplier = gradient, multiplier
        self.multiplier_norm, self.normal_norm = multiplier_norm, normal_norm
        self.distance, self.correction, self.measured = distance, correction, measured
        self.gradient_norm = size = norm(gradient)
        self.euclidean_norm = math.hypot(size, normal_norm)
        self.finite = math.isfinite(value + size + distance + correction)

    def landed(self, X: Any, D: Any, distance: float) -> "Point":
        """The same values for the X that it was landed at, where D was measured."""
        landed = object.__new__(Point)
        for name in self.__slots__:
            setattr(landed, name, getattr(self, name))
        landed.X, landed.D, landed.distance, landed.measured = X, D, distance, True
        return landed

    def merit(self, lam: float) -> float:
        """``f - <Sym(X^H G), X^H X - I> / 2 + lam N``.

        The first two terms are f at the nearest point of the manifold, up to terms of second order
        in the distance, which the third outweighs: Fletcher's function for this constraint.
        """
        return self.value - self.correction + lam * self.distance * self.distance / 4


class ManifoldCost:
    """The problem as methods see it.

    Attributes:
        objective: the user's functions.
        geometry: the manifold.
        saw_non_finite: whether something was not finite since this was last reset.
    """

    def __init__(self, objective: Objective, geometry: Geometry | None = None) -> None:
        self.objective = objective
        self.geometry: Any = geometry or objective.variables.geometry
        self.saw_non_finite = False

    def at(self, X: Any, D: Any = None, measured: bool = False) -> Point:
        """Evaluate everything at X; measure the residual unless it is given."""
        value, G = self.objective.value_and_gradient(X)
        if D is None:
            D, measured = self.geometry.residual(X), True
        return self.known(X, D, value, G, measured)

    def known(self, X: Any, D: Any, value: float, G: Any, measured: bool = False) -> Point:
        """A point from f and its gradient, which are known already."""
        geometry = self.geometry
        gradient, multiplier, correction = geometry.differentiate(X, D, G)
        normal = geometry.size(multiplier)
        out = geometry.normal_norm(X, multiplier, normal)
        point = Point(
            X,
            D,
            value,
            G,
            gradient,
            multiplier,
            normal,
            geometry.size(D),
            correction,
            measured,
            out,
        )
        if not point.finite:
            self.saw_non_finite = True
        return point

    def line(self, point: Point, direction: Any) -> Line:
        """The line from a point along a direction, given in coordinates."""
        return self.geometry.line(point.X, point.D, direction)

    def go(self, line: Line, t: float, near: float = NEAR) -> tuple[Point, float]:
        """The evaluated point at t on a line, and t, shortened if need be."""
        t = line.limit(t)
        return self.at(*line.at(t, near)), t

    def measure(self, point: Point) -> None:
        """Replace a residual that was derived by the measured one."""
        if not point.measured:
            point.D = self.geometry.residual(point.X)
            point.distance, point.measured = self.geometry.size(point.D), True

    def settled(self, point: Point) -> Point:
        """The point after landing; evaluated again only if landing moves it."""
        X, D = self.geometry.settle(point.X)
        if X is not point.X or not point.finite:
            return self.at(X, D, measured=True)
        return point.landed(X, D, self.geometry.size(D))

    def on_manifold(self, point: Point) -> Point:
        """The point itself if it was measured on the manifold; otherwise, after landing."""
        feasible = point.measured and point.distance <= self.geometry.feasible(point.X)
        return point if feasible else self.settled(point)

    def gradient_change(self, point: Point, direction: Any, t: float) -> Any:
        """How much the gradient changes along a direction, up to t."""
        there, _ = self.go(self.line(point, direction), t)
        return self.geometry.tangent(point.X, there.gradient - point.gradient)

    def columns(self, point: Point) -> float:
        """How many vectors move."""
        return self.geometry.columns(point.X)


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


class RetractedLine:
    """``R(X, t B)``."""

    def __init__(self, X: Array, B: Array, geometry: Retracting) -> None:
        self.X, self.B, self.geometry = X, B, geometry

    def limit(self, t: float) -> float:
        """t itself: a retraction sets no limit."""
        return t

    def at(self, t: float, near: float) -> tuple[Array, Any]:  # noqa: ARG002
        """The point at t."""
        moved = retract(as_tensor(self.X), t * as_tensor(self.B), self.geometry.kind)
        X = back_from_tensor(moved, self.X)
        return X, self.geometry.residual(X)


def with_retraction(geometry: Any, kind: Any) -> Any:
    """The same manifold, moving by a retraction."""
    find_retraction(kind)
    if isinstance(geometry, GeneralizedColumns):
        raise ValueError(
            "The methods 'retraction-*' need orthonormal columns, which only new variables have: "
            "use ol.GeneralizedStiefel(B, form='cholesky') with a dense B, or another method, such "
            "as 'lbfgs' or 'cg'."
        )
    if isinstance(geometry, Product):
        parts = [with_retraction(part, kind) for part in geometry.geometries]
        return Product(parts, geometry.packing)
    return geometry if isinstance(geometry, Flat) else Retracting(geometry, kind)
