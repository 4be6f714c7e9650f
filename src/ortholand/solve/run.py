"""How a run goes, what counts as success, and what a user gets: reports, and a result."""

import inspect
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.options import Limits, Status

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


if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


def best_on_manifold(run: Run, status: Status) -> Point:
    """The best point of a run, on the manifold, with everything evaluated there."""
    if status is Status.CONVERGED:
        return run.point
    if run.broken is not None:
        return _landed(run, run.broken)
    best = _settled(run, run.best)
    if run.point is run.best or status is Status.MAXFEV:
        return best
    last = _settled(run, run.point)
    if not last.finite:
        return best
    rounding = 1e3 * run.targets.eps * abs(best.value)
    if last.value < best.value - rounding:
        return last
    # Equally low: the flatter one.
    tied = last.value <= best.value + rounding
    return last if tied and last.gradient_norm <= best.gradient_norm else best


def _settled(run: Run, point: Point) -> Point:
    after = run.cost.on_manifold(point)
    # If fun has failed since, its earlier values count.
    return after if after.finite else _landed(run, point)


def _landed(run: Run, point: Point) -> Point:
    """The point moved to the manifold, without calling fun again."""
    X, D = run.cost.geometry.settle(point.X)
    return point.landed(X, D, run.cost.geometry.size(D))


def result_of(
    run: Run, point: Point, status: Status, advice: Mapping[Status, str] = {}
) -> "OptimizeResult":
    """All fields of the result; a caller may have its own messages, with a place for the rest."""
    objective = run.cost.objective
    if status is Status.STALLED and not run.fault and run.succeeded(point):
        status = Status.CONVERGED
    distance, allowed = objective.variables.missed_by(
        point.X, point.distance, run.cost.geometry.feasible(point.X)
    )
    if status is Status.CONVERGED and not distance <= allowed:
        status = Status.STALLED
    from scipy.optimize import OptimizeResult  # here: importing ortholand must stay cheap

    return OptimizeResult(
        x=objective.variables.owned(point.X),
        fun=point.value * objective.scale,
        jac=objective.variables.owned(point.euclidean * objective.scale, gradient=True),
        grad_norm=point.gradient_norm * objective.scale,
        distance=distance,
        nit=run.nit,
        nfev=objective.nfev,
        njev=objective.njev,
        nhev=objective.nhev,
        success=status is Status.CONVERGED,
        status=int(status),
        method=run.method,
        message=_message(run, point, status, advice) + _remark(objective),
        min_curvature=None if run.min_curvature is None else run.min_curvature * objective.scale,
        history=run.history(),
    )


def intermediate_result(run: Run) -> "OptimizeResult":
    from scipy.optimize import OptimizeResult  # here: importing ortholand must stay cheap

    point, objective = run.point, run.cost.objective
    return OptimizeResult(
        x=objective.variables.owned(point.X),  # a copy, which the callback may change
        fun=point.value * objective.scale,
        grad_norm=point.gradient_norm * objective.scale,
        distance=point.distance,
        nit=run.nit,
        method=run.method,
    )


def reporter(
    callback: Callable[..., Any] | None, display: bool = False
) -> Callable[[Run], bool] | None:
    """Call the user's callback as SciPy does: stop if it returns True or raises StopIteration."""
    if callback is None:
        return _display if display else None
    if not callable(callback):
        raise TypeError(f"callback must be a function or None, got {callback!r}.")
    try:
        by_name = set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except (TypeError, ValueError):  # a builtin without a signature
        by_name = False

    def report(run: Run) -> bool:
        if display:
            _display(run)
        result = intermediate_result(run)
        try:
            answer = callback(intermediate_result=result) if by_name else callback(result.x)
        except StopIteration:
            return True
        # True in Python, NumPy or torch, and not a number or a matrix.
        if isinstance(answer, torch.Tensor):
            return answer.dtype == torch.bool and answer.numel() == 1 and bool(answer)
        return isinstance(answer, (bool, np.bool_)) and bool(answer)

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


def _message(run: Run, point: Point, status: Status, advice: Mapping[Status, str]) -> str:
    reached = run.reached(point)
    if status is Status.CONVERGED:
        return f"Converged: {reached}{_why(run, point)}{_order(run)}."
    if run.fault:
        return f"Stopped: {run.fault}; {reached}."
    if status in advice:
        return advice[status].format(reached)
    return {
        Status.MAXITER: f"Stopped after maxiter={run.limits.maxiter} iterations: {reached}. Raise "
        "maxiter, start from this x, or try another method ('lbfgs' or 'newton').",
        Status.CALLBACK: f"The callback stopped the run: {reached}.",
        Status.STALLED: f"No lower point was found: {reached}{_why(run, point)}. If that is small, "
        "it is what the precision of fun allows: raise gtol, or use float64. Otherwise jac may not "
        "be fun's gradient: try ortholand.check_gradient(fun, jac, x0).",
        Status.NON_FINITE: f"{_where(run)}: {reached}. Start elsewhere, or check what fun and "
        "jac return there.",
        Status.MAXFEV: f"Stopped after maxfev={run.limits.maxfev} evaluations: {reached}.",
        Status.UNBOUNDED: "f has no minimum, it seems: it is unbounded below, or falls for ever as "
        f"X grows; {reached}. Bound the free blocks, or check the sign of fun.",
        Status.MAXTIME: f"Stopped after maxtime={run.limits.maxtime} seconds: {reached}. Raise "
        "maxtime, or start from this x.",
    }[status]


def _why(run: Run, point: Point) -> str:
    """What to add if it was not the tolerance that was met, or nothing had to be done."""
    targets = run.targets
    text = ""
    if targets.is_rounding(point) and point.gradient_norm > targets.goal(point):
        text = ", and the rest is rounding of jac"
    elif run.nit or point.gradient_norm > targets.gtol * point.euclidean_norm:
        return ""
    return text + ("" if run.nit else "; x0 was stationary already")


def _order(run: Run) -> str:
    if run.min_curvature is not None:
        return (
            f"; the smallest curvature found is {run.min_curvature * run.cost.objective.scale:.1e}"
        )
    text = "; only the gradient was checked"
    return text if run.nit else text + ": move x0 to leave a saddle point"


def _remark(objective: Any) -> str:
    found = [objective.distrusted, objective.watch.remark if objective.watch else ""]
    return "".join(f" {text[0].upper()}{text[1:]}." for text in found if text)


def _where(run: Run) -> str:
    if run.broken is not None:
        return "fun or jac is not finite at x0"
    place = "x0" if run.nit == 0 else "the last point"
    return f"fun or jac is not finite near {place}, and the best point so far is returned"
