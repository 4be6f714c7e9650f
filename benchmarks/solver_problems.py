"""The problems of solvers.py, in NumPy and in torch, and the oracle that counts what is asked.

Cost, gradient and Hessian product are written by hand, and what the cost computes the gradient uses
again. All solvers are given this, whatever their interface: :class:`Oracle` knows the last points.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ortholand import random_orthogonal

Matrix = NDArray[np.float64]


class Problem(ABC):
    """A cost over n x p matrices with orthonormal columns.

    Attributes:
        X0: where all solvers start.
        optimum: the least cost, by a closed form; None where there is none.
    """

    X0: Matrix
    optimum: float | None = None

    @abstractmethod
    def share(self, X: Matrix) -> Any:
        """What cost, gradient and Hessian at X have in common."""

    @abstractmethod
    def value(self, X: Matrix, shared: Any) -> float:
        """Cost."""

    @abstractmethod
    def gradient(self, X: Matrix, shared: Any) -> Matrix:
        """Euclidean gradient."""

    @abstractmethod
    def hessian(self, V: Matrix, shared: Any) -> Matrix:
        """Euclidean Hessian applied to V."""

    @abstractmethod
    def torch_fun(self, X: Tensor) -> Tensor:
        """Cost in torch, for those who differentiate themselves."""

    def riemannian_norm(self, X: Matrix) -> float:
        """Norm of the Riemannian gradient, Euclidean metric: ``G - X sym(X^T G)``."""
        G = self.gradient(X, self.share(X))
        S = X.T @ G
        return float(np.linalg.norm(G - X @ ((S + S.T) / 2)))


class Procrustes(Problem):
    """``||X A - B||^2 / N`` over square X, for A and B with N columns."""

    def __init__(self, A: Matrix, B: Matrix, X0: Matrix) -> None:
        self.A, self.B, self.X0 = A, B, X0
        self.N = A.shape[1]
        self.hessian_matrix = 2 / self.N * A @ A.T
        self.torch_A, self.torch_B = torch.from_numpy(A), torch.from_numpy(B)
        U, s, Vh = np.linalg.svd(B @ A.T)
        # Only matrices of the start's determinant can be reached; s[-1] is what that may cost.
        same = np.linalg.det(U @ Vh) * np.linalg.det(X0) > 0
        gain = s.sum() - (0 if same else 2 * s[-1])
        self.optimum = float((np.vdot(A, A) + np.vdot(B, B) - 2 * gain) / self.N)

    def share(self, X: Matrix) -> Matrix:
        """The residual."""
        return X @ self.A - self.B

    def value(self, X: Matrix, shared: Matrix) -> float:  # noqa: ARG002
        """Cost."""
        return float(np.vdot(shared, shared)) / self.N

    def gradient(self, X: Matrix, shared: Matrix) -> Matrix:  # noqa: ARG002
        """Euclidean gradient."""
        return (2 / self.N) * (shared @ self.A.T)

    def hessian(self, V: Matrix, shared: Matrix) -> Matrix:  # noqa: ARG002
        """Euclidean Hessian applied to V."""
        return V @ self.hessian_matrix

    def torch_fun(self, X: Tensor) -> Tensor:
        """Cost in torch."""
        return (X @ self.torch_A - self.torch_B).square().sum() / self.N


class Trace(Problem):
    """``Tr(X^T C X D) / 2``, C symmetric and D a diagonal matrix of weights: PCA and Brockett."""

    def __init__(self, eigenvalues: Matrix, weights: Matrix, X0: Matrix, seed: int) -> None:
        n, self.X0 = len(eigenvalues), X0
        Q = random_orthogonal(n, n, seed=seed, dtype=torch.float64).numpy()
        self.C, self.weights = (Q * eigenvalues) @ Q.T, weights
        self.torch_C, self.torch_weights = torch.from_numpy(self.C), torch.from_numpy(weights)
        # Rearrangement: the largest weight for the smallest eigenvalue.
        smallest = np.sort(eigenvalues)[: len(weights)]
        self.optimum = float(smallest @ np.sort(weights)[::-1]) / 2

    def share(self, X: Matrix) -> Matrix:
        """The gradient."""
        return (self.C @ X) * self.weights

    def value(self, X: Matrix, shared: Matrix) -> float:
        """Cost."""
        return float(np.vdot(X, shared)) / 2

    def gradient(self, X: Matrix, shared: Matrix) -> Matrix:  # noqa: ARG002
        """Euclidean gradient."""
        return shared

    def hessian(self, V: Matrix, shared: Matrix) -> Matrix:  # noqa: ARG002
        """Euclidean Hessian applied to V."""
        return (self.C @ V) * self.weights

    def torch_fun(self, X: Tensor) -> Tensor:
        """Cost in torch."""
        return (X * (self.torch_C @ X) * self.torch_weights).sum() / 2


class ICA(Problem):
    """Mean over the samples of ``sum_i log cosh (X Z)_i``, Z white mixtures of Laplace sources."""

    def __init__(self, sources: int, samples: int, X0: Matrix, seed: int) -> None:
        rng = np.random.default_rng(seed)
        mixtures = rng.standard_normal((sources, sources)) @ rng.laplace(size=(sources, samples))
        mixtures -= mixtures.mean(1, keepdims=True)
        self.X0, self.samples = X0, samples
        self.Z = np.sqrt(samples) * np.linalg.svd(mixtures, full_matrices=False)[2]
        self.torch_Z = torch.from_numpy(self.Z)

    def share(self, X: Matrix) -> dict[str, Matrix]:
        """``|Y|`` and ``exp(-2 |Y|)``: they give log cosh and tanh, which is kept once made."""
        Y = X @ self.Z
        absolute = np.abs(Y)
        return {"Y": Y, "absolute": absolute, "decay": np.exp(-2 * absolute)}

    def value(self, X: Matrix, shared: dict[str, Matrix]) -> float:
        """Cost."""
        logarithms = np.log(1 + shared["decay"])
        total = float(shared["absolute"].sum() + logarithms.sum())
        return total / self.samples - len(X) * float(np.log(2))

    def gradient(self, X: Matrix, shared: dict[str, Matrix]) -> Matrix:  # noqa: ARG002
        """Euclidean gradient."""
        return self._tanh(shared) @ self.Z.T / self.samples

    def hessian(self, V: Matrix, shared: dict[str, Matrix]) -> Matrix:
        """Euclidean Hessian applied to V."""
        if "curvature" not in shared:
            shared["curvature"] = 1 - self._tanh(shared) ** 2
        return (shared["curvature"] * (V @ self.Z)) @ self.Z.T / self.samples

    def torch_fun(self, X: Tensor) -> Tensor:
        """Cost in torch."""
        return (X @ self.torch_Z).cosh().log().sum() / self.samples

    @staticmethod
    def _tanh(shared: dict[str, Matrix]) -> Matrix:
        if "tanh" not in shared:
            decay = shared["decay"]
            shared["tanh"] = np.copysign((1 - decay) / (1 + decay), shared["Y"])
        return shared["tanh"]


def start(n: int, p: int, seed: int) -> Matrix:
    """A start drawn uniformly, independent of the data of the same seed."""
    return random_orthogonal(n, p, seed=1_000 + seed, dtype=torch.float64).numpy()


def gaussian_procrustes(seed: int, p: int = 40) -> Procrustes:
    """The paper's: A and B have independent normal entries."""
    A, B = np.random.default_rng(seed).standard_normal((2, p, p))
    return Procrustes(A, B, start(p, p, seed))


