"""The loop that drives every method: stopping, counting, history, callback, and the last word.

Success is claimed at one place only, for a point that is on the manifold to rounding and whose
gradient was evaluated there.
"""

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from ortholand.solve.methods import Method
from ortholand.solve.points import Point, Terrain, feasible, norm


class Status(IntEnum):
    """Why a solver stopped."""

    CONVERGED = 0
    MAXITER = 1
    CALLBACK = 2
    STALLED = 3
    NON_FINITE = 4
    MAXTIME = 5


@dataclass(frozen=True)
class Limits:
    """When to stop."""

    gtol: float | None
    atol: float
    maxiter: float
    maxtime: float


@dataclass
class Run:
    """A run of a method: where it is, how it went, why it ended."""

    terrain: Terrain
    method: Method
    limits: Limits
    report: Callable[["Run"], bool]
    nit: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    def from_point(self, point: Point) -> Status:
        """Follow the method until there is a reason to stop."""
        self.point = self.best = self.first = point
        self.flattest, self.in_vain = point.gradient_norm, 0
        if not point.finite:
            self._record()
            return Status.NON_FINITE
        atol = self.limits.atol / self.terrain.objective.scale
        gtol = self.limits.gtol
        if gtol is None:
            gtol = torch.finfo(point.X.dtype).eps ** 0.5
        self.terrain.goal = max(gtol * point.gradient_norm, atol)
        self.terrain.magnitude = max(abs(point.value), norm(point.euclidean) * norm(point.X))
        self.method.start(self.terrain, point)
        while True:
            self._record()
            status = self._reason_to_stop()
            if status is not None:
                return status
            if not self._advance():
                return Status.NON_FINITE if self.terrain.saw_non_finite else Status.STALLED

    def _reason_to_stop(self) -> Status | None:
        stopped = self.nit > 0 and self.report(self)
        if self.is_stationary(self.point) and self._settled():
            return Status.CONVERGED
        if stopped:
            return Status.CALLBACK
        if self.in_vain > self.method.patience or self.is_rounding(self.point):
            return Status.STALLED
        if self.nit >= self.limits.maxiter:
            return Status.MAXITER
        if time.perf_counter() - self.began > self.limits.maxtime:
            return Status.MAXTIME
        return None

    def _advance(self) -> bool:
        """Go on; if the method is stuck, from the manifold and without its memory, once."""
        after = self.method.advance(self.point)
        if after is None:
            forgot = self.method.restart()
            if not forgot and self.point.distance <= feasible(self.point.X):
                return False
            settled = self.terrain.at(self.terrain.settle(self.point.X))
            if not settled.finite:
                return False
            self.point = settled
            after = self.method.advance(settled)
        if after is None:
            return False
        self.nit += 1
        self.point = after
        self.terrain.saw_non_finite = False
        self._look_for_progress(after)
        return True

    def _look_for_progress(self, point: Point) -> None:
        """Count the steps since f or the gradient was last lower than ever: some may pass."""
        lower = point.value - point.correction < self.best.value - self.best.correction
        self.best = point if lower else self.best
        flatter = point.gradient_norm < self.flattest
        self.flattest = min(self.flattest, point.gradient_norm)
        self.in_vain = 0 if lower or flatter else self.in_vain + 1

    def is_stationary(self, point: Point) -> bool:
        """Whether the gradient has fallen enough, or is rounding beside the Euclidean one."""
        if point.gradient_norm <= self.terrain.goal:
            return True
        # A Euclidean gradient that is almost all normal could hide much in its rounding.
        little = torch.finfo(point.X.dtype).eps ** 0.5 * self.first.gradient_norm
        return self.is_rounding(point) and (self.nit == 0 or point.gradient_norm <= little)

    def is_rounding(self, point: Point) -> bool:
        """Whether nothing is left of the gradient but rounding: there is nothing to gain."""
        eps = torch.finfo(point.X.dtype).eps
        return point.gradient_norm <= 8 * eps * norm(point.euclidean) < math.inf

    def _settled(self) -> bool:
        """Whether the point is stationary also where it lands; then it is moved there."""
        if self.point.distance > feasible(self.point.X) / 2:
            self.point = self.terrain.at(self.terrain.settle(self.point.X))
        return self.succeeded(self.point)

    def succeeded(self, point: Point) -> bool:
        """On the manifold, stationary, finite: nothing less is success."""
        on_manifold = point.distance <= feasible(point.X)
        return point.finite and on_manifold and self.is_stationary(point)

    def _record(self) -> None:
        objective, point = self.terrain.objective, self.point
        now = {
            "fun": point.value * objective.scale,
            "grad_norm": point.gradient_norm * objective.scale,
            "distance": point.distance,
            "nfev": objective.nfev,
            "njev": objective.njev,
            "nhev": objective.nhev,
            "time": time.perf_counter() - self.began,
        }
        for name, value in now.items():
            self.history.setdefault(name, []).append(value)


def reporter(callback: Callable[..., Any] | None, intermediate: Callable[[Run], Any]) -> Callable:
    """Call the user's callback as SciPy does: stop if it returns True or raises StopIteration."""
    if callback is None:
        return lambda _: False
    by_name = _wants_result(callback)

    def report(run: Run) -> bool:
        result = intermediate(run)
        try:
            answer = callback(intermediate_result=result) if by_name else callback(result.x)
        except StopIteration:
            return True
        return _is_true(answer)

    return report


def _is_true(answer: Any) -> bool:
    """True of Python, NumPy or torch; not a number or a matrix that happens to be returned."""
    if isinstance(answer, torch.Tensor):
        return answer.dtype == torch.bool and answer.numel() == 1 and bool(answer)
    return isinstance(answer, (bool, np.bool_)) and bool(answer)


def _wants_result(callback: Callable[..., Any]) -> bool:
    try:
        return set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except (TypeError, ValueError):  # a builtin without a signature
        return False
