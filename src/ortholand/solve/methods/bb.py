"""Barzilai-Borwein steps: gradient descent with steps from the curvature along the last one."""

import math
from typing import Any, ClassVar

from ortholand.solve.arrays import inner
from ortholand.solve.curvature import BlockUnits, units_for
from ortholand.solve.line_search import DECREASE, Merit, Search, Trial
from ortholand.solve.manifold_cost import ManifoldCost, Point, Preconditioner, Targets
from ortholand.solve.method import Method, Progress
from ortholand.solve.options import Rule, is_function_or_none

FORGETTING = 0.85  # the safeguard looks back on about 1 / (1 - this) merits
RANGE = 1e10  # how many times as long as a cautious step one may be
MOST_REJECTED = 100  # steps that may be shortened without any progress in between


class BarzilaiBorwein(Method):
    """The two Barzilai-Borwein steps in turn, with Zhang and Hager's non-monotone safeguard.

    The step that fits a quadratic may go uphill for a while; it is shortened only if the merit
    rises above a running mean of the past. In a product each block has its own unit, unless the
    user gives a preconditioner, which takes the place of units.
    """

    name = "bb"
    patience: float = 300
    rules: ClassVar[dict[str, Rule]] = {
        "preconditioner": ("a function (X, V) -> V, or None", is_function_or_none)
    }

    def __init__(
        self, lam: float | None = None, preconditioner: Preconditioner | None = None
    ) -> None:
        self.merit, self.preconditioner = Merit(lam), preconditioner
        self.units: BlockUnits | None = None
        self.rejected = 0  # steps shortened since the last progress
        self.lowest = self.flattest = math.inf  # merit and gradient norm that count as progress
        self.restart()

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        self.cost, self.targets = cost, targets
        self.merit.start(cost)
        if self.preconditioner is None:
            self.units = units_for(cost.geometry, point.gradient)

    def restart(self) -> bool:
        forgot = getattr(self, "step", None) is not None
        self.step: float | None = None
        self.weight, self.reference = 0.0, 0.0
        self.count = 0
        return forgot

    def advance(self, point: Point, progress: Progress) -> Point | None:  # noqa: ARG002
        lam = self.merit.weight(point)
        self.weight = FORGETTING * self.weight + 1  # a running mean of merits
        self.reference += (point.merit(lam) - self.reference) / self.weight
        direction, slope = self._direction(point)
        search = Search(self.cost, self.targets, point, direction, slope, lam, 0.9)
        cautious = self.cost.cautious_step(point, point.gradient_norm)
        t = cautious if self.step is None else self.step
        # Where differences of f are rounding, the step that fits a quadratic is as good as any.
        blur = self.targets.rounding(point.value, 10 * self.targets.eps)
        for _ in range(40):
            trial = search.attempt(t)
            if self._accepts(search, trial, blur if search.trials == 1 and self.step else 0.0):
                self.merit.judge(search)
                self.step = self._next_step(search, trial)
                return trial.point if self._gets_on(trial.point, lam, blur) else None
            self.rejected += 1
            t = trial.t * (0.25 if trial.point.finite else 0.1)
        self.merit.judge(search)
        return None

    def _gets_on(self, point: Point, lam: float, blur: float) -> bool:
        """Whether there was progress beyond rounding, or not too much was tried in vain.

        If jac is wrong, steps are shortened until f changes by rounding, which may be downward.
        """
        merit, size = point.merit(lam), point.gradient_norm
        if merit < self.lowest - blur or size < 0.999 * self.flattest:
            self.lowest, self.flattest = min(merit, self.lowest), min(size, self.flattest)
            self.rejected = 0
        return self.rejected <= MOST_REJECTED

    def _accepts(self, search: Search, trial: Trial, blur: float) -> bool:
        if not trial.point.finite:
            return False
        allowed = self.reference + DECREASE * trial.t * search.slope + blur
        return trial.point.merit(search.lam) <= allowed or search.is_lower(trial)

    def _direction(self, point: Point) -> tuple[Any, float]:
        """The negative gradient, preconditioned or in the blocks' units; and its slope."""
        if self.units is None and self.preconditioner is None:
            return -point.gradient, -point.gradient_norm * point.gradient_norm
        direction = -self._scaled(point, point.gradient)
        return direction, inner(direction, point.gradient)

    def _scaled(self, point: Point, vector: Any) -> Any:
        if self.preconditioner is not None:
            return self.cost.precondition(self.preconditioner, point, vector)
        return vector if self.units is None else self.units.scaled(vector)

    def _next_step(self, search: Search, trial: Trial) -> float:
        """``<s, s> / <s, y>`` and ``<s, y> / <y, y>`` in turn; longer where f is not convex."""
        self.count += 1
        before = -search.slope
        # y = g' - g and s = -t g: products with s follow from <g, g'>, which is the slope.
        sy = trial.t * (before + trial.slope)
        yy, scaled = self._change(search, trial)
        if sy <= 0 or yy <= 0 or trial.point.gradient_norm == 0:
            return 4 * trial.t
        self.targets.saw(yy / sy, search.start)
        step = trial.t * trial.t * before / sy if self.count % 2 else sy / scaled
        # There is no lower limit, because a cautious step is longer for a smaller gradient.
        size = trial.point.gradient_norm
        return min(step, RANGE * self.cost.cautious_step(trial.point, size))

    def _change(self, search: Search, trial: Trial) -> tuple[float, float]:
        """``<y, y>``, and the same of scaled y; units learn from it."""
        if self.units is None and self.preconditioner is None:
            size = trial.point.gradient_norm
            yy = size * size + 2 * trial.slope - search.slope
            return yy, yy
        y = trial.point.gradient - search.start.gradient
        if self.preconditioner is not None:
            y = self.cost.geometry.tangent(trial.point.X, y)
        scaled = inner(y, self._scaled(trial.point, y))
        if self.units is not None:
            self.units.learn(trial.t * search.direction, y)
        return inner(y, y), scaled
