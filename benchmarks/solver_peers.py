"""Who takes part in solvers.py: ours and its peers, each behind the same function.

A solver maps ``(oracle, tolerance)`` to a :class:`Run`; tolerance is the norm that its own rule is
to compare the Riemannian gradient with. Solvers with no such rule are stopped from outside, by
Stop, at the gradient after which a first run has seen the rule hold: they lose no time on a rule of
another kind. All other limits are put out of reach.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from solver_problems import Matrix, Oracle

FOREVER = 10**9  # iterations


@dataclass
class Run:
    """What a solver says of its run. Counts not known to the oracle may be given."""

    X: Matrix
    iterations: int
    message: str
    success: bool = False  # whether it says that its rule holds
    counts: tuple[int, int, int] | None = None  # costs, gradients, Hessian products


@dataclass(frozen=True)
class Solver:
    """One row of the tables.

    Attributes:
        run: the solver.
        ours: whether it is ortholand's.
        stops: whether its own rule is that of the benchmark.
        iterations: how many there were when the run was stopped from outside; 0 if unknown.
    """

    label: str
    run: Callable[[Oracle, float], Run]
    ours: bool = False
    stops: bool = True
    iterations: Callable[[Oracle], int] = lambda _: 0


def one_gradient_each(oracle: Oracle) -> int:
    """Iterations of a method that takes one gradient in each."""
    return oracle.grad_count


def pymanopt_solver(optimizer: str) -> Callable[[Oracle, float], Run]:
    """One of pymanopt's optimizers as it comes, on its Stiefel manifold."""

    def run(oracle: Oracle, tolerance: float) -> Run:
        import pymanopt
        from pymanopt import optimizers
        from pymanopt.manifolds import Stiefel

        manifold = Stiefel(*oracle.problem.X0.shape)
        numpy_function = pymanopt.function.numpy(manifold)
        problem = pymanopt.Problem(
            manifold,
            numpy_function(oracle.fun),
            euclidean_gradient=numpy_function(oracle.grad),
            euclidean_hessian=numpy_function(oracle.hessp),
        )
        # A failed line search has a step of zero; steps that are merely short may go on.
        solver = getattr(optimizers, optimizer)(
            min_gradient_norm=tolerance,
            min_step_size=1e-30,
            max_iterations=FOREVER,
            max_cost_evaluations=FOREVER,
            max_time=np.inf,  # the oracle has the clock
            verbosity=0,
        )
        result = solver.run(problem, initial_point=oracle.problem.X0.copy())
        success = result.gradient_norm < tolerance
        return Run(result.point, result.iterations, result.stopping_criterion, success)

    return run


def smopt_slpg(oracle: Oracle, tolerance: float) -> Run:
    """smopt's penalty-free solver; it rounds its last iterate onto the manifold itself."""
    import smopt

    X, out = smopt.slpg_smooth(
        oracle.fun_and_grad,
        smopt.Stiefel(*oracle.problem.X0.shape),
        xinit=oracle.problem.X0,
        maxit=1_000_000,  # three arrays of this length are allocated
        gtol=tolerance,
        verbosity=0,
    )
    return Run(X, len(out["kkts"]), f"kkt {out['kkt']:.1e}", out["kkts"][-1] <= tolerance)


# What each of SciPy's methods takes so that only rounding stops it.
SCIPY_OPTIONS: dict[str, dict[str, Any]] = {
    "L-BFGS-B": dict(ftol=0.0, gtol=0.0, maxfun=FOREVER, maxiter=FOREVER),
    "CG": dict(gtol=0.0, maxiter=FOREVER),
    "Newton-CG": dict(xtol=0.0, maxiter=FOREVER),
    "trust-ncg": dict(gtol=0.0, maxiter=FOREVER),
}


def cdopt_solver(method: str) -> Solver:
    """SciPy's method on cdopt's constraint dissolving function, its penalty chosen by cdopt."""
    steps = 0
    second_order = method in ("Newton-CG", "trust-ncg")

    def iterated(_: Matrix) -> None:
        nonlocal steps
        steps += 1

    def run(oracle: Oracle, tolerance: float) -> Run:  # noqa: ARG001
        import cdopt
        import scipy.optimize
        from cdopt.manifold_np import stiefel_np

        nonlocal steps
        steps = 0
        X0 = oracle.problem.X0
        np.random.seed(0)  # noqa: NPY002  cdopt draws the samples for its penalty from here
        problem = cdopt.core.problem(
            stiefel_np(X0.shape), oracle.fun, oracle.grad, oracle.hessp, beta="auto", Xinit=X0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflow, when it leaves the manifold for good
            result = scipy.optimize.minimize(
                problem.cdf_fun_vec_np,
                problem.Xinit_vec_np,
                method=method,
                jac=problem.cdf_grad_vec_np,
                hessp=problem.cdf_hvp_vec_np if second_order else None,
                callback=iterated,
                options=SCIPY_OPTIONS[method],
            )
        return Run(result.x.reshape(X0.shape), result.nit, str(result.message))

    label = f"cdopt {method}"
    return Solver(label, run, stops=False, iterations=lambda _: steps)


class _Weight(nn.Module):
    """A module whose weight is to be orthogonal."""

    def __init__(self, X: Matrix) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(X.copy()))


