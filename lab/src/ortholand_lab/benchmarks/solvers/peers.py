"""The participants: our methods and their peers, each behind the same function.

A solver maps ``(oracle, tolerance)`` to an :class:`Attempt`; tolerance is the norm with which its
own rule compares the Riemannian gradient. Solvers with no such rule are stopped from outside, by
Stop, at the gradient after which a first run has seen the rule hold: they lose no time on a rule of
another kind. All other limits are out of reach.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ortholand
from ortholand_lab.benchmarks.solvers.oracle import Oracle
from ortholand_lab.benchmarks.solvers.problems import Case, Matrix
from ortholand_lab.solvers import METHODS

FOREVER = 10**9  # iterations


@dataclass(frozen=True)
class Attempt:
    """How a run ended, as the solver reports it; counts and times are added later."""

    X: Matrix
    iterations: int
    success: bool = False  # whether the solver says that its rule holds
    limited: bool = False  # whether it stopped at the oracle's limit on iterations
    counts: tuple[int, int, int] = (0, 0, 0)  # costs, gradients, products; 0: as the oracle says
    seconds: float = math.nan  # by the clock on the wall
    processor_seconds: float = math.nan


Runner = Callable[[Oracle, float], Attempt]


@dataclass(frozen=True)
class Solver:
    """One row of the tables."""

    label: str
    run: Runner
    ours: bool = False
    stops: bool = True  # whether its own rule is that of the benchmark
    of_span: bool = False  # whether it is for costs of the span alone
    stacks: bool = False  # whether it can have a stack of matrices
    complex: bool = False  # whether it can have complex matrices
    in_torch: bool = False  # whether it needs the problem in torch
    eigen: bool = False  # whether it is for eigenvalues of a matrix

    def fits(self, case: Case) -> bool:
        """Whether the solver can be run on the case."""
        return (
            (case.of_span or not self.of_span)
            and (self.stacks or case.X0.ndim == 2)
            and (self.complex or case.X0.dtype.kind != "c")
            and (case.problem is not None or not self.in_torch)
            and (case.matrix is not None or not self.eigen)
        )


def pymanopt_solver(optimizer: str, manifold_name: str = "Stiefel") -> Runner:
    """One of pymanopt's optimizers with its defaults, on its Stiefel or Grassmann manifold."""

    def run(oracle: Oracle, tolerance: float) -> Attempt:
        import pymanopt
        from pymanopt import manifolds, optimizers

        def gradient(X: Matrix) -> Matrix:
            try:
                return oracle.grad(X)
            finally:  # methods of first order take one gradient in each iteration
                oracle.iterations = 0 if optimizer == "TrustRegions" else oracle.gradients

        shape, is_complex = oracle.case.X0.shape, oracle.case.X0.dtype.kind == "c"
        manifold = (
            manifolds.SpecialOrthogonalGroup(shape[-1], k=shape[0])
            if len(shape) == 3
            else getattr(manifolds, "Complex" * is_complex + manifold_name)(*shape)
        )
        numpy_function = pymanopt.function.numpy(manifold)
        problem = pymanopt.Problem(
            manifold,
            numpy_function(oracle.fun),
            euclidean_gradient=numpy_function(gradient),
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
        result = solver.run(problem, initial_point=oracle.case.X0.copy())
        return Attempt(result.point, result.iterations, result.gradient_norm < tolerance)

    return run


def smopt_slpg(oracle: Oracle, tolerance: float) -> Attempt:
    """smopt's penalty-free solver, which brings its last iterate to the manifold itself.

    Before it begins it fills arrays as long as its limit on iterations: 5 ms for a million.
    """
    import smopt

    result: Any = smopt.slpg_smooth(
        oracle.fun_and_grad,
        smopt.Stiefel(*oracle.case.X0.shape),
        xinit=oracle.case.X0,
        maxit=oracle.limit,
        gtol=tolerance,
        verbosity=0,
    )
    X, norms = result[0], result[1]["kkts"]
    return Attempt(X, len(norms), norms[-1] <= tolerance, limited=len(norms) >= oracle.limit)


def eigensolver(lobpcg: bool) -> Runner:
    """SciPy's ``eigsh`` or LOBPCG; their tolerances are for residuals of single vectors."""

    def run(oracle: Oracle, tolerance: float) -> Attempt:
        from scipy.sparse import linalg

        A, X0 = oracle.case.matrix, oracle.case.X0
        (n, p), vectors = X0.shape, 0

        def product(V: Matrix) -> Matrix:
            nonlocal vectors
            vectors += V.size // n
            return A @ V

        kind: Any = linalg.LinearOperator
        operator = kind((n, n), matvec=product, matmat=product, dtype=X0.dtype)
        if lobpcg:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tol = tolerance / p**0.5
                X = linalg.lobpcg(operator, X0.copy(), tol=tol, maxiter=10_000, largest=False)[1]
        else:
            tol = tolerance / p**0.5 / abs(A).sum(0).max()
            X = linalg.eigsh(operator, p, which="SA", v0=X0[:, 0], tol=tol)[1]
        return Attempt(X, 0, True, counts=(0, vectors // p, 0))

    return run


# What each of SciPy's methods takes so that only rounding stops it.
SCIPY_OPTIONS: dict[str, dict[str, Any]] = {
    "L-BFGS-B": dict(ftol=0.0, gtol=0.0, maxfun=FOREVER, maxiter=FOREVER),
    "CG": dict(gtol=0.0, maxiter=FOREVER),
    "Newton-CG": dict(xtol=0.0, maxiter=FOREVER),
    "trust-ncg": dict(gtol=0.0, maxiter=FOREVER),
}


def cdopt_solver(method: str) -> Solver:
    """A SciPy method on cdopt's constraint dissolving function; cdopt chooses the penalty."""

    def run(oracle: Oracle, tolerance: float) -> Attempt:  # noqa: ARG001
        import cdopt
        from cdopt.manifold_np import stiefel_np
        from scipy.optimize import minimize

        def iterated(_: Matrix) -> None:
            oracle.iterations += 1

        X0 = oracle.case.X0
        np.random.seed(0)  # noqa: NPY002  cdopt draws the samples for its penalty from here
        problem = cdopt.core.problem(
            stiefel_np(X0.shape), oracle.fun, oracle.grad, oracle.hessp, beta="auto", Xinit=X0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflow, when it leaves the manifold for good
            result = minimize(
                problem.cdf_fun_vec_np,
                problem.Xinit_vec_np,
                method=method,
                jac=problem.cdf_grad_vec_np,
                hessp=problem.cdf_hvp_vec_np if method in ("Newton-CG", "trust-ncg") else None,
                callback=iterated,
                options=SCIPY_OPTIONS[method],
            )
        return Attempt(result.x.reshape(X0.shape), result.nit)

    return Solver(f"cdopt {method}", run, stops=False)


def torch_lbfgs(oracle: Oracle, tolerance: float) -> Attempt:  # noqa: ARG001
    """torch's L-BFGS on a parametrization by the matrix exponential, from the common start."""
    X0 = torch.tensor(oracle.case.X0)
    module = nn.Linear(X0.shape[1], X0.shape[0], bias=False, dtype=X0.dtype)
    module.weight.data.copy_(X0)
    torch.manual_seed(0)  # a tall start is completed to a square matrix at random
    parametrizations.orthogonal(module, orthogonal_map="matrix_exp")
    optimizer = torch.optim.LBFGS(
        module.parameters(),
        max_iter=FOREVER,
        max_eval=FOREVER,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        oracle.iterations = max((s.get("n_iter", 0) for s in optimizer.state.values()), default=0)
        optimizer.zero_grad()
        X = module.weight
        loss = oracle.torch_fun(X)
        loss.backward()
        oracle.took_gradient(X.detach().numpy())
        return loss

    optimizer.step(closure)
    return Attempt(module.weight.detach().numpy(), oracle.iterations)


def our_solver(method: str | None, library: str) -> Runner:
    """``ortholand.minimize`` on NumPy functions, with or without hessp, or by autograd in torch."""

    def run(oracle: Oracle, tolerance: float) -> Attempt:
        X0 = oracle.case.X0.copy()
        options = dict(
            method=METHODS.get(method or "", method),
            gtol=tolerance / oracle.case.start_norm,
            maxiter=FOREVER,
        )
        if library != "torch":
            hessp = oracle.hessp if library == "numpy" else None
            result = ortholand.minimize(oracle.fun_and_grad, X0, jac=True, hessp=hessp, **options)
            return Attempt(result.x, result.nit, result.success)
        result = ortholand.minimize(oracle.torch_fun, torch.from_numpy(X0), **options)
        counts = (result.nfev, result.njev, result.nhev)
        return Attempt(result.x.numpy(), result.nit, result.success, counts=counts)

    return run


OUR_METHODS = ("lbfgs", "newton", "bb", "cg", "landing", "retraction-cg", "retraction-gd")
LIBRARIES = {"numpy": "NumPy, jac", "torch": "torch, autograd"}
ALONE = {"jac": "NumPy, jac, no hessp"}

PARTICIPANTS: dict[str, Solver] = {
    **{
        f"ortholand-default-{library}": Solver(
            f"ortholand, default ({how})",
            our_solver(None, library),
            ours=True,
            stacks=True,
            complex=True,
            in_torch=library == "torch",
        )
        for library, how in {**LIBRARIES, **ALONE}.items()
    },
    **{
        f"ortholand-{method}-{library}": Solver(
            f'ortholand "{method}" ({how})',
            our_solver(method, library),
            ours=True,
            stacks=True,
            complex=True,
            in_torch=library == "torch",
        )
        for method in OUR_METHODS
        for library, how in LIBRARIES.items()
    },
    # It returns the point after the one whose gradient it finds small enough.
    "pymanopt-sd": Solver(
        "pymanopt steepest descent", pymanopt_solver("SteepestDescent"), stops=False
    ),
    "pymanopt-cg": Solver(
        "pymanopt conjugate gradient", pymanopt_solver("ConjugateGradient"), stacks=True
    ),
    "pymanopt-tr": Solver("pymanopt trust regions", pymanopt_solver("TrustRegions"), stacks=True),
    **{
        f"pymanopt-{short}-grassmann": Solver(
            f"pymanopt {words}, Grassmann",
            pymanopt_solver(name, "Grassmann"),
            of_span=True,
            complex=True,
        )
        for short, words, name in [
            ("cg", "conjugate gradient", "ConjugateGradient"),
            ("tr", "trust regions", "TrustRegions"),
        ]
    },
    "smopt-slpg": Solver("smopt slpg", smopt_slpg),
    "cdopt-lbfgs": cdopt_solver("L-BFGS-B"),
    "cdopt-cg": cdopt_solver("CG"),
    "cdopt-newton": cdopt_solver("Newton-CG"),
    "cdopt-trust": cdopt_solver("trust-ncg"),
    "torch-lbfgs": Solver("torch LBFGS on matrix_exp", torch_lbfgs, stops=False, in_torch=True),
    "eigsh": Solver("SciPy eigsh", eigensolver(lobpcg=False), eigen=True),
    "lobpcg": Solver("SciPy lobpcg", eigensolver(lobpcg=True), eigen=True),
}
