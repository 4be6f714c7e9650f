"""What methods work with: points, the cost on its manifold, and what counts as small."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ortholand.solve.arrays import inner, norm, precision
from ortholand.solve.manifolds.geometry import NEAR, Geometry, Line
from ortholand.solve.objective import Objective
from ortholand.solve.options import Limits

POWER_ITERATIONS = 8
FIRST_ANGLE = 0.2  # of a first step, in radians for each column
RECENT = 3  # how many curvatures are remembered
WARM = 0.01  # of the usual gradient: a start with less than this is near a solution
SHARE = 0.3  # of the usual gradient, which then counts as the first one
LOOKS = (10, 30, 100)  # iterations in vain after which X may have run out of digits

Preconditioner = Callable[[Any, Any], Any]  # (X, V) -> V: an approximate inverse Hessian


@dataclass(slots=True, eq=False)
class Point:
    """A point near the manifold with all that was computed there."""

    X: Any
    D: Any  # the residual, by which X misses the constraint
    value: float
    euclidean: Any  # the Euclidean gradient G
    gradient: Any  # coordinates of the Riemannian gradient
    multiplier: Any  # Sym(X^H G), Sym(G X^H) if square: G = X multiplier at critical X
    multiplier_norm: float
    distance: float  # norm of D
    correction: float  # <multiplier, D> / 2
    measured: bool  # if not, D was derived, without the rounding of X
    euclidean_norm: float = math.nan  # of G, up to the distance: its two parts are orthogonal
    gradient_norm: float = field(init=False)
    finite: bool = field(init=False)  # whether everything here is

    def __post_init__(self) -> None:
        self.gradient_norm = size = norm(self.gradient)
        self.finite = math.isfinite(self.value + size + self.distance + self.correction)

    def landed(self, X: Any, D: Any, distance: float) -> "Point":
        """The same values for the X that it was landed at, where D was measured."""
        return replace(self, X=X, D=D, distance=distance, measured=True)

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
        lands_closely: whether trial points are landed up to rounding, because one may be the last.
    """

    smooth = True  # whether all of the cost has a gradient

    def __init__(self, objective: Objective, geometry: Geometry) -> None:
        self.objective, self.geometry = objective, geometry
        self.saw_non_finite = False
        self.lands_closely = False

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
        normal, distance = geometry.size(multiplier), geometry.size(D)
        point = Point(X, D, value, G, gradient, multiplier, normal, distance, correction, measured)
        point.euclidean_norm = math.hypot(
            point.gradient_norm, geometry.normal_norm(X, multiplier, normal)
        )
        if not point.finite:
            self.saw_non_finite = True
        return point

    def line(self, point: Point, direction: Any) -> Line:
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
        there, _ = self.go(self.line(point, direction), t)
        return self.geometry.tangent(point.X, there.gradient - point.gradient)

    def hessian(self, point: Point) -> Callable[[Any], Any]:
        euclidean = self.objective.hessian(point.X, point.euclidean)

        def product(A: Any) -> Any:
            W = euclidean(self.geometry.ambient(point.X, A))
            return self.geometry.hessian(point.X, point.multiplier, A, W)

        return product

    def lipschitz_constant(self, point: Point) -> float:
        """The largest curvature that power iterations on differences of gradients find."""
        if point.distance > self.geometry.feasible(point.X):
            point = self.settled(point)  # the trial points below are landed, so this must be too
        direction, largest = point.gradient, 0.0
        length = precision(point.X) ** 0.3 * math.sqrt(self.geometry.columns(point.X))
        for _ in range(POWER_ITERATIONS):
            size = norm(direction)
            if size == 0:
                break
            direction = self.gradient_change(point, direction, length / size)
            curvature = norm(direction) / length
            if not curvature < math.inf:
                break
            largest = max(largest, curvature)
        return largest or 1.0

    def cautious_step(self, point: Point, length: float) -> float:
        """The step by a fifth of a radian per column along a direction of this length."""
        return FIRST_ANGLE * math.sqrt(self.geometry.columns(point.X)) / length

    def precondition(self, preconditioner: Preconditioner, point: Point, gradient: Any) -> Any:
        variables, geometry = self.objective.variables, self.geometry
        V = geometry.ambient(point.X, gradient)
        W = preconditioner(variables.outward(point.X), variables.outward(V, gradient=True))
        scaled = geometry.coordinates(
            point.X, variables.inward(W, "preconditioner", gradient=False)
        )
        cosine = inner(gradient, scaled)
        if not (cosine > 0 or norm(gradient) == 0):
            raise ValueError(
                "preconditioner(X, V) must be positive definite, <V, preconditioner(X, V)> > 0, "
                f"got {cosine:.1e}. Shift or clip its eigenvalues."
            )
        return scaled


