"""What methods with a line search share: gradient descent, CG and L-BFGS differ in directions."""

import math
from typing import ClassVar

from torch import Tensor

from ortholand.solve.line_search import Search, Trial
from ortholand.solve.points import Point, Terrain, inner, norm


class Descent:
    """Directions by a subclass, line search on the merit function.

    Attributes:
        lam: weight of N in the merit function; None: twice the multiplier's norm, which outweighs
            the terms of second order.
        flatness: how exact the line search is.
    """

    flatness: ClassVar[float] = 0.9
    patience: ClassVar[float] = 100

    def __init__(self, lam: float | None = None) -> None:
        self.lam = lam
        self.last: Trial | None = None

    def start(self, terrain: Terrain, point: Point) -> None:  # noqa: ARG002
        """Remember where."""
        self.terrain = terrain
        self.lam = in_our_unit(self.lam, terrain)

    def advance(self, point: Point) -> Point | None:
        """One direction, one line search."""
        direction = self.direction(point)
        slope = inner(point.gradient, direction)
        if not slope < -1e-10 * point.gradient_norm * norm(direction):
            if not self.restart():
                return None
            direction, slope = -point.gradient, -point.gradient_norm * point.gradient_norm
        search = Search(
            self.terrain, point, direction, slope, merit_weight(self.lam, point), self.flatness
        )
        self.last = search.run(self.first_step(point, slope, direction))
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


def in_our_unit(lam: float | None, terrain: Terrain) -> float | None:
    """The user's lam, which is in the unit of f."""
    return None if lam is None else lam / terrain.objective.scale


def merit_weight(lam: float | None, point: Point) -> float:
    """The user's lam, or one that makes the merit function's minimum lie on the manifold."""
    return 2 * norm(point.multiplier) if lam is None else lam


def cautious_step(point: Point, direction: Tensor) -> float:
    """A first step without knowledge of f: a tenth of a turn of a typical column."""
    return 0.1 * math.sqrt(point.X.shape[-1]) / norm(direction)
