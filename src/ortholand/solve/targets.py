"""When a gradient counts as zero, and a difference of f as rounding."""

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ortholand.solve.arrays import norm, precision
from ortholand.solve.manifold_cost import Point

RECENT = 3  # how many curvatures are remembered
WARM = 0.01  # of the usual gradient: a start with less than this is near a solution
SHARE = 0.3  # of the usual gradient, which then counts as the first one


class Limits(NamedTuple):
    """When to stop, in the user's unit."""

    gtol: float | None
    maxiter: float
    atol: float = 0.0
    maxtime: float = math.inf
    noise: float = 0.0


class Targets:
    """The gradient norm at which a run ends, and the rounding of f.

    ``gtol`` is relative to the first Riemannian gradient, unless the start makes that much larger
    (near a pole) or smaller (at a solution) than is usual here. The usual size is judged by two
    measures that are hardly ever both misleading: the Euclidean gradient, whose normal part depends
    on how f continues off the manifold; and the curvature along the last steps times ``||X||``,
    which kinks and noise make large.
    """

    def __init__(self, limits: Limits, point: Point, unit: float) -> None:
        self.eps = precision(point.X)
        self.gtol = math.sqrt(self.eps) if limits.gtol is None else limits.gtol
        self.atol, self.noise = limits.atol / unit, limits.noise / unit
        self.first = point.gradient_norm
        self.length = norm(point.X) or 1.0
        self.magnitude = max(abs(point.value), point.euclidean_norm * self.length)
        self.deadline = math.inf  # of time.perf_counter()
        self.curvatures: deque[float] = deque(maxlen=RECENT)
        self.seen = 0  # curvatures so far
        self.curved = 0.0  # a gradient's norm that the curvature along the last steps explains

    def saw(self, curvature: float, point: Point) -> None:
        """Note how much the gradient changes per step, unless that may be rounding."""
        clear = point.gradient_norm > 1e3 * self.eps * point.euclidean_norm
        if clear and 0 < curvature < math.inf:
            self.curvatures.append(curvature)
            self.seen += 1
            self.curved = max(self.curvatures) * self.length

    def remember(self, seen: int, curvatures: Iterable[float]) -> None:
        """Take over the curvatures that compiled code has seen."""
        self.seen = seen
        self.curvatures.extend(curvature for curvature in curvatures if curvature > 0)
        self.curved = max(self.curvatures, default=0.0) * self.length

    def goal(self, point: Point) -> float:
        """The gradient norm to reach."""
        return max(self.gtol * self._scale(point), self.atol)

    def _scale(self, point: Point) -> float:
        here, curved = point.euclidean_norm, self.curved
        # Steps away from a pole are still curved by it: the first ones do not count.
        usual = max(here, curved) if self.seen > RECENT else here
        less = min(here, curved)
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
