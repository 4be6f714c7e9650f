"""What methods with a line search share: gradient descent, CG and L-BFGS differ in directions."""

import math
from typing import ClassVar

from torch import Tensor

from ortholand.solve.line_search import Merit, Search, Trial
from ortholand.solve.points import Point, Terrain, inner, norm


class Descent:
    """Directions by a subclass, line search on the merit function.

    ``flatness`` says how exact the line search is.
    """

    flatness: ClassVar[float] = 0.9
    patience: ClassVar[float] = 100

    def __init__(self, lam: float | None = None) -> None:
        self.merit = Merit(lam)
        self.last: Trial | None = None

    def start(self, terrain: Terrain, point: Point) -> None:  # noqa: ARG002
        """Remember where."""
        self.terrain = terrain
        self.merit.start(terrain)

    def advance(self, point: Point) -> Point | None:
        """One direction, one line search."""
        direction = self.direction(point)
        slope = inner(point.gradient, direction)
        if not slope < -1e-10 * point.gradient_norm * norm(direction):
            if not self.restart():
                return None
            direction, slope = -point.gradient, -point.gradient_norm * point.gradient_norm
        search = Search(
            self.terrain, point, direction, slope, self.merit.weight(point), self.flatness
        )
        self.last = search.run(self.first_step(point, slope, direction))
        self.merit.judge(search)
        if self.last is None:
            return None
        self.remember(point, direction, self.last)
        return self.last.point

    def direction(self, point: Point) -> Tensor:
        """Coordinates of a tangent vector at the point."""
        raise NotImplementedError

    def first_step(self, point: Point, slope: float, direction: Tensor) -> float:
        """Where the line search starts."""
        raise NotImplementedError

    def remember(self, point: Point, direction: Tensor, trial: Trial) -> None:
        """Learn from a step."""

    def restart(self) -> bool:
        """Forget the past."""
        forgot, self.last = self.last is not None, None
        return forgot


def cautious_step(point: Point, length: float) -> float:
    """A first step along a direction of this length, f unknown: a tenth of a radian per column."""
    return 0.1 * math.sqrt(point.X.shape[-1]) / length
