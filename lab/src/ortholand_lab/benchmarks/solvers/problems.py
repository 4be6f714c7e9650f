"""The library's problems, each with a start, and in NumPy, for solvers that use arrays.

The gradient and the Hessian reuse what the cost has computed at a point: solvers ask for them one
by one, and none should pay twice. Nor should any pay for torch, whose calls take longer than small
products: so the derivatives are written again in NumPy. A test holds them equal to the library's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, SupportsFloat

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from ortholand.geometry import polar_projection, riemannian_gradient
from ortholand_lab.problems import ICA, PCA, Brockett, KohnSham, Problem, Procrustes

Matrix = NDArray[np.float64]
# At a point: cost and gradient, once they are asked for, and the Hessian as a function.
Parts = tuple[Callable[[], SupportsFloat], Callable[[], Matrix], Callable[[Matrix], Matrix]]


def quadratic(M: Matrix, weights: Matrix | float, X: Matrix) -> Parts:
    """``Tr(X^T M X diag(weights)) / 2``: the gradient gives the cost."""
    G = (M @ X) * weights
    return lambda: np.vdot(X, G) / 2, lambda: G, lambda V: (M @ V) * weights


def procrustes(A: Matrix, B: Matrix, curvature: Matrix, X: Matrix) -> Parts:
    """Procrustes: cost and gradient share the residual; the Hessian is constant."""
    E, p = X @ A - B, A.shape[1]
    return lambda: np.vdot(E, E) / p, lambda: 2 / p * (E @ A.T), lambda V: V @ curvature


def log_cosh(Z: Matrix, X: Matrix) -> Parts:
    """ICA: cost and derivatives share ``exp(-2 |X Z|)``, which gives log cosh and tanh."""
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


def kohn_sham(alpha: float, X: Matrix) -> Parts:
    """Kohn-Sham: cost and derivatives share the potential."""
    rho = np.einsum("ij,ij->i", X, X)
    u, LX = _potential(rho), _laplacian(X)

    def hessian(V: Matrix) -> Matrix:
        change = _potential(2 * np.einsum("ij,ij->i", X, V))
        return _laplacian(V) + alpha * (u[:, None] * V + change[:, None] * X)

    return (
        lambda: np.vdot(X, LX) / 2 + alpha / 4 * np.vdot(rho, u),
        lambda: LX + alpha * u[:, None] * X,
        hessian,
    )


def _laplacian(X: Matrix) -> Matrix:
    Y = 2 * X
    Y[1:] -= X[:-1]
    Y[:-1] -= X[1:]
    return Y


def _potential(rho: Matrix) -> Matrix:
    n = len(rho)
    twice = np.concatenate([[0.0], np.cumsum(np.cumsum(rho))])
    return np.arange(1, n + 1) / (n + 1) * twice[-1] - twice[:-1]


@dataclass(frozen=True, eq=False)
class Synchronization(Problem):
    """``sum |X_j - X_i H_ij|^2 / 2`` over pairs: a stack of rotations from their differences."""

    first: Tensor  # (m,) the i of each pair
    second: Tensor  # (m,) the j
    H: Tensor  # (m, 3, 3)
    truth: Tensor  # (N, 3, 3)

    @classmethod
    def planted(cls, count: int, pairs: int, seed: int) -> "Synchronization":
        """Pairs along a ring, and random ones."""
        random = torch.Generator().manual_seed(seed)
        truth = _rotations(torch.randn(count, 3, 3, generator=random, dtype=torch.float64))
        ring = torch.arange(count)
        more = torch.randint(count, (2, pairs - count), generator=random)
        first, second = torch.cat([ring, more[0]]), torch.cat([ring.roll(-1), more[1]])
        return cls(first, second, truth[first].mT @ truth[second], truth)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of one rotation."""
        return 3, 3

    @property
    def data(self) -> Tensor:
        """The differences of rotations."""
        return self.H

    def _errors(self, X: Tensor) -> Tensor:
        return X[self.second] - X[self.first] @ self.H

    def fun(self, X: Tensor) -> Tensor:
        """Cost of a stack."""
        return self._errors(X).square().sum() / 2

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient, linear in X."""
        E = self._errors(X)
        G = torch.zeros_like(X).index_add_(0, self.second, E)
        return G.index_add_(0, self.first, E @ self.H.mT, alpha=-1)

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Cost and Euclidean gradient of a stack."""
        return self.fun(X), self.grad(X)

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:  # noqa: ARG002
        """Hessian product: the cost is quadratic, so the Hessian is constant."""
        return self.grad(V)

    def solution(self) -> Tensor:
        """The planted rotations, since there is no noise."""
        return self.truth

    def nearby(self, seed: int) -> Tensor:
        """A start: every rotation turned by about 40 degrees."""
        random = torch.Generator().manual_seed(seed + 1)
        noise = torch.randn(self.truth.shape, generator=random, dtype=torch.float64)
        return _rotations(self.truth + 0.3 * noise)


def _rotations(M: Tensor) -> Tensor:
    """The nearest rotations, after a reflection where needed."""
    X = polar_projection(M)
    return X * torch.linalg.det(X).sign()[:, None, None]


