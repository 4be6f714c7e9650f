"""``minimize``: what SciPy's users know, over matrices with orthonormal columns."""

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from ortholand.geometry.manifold import distance
from ortholand.safe_step import check_ball, check_rule
from ortholand.solve.bb import BarzilaiBorwein
from ortholand.solve.cg import ConjugateGradient, GradientDescent
from ortholand.solve.landing import Landing
from ortholand.solve.lbfgs import LBFGS
from ortholand.solve.loop import Limits, Run, Status, reporter
from ortholand.solve.newton import Newton
from ortholand.solve.objective import Array, Door, Objective
from ortholand.solve.points import Move, Point, Terrain, land, retraction

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

# A method is a class; its options are the arguments of its constructor.
METHODS: dict[str, Callable[..., Any]] = {
    "lbfgs": LBFGS,
    "bb": BarzilaiBorwein,
    "cg": ConjugateGradient,
    "newton": Newton,
    "landing": Landing,
    "retraction-gd": GradientDescent,
    "retraction-cg": ConjugateGradient,
}
LOOP_OPTIONS = ("atol", "maxtime")
FARTHEST_START = 0.5  # the ball of the paper; Newton-Schulz steps lead back from there


def minimize(
    fun: Callable[..., Any],
    x0: Array,
    *,
    jac: Callable[..., Any] | bool | None = None,
    hessp: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    method: str = "lbfgs",
    lam: float | None = None,
    gtol: float | None = None,
    maxiter: int | None = None,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> "OptimizeResult":
    """Minimise a function of a matrix with orthonormal columns (rows, if it is wide).

    Args:
        fun: the cost, ``fun(X, *args)``; a real number.
        x0: where to start: one matrix with orthonormal columns, NumPy or torch, real or complex.
            What it is, X is in all calls, and in the result. Off the manifold by at most 1/2 in
            ``||X^H X - I||`` it is landed first.
        jac: Euclidean gradient ``jac(X, *args)``, or True if fun returns (cost, gradient). With a
            tensor x0 it may be left out: autograd computes it. Complex X: ``df = Re <jac, dX>``.
        hessp: Euclidean Hessian times a matrix, ``hessp(X, V, *args)``, for ``"newton"``; without
            it, autograd, or differences of gradients if there is a jac.
        args: further arguments of the functions.
        method: ``"lbfgs"``, ``"bb"``, ``"cg"``, ``"newton"``, ``"landing"`` (the paper's), and to
            compare with, ``"retraction-gd"`` and ``"retraction-cg"``.
        lam: attraction to the manifold: weight of N in the merit function, for ``"landing"`` in
            the field. None: chosen by the method.
        gtol: the Riemannian gradient's norm must fall to this fraction of its first value; None:
            the square root of the precision, 1.5e-8 in float64.
        maxiter: number of iterations at most; None: 10,000 (1,000 for ``"newton"``).
        callback: called after each iteration, as in SciPy: ``callback(intermediate_result=...)``
            if that is its argument's name, else ``callback(X)``. It stops the run by returning
            True or raising StopIteration.
        options: ``atol`` (a norm of the gradient that is small enough), ``maxtime`` (seconds); the
            method's own: ``memory`` (lbfgs), ``preconditioner`` (cg, newton), ``inner_maxiter``
            (newton), ``step, momentum, eps, rule`` (landing), ``retraction`` (retraction-*).

    Returns:
        SciPy's ``OptimizeResult``: ``x, fun, jac, grad_norm, distance, nit, nfev, njev, nhev,
        success, status, message, history``. x has orthonormal columns to rounding whatever
        happened; success means that it is stationary, too. Numerical failures are statuses, with
        the best point found.

    >>> import ortholand, torch
    >>> A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    >>> x0 = ortholand.random_orthogonal(3, 1, seed=0, dtype=torch.float64)
    >>> result = minimize(lambda X: (X * (A @ X)).sum(), x0)  # the smallest eigenvalue
    >>> result.success, round(result.fun, 6)
    (True, 1.0)
    """
    options = dict(options or {})
    door = Door(x0)
    objective = Objective(fun, door, jac=jac, hessp=hessp, args=args)
    _check_start(door)
    limits = _limits(method, door, gtol, maxiter, options)
    move = _move(method, options)
    solver = _solver(method, lam, options)
    terrain = Terrain(objective, move)
    X = door.start if method == "landing" else terrain.settle(door.start)
    run = Run(terrain, solver, limits, reporter(callback, _intermediate))
    with torch.no_grad():
        status = run.from_point(terrain.at(X))
        point = _last_word(run, status)
    return _result(run, point, status)


def _last_word(run: Run, status: Status) -> Point:
    """The best point, on the manifold, with everything evaluated there."""
    point = run.point if status is Status.CONVERGED else _better(run)
    if status is Status.CONVERGED or not point.finite:
        return point
    return run.terrain.at(run.terrain.settle(point.X))


def _better(run: Run) -> Point:
    """The lowest point, unless the last is as low up to rounding and flatter."""
    best, last = run.best, run.point
    rounding = 1e3 * torch.finfo(last.X.dtype).eps * abs(best.value)
    as_low = last.value - last.correction <= best.value - best.correction + rounding
    return last if as_low and last.gradient_norm <= best.gradient_norm else best


def _result(run: Run, point: Point, status: Status) -> "OptimizeResult":
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
        history=run.history,
    )


