"""Descent directions, and how far to go along one: Wolfe's conditions on the merit function.

A trial point is evaluated with its gradient, so slopes are known at every trial. Near a solution,
where differences of f are rounding, slopes decide alone (Hager and Zhang's approximate conditions),
which lets a method reach a gradient of 1e-10.
"""

import math
from typing import Any, ClassVar, NamedTuple

from ortholand.solve.arrays import inner, norm
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets

DECREASE = 1e-4  # c_1: share of the decrease that the first slope promises
FLATTENED = 0.9  # share of the first slope below which a step was not mere rounding
MAX_TRIALS = 25
MANY_TRIALS = 6
LAST = 10.0  # times the gradient norm to reach, from where the next point may be the last


class Trial(NamedTuple):
    """A point on the line, the step that led there, and the slope of f in the direction."""

    point: Point
    t: float
    slope: float


class Merit:
    """The weight of N in the merit function, large enough for its minimum to be on the manifold.

    Attributes:
        lam: the user's weight; None: twice the multiplier's norm, which outweighs the second-order
            terms of the constraint. Those of f are not known: if searches take long, the weight
            is raised, and trial points are landed more closely.
    """

    def __init__(self, lam: float | None) -> None:
        self.lam = lam
        self.caution = 1.0

    def start(self, cost: ManifoldCost) -> None:
        """Convert the user's lam to the solver's unit of f."""
        self.lam = None if self.lam is None else self.lam / cost.objective.scale

    def weight(self, point: Point) -> float:
        return self.caution * (2 * point.multiplier_norm if self.lam is None else self.lam)

    def judge(self, search: "Search") -> None:
        if search.trials > MANY_TRIALS and self.caution < 1e12:
            self.caution *= 10


class Search:
    """A line search from a point along a direction, given in coordinates.

    ``slope`` is that of f in it, negative; lam the weight of N in the merit function. ``flatness``
    is c_2, the largest share of the slope that may remain: a small one makes the search exact.
    """

    def __init__(
        self,
        cost: ManifoldCost,
        targets: Targets,
        start: Point,
        direction: Any,
        slope: float,
        lam: float,
        flatness: float,
    ) -> None:
        self.cost, self.targets, self.start = cost, targets, start
        self.direction, self.slope = direction, slope
        self.lam, self.flatness = lam, flatness
        self.line = cost.line(start, direction)
        self.merit = start.merit(lam)
        self.trials = 0
        # What may be the solution is landed up to rounding, to be evaluated only once.
        self.may_end = cost.lands_closely or start.gradient_norm <= LAST * targets.goal(start)

    def run(self, t: float) -> Trial | None:
        """The first trial that satisfies the conditions, else the lowest; None if none is lower."""
        low, high = Trial(self.start, 0.0, self.slope), None
        best: Trial | None = None
        for _ in range(MAX_TRIALS):
            trial = self.attempt(t)
            lower = self.is_lower(trial)
            if lower and abs(trial.slope) <= -self.flatness * self.slope:
                return trial
            if lower and (best is None or self._merit(trial) < self._merit(best)):
                best = trial
            if not lower or trial.slope > 0:
                high = trial
            elif trial.t < t:
                return trial  # as far as one can go
            else:
                low = trial
            t = _next(low, high)
            if high is not None and high.t - low.t <= 1e-12 * high.t:
                break
        return best

    def attempt(self, t: float) -> Trial:
        """Evaluate the point at t, so near the manifold that N does not blur the decrease."""
        self.trials += 1
        blur = math.sqrt(0.01 * t * abs(self.slope) / self.lam) if self.lam else math.inf
        near = 0.0 if self.may_end else blur
        point, t = self.cost.go(self.line, t, max(near, self.targets.eps))
        return Trial(point, t, inner(point.gradient, self.direction))

    def is_lower(self, trial: Trial) -> bool:
        """Whether there is sufficient decrease or, if rounding hides it, slopes that imply it."""
        if not trial.point.finite:
            return False
        change = self._merit(trial) - self.merit
        if change <= DECREASE * trial.t * self.slope:
            return True
        flattened = FLATTENED * self.slope <= trial.slope <= (2 * DECREASE - 1) * self.slope
        return flattened and change <= self.targets.rounding(
            self.start.value, self.targets.eps ** (2 / 3)
        )

    def _merit(self, trial: Trial) -> float:
        return trial.point.merit(self.lam)


def _next(low: Trial, high: Trial | None) -> float:
    """Where the slope would vanish if it were linear; within limits."""
    if high is None:
        return 4 * low.t
    width = high.t - low.t
    if not math.isfinite(high.slope) or not high.point.finite:
        return low.t + width / 10
    if high.slope <= 0:  # too high nevertheless: the slopes do not show where the valley is
        return low.t + width / 3
    share = low.slope / (low.slope - high.slope)
    return low.t + width * min(max(share, 0.05), 0.95)


class Descent:
    """Directions from a subclass, and a line search on the merit function; beside ``Method``.

    ``flatness`` sets how exact the line search is.
    """

    flatness: ClassVar[float] = 0.9

    def __init__(self, lam: float | None = None) -> None:
        self.merit = Merit(lam)
        self.last: Trial | None = None

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:  # noqa: ARG002
        self.cost, self.targets = cost, targets
        self.merit.start(cost)

    def advance(self, point: Point, progress: Any) -> Any:  # noqa: ARG002
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
        self.remember(search, self.last)
        return self.last.point

    def direction(self, point: Point) -> Any:
        raise NotImplementedError

    def first_step(self, point: Point, slope: float, length: float) -> float:
        """Where the line search along a direction of this length starts."""
        raise NotImplementedError

    def remember(self, search: Search, trial: Trial) -> None:
        raise NotImplementedError

    def restart(self) -> bool:
        forgot, self.last = self.last is not None, None
        return forgot