def planted_procrustes(seed: int, p: int = 40, columns: int = 400) -> Procrustes:
    """``B = Q A``, Q in the start's component: with 10 p columns well conditioned, with p not."""
    A = np.random.default_rng(seed).standard_normal((p, columns))
    X0, Q = start(p, p, seed), start(p, p, 500 + seed)
    if np.linalg.det(X0) * np.linalg.det(Q) < 0:
        X0[:, 0] *= -1
    return Procrustes(A, Q @ A, X0)


def pca(seed: int, n: int = 1000, p: int = 200) -> Trace:
    """``-Tr(X^T C X)``: p components with variances 2 to 1 beside .9 to .01."""
    variances = np.concatenate([np.linspace(2, 1, p), np.linspace(0.9, 0.01, n - p)])
    return Trace(-2 * variances, np.ones(p), start(n, p, seed), seed)


def brockett(seed: int, n: int, p: int) -> Trace:
    """Eigenvalues 1 to n, weights p to 1: the p smallest eigenvectors in their order."""
    return Trace(np.arange(1.0, n + 1), np.arange(p, 0.0, -1), start(n, p, seed), seed)


PROBLEMS: dict[str, tuple[str, Callable[[int], Problem]]] = {
    "procrustes-planted": ("Procrustes p = 40, planted, 400 columns", planted_procrustes),
    "procrustes-planted-square": (
        "Procrustes p = 40, planted, square data",
        lambda seed: planted_procrustes(seed, columns=40),
    ),
    "procrustes-gaussian": ("Procrustes p = 40, Gaussian", gaussian_procrustes),
    "ica": (
        "ICA, 40 Laplace sources, 5,000 samples",
        lambda seed: ICA(40, 5_000, start(40, 40, seed), seed),
    ),
    "brockett-small": ("Brockett 200 x 10", lambda seed: brockett(seed, 200, 10)),
    "pca": ("PCA n = 1000, p = 200", pca),
    "brockett-large": ("Brockett 1000 x 200", lambda seed: brockett(seed, 1000, 200)),
}


