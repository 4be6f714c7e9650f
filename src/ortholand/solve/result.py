"""What the user gets: the best point, on the manifold, and a message saying what happened."""

from functools import cache
from typing import TYPE_CHECKING

from ortholand.solve.loop import Run, Status
from ortholand.solve.manifold_cost import Point

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


def best_on_manifold(run: Run, status: Status) -> Point:
    """The best point of a run, on the manifold, with everything evaluated there."""
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


def result_of(run: Run, point: Point, status: Status) -> "OptimizeResult":
    """All fields of the result."""
    objective = run.cost.objective
    if status is Status.STALLED and run.succeeded(point):
        status = Status.CONVERGED
    distance, allowed = objective.variables.missed_by(
        point.X, point.distance, run.cost.geometry.feasible(point.X)
    )
    if status is Status.CONVERGED and not distance <= allowed:
        status = Status.STALLED
    return _optimize_result()(
        x=objective.variables.owned(point.X),
        fun=point.value * objective.scale,
        jac=objective.variables.owned_gradient(point.euclidean * objective.scale),
        grad_norm=point.gradient_norm * objective.scale,
        distance=distance,
        nit=run.nit,
        nfev=objective.nfev,
        njev=objective.njev,
        nhev=objective.nhev,
        success=status is Status.CONVERGED,
        status=int(status),
        method=run.method.name,
        message=_message(run, point, status),
        history=run.history,
    )


def intermediate_result(run: Run) -> "OptimizeResult":
    """What a callback sees."""
    point, objective = run.point, run.cost.objective
    return _optimize_result()(
        x=objective.variables.owned(point.X),  # a copy, which the callback may change
        fun=point.value * objective.scale,
        grad_norm=point.gradient_norm * objective.scale,
        distance=point.distance,
        nit=run.nit,
        method=run.method.name,
    )


@cache
def _optimize_result() -> "type[OptimizeResult]":
    """SciPy's class, imported when it is first needed: importing ortholand must stay cheap."""
    from scipy.optimize import OptimizeResult

    return OptimizeResult


def _message(run: Run, point: Point, status: Status) -> str:
    unit = run.cost.objective.scale
    reached = (
        f"the Riemannian gradient's norm is {point.gradient_norm * unit:.1e}, "
        f"asked for {run.targets.goal(point) * unit:.1e}"
    )
    if status is Status.CONVERGED:
        return f"Converged: {reached}{_why(run, point)}."
    return {
        Status.MAXITER: f"Stopped after maxiter={run.limits.maxiter} iterations: {reached}. Raise "
        "maxiter, start from this x, or try another method ('lbfgs' or 'newton').",
        Status.CALLBACK: f"The callback stopped the run: {reached}.",
        Status.STALLED: f"No lower point was found: {reached}{_why(run, point)}. If that is small, "
        "it is what the precision of fun allows: raise gtol, or use float64. Otherwise jac may not "
        "be fun's gradient: try ortholand.check_gradient(fun, jac, x0).",
        Status.NON_FINITE: f"{_where(run)}: {reached}. Start elsewhere, or check what fun and "
        "jac return there.",
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
    moved = "" if run.nit else "; x0 was stationary already: move it to leave a saddle point"
    return text + moved


def _where(run: Run) -> str:
    if not run.first.finite:
        return "fun or jac is not finite at x0"
    place = "x0" if run.nit == 0 else "the last point"
    return f"fun or jac is not finite near {place}, and the best point so far is returned"
