"""What a method is to the loop that drives it, and what methods with a line search share."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

from ortholand.solve.arrays import inner, norm
from ortholand.solve.line_search import Merit, Search, Trial
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.options import Rule
from ortholand.solve.small import Passed, Progress
from ortholand.solve.targets import Targets

# Several iterations at once, where no callback needs each.
RunAhead = Callable[[Point, Progress], Passed | None]


class Method(Protocol):
    """How to go from one point to the next; one file per method."""

    @property
    def name(self) -> str:
        """The name given in the result."""
        ...

    @property
    def patience(self) -> float:
        """How many iterations without progress are usual for the method."""
        ...

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Get ready at the first point. Evaluations here are counted too."""
        ...

    def advance(self, point: Point) -> Point | None:
        """The next point; None if no better one was found."""
        ...

    def ahead(self, point: Point) -> RunAhead | None:
        """A function that makes several iterations at once; None if the method cannot."""
        ...

    def restart(self) -> bool:
        """Forget the past; False if there was nothing to forget."""
        ...


class StepByStep:
    """A method that makes one iteration at a time."""

    def ahead(self, point: Point) -> RunAhead | None:  # noqa: ARG002
        """None: this method cannot run ahead."""
        return None


class Step(NamedTuple):
    """A point and a direction from it."""

    point: Point
    direction: Any
    slope: float  # of f along it
    length: float


class Descent(StepByStep):
    """Directions from a subclass, and a line search on the merit function.

    ``flatness`` sets how exact the line search is.
    """

    flatness: ClassVar[float] = 0.9
    patience: float = 100
    rules: ClassVar[dict[str, Rule]] = {}

    def __init__(self, lam: float | None = None) -> None:
        self.merit = Merit(lam)
        self.last: Trial | None = None

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:  # noqa: ARG002
        """Keep the problem and its targets."""
        self.cost, self.targets = cost, targets
        self.merit.start(cost)

    def advance(self, point: Point) -> Point | None:
        """One direction, one line search."""
        direction = self.direction(point)
        slope, length = inner(point.gradient, direction), norm(direction)
        if not slope < -1e-10 * point.gradient_norm * length:
            if not self.restart():
                return None
            direction, length = -point.gradient, point.gradient_norm
            slope = -length * length
        lam = self.merit.weight(point)
        search = Search(self.cost, self.targets, point, direction, slope, lam, self.flatness)
        self.last = search.run(self.first_step(point, slope, length))
        self.merit.judge(search)
        if self.last is None:
            return None
        self.remember(Step(point, direction, slope, length), self.last)
        return self.last.point

    def direction(self, point: Point) -> Any:
        """Coordinates of a tangent vector at the point."""
        raise NotImplementedError

    def first_step(self, point: Point, slope: float, length: float) -> float:
        """Where the line search along a direction of this length starts."""
        raise NotImplementedError

    def remember(self, step: Step, trial: Trial) -> None:
        """Learn from a step."""

    def restart(self) -> bool:
        """Forget the past."""
        forgot, self.last = self.last is not None, None
        return forgot

    def cautious_step(self, point: Point, length: float) -> float:
        """A first step along a direction of this length, while f is unknown."""
        return cautious_step(self.cost, point, length)


def cautious_step(cost: ManifoldCost, point: Point, length: float) -> float:
    """The step by a fifth of a radian per column, along a direction of this length."""
    return 0.2 * math.sqrt(cost.columns(point)) / length
