"""The loop that drives every method: stopping, counting, history, callback.

Success is claimed in one place only, for a point that is on the manifold up to rounding and whose
gradient was evaluated there.
"""

import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from ortholand.solve.arrays import norm, precision
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.method import Method, RunAhead
from ortholand.solve.small import Progress
from ortholand.solve.targets import Limits, Targets


class Status(IntEnum):
    """Why a solver stopped."""

    CONVERGED = 0
    MAXITER = 1
    CALLBACK = 2
    STALLED = 3
    NON_FINITE = 4
    MAXTIME = 5


LOOKS = (10, 30, 100)  # iterations in vain after which to ask whether digits have run out
RECORDED = ("fun", "grad_norm", "distance", "nfev", "njev", "nhev", "time")


class History(Mapping[str, np.ndarray]):
    """What was recorded at each iteration, one array for each of RECORDED.

    Rows are kept as they come, single ones and blocks of them from compiled code, and put together
    when the history is first read: for a small problem that takes as long as three evaluations.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[Any, Sequence[float], Sequence[float]]] = []
        self._single: list[Sequence[float]] = []
        self._columns: dict[str, np.ndarray] | None = None

    def add(self, row: Sequence[float]) -> None:
        """Add an iteration."""
        self._single.append(row)
        self._columns = None

    def add_block(
        self, rows: np.ndarray, factors: Sequence[float], shifts: Sequence[float]
    ) -> None:
        """Add the iterations ``rows * factors + shifts``."""
        if len(rows):
            self._close()
            self._blocks.append((rows, factors, shifts))
            self._columns = None

    def _close(self) -> None:
        if self._single:
            self._blocks.append((self._single, (1.0,), (0.0,)))
            self._single = []

    def _read(self) -> dict[str, np.ndarray]:
        if self._columns is None:
            self._close()
            blocks = [np.array(rows) * factors + shifts for rows, factors, shifts in self._blocks]
            fun, size, distance, *counts, seconds = np.concatenate(blocks).T.copy()
            whole = [count.astype(int) for count in counts]
            columns = (fun, size, distance, *whole, seconds)
            self._columns = dict(zip(RECORDED, columns, strict=True))
        return self._columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(RECORDED)

    def __len__(self) -> int:
        return len(RECORDED)

    def __repr__(self) -> str:
        return repr(self._read())


class Run:
    """A run of a method: where it is, how it went, why it ended."""

    def __init__(
        self,
        cost: ManifoldCost,
        method: Method,
        limits: Limits,
        report: Callable[["Run"], bool] | None,
    ) -> None:
        self.cost, self.method, self.limits, self.report = cost, method, limits, report
        self.nit = 0
        self.history = History()
        self.began = time.perf_counter()

    def from_point(self, point: Point) -> Status:
        """Follow the method until there is a reason to stop."""
        self.point = self.best = self.first = point
        self.flattest, self.in_vain = point.gradient_norm, 0
        self.targets = Targets(self.limits, point, self.cost.objective.scale)
        self.targets.deadline = self.began + self.limits.maxtime
        if not point.finite:
            self._record()
            return Status.NON_FINITE
        self.cost.geometry.check_first(point.X, point.euclidean)
        if self.targets.may_be_stationary(point):
            self.targets.saw(self._curvature(point), point)
            self.cost.saw_non_finite = False
        self.method.start(self.cost, point, self.targets)
        while True:
            self._record()
            status = self._reason_to_stop()
            if status is None and not self._advance():
                status = Status.NON_FINITE if self.cost.saw_non_finite else Status.STALLED
            if status is Status.STALLED and self._is_rounding_of_x():
                return Status.CONVERGED
            if status is not None:
                return status

    def _curvature(self, point: Point) -> float:
        """Curvature by two power iterations from the gradient, to tell whether that is small."""
        length = precision(point.X) ** (1 / 3) * self.targets.length
        direction, curvature = point.gradient, 0.0
        for _ in range(2):
            size = norm(direction)
            if not 0 < size < math.inf:
                break
            direction = self.cost.gradient_change(point, direction, length / size)
            curvature = max(curvature, norm(direction) / length)
        return curvature

    def _is_rounding_of_x(self) -> bool:
        """Whether nothing lower can be found because X has no more digits."""
        point = self.cost.on_manifold(self.point)
        if not (point.finite and point.gradient_norm > 0):
            return False
        if not self.targets.is_rounding_of_x(point, self._curvature(point)):
            return False
        self.point = point
        return point.distance <= self.cost.geometry.feasible(point.X)

    def _reason_to_stop(self) -> Status | None:
        point, targets = self.point, self.targets
        stopped = self.nit > 0 and self.report is not None and self.report(self)
        if targets.is_stationary(point, self.nit == 0) and self._settled():
            return Status.CONVERGED
        if stopped:
            return Status.CALLBACK
        if targets.is_rounding(point):
            return Status.STALLED
        if self.in_vain and self.in_vain > self.method.patience:
            return Status.STALLED
        if self.in_vain in LOOKS and self._is_rounding_of_x():
            return Status.CONVERGED
        if self.nit >= self.limits.maxiter:
            return Status.MAXITER
        if self.last[-1] > self.limits.maxtime:
            return Status.MAXTIME
        return None

    def _advance(self) -> bool:
        """Advance; if the method is stuck, once more from the manifold and without its memory."""
        after = self._next(self.point)
        if after is None:
            forgot = self.method.restart()
            if not forgot and self.point.distance <= self.cost.geometry.feasible(self.point.X):
                return False
            settled = self.cost.settled(self.point)
            if not settled.finite:
                return False
            self.point = settled
            after = self._next(settled)
        if after is None:
            return False
        self.point = after
        self.cost.saw_non_finite = False
        return True

    def _next(self, point: Point) -> Point | None:
        """One iteration, or several if the method can make them and no callback needs each."""
        run_ahead = self.method.ahead(point)
        if run_ahead is not None:
            return self._next_but_several(point, run_ahead)
        after = self.method.advance(point)
        if after is not None:
            self.nit += 1
            self._look_for_progress(after)
        return after

    def _next_but_several(self, point: Point, run_ahead: RunAhead) -> Point | None:
        objective, unit = self.cost.objective, self.cost.objective.scale
        nfev, njev = objective.nfev, objective.njev
        left = min(self.limits.maxiter - self.nit, sys.maxsize) if self.report is None else 1
        lowest = self.best.value - self.best.correction
        patience = self.method.patience
        progress = Progress(lowest, self.flattest, self.in_vain, patience, int(left))
        passed = run_ahead(point, progress)
        if passed is None:
            return None
        self.nit += len(passed.rows)
        self.best = passed.best or self.best
        self.flattest, self.in_vain = passed.flattest, passed.in_vain
        # In the user's unit, and from where this run's counters and clock began.
        factors, shifts = (unit, unit, *[1] * 5), (0, 0, 0, nfev, njev, objective.nhev, -self.began)
        self.history.add_block(passed.rows[:-1], factors, shifts)
        return passed.point

    def _look_for_progress(self, point: Point) -> None:
        """Count the steps since f or the gradient last reached a new low."""
        lower = point.value - point.correction < self.best.value - self.best.correction
        self.best = point if lower else self.best
        flatter = point.gradient_norm < self.flattest
        self.flattest = min(self.flattest, point.gradient_norm)
        self.in_vain = 0 if lower or flatter else self.in_vain + 1

    def _settled(self) -> bool:
        """Land the point, and say whether it is stationary there too."""
        self.cost.measure(self.point)
        if self.point.distance > self.cost.geometry.feasible(self.point.X) / 2:
            self.point = self.cost.settled(self.point)
        return self.succeeded(self.point)

    def succeeded(self, point: Point) -> bool:
        """Whether a point is finite, on the manifold and stationary: nothing less is success."""
        on_manifold = point.distance <= self.cost.geometry.feasible(point.X)
        return point.finite and on_manifold and self.targets.is_stationary(point, self.nit == 0)

    def _record(self) -> None:
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
        self.history.add(self.last)


def reporter(
    callback: Callable[..., Any] | None, intermediate: Callable[[Run], Any], display: bool = False
) -> Callable[[Run], bool] | None:
    """Call the user's callback as SciPy does: stop if it returns True or raises StopIteration."""
    if callback is None:
        return _display if display else None
    by_name = _wants_result(callback)

    def report(run: Run) -> bool:
        if display:
            _display(run)
        result = intermediate(run)
        try:
            answer = callback(intermediate_result=result) if by_name else callback(result.x)
        except StopIteration:
            return True
        return _is_true(answer)

    return report


def _display(run: Run) -> bool:
    """Print a line after iterations 1, 2, 4, 8, ..."""
    if run.nit & (run.nit - 1) == 0:
        fun, size, distance, *_, seconds = run.last
        print(  # asked for by disp
            f"{run.nit:7d}  f = {fun:.10g}  gradient {size:.2e}  distance {distance:.0e}  "
            f"{seconds:.2f} s"
        )
    return False


def _is_true(answer: Any) -> bool:
    """Whether an answer is True in Python, NumPy or torch, not a number or matrix."""
    if isinstance(answer, torch.Tensor):
        return answer.dtype == torch.bool and answer.numel() == 1 and bool(answer)
    return isinstance(answer, (bool, np.bool_)) and bool(answer)


def _wants_result(callback: Callable[..., Any]) -> bool:
    try:
        return set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except (TypeError, ValueError):  # a builtin without a signature
        return False
