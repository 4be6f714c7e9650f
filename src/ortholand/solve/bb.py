"""Barzilai-Borwein steps: gradient descent whose step remembers the last one's curvature."""

from typing import ClassVar

from ortholand.solve.line_search import DECREASE, Merit, Search, Trial
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.method import cautious_step
from ortholand.solve.options import Rule
from ortholand.solve.targets import Targets

FORGETTING = 0.85  # how many past merits the safeguard looks back on: about 1 / (1 - this)
RANGE = 1e10  # how much longer than a cautious step one may be


class BarzilaiBorwein:
    """The two Barzilai-Borwein steps in turn, with Zhang and Hager's non-monotone safeguard.

    The step that fits a quadratic may go uphill for a while; it is shortened only if the merit
    rises above a running mean of the past.
    """

    name = "bb"
    patience: float = 300
    rules: ClassVar[dict[str, Rule]] = {}

    def __init__(self, lam: float | None = None) -> None:
        self.merit = Merit(lam)
        self.restart()

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:  # noqa: ARG002
        """Remember where."""
        self.cost, self.targets = cost, targets
        self.merit.start(cost)

    def restart(self) -> bool:
        """Forget steps and merits."""
        forgot = getattr(self, "step", None) is not None
        self.step: float | None = None
        self.weight, self.reference = 0.0, 0.0
        self.count = 0
        return forgot

    def advance(self, point: Point) -> Point | None:
        """One step down the gradient, shortened as long as the safeguard wants."""
        lam, size = self.merit.weight(point), point.gradient_norm
        self._look_back(point.merit(lam))
        direction = -point.gradient
        search = Search(self.cost, self.targets, point, direction, -size * size, lam, 0.9)
        t = cautious_step(self.cost, point, size) if self.step is None else self.step
        # Where differences of f are rounding, the step that fits a quadratic is as good as any.
        blur = self.targets.rounding(point.value, 10 * self.targets.eps)
        for _ in range(40):
            trial = search.attempt(t)
            if self._accepts(search, trial, blur if search.trials == 1 and self.step else 0.0):
                self.merit.judge(search)
                self.step = self._next_step(point, trial)
                return trial.point
            t = trial.t * (0.25 if trial.point.finite else 0.1)
        self.merit.judge(search)
        return None

    def _look_back(self, merit: float) -> None:
        weight = FORGETTING * self.weight + 1
        self.reference += (merit - self.reference) / weight
        self.weight = weight

    def _accepts(self, search: Search, trial: Trial, blur: float) -> bool:
        if not trial.point.finite:
            return False
        allowed = self.reference + DECREASE * trial.t * search.slope + blur
        return trial.point.merit(search.lam) <= allowed or search.is_lower(trial)

    def _next_step(self, point: Point, trial: Trial) -> float:
        """``<s, s> / <s, y>`` and ``<s, y> / <y, y>`` in turn; longer where f is not convex."""
        self.count += 1
        after, before = trial.point, point.gradient_norm * point.gradient_norm
        # y = g' - g and s = -t g: all products follow from <g, g'>, which the slope is.
        sy = trial.t * (before + trial.slope)
        yy = after.gradient_norm * after.gradient_norm + 2 * trial.slope + before
        if sy <= 0 or yy <= 0 or after.gradient_norm == 0:
            return 4 * trial.t
        self.targets.saw(yy / sy, point)
        step = trial.t * trial.t * before / sy if self.count % 2 else sy / yy
        # No lower limit: the smaller the gradient, the shorter is 1 / curvature beside caution.
        return min(step, RANGE * cautious_step(self.cost, after, after.gradient_norm))
