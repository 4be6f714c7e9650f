"""What the user gets: the best point, on the manifold, and what happened, in words."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ortholand.solve.loop import Run, Status
from ortholand.solve.objective import Array
from ortholand.solve.points import Point, norm

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


def last_word(run: Run, status: Status) -> Point:
    """The best point, on the manifold, with everything evaluated there."""
    if status is Status.CONVERGED:
        return run.point
    if not run.first.finite:
        return _landed(run, run.first)
    best = _settled(run, run.best)
    if run.point is run.best:
        return best
    last = _settled(run, run.point)
    if not last.finite:
        return best
    rounding = 1e3 * torch.finfo(last.X.dtype).eps * abs(best.value)
    if last.value < best.value - rounding:
        return last
    # As low as each other: the flatter one.
    tied = last.value <= best.value + rounding
    return last if tied and last.gradient_norm <= best.gradient_norm else best


def _settled(run: Run, point: Point) -> Point:
    after = run.terrain.at(run.terrain.settle(point.X))
    # If fun has broken down since, what it said before counts.
    return after if after.finite else _landed(run, point)


def _landed(run: Run, point: Point) -> Point:
    """The point moved to the manifold, without asking fun again."""
    X = run.terrain.settle(point.X)
    return replace(point, X=X, distance=norm(run.terrain.frame.residual(X)))


def result_of(run: Run, point: Point, status: Status) -> "OptimizeResult":
    """All fields of the result."""
    from scipy.optimize import OptimizeResult  # here: importing ortholand must stay cheap

    objective, door = run.terrain.objective, run.terrain.objective.door
    if status is Status.STALLED and run.succeeded(point):
        status = Status.CONVERGED
    return OptimizeResult(
        x=_owned(door.outward(point.X)),
        fun=point.value * objective.scale,
        jac=_owned(door.outward(point.euclidean * objective.scale)),
        grad_norm=point.gradient_norm * objective.scale,
        distance=point.distance,
        nit=run.nit,
        nfev=objective.nfev,
        njev=objective.njev,
        nhev=objective.nhev,
        success=status is Status.CONVERGED,
        status=int(status),
        message=_message(run, point, status),
        # As arrays, which SciPy prints in brief.
        history={name: np.array(values) for name, values in run.history.items()},
    )


def intermediate_result(run: Run) -> "OptimizeResult":
    """What a callback sees."""
    from scipy.optimize import OptimizeResult

    point, objective = run.point, run.terrain.objective
    return OptimizeResult(
        x=objective.door.outward(point.X.clone()),  # theirs: they may write to it
        fun=point.value * objective.scale,
        grad_norm=point.gradient_norm * objective.scale,
        distance=point.distance,
        nit=run.nit,
    )


def _owned(array: Array) -> Array:
    """A matrix of the user's own, to write to."""
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def _message(run: Run, point: Point, status: Status) -> str:
    unit = run.terrain.objective.scale
    reached = (
        f"the Riemannian gradient's norm is {point.gradient_norm * unit:.1e}, "
        f"asked for {run.terrain.goal * unit:.1e}"
    )
    return {
        Status.CONVERGED: f"Converged: {reached}{_why(run, point)}.",
        Status.MAXITER: f"Stopped after maxiter={run.limits.maxiter} iterations: {reached}. Raise "
        "maxiter, start from this x, or try another method ('lbfgs' or 'newton').",
        Status.CALLBACK: f"The callback stopped the run: {reached}.",
        Status.STALLED: f"No lower point was found: {reached}{_why(run, point)}. If that is small, "
        "it is what the precision of fun allows: raise gtol, or use float64. Otherwise jac may not "
        "be fun's gradient: try ortholand.check_gradient(fun, jac, x0).",
        Status.NON_FINITE: f"{_where(run)}: {reached}. Start elsewhere, or look at what fun and "
        "jac return there.",
        Status.MAXTIME: f"Stopped after maxtime={run.limits.maxtime} seconds: {reached}. Raise "
        "maxtime, or start from this x.",
    }[status]


def _why(run: Run, point: Point) -> str:
    """What to add where it is not the tolerance that was met, or nothing had to be done."""
    if run.is_rounding(point) and point.gradient_norm > run.terrain.goal:
        text = ", and what is left is rounding beside the norm of jac"
    elif run.nit == 0 and point.gradient_norm == 0:
        text = ""
    else:
        return ""
    moved = "" if run.nit else "; x0 was stationary already: move it to leave a saddle point"
    return text + moved


def _where(run: Run) -> str:
    if not run.first.finite:
        return "fun or jac is not finite at x0"
    place = "x0" if run.nit == 0 else "the last point"
    return f"fun or jac is not finite near {place}, and the best point so far is returned"
