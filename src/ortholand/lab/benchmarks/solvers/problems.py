"""The library's problems, each with a start, and in NumPy, for solvers that ask with arrays.

What the cost computes at a point the gradient and the Hessian use again: solvers ask for them one
by one, and none should pay twice. Nor for torch, whose calls take longer than small products do: so
the derivatives are written once more. A test holds them equal to the library's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import SupportsFloat

import numpy as np
import torch
from numpy.typing import NDArray

from ortholand.geometry import polar_projection, riemannian_gradient
from ortholand.problems import ICA, PCA, Brockett, Problem, Procrustes

Matrix = NDArray[np.float64]
# At a point: cost and gradient, once they are asked for, and the Hessian as a function.
Parts = tuple[Callable[[], SupportsFloat], Callable[[], Matrix], Callable[[Matrix], Matrix]]


def quadratic(M: Matrix, weights: Matrix | float, X: Matrix) -> Parts:
    """``Tr(X^T M X diag(weights)) / 2``: the gradient gives the cost."""
    G = (M @ X) * weights
    return lambda: np.vdot(X, G) / 2, lambda: G, lambda V: (M @ V) * weights


def procrustes(A: Matrix, B: Matrix, curvature: Matrix, X: Matrix) -> Parts:
    """They have the residual in common; the Hessian is the same everywhere."""
    E, p = X @ A - B, A.shape[1]
    return lambda: np.vdot(E, E) / p, lambda: 2 / p * (E @ A.T), lambda V: V @ curvature


def log_cosh(Z: Matrix, X: Matrix) -> Parts:
    """They have ``exp(-2 |X Z|)`` in common: it gives log cosh and tanh."""
    Y, samples = X @ Z, Z.shape[1]
    absolute = np.abs(Y)
    decay = np.exp(-2 * absolute)
    tanh = cache(lambda: np.copysign((1 - decay) / (1 + decay), Y))
    slopes = cache(lambda: 1 - tanh() ** 2)
    return (
        lambda: (absolute.sum() + np.log(1 + decay).sum()) / samples - len(X) * math.log(2),
        lambda: tanh() @ Z.T / samples,
        lambda V: (slopes() * (V @ Z)) @ Z.T / samples,
    )


def in_numpy(problem: Problem) -> Callable[[Matrix], Parts]:
    """A problem of the library as a function of the point."""
    if isinstance(problem, PCA) and problem.C.ndim == 2:
        return partial(quadratic, -2 * problem.C.numpy(), 1.0)
    if isinstance(problem, Brockett):
        return partial(quadratic, problem.A.numpy(), 2 * problem.mu.numpy())
    if isinstance(problem, Procrustes):
        data = problem.A, problem.B, problem.curvature
        return partial(procrustes, *(tensor.numpy() for tensor in data))
    if isinstance(problem, ICA) and problem.signs is None:
        return partial(log_cosh, problem.Z.numpy())
    raise TypeError(f"Not written in NumPy yet: {type(problem).__name__}. Add it to {__name__}.")


@dataclass(frozen=True, eq=False)
class Case:
    """A problem and where all solvers start."""

    problem: Problem
    X0: Matrix
    optimum: float = math.nan  # the least cost that can be reached from there, where it is known

    @cached_property
    def at(self) -> Callable[[Matrix], Parts]:
        """The problem in NumPy, as a function of the point."""
        return in_numpy(self.problem)

    def cost(self, X: Matrix) -> float:
        """Cost of X."""
        return float(self.at(X)[0]())

    def riemannian_norm(self, X: Matrix) -> float:
        """Norm of the Riemannian gradient, Euclidean metric."""
        G = self.at(X)[1]()
        return float(riemannian_gradient(torch.tensor(X), torch.tensor(G)).norm())

    @cached_property
    def start_norm(self) -> float:
        """The norm at the start."""
        return self.riemannian_norm(self.X0)


def nearest(X: Matrix) -> Matrix:
    """The nearest matrix with orthonormal columns; NaN if X is not finite."""
    finite = np.isfinite(X).all()
    return polar_projection(torch.tensor(X)).numpy() if finite else np.full_like(X, np.nan)


def gaussian(seed: int, p: int = 40) -> Case:
    """The paper's. Only matrices of the start's determinant can be reached."""
    problem = Procrustes.gaussian(p, seed=seed)
    X0 = problem.start(seed)
    reachable = problem.solution(determinant=int(torch.linalg.det(X0).sign()))
    return Case(problem, X0.numpy(), float(problem.fun(reachable)))


def planted(columns: int, seed: int) -> Case:
    """Started in the solution's component: with 10 p columns well conditioned, with p not."""
    problem = Procrustes.planted(40, columns=columns, seed=seed)
    X0 = problem.start(seed)
    X0[:, 0] *= torch.linalg.det(X0 @ problem.solution()).sign()
    return Case(problem, X0.numpy(), float(problem.optimum()))


def ica(seed: int) -> Case:
    """Laplace sources, mixed and whitened."""
    problem = ICA.planted(40, 5_000, seed=seed)
    return Case(problem, problem.start(seed).numpy())


def pca(seed: int) -> Case:
    """200 components with variances 2 to 1 beside 800 of .9 to .01."""
    leading, others = np.linspace(2, 1, 200), np.linspace(0.9, 0.01, 800)
    variances = torch.from_numpy(np.concatenate([leading, others]))
    problem = PCA.with_spectrum(variances, 200, seed=seed)
    return Case(problem, problem.start(seed).numpy(), float(problem.optimum()))


def brockett(n: int, p: int, seed: int) -> Case:
    """Half of Brockett's cost, as it is often written: the gradient is then ``A X N``."""
    problem = Brockett.linear(n, p, seed=seed)
    problem = replace(problem, A=problem.A / 2)
    return Case(problem, problem.start(seed).numpy(), float(problem.optimum()))


# Title, and what the seed makes.
PROBLEMS: dict[str, tuple[str, Callable[[int], Case]]] = {
    "procrustes-planted": ("Procrustes p = 40, planted, 400 columns", partial(planted, 400)),
    "procrustes-planted-square": ("Procrustes p = 40, planted, square data", partial(planted, 40)),
    "procrustes-gaussian": ("Procrustes p = 40, Gaussian", gaussian),
    "ica": ("ICA, 40 Laplace sources, 5,000 samples", ica),
    "brockett-small": ("Brockett 200 x 10", partial(brockett, 200, 10)),
    "pca": ("PCA n = 1000, p = 200", pca),
    "brockett-large": ("Brockett 1000 x 200", partial(brockett, 1000, 200)),
}
