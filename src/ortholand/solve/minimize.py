"""``minimize``: SciPy's interface, over matrices with orthonormal columns."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ortholand.solve.arrays import precision
from ortholand.solve.loop import Loop
from ortholand.solve.manifold_cost import ManifoldCost
from ortholand.solve.manifolds import Sphere, geometry_of, variables_on
from ortholand.solve.manifolds.geometry import (
    Geometry,
    MatrixGeometry,
    SquareStiefel,
    Subspaces,
    TallStiefel,
)
from ortholand.solve.manifolds.product import Product
from ortholand.solve.method import Method, check_method
from ortholand.solve.methods.automatic import Automatic
from ortholand.solve.methods.bb import BarzilaiBorwein
from ortholand.solve.methods.landing import Landing
from ortholand.solve.methods.lbfgs import LBFGS
from ortholand.solve.methods.newton import Newton
from ortholand.solve.methods.proximal import ProximalCost, ProximalLanding
from ortholand.solve.objective import Objective, product_from
from ortholand.solve.options import (
    Limits,
    check_lam,
    check_options,
    limits_from,
    one_of_two,
)
from ortholand.solve.prox import Box, Prox
from ortholand.solve.run import Run, best_on_manifold, reporter, result_of
from ortholand.solve.variables import Block, assign
from ortholand.solve.watch import Watch

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

# A method is a class; its options are the arguments of its constructor.
METHODS: dict[str, type[Any]] = {
    "lbfgs": LBFGS,
    "bb": BarzilaiBorwein,
    "newton": Newton,
    "landing": Landing,
}
_IN_THE_LABORATORY = (
    "is not in the library any more, because other methods need fewer evaluations. Use method="
    "'bb', which takes a preconditioner too, or the class {0} of ortholand_lab.solvers as method."
)
MOVED = {
    "cg": _IN_THE_LABORATORY.format("ConjugateGradient"),
    "retraction-cg": _IN_THE_LABORATORY.format("RetractionCG"),
    "retraction-gd": _IN_THE_LABORATORY.format("RetractionGD"),
}


@torch.inference_mode(False)
def minimize(
    fun: Callable[..., Any],
    x0: Any,
    args: Any = (),
    method: str | type[Method] | None = None,
    jac: Callable[..., Any] | bool | None = None,
    *,
    hess: Callable[..., Any] | None = None,
    hessp: Callable[..., Any] | None = None,
    manifold: Any = None,
    lam: float | None = None,
    gtol: float | None = None,
    tol: float | None = None,
    maxiter: int | None = None,
    callback: Callable[..., Any] | None = None,
    disp: bool | None = None,
    options: Mapping[str, Any] | None = None,
    state: Any = None,
    prox: Any = None,
) -> "OptimizeResult":
    """Minimise a function of a matrix with orthonormal columns (rows, if it is wide).

    Args:
        fun: the cost, ``fun(X, *args)``; a real number.
        x0: where to start: a matrix with orthonormal columns, or a stack ``(..., n, p)`` of them;
            or a dict, list or tuple of blocks, each on its own manifold. NumPy or torch, real or
            complex; X is of the same kind in all calls, and in the result. It may be off the
            manifold by at most 1/2 in ``||X^H X - I||``, and is landed first.
        args: tuple of further arguments of the functions.
        method: ``"lbfgs"``, ``"bb"``, ``"newton"``, ``"landing"`` (the paper's), or a subclass of
            ``ortholand.solve.Method``. None: chosen; the result's ``method`` says which.
        jac: Euclidean gradient ``jac(X, *args)``, or True if fun returns (cost, gradient). For
            tensors and JAX's arrays it may be left out, because it is derived. ``"2-point"`` and
            ``"3-point"`` are differences, for few numbers. Complex X: ``df = Re <jac, dX>``.
        hess: the Euclidean Hessian as an array of ``x0.size`` rows, or of shape
            ``x0.shape + x0.shape``; ``hess(X, *args)``.
        hessp: Euclidean Hessian times a matrix, ``hessp(X, V, *args)``, for ``"newton"``; without
            it, autograd, or differences of gradients if jac is given.
        manifold: ``ol.Stiefel()``, ``ol.Grassmann()``, ``ol.Rotations()``, ``ol.Sphere()`` or
            ``ol.Euclidean()``; for several blocks one for all, or the structure of x0 with one in
            each place. None: Stiefel for matrices, Euclidean for vectors and numbers in a product.
        lam: attraction to the manifold: weight of N in the merit function, for ``"landing"`` in
            the field. None: chosen by the method.
        gtol: the Riemannian gradient's norm must fall to this fraction of its usual size, see
            docs/minimize.md; None: the square root of the precision, 1.5e-8 in float64.
        tol: SciPy's name for gtol.
        maxiter: largest number of iterations; None: 10,000 (1,000 for ``"newton"``).
        callback: called after each iteration, as in SciPy: ``callback(intermediate_result=...)``
            if that is its argument's name, else ``callback(X)``. It stops the run by returning
            True or raising StopIteration.
        disp: True prints progress.
        options: ``gtol``, ``maxiter``, ``disp``; ``atol`` (a norm of the gradient that is small
            enough), ``maxfev``, ``maxtime`` (seconds), ``noise`` (smaller differences of f mean
            nothing), ``clock`` (times the functions, for the choice of a method);
            the method's own: ``memory`` (lbfgs), ``preconditioner`` (bb, newton),
            ``inner_maxiter`` (newton), ``step, momentum, eps, safe_step`` (landing).
        state: an earlier result's ``state``: the run goes on from there, with all that its method
            has learnt, and x0 gives shapes only.
        prox: a part g of the cost that has kinks, added to fun: ``ol.L1``, ``ol.L21``,
            ``ol.Nonnegative``, ``ol.Box`` or an ``ol.Prox``; for several blocks, the structure of
            x0 with one or None in each place.

    Returns:
        SciPy's ``OptimizeResult``: ``x, fun, jac, grad_norm, distance, nit, nfev, njev, nhev,
        success, status, method, choice, message, min_curvature, history, state``. x has
        orthonormal columns up to rounding in any case; success means that it is also stationary.
        Numerical failures are reported as a status, with the best point found.

    >>> import ortholand, torch
    >>> A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    >>> x0 = ortholand.random_orthogonal(3, 1, seed=0, dtype=torch.float64)
    >>> result = minimize(lambda X: (X * (A @ X)).sum(), x0)  # the smallest eigenvalue
    >>> result.success, round(result.fun, 6)
    (True, 1.0)
    """
    if method is not None:
        check_method(method, METHODS, MOVED)
    known: Any = METHODS[method] if isinstance(method, str) else method
    gtol = one_of_two("the tolerance", gtol, tol, ("gtol", "tol"))
    limits, rest = limits_from(options, gtol, maxiter, getattr(known, "maxiter", 10_000), disp)
    report = reporter(callback, limits.display)
    check_lam(lam)
    rules = {**LBFGS.rules, **Newton.rules} if known is None else known.rules
    check_options(method, rules, rest)
    solver = Automatic(METHODS, lam, rest) if known is None else known(lam=lam, **rest)
    if hess is not None:
        if hessp is not None or not callable(hess):
            raise TypeError(f"Give one of hess and hessp, a function, got hess={hess!r:.60}.")
        hessp = product_from(hess)
    variables = variables_on(x0, manifold)
    objective = Objective(fun, variables, jac=jac, hessp=hessp, args=args, clock=limits.clock)
    geometry = geometry_of(variables)
    # NumPy's operations need no shield from autograd.
    shield = nullcontext() if variables.inside_numpy else torch.no_grad()
    with shield, np.errstate(all="ignore"):
        if state is not None:
            return _resumed(state, objective, limits, report)
        cost = ManifoldCost(objective, geometry)
        if prox is not None:
            cost, solver = _proximal(objective, geometry, prox, x0, method, lam)
        start = variables.start
        watch = Watch(objective.value_and_gradient, precision(start), limits.noise, limits.maxfev)
        start, D = geometry.settle(start) if solver.begins_on_manifold else (start, None)
        run = Run(cost, limits)
        loop = Loop(run, solver, report)
        if isinstance(cost, ProximalCost):
            start, D = cost.admissible(start), None
        first = cost.at(start, D, measured=True)
        watch.noise /= objective.scale
        objective.watch = watch
        status = loop.from_point(first)
        result = result_of(run, best_on_manifold(run, status), status)
        _add_state(result, loop)
    if limits.display:
        print(result.message)
    return result


def _resumed(
    state: Any, objective: Objective, limits: Limits, report: Callable[[Run], bool] | None
) -> "OptimizeResult":
    """The run that ``result.state`` holds, continued on the functions of this call."""
    if not isinstance(state, Loop):
        raise TypeError(
            f"state must be the state of an earlier result, got {type(state).__name__}."
        )
    ours = state.cost.objective
    if [b.shape for b in ours.variables.blocks] != [b.shape for b in objective.variables.blocks]:
        raise ValueError("state must be of a run on variables of the shapes of x0.")
    for name in ("fun", "jac", "hessp", "args"):
        setattr(ours, name, getattr(objective, name))
    status = state.resume(limits, report)
    result = result_of(state.run, best_on_manifold(state.run, status), status)
    _add_state(result, state)
    return result


def _add_state(result: "OptimizeResult", loop: Loop) -> None:
    result.state = loop
    result.choice = list(getattr(loop.method, "reasons", [f"{loop.method.name}: named"]))


def _proximal(
    objective: Objective, geometry: Geometry, prox: Any, x0: Any, method: Any, lam: float | None
) -> tuple[ProximalCost, Method]:
    """What minimises f + g, where g is given by proximal maps."""
    if method is not None:
        raise ValueError(f"With prox= there is one method, proximal landing, got {method!r}.")
    variables = objective.variables
    # One matrix is a leaf; lists of numbers are one, too.
    proxes = assign(prox, Prox, np.zeros(1) if variables.single else x0, "prox")
    parts = geometry.geometries if isinstance(geometry, Product) else [geometry]
    for part, one, block in zip(parts, proxes, variables.blocks, strict=True):
        _check_prox(part, one, block)
    # Coordinates of tall matrices for square ones too.
    tall = [TallStiefel() if isinstance(part, MatrixGeometry) else part for part in parts]
    whole = tall[0] if variables.single else Product(tall, variables.packing)
    return ProximalCost(objective, whole, proxes), ProximalLanding(lam)


def _check_prox(geometry: Geometry, prox: Any, block: Block) -> None:
    known = (Geometry, TallStiefel, SquareStiefel, Subspaces)
    if type(geometry) not in known or (type(geometry) is not Geometry and len(block.shape) > 2):
        raise ValueError(
            "prox= is for single matrices with orthonormal columns, spheres and Euclidean blocks, "
            f"got {block.manifold!r} for {block.name}."
        )
    if isinstance(prox, Box) and type(geometry) is not Geometry and not is_sphere(block):
        raise ValueError(
            "prox= has no bounds on entries of orthonormal matrices of several columns, got "
            f"{prox!r} for {block.name}. Penalise what is out of bounds in fun instead."
        )


def is_sphere(block: Block) -> bool:
    """Whether a block is one unit vector."""
    return isinstance(block.manifold, Sphere) or 1 in block.shape