def synchronization(problem: Synchronization) -> Callable[[Matrix], Parts]:
    """The problem in NumPy; a sparse matrix sums over the pairs of each rotation."""
    first, second, H = (x.numpy() for x in (problem.first, problem.second, problem.H))
    count, pairs = len(problem.truth), len(H)
    ones, places = np.ones(pairs), np.arange(pairs)
    to_first = csr_matrix((ones, (first, places)), shape=(count, pairs))
    to_second = csr_matrix((ones, (second, places)), shape=(count, pairs))

    def errors(X: Matrix) -> Matrix:
        return X[second] - X[first] @ H

    def gather(E: Matrix) -> Matrix:
        back = (E @ H.swapaxes(-1, -2)).reshape(pairs, 9)
        return (to_second @ E.reshape(pairs, 9) - to_first @ back).reshape(count, 3, 3)

    def at(X: Matrix) -> Parts:
        E = errors(X)
        return lambda: np.vdot(E, E) / 2, lambda: gather(E), lambda V: gather(errors(V))

    return at


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
    if isinstance(problem, KohnSham):
        return partial(kohn_sham, problem.alpha)
    if isinstance(problem, Synchronization):
        return synchronization(problem)
    raise TypeError(f"Not written in NumPy yet: {type(problem).__name__}. Add it to {__name__}.")


@dataclass(frozen=True, eq=False)
class Case:
    """A problem and where all solvers start."""

    problem: Problem | None  # None: written in NumPy only, as ``parts``
    X0: Matrix
    optimum: float = math.nan  # the least cost that can be reached from there, where it is known
    of_span: bool = False  # whether the cost depends on the span of X alone
    parts: Callable[[Matrix], Parts] | None = None
    matrix: Any = None  # of an eigenproblem whose smallest eigenvalues are wanted

    @cached_property
    def at(self) -> Callable[[Matrix], Parts]:
        """The problem in NumPy, as a function of the point."""
        if self.parts is not None:
            return self.parts
        assert self.problem is not None
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
        """Norm of the Riemannian gradient at the start."""
        return self.riemannian_norm(self.X0)


def nearest(X: Matrix) -> Matrix:
    """The nearest matrix with orthonormal columns; NaN if X is not finite."""
    finite = np.isfinite(X).all()
    return polar_projection(torch.tensor(X)).numpy() if finite else np.full_like(X, np.nan)


def gaussian(seed: int, p: int = 40) -> Case:
    """The paper's problem. Only matrices with the start's determinant can be reached."""
    problem = Procrustes.gaussian(p, seed=seed)
    X0 = problem.start(seed)
    reachable = problem.solution(determinant=int(torch.linalg.det(X0).sign()))
    return Case(problem, X0.numpy(), float(problem.fun(reachable)))


def planted(columns: int, seed: int) -> Case:
    """From a start in the solution's component; well conditioned with 10 p columns, not with p."""
    problem = Procrustes.planted(40, columns=columns, seed=seed)
    X0 = problem.start(seed)
    X0[:, 0] *= torch.linalg.det(X0 @ problem.solution()).sign()
    return Case(problem, X0.numpy(), float(problem.optimum()))


def ica(seed: int) -> Case:
    """Laplace sources, mixed and whitened."""
    problem = ICA.planted(40, 5_000, seed=seed)
    return Case(problem, problem.start(seed).numpy())


def pca(seed: int) -> Case:
    """200 components with variances 2 to 1, and 800 of .9 to .01."""
    leading, others = np.linspace(2, 1, 200), np.linspace(0.9, 0.01, 800)
    variances = torch.from_numpy(np.concatenate([leading, others]))
    problem = PCA.with_spectrum(variances, 200, seed=seed)
    return Case(problem, problem.start(seed).numpy(), float(problem.optimum()), of_span=True)


def brockett(n: int, p: int, seed: int) -> Case:
    """Half of Brockett's cost, as it is often written: the gradient is then ``A X N``."""
    problem = Brockett.linear(n, p, seed=seed)
    problem = replace(problem, A=problem.A / 2)
    return Case(problem, problem.start(seed).numpy(), float(problem.optimum()))


def electrons(n: int, p: int, seed: int) -> Case:
    """The ground state of p electrons, from a random start."""
    problem = KohnSham(n, p)
    return Case(problem, problem.start(seed).numpy(), of_span=True)


def decaying_pca(seed: int, n: int = 500, p: int = 20) -> Case:
    """Eigenvalues 1 / i^2: the last component's gap is 5e-5 of the first's."""
    values = torch.arange(1, n + 1, dtype=torch.float64) ** -2.0
    problem = PCA.with_spectrum(values, p, seed=seed)
    return Case(problem, problem.start(seed).numpy(), float(problem.optimum()), of_span=True)


def rotations(seed: int, count: int = 1000) -> Case:
    """A thousand rotations from 3,000 differences."""
    problem = Synchronization.planted(count, 3 * count, seed)
    return Case(problem, problem.nearby(seed).numpy(), 0.0)
