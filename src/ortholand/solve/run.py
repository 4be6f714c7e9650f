"""How a run goes: its points, its history, and what counts as success."""

import time
from typing import Any

import numpy as np

from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.options import Limits

RECORDED = ("fun", "grad_norm", "distance", "nfev", "njev", "nhev", "time")


class Run:
    """Where a run of a method is, and how it went.

    Attributes:
        method: the name of the method, or of those used so far.
        point: where it is.
        best: the point with the lowest f, as far as it is known.
        first: where it began.
        flattest: smallest norm of the gradient.
        in_vain: iterations since f or the gradient last reached a new low.
        last: what was recorded last.
        fault: what is to blame for the end, in words, if that is known.
    """

    def __init__(self, cost: ManifoldCost, limits: Limits) -> None:
        self.cost, self.limits, self.method, self.fault = cost, limits, "", ""
        self.began = time.perf_counter()
        self.rows: list[Any] = []  # blocks of what was recorded at each iteration

    def begin(self, point: Point) -> None:
        """Begin at a point, which has been evaluated in the meantime."""
        self.point = self.best = self.first = point
        self.flattest, self.in_vain, self.nit = point.gradient_norm, 0, 0
        self.targets = Targets(self.limits, point, self.cost.objective.scale)
        self.targets.deadline = self.began + self.limits.maxtime

    def record(self, method: str) -> None:
        """Add where it is to the history, in the user's unit of f."""
        self.method = method
        objective, point, unit = self.cost.objective, self.point, self.cost.objective.scale
        self.last = (
            point.value * unit,
            point.gradient_norm * unit,
            point.distance,
            objective.nfev,
            objective.njev,
            objective.nhev,
            time.perf_counter() - self.began,
        )
        self.rows.append([self.last])

    def history(self) -> dict[str, np.ndarray]:
        """What was recorded, one array for each of RECORDED."""
        fun, size, distance, *counts, seconds = np.concatenate(self.rows).T.copy()
        columns = (fun, size, distance, *(count.astype(int) for count in counts), seconds)
        return dict(zip(RECORDED, columns, strict=True))

    def arrive(self, point: Point) -> Point:
        """Count an iteration; look whether f or the gradient has reached a new low."""
        self.nit += 1
        lower = point.value - point.correction < self.best.value - self.best.correction
        self.best = point if lower else self.best
        flatter = point.gradient_norm < self.flattest
        self.flattest = min(self.flattest, point.gradient_norm)
        self.in_vain = 0 if lower or flatter else self.in_vain + 1
        return point

    def succeeded(self, point: Point) -> bool:
        """Whether a point is finite, on the manifold and stationary: nothing less is success."""
        on_manifold = point.distance <= self.cost.geometry.feasible(point.X)
        return point.finite and on_manifold and self.targets.is_stationary(point, self.nit == 0)

    def reached(self, point: Point) -> str:
        """What was reached and asked for, in words."""
        unit = self.cost.objective.scale
        return (
            f"the Riemannian gradient's norm is {point.gradient_norm * unit:.1e}, "
            f"asked for {self.targets.goal(point) * unit:.1e}"
        )
