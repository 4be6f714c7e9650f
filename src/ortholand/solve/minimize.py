"""``minimize``: what SciPy's users know, over matrices with orthonormal columns."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ortholand.geometry.manifold import distance
from ortholand.solve.bb import BarzilaiBorwein
from ortholand.solve.cg import ConjugateGradient, GradientDescent
from ortholand.solve.landing import Landing
from ortholand.solve.lbfgs import LBFGS
from ortholand.solve.loop import Run, reporter
from ortholand.solve.newton import Newton
from ortholand.solve.objective import Array, Door, Objective
from ortholand.solve.options import check_callback, check_method, limits_from, method_options
from ortholand.solve.points import Move, Terrain, land, retraction
from ortholand.solve.result import intermediate_result, last_word, result_of

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
FARTHEST_START = 0.5  # the ball of the paper; Newton-Schulz steps lead back from there


def minimize(
    fun: Callable[..., Any],
    x0: Array,
    *,
    jac: Callable[..., Any] | bool | None = None,
    hessp: Callable[..., Any] | None = None,
    args: Any = (),
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
        args: tuple of further arguments of the functions.
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
            (newton), ``step, momentum, eps, safe_step`` (landing), ``retraction`` (retraction-*).

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
    check_method(method, METHODS)
    check_callback(callback)
    limits, rest = limits_from(method, options, gtol, maxiter)
    move, rest = _move(method, rest)
    solver = METHODS[method](lam=lam, **method_options(method, METHODS[method], lam, rest))
    door = Door(x0)
    objective = Objective(fun, door, jac=jac, hessp=hessp, args=args)
    check_start(door)
    with torch.no_grad():
        terrain = Terrain(objective, move)
        X = door.start if method == "landing" else terrain.settle(door.start)
        run = Run(terrain, solver, limits, reporter(callback, intermediate_result))
        status = run.from_point(terrain.at(X))
        return result_of(run, last_word(run, status), status)


def _move(method: str, options: dict[str, Any]) -> tuple[Move, dict[str, Any]]:
    if not method.startswith("retraction"):
        return land, options
    rest = {name: value for name, value in options.items() if name != "retraction"}
    return retraction(options.get("retraction", "polar")), rest


def check_start(door: Door) -> None:
    """Raise unless x0 is finite and near the manifold."""
    X = door.start
    if not bool(X.isfinite().all()):
        raise ValueError("x0 must be finite, but it has infinite or NaN entries.")
    d = float(distance(X))
    if d > FARTHEST_START:
        side = "rows" if door.wide else "columns"
        project = (
            "U, _, Vh = numpy.linalg.svd(x0, full_matrices=False); x0 = U @ Vh"
            if door.numpy
            else "x0 = ortholand.geometry.polar_projection(x0)"
        )
        raise ValueError(
            f"x0 must have orthonormal {side} up to ||X^H X - I|| <= {FARTHEST_START}, but it is "
            f"{d:.2g} away. Take the nearest such matrix: {project}."
        )
