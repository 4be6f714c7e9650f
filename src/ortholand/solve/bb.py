"""Barzilai-Borwein steps: gradient descent whose step remembers the last one's curvature."""

from typing import ClassVar

from torch import Tensor

from ortholand.solve.descent import cautious_step
from ortholand.solve.line_search import DECREASE, Merit, Search, Trial
from ortholand.solve.points import Point, Terrain, inner

FORGETTING = 0.85  # how many past merits the safeguard looks back on: about 1 / (1 - this)
RANGE = 1e10  # how much longer or shorter than a cautious step one may be


class BarzilaiBorwein:
    """The two Barzilai-Borwein steps in turn, with Zhang and Hager's non-monotone safeguard.

    The step that fits a quadratic may go uphill for a while; it is shortened only if the merit
    rises above a running mean of the past.
    """

    patience: ClassVar[float] = 300

    def __init__(self, lam: float | None = None) -> None:
        self.merit = Merit(lam)
        self.restart()

    def start(self, terrain: Terrain, point: Point) -> None:  # noqa: ARG002
        """Remember where."""
        self.terrain = terrain
        self.merit.start(terrain)

    def restart(self) -> bool:
        """Forget steps and merits."""
        forgot = getattr(self, "step", None) is not None
        self.step: float | None = None
        self.weight, self.reference = 0.0, 0.0
        self.count = 0
        return forgot

    def advance(self, point: Point) -> Point | None:
        """One step down the gradient, shortened as long as the safeguard wants."""
        lam = self.merit.weight(point)
        self._look_back(point.merit(lam))
        direction = -point.gradient
        search = Search(
            self.terrain, point, direction, -point.gradient_norm * point.gradient_norm, lam, 0.9
        )
        t = cautious_step(point, point.gradient_norm) if self.step is None else self.step
        for _ in range(40):
            trial = search.attempt(t)
            if self._accepts(search, trial):
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

    def _accepts(self, search: Search, trial: Trial) -> bool:
        if not trial.point.finite:
            return False
        allowed = self.reference + DECREASE * trial.t * search.slope
        return trial.point.merit(search.lam) <= allowed or search.is_lower(trial)

    def _next_step(self, point: Point, trial: Trial) -> float:
        """``<s, s> / <s, y>`` and ``<s, y> / <y, y>`` in turn; longer where f is not convex."""
        self.count += 1
        y: Tensor = trial.point.gradient - point.gradient
        sy, yy = -trial.t * inner(point.gradient, y), inner(y, y)
        if sy <= 0 or yy == 0 or trial.point.gradient_norm == 0:
            return 4 * trial.t
        ss = trial.t * trial.t * point.gradient_norm * point.gradient_norm
        step = ss / sy if self.count % 2 else sy / yy
        cautious = cautious_step(trial.point, trial.point.gradient_norm)
        return min(max(step, cautious / RANGE), cautious * RANGE)