class Targets:
    """The gradient norm at which a run ends, and the rounding of f.

    ``gtol`` is relative to the first Riemannian gradient, unless the start makes that much larger
    (near a pole) or smaller (at a solution) than is usual here. The usual size is judged by two
    measures that are hardly ever both misleading: the Euclidean gradient, whose normal part depends
    on how f continues off the manifold; and the curvature along the last steps times ``||X||``,
    which kinks and noise make large. ``eps`` is the precision of the gradient.
    """

    def __init__(self, limits: Limits, point: Point, unit: float, eps: float = 0.0) -> None:
        self.eps = max(precision(point.X), eps)
        self.gtol = math.sqrt(self.eps) if limits.gtol is None else limits.gtol
        self.atol, self.noise = limits.atol / unit, limits.noise / unit
        self.first = point.gradient_norm
        self.length = norm(point.X) or 1.0
        self.magnitude = max(abs(point.value), point.euclidean_norm * self.length)
        self.deadline = math.inf  # of time.perf_counter()
        self.curvatures: deque[float] = deque(maxlen=RECENT)
        self.seen = 0  # curvatures so far
        self.curved = 0.0  # a gradient's norm that the curvature along the last steps explains

    def saw(self, curvature: float, point: Point, measured: bool = False) -> None:
        """Note how much the gradient changes per step, unless that may be rounding."""
        clear = point.gradient_norm > 1e3 * self.eps * point.euclidean_norm
        if (clear or measured) and 0 < curvature < math.inf:
            self.curvatures.append(curvature)
            self.seen += 1
            self.curved = max(self.curvatures) * self.length

    def remember(self, seen: int, curvatures: Iterable[float]) -> None:
        """Take over the curvatures that compiled code has seen."""
        self.seen = seen
        self.curvatures.extend(curvature for curvature in curvatures if curvature > 0)
        self.curved = max(self.curvatures, default=0.0) * self.length

    def goal(self, point: Point) -> float:
        return max(self.gtol * self._scale(point), self.atol)

    def less(self, point: Point) -> float:
        """The smaller of the two measures of a usual gradient's norm."""
        return min(point.euclidean_norm, self.curved)

    def _scale(self, point: Point) -> float:
        here, curved = point.euclidean_norm, self.curved
        # Steps away from a pole are still curved by it: the first ones do not count.
        usual = max(here, curved) if self.seen > RECENT else here
        less = self.less(point)
        return min(self.first, usual) if self.first > WARM * less else SHARE * less

    def is_stationary(self, point: Point, is_first: bool) -> bool:
        """Whether the gradient is small enough, or zero up to rounding."""
        size, scale = point.gradient_norm, self._scale(point)
        if size <= max(self.gtol * scale, self.atol):
            return True
        # A Euclidean gradient that is almost all normal could hide much in its rounding.
        return self.is_rounding(point) and (is_first or size <= math.sqrt(self.eps) * scale)

    def is_rounding(self, point: Point) -> bool:
        """Whether the gradient is mere rounding, so that nothing can be gained."""
        return point.gradient_norm <= 8 * self.eps * point.euclidean_norm < math.inf

    def is_rounding_of_x(self, point: Point, curvature: float) -> bool:
        """Whether rounding of X explains the gradient, by a curvature that was just measured."""
        return self.gtol > 0 and point.gradient_norm <= 8 * self.eps * curvature * self.length

    def may_be_stationary(self, point: Point) -> bool:
        """Whether it is worth an evaluation to learn the curvature at the first point."""
        size = point.gradient_norm
        return 8 * self.eps * point.euclidean_norm < size <= self.gtol * point.euclidean_norm

    def rounding(self, value: float, roundings: float) -> float:
        """The size up to which differences of f mean nothing."""
        return max(roundings * max(abs(value), self.magnitude), self.noise)