class Stop(Exception):  # noqa: N818
    """A run is ended from outside; its solver has no say in it."""


class _Seen:
    """What is known at a point."""

    def __init__(self, X: Matrix, shared: Any) -> None:
        self.X = X.copy()  # solvers may go on to change theirs
        self.shared = shared
        self.value: float | None = None
        self.gradient: Matrix | None = None

    def at(self, X: Matrix) -> bool:
        return bool(X.flat[0] == self.X.flat[0]) and np.array_equal(X, self.X)


class Oracle:
    """Answers a solver's questions about a problem; counts them, and ends the run when it is time.

    A question asked again at one of the last two points is neither computed nor counted again.

    Args:
        problem: the problem.
        start_norm: of the Riemannian gradient at the start.
        deadline: ``perf_counter()`` after which the next question raises Stop.
        last_gradient: number of the gradient after which to raise Stop.
        watch: called with every point whose gradient was asked, while the clock stands; Stop is
            raised when it says True.
    """

    def __init__(
        self,
        problem: Problem,
        start_norm: float,
        *,
        deadline: float = np.inf,
        last_gradient: int | None = None,
        watch: Callable[[Matrix], bool] | None = None,
    ) -> None:
        self.problem = problem
        self.start_norm = start_norm
        self.deadline = deadline
        self.last_gradient = last_gradient
        self.watch = watch
        self.fun_count = self.grad_count = self.hess_count = 0
        self.pause = 0.0  # seconds for which the clock stood
        self.last = problem.X0  # where a gradient was last asked
        self._seen: list[_Seen] = []

    def fun(self, X: Matrix) -> float:
        """Cost."""
        return self._value(self._find(X))

    def grad(self, X: Matrix) -> Matrix:
        """Euclidean gradient."""
        seen = self._find(X)
        return self._gradient(seen) if seen.gradient is None else seen.gradient

    def fun_and_grad(self, X: Matrix) -> tuple[float, Matrix]:
        """Both."""
        seen = self._find(X)
        value = self._value(seen)
        return value, self._gradient(seen) if seen.gradient is None else seen.gradient

    def hessp(self, X: Matrix, V: Matrix) -> Matrix:
        """Euclidean Hessian at X applied to V."""
        self.hess_count += 1
        self._check_time()
        return self.problem.hessian(V, self._find(X).shared)

    def torch_fun(self, X: Tensor) -> Tensor:
        """Cost in torch, differentiable. Whoever takes its gradient calls :meth:`took_gradient`."""
        self.fun_count += 1
        self.last = X.detach().numpy()
        self._check_time()
        return self.problem.torch_fun(X)

    def took_gradient(self, X: Matrix) -> None:
        """Count a gradient at X, and stop if it was the last one."""
        self.grad_count += 1
        self.last = X
        if self.last_gradient is not None and self.grad_count >= self.last_gradient:
            raise Stop("the rule holds")
        if self.watch is None:
            return
        start = perf_counter()
        done = self.watch(X)
        self.pause += perf_counter() - start
        if done:
            raise Stop("the rule holds")

    def _find(self, X: Matrix) -> _Seen:
        for seen in self._seen:
            if seen.at(X):
                return seen
        self._check_time()
        seen = _Seen(X, self.problem.share(X))
        self._seen = [seen, *self._seen[:1]]
        return seen

    def _value(self, seen: _Seen) -> float:
        if seen.value is None:
            self.fun_count += 1
            seen.value = self.problem.value(seen.X, seen.shared)
        return seen.value

    def _gradient(self, seen: _Seen) -> Matrix:
        seen.gradient = self.problem.gradient(seen.X, seen.shared)
        self.took_gradient(seen.X)
        return seen.gradient

    def _check_time(self) -> None:
        if perf_counter() - self.pause > self.deadline:
            raise Stop("out of time")