def torch_lbfgs() -> Solver:
    """torch's L-BFGS on a parametrization by the matrix exponential, started where all start."""
    optimizer: torch.optim.LBFGS | None = None

    def run(oracle: Oracle, tolerance: float) -> Run:  # noqa: ARG001
        from torch.nn.utils.parametrizations import orthogonal

        nonlocal optimizer
        torch.manual_seed(
            0
        )  # the parametrization completes a tall start to a square matrix at random
        module = orthogonal(_Weight(oracle.problem.X0), orthogonal_map="matrix_exp")
        optimizer = torch.optim.LBFGS(
            module.parameters(),
            max_iter=FOREVER,
            max_eval=FOREVER,
            tolerance_grad=0,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> torch.Tensor:
            assert optimizer is not None
            optimizer.zero_grad()
            X = module.weight
            loss = oracle.torch_fun(X)
            loss.backward()
            oracle.took_gradient(X.detach().numpy())
            return loss

        optimizer.step(closure)
        return Run(module.weight.detach().numpy(), iterations(oracle), "ended by itself")

    def iterations(_: Oracle) -> int:
        states = list(optimizer.state.values()) if optimizer is not None else []
        return states[0]["n_iter"] if states else 0

    label = "torch LBFGS on matrix_exp"
    return Solver(label, run, stops=False, iterations=iterations)


def our_solver(method: str, door: str) -> Callable[[Oracle, float], Run]:
    """``ortholand.minimize`` on NumPy functions and derivatives, or on torch with autograd."""

    def run(oracle: Oracle, tolerance: float) -> Run:
        from ortholand import minimize

        X0 = oracle.problem.X0.copy()
        options = dict(
            method=method,
            gtol=tolerance / oracle.start_norm,
            maxiter=FOREVER,
            # A little early, so that it returns by itself, with a feasible point.
            options={"maxtime": 0.98 * (oracle.deadline - perf_counter())},
        )
        if door == "numpy":
            result = minimize(oracle.fun_and_grad, X0, jac=True, hessp=oracle.hessp, **options)
            return Run(result.x, result.nit, result.message, result.success)
        result = minimize(oracle.torch_fun, torch.from_numpy(X0), **options)
        counts = (result.nfev, result.njev, result.nhev)
        return Run(result.x.numpy(), result.nit, result.message, result.success, counts)

    return run


OUR_METHODS = ("lbfgs", "newton", "bb", "cg", "landing", "retraction-cg", "retraction-gd")
DOORS = {"numpy": "NumPy, jac", "torch": "torch, autograd"}

SOLVERS: dict[str, Solver] = {
    **{
        f"ortholand-{method}-{door}": Solver(
            f'ortholand "{method}" ({how})', our_solver(method, door), ours=True
        )
        for method in OUR_METHODS
        for door, how in DOORS.items()
    },
    # It returns the point after the one whose gradient it finds small enough.
    "pymanopt-sd": Solver(
        "pymanopt steepest descent",
        pymanopt_solver("SteepestDescent"),
        stops=False,
        iterations=one_gradient_each,
    ),
    "pymanopt-cg": Solver(
        "pymanopt conjugate gradient",
        pymanopt_solver("ConjugateGradient"),
        iterations=one_gradient_each,
    ),
    "pymanopt-tr": Solver("pymanopt trust regions", pymanopt_solver("TrustRegions")),
    "smopt-slpg": Solver("smopt slpg", smopt_slpg),
    "cdopt-lbfgs": cdopt_solver("L-BFGS-B"),
    "cdopt-cg": cdopt_solver("CG"),
    "cdopt-newton": cdopt_solver("Newton-CG"),
    "cdopt-trust": cdopt_solver("trust-ncg"),
    "torch-lbfgs": torch_lbfgs(),
}
