"""Constraints of one's own, ``c(x) = 0`` of full rank: landing by Gauss-Newton steps.

With the Jacobian J of c, the normal step is ``-J^T (J J^T)^-1 c`` and the tangent part of a
gradient G is ``G - J^T mu`` with the least-squares multiplier ``mu = (J J^T)^-1 J G``. Fletcher's
merit function is ``f - <mu, c> + lam ||c||^2 / 4``. A move so long that Gauss-Newton steps would
not land it is shortened, as trial points show.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ortholand.solve.arrays import Array, as_tensor, from_numpy, inner, norm, precision, to_numpy
from ortholand.solve.manifolds.geometry import Geometry, Line
from ortholand.solve.variables import Manifold

KEPT = 4  # points whose Jacobian is remembered
SHORTEST = 8  # halvings of a Gauss-Newton step that overshoots
SINGULAR = 1e-12  # smallest eigenvalue of J J^T, relative to the largest, of a full rank


class Constraint(Manifold):
    """Arrays of any shape with ``fun(x) = 0``.

    Args:
        fun: ``fun(x)``, a vector of m numbers, fewer than x has; of a block as x0 holds it.
        jac: ``jac(x)``, its derivative, of shape (m, ...) with the shape of x; None: autograd for
            tensors, central differences for arrays. It must have full rank near the solution.

    >>> import numpy as np
    >>> import ortholand as ol
    >>> ellipse = ol.Constraint(lambda x: [x[0] ** 2 + 4 * x[1] ** 2 - 4])
    >>> fun = lambda x: (x.sum(), np.ones(2))
    >>> result = ol.minimize(fun, np.array([2.0, 0.0]), jac=True, manifold=ellipse)
    >>> round(result.fun, 6)
    -2.236068
    """

    def __init__(self, fun: Callable[..., Any], jac: Callable[..., Any] | None = None) -> None:
        if not callable(fun) or not (jac is None or callable(jac)):
            raise TypeError(f"fun and jac must be functions, got {fun!r:.40} and {jac!r:.40}.")
        self.fun, self.jac = fun, jac

    def nearness(self, shape: tuple[int, ...], numpy: bool) -> tuple[str, str]:  # noqa: ARG002
        return (
            "nearly satisfy its ol.Constraint: the Gauss-Newton step, relative to ||x0||, must be",
            "Start nearer to where fun is zero.",
        )

    def geometry(self, X: Any, numpy: bool) -> "LevelSet":
        if X.dtype in (np.complex64, np.complex128, torch.complex64, torch.complex128):
            raise TypeError(f"ol.Constraint needs real variables, got {X.dtype}.")
        return LevelSet(self, numpy)


class Known(NamedTuple):
    """What was computed at a point."""

    X: Any
    J: np.ndarray  # m x numbers of X
    factor: np.ndarray  # Cholesky's, of J J^T


class LevelSet(Geometry):
    """The points with ``c(x) = 0``; the residual is c, and dense algebra is of size m."""

    def __init__(self, constraint: Constraint, numpy: bool) -> None:
        self.constraint, self.numpy = constraint, numpy
        self.known: list[Known] = []

    def columns(self, X: Array) -> float:
        return inner(X, X) or 1.0

    def residual(self, X: Array) -> np.ndarray:
        c = self.constraint.fun(self._shown(X))
        c = c if isinstance(c, torch.Tensor) else np.asarray(c)
        return to_numpy(c).reshape(-1).astype(float)

    def size(self, residual: Any) -> float:
        return norm(residual)

    def far(self, X: Array) -> float:
        return norm(self._normal_step(X, self.residual(X))) / (norm(X) or 1.0)

    def feasible(self, X: Array) -> float:
        J = self._at(X).J
        return 100 * precision(X) * math.sqrt(len(J)) * max(1.0, norm(J) * norm(X))

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, np.ndarray, float]:
        mu = self._multipliers(X, G)
        return G - self._back(X, mu), mu, float(mu @ D)

    def tangent(self, X: Array, A: Array) -> Array:
        return A - self._back(X, self._multipliers(X, A))

    def hessian(self, X: Array, multiplier: Any, A: Array, W: Array) -> Array:
        """``W - sum_i mu_i c_i''(X)[A]`` without its normal part; c'' by a difference of J."""
        length = norm(A)
        if length == 0:
            return W
        h = precision(X) ** 0.5 * max(norm(X), 1.0) / length
        change = self._jacobian(X + h * A).T @ multiplier - self._at(X).J.T @ multiplier
        return self.tangent(X, W - self._as(change / h, X))

    def line(self, X: Array, D: Any, A: Array) -> "LevelLine":  # noqa: ARG002
        return LevelLine(self, X, A)

    def settle(self, X: Array) -> tuple[Array, np.ndarray]:
        return self.landed(X, 0.0)

    def landed(self, X: Array, near: float) -> tuple[Array, np.ndarray]:
        """X moved to where ``||c||`` is at most this, if Gauss-Newton steps lead there."""
        c = self.residual(X)
        for _ in range(30):
            error = norm(c)
            if not near < error < math.inf or error <= self.feasible(X) / 20:
                break
            step = self._normal_step(X, c)
            for halving in range(SHORTEST):
                Y = X - 0.5**halving * step
                after = self.residual(Y)
                if norm(after) < error * (1 - 0.5**halving / 4):
                    break
            else:
                break  # rounding
            X, c = Y, after
        return X, c

    def _normal_step(self, X: Array, c: np.ndarray) -> Array:
        return self._back(X, _solve(self._at(X).factor, c))

    def _multipliers(self, X: Array, G: Array) -> np.ndarray:
        one = self._at(X)
        return _solve(one.factor, one.J @ to_numpy(G).reshape(-1))

    def _back(self, X: Array, mu: np.ndarray) -> Array:
        """``J^T mu``."""
        return self._as(self._at(X).J.T @ mu, X)

    def _as(self, flat: np.ndarray, X: Array) -> Array:
        return from_numpy(flat.reshape(tuple(X.shape)), X)

    def _at(self, X: Array) -> Known:
        for one in self.known:
            if one.X is X:
                return one
        J = self._jacobian(X)
        gram = J @ J.T
        values = np.linalg.eigvalsh(gram) if np.isfinite(gram).all() else np.zeros(1)
        if not values[0] > SINGULAR * values[-1]:
            raise ValueError(
                "The derivative of an ol.Constraint must have full rank, but at some point it has "
                f"singular values down to {math.sqrt(max(values[0], 0.0)):.1e} of "
                f"{math.sqrt(values[-1]):.1e}. Remove dependent constraints, or start elsewhere."
            )
        self.known = [*self.known[1 - KEPT :], Known(X, J, np.linalg.cholesky(gram))]
        return self.known[-1]

    def _jacobian(self, X: Array) -> np.ndarray:
        x, constraint = self._shown(X), self.constraint
        if constraint.jac is not None:
            J = constraint.jac(x)
            J = to_numpy(J) if isinstance(J, torch.Tensor) else np.asarray(J)
        elif isinstance(x, torch.Tensor):
            with torch.enable_grad():
                J = to_numpy(torch.func.jacrev(_stacked(constraint.fun))(x))
        else:
            J = self._differences(X)
        return J.reshape(-1, math.prod(X.shape)).astype(float)

    def _differences(self, X: Array) -> np.ndarray:
        def at(flat: np.ndarray) -> np.ndarray:
            return self.residual(self._as(flat, X))

        flat, columns = to_numpy(X).reshape(-1).astype(float), []
        for i, entry in enumerate(flat):
            h = precision(X) ** (1 / 3) * max(1.0, abs(float(entry)))
            step = np.zeros_like(flat)
            step[i] = h
            columns.append((at(flat + step) - at(flat - step)) / (2 * h))
        return np.stack(columns, axis=1)

    def _shown(self, X: Array) -> Any:
        return X if self.numpy else as_tensor(X)


class LevelLine(Line):
    """A tangent move, then Gauss-Newton steps."""

    def __init__(self, geometry: LevelSet, X: Array, V: Array) -> None:
        super().__init__(X, V)
        self.geometry = geometry

    def limit(self, t: float) -> float:
        """Shorten a move from which Gauss-Newton steps would lead far away."""
        for _ in range(30):
            Y = self.X + t * self.V
            c = self.geometry.residual(Y)
            if norm(c) <= self.geometry.feasible(self.X):
                break
            if np.isfinite(c).all():
                step = self.geometry._normal_step(Y, c)
                near = norm(step) <= max(0.5 * t * norm(self.V), 1e-12 * norm(Y))
                if near and norm(self.geometry.residual(Y - step)) <= 0.5 * norm(c):
                    break
            t /= 2
        return t

    def at(self, t: float, near: float) -> tuple[Array, np.ndarray]:
        Y = self.X + t * self.V
        size = norm(self.geometry._at(self.X).J)  # near is a length, c a value
        return self.geometry.landed(Y, min(near, 1e-2) * size)


def _solve(factor: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.solve(factor.T, np.linalg.solve(factor, b))


def _stacked(fun: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def stacked(x: torch.Tensor) -> torch.Tensor:
        c = fun(x)
        return c.reshape(-1) if isinstance(c, torch.Tensor) else torch.stack(list(c)).reshape(-1)

    return stacked
