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
        broken: where it began, if f or its gradient is not finite there.
        first_value: f there.
        flattest: smallest norm of the gradient.
        in_vain: iterations since f or the gradient last reached a new low.
        last: what was recorded last.
        fault: what is to blame for the end, in words, if that is known.
    """

    def __init__(self, cost: ManifoldCost, limits: Limits) -> None:
        self.cost, self.limits, self.method, self.fault = cost, limits, "", ""
        self.min_curvature: float | None = None  # in the solver's unit
        self.began = time.perf_counter()
        self.rows: list[Any] = []  # blocks of what was recorded at each iteration

    def begin(self, point: Point) -> None:
        """Begin at a point, which has been evaluated in the meantime."""
        self.point = self.best = point
        self.broken = None if point.finite else point  # nothing else is kept of where it began
        self.first_value = point.value
        self.flattest, self.in_vain, self.nit = point.gradient_norm, 0, 0
        objective = self.cost.objective
        self.targets = Targets(self.limits, point, objective.scale, objective.eps)
        self.targets.deadline = self.began + self.limits.maxtime

    def again(self, limits: Limits) -> None:
        """Count from here."""
        self.limits, self.rows, self.nit, self.in_vain, self.fault = limits, [], 0, 0, ""
        self.began = time.perf_counter()
        self.targets.deadline = self.began + limits.maxtime
        objective = self.cost.objective
        objective.count_from_here()
        if objective.watch is not None:
            objective.watch.open(limits.maxfev)

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
        unit = self.cost.objective.scale
        return (
            f"the Riemannian gradient's norm is {point.gradient_norm * unit:.1e}, "
            f"asked for {self.targets.goal(point) * unit:.1e}"
        )