def _message(run: Run, point: Point, status: Status) -> str:
    unit = run.terrain.objective.scale
    reached = (
        f"the Riemannian gradient's norm is {point.gradient_norm * unit:.1e}, "
        f"asked for {run.terrain.goal * unit:.1e}"
    )
    return {
        Status.CONVERGED: f"Converged: {reached}."
        + (" x0 was stationary already: move it to leave a saddle point." if not run.nit else ""),
        Status.MAXITER: f"Stopped after maxiter={run.limits.maxiter} iterations: {reached}. Raise "
        "maxiter, start from this x, or try another method ('lbfgs' or 'newton').",
        Status.CALLBACK: f"The callback stopped the run: {reached}.",
        Status.STALLED: f"No lower point was found: {reached}. If that is small, it is what the "
        "precision of fun allows: raise gtol, or use float64. Otherwise jac may not be fun's "
        "gradient: try ortholand.check_gradient(fun, jac, x0).",
        Status.NON_FINITE: "fun or jac is not finite "
        + ("at x0. Start elsewhere." if not run.nit else "near the last point, which is returned: ")
        + ("" if not run.nit else f"{reached}."),
        Status.MAXTIME: f"Stopped after maxtime={run.limits.maxtime} seconds: {reached}. Raise "
        "maxtime, or start from this x.",
    }[status]


def _intermediate(run: Run) -> "OptimizeResult":
    from scipy.optimize import OptimizeResult

    point, objective = run.point, run.terrain.objective
    return OptimizeResult(
        x=objective.door.outward(point.X),
        fun=point.value * objective.scale,
        grad_norm=point.gradient_norm * objective.scale,
        distance=point.distance,
        nit=run.nit,
    )


def _owned(array: Array) -> Array:
    """A matrix of the user's own, to write to."""
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def _check_start(door: Door) -> None:
    X = door.start
    if not bool(X.isfinite().all()):
        raise ValueError("x0 must be finite, but it has infinite or NaN entries.")
    d = float(distance(X))
    if d > FARTHEST_START:
        side = "rows" if door.wide else "columns"
        project = (
            "U, _, Vh = numpy.linalg.svd(x0, full_matrices=False); x0 = U @ Vh"
            if door.numpy
            else "x0 = ortholand.polar_projection(x0)"
        )
        raise ValueError(
            f"x0 must have orthonormal {side} up to ||X^H X - I|| <= {FARTHEST_START}, but it is "
            f"{d:.2g} away. Take the nearest such matrix: {project}."
        )


def _limits(
    method: str, door: Door, gtol: float | None, maxiter: int | None, options: dict[str, Any]
) -> Limits:
    gtol = torch.finfo(door.dtype).eps ** 0.5 if gtol is None else gtol
    maxiter = (1_000 if method == "newton" else 10_000) if maxiter is None else maxiter
    atol, maxtime = options.pop("atol", 0.0), options.pop("maxtime", math.inf)
    for name, value in [("gtol", gtol), ("atol", atol), ("maxiter", maxiter), ("maxtime", maxtime)]:
        if not _is_number(value) or not value >= 0:
            raise ValueError(f"{name} must be a number >= 0, got {value!r}.")
    return Limits(gtol, atol, int(maxiter), maxtime)


def _move(method: str, options: dict[str, Any]) -> Move:
    if not method.startswith("retraction"):
        return land
    return retraction(options.pop("retraction", "polar"))


def _solver(method: str, lam: float | None, options: dict[str, Any]) -> Any:
    if method not in METHODS:
        raise ValueError(f"method must be one of {tuple(METHODS)}, got {method!r}.")
    if lam is not None and not (_is_number(lam) and 0 <= lam < math.inf):
        raise ValueError(f"lam must be a number >= 0, or None for the method's own, got {lam!r}.")
    known = tuple(name for name in signature(METHODS[method]).parameters if name != "lam")
    _check_options(method, options, known)
    return METHODS[method](lam=lam, **options)


def _check_options(method: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in options.items():
        if name not in known:
            also = ("retraction",) if method.startswith("retraction") else ()
            raise ValueError(
                f"method={method!r} has the options {(*LOOP_OPTIONS, *known, *also)}, got {name!r}."
            )
        rule = RULES.get(name)
        if rule is not None and not rule[1](value):
            raise ValueError(f"options[{name!r}] must be {rule[0]}, got {value!r}.")
    if method != "newton" and options.get("preconditioner") == "auto":
        raise ValueError("preconditioner='auto' is for method='newton'; pass a function, or None.")
    if "eps" in options:
        check_ball(1.0, options["eps"])
    if "rule" in options:
        check_rule(options["rule"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "memory": ("a whole number >= 1", _is_count),
    "inner_maxiter": ("a whole number >= 1, or None", lambda v: v is None or _is_count(v)),
    "preconditioner": (
        "a function (X, V) -> V, or None; for 'newton' also 'auto'",
        lambda v: v is None or callable(v) or v == "auto",
    ),
    "momentum": ("a number in [0, 1)", lambda v: _is_number(v) and 0 <= v < 1),
    "step": (
        "a number > 0, a function k -> eta_k, or None",
        lambda v: v is None or callable(v) or (_is_number(v) and 0 < v < math.inf),
    ),
}
