"""Matrices with ``X^H B X = I``: by products with B alone, or in new variables where B is small.

**Landing form.** The metric is the Euclidean one, and no factor or inverse of B is used. With
``Y = B X`` the normal vectors at X are ``Y M``, M Hermitian, so that the tangent part of G is
``G - Y M`` with ``K M + M K = Y^H G + G^H Y``, ``K = Y^H Y``: p x p algebra. Newton-Schulz steps
``X (I - D / 2)`` land by ``D = X^H B X - I`` as for B = I. A move along V takes one product,
``B V``: that with the landed point, ``(B X + t B V) C``, follows.

**Cholesky form.** ``B = L L^H`` and ``Z = L^H X`` has orthonormal columns: the solver's own. A cost
that is well conditioned in Z may not be so in X, so this form is used where L is available.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.safe_step import MARGIN, largest_root
from ortholand.solve.arrays import (
    Array,
    adjoint,
    all_finite,
    as_tensor,
    combine,
    from_numpy,
    identity,
    inner,
    minus_product,
    norm,
    sym,
    to_numpy,
)
from ortholand.solve.manifolds.geometry import (
    Geometry,
    LandedLine,
    MatrixGeometry,
    SquareStiefel,
    TallStiefel,
    half_inner,
    roundings,
)
from ortholand.solve.manifolds.operators import (
    Covariance,
    Operator,
    check_form,
    check_kinds,
    check_size,
    is_dense,
    not_definite,
    operator_for,
)
from ortholand.solve.variables import Manifold

CHOLESKY_UP_TO = 2000  # rows of a dense B that is factorised by default
KEPT = 4  # points whose products with B are remembered
MEASURED = 50  # lines after which a residual is measured again: derived ones collect rounding


class GeneralizedStiefel(Manifold):
    """Matrices with ``X^H B X = I``, B Hermitian and positive definite; stacks (..., n, p) of them.

    Args:
        B: n x n: a matrix of NumPy or torch, a SciPy sparse matrix, a LinearOperator,
            :class:`ortholand.Covariance` of data, or a function V -> B V of matrices (n, k)
            like x0.
        form: ``"landing"`` uses products with B only, never a factor or inverse of it;
            ``"cholesky"`` changes variables, and needs a dense B. None: Cholesky for a dense B of
            at most 2,000 rows, where it is faster.

    >>> import numpy as np
    >>> import ortholand as ol
    >>> A, B = np.diag([1.0, 2.0, 3.0]), np.diag([1.0, 4.0, 1.0])
    >>> manifold = ol.GeneralizedStiefel(B)
    >>> x0 = manifold.project(np.ones((3, 1)))
    >>> result = ol.minimize(lambda X: (np.sum(X * (A @ X)), 2 * A @ X), x0, jac=True,
    ...                      manifold=manifold)
    >>> round(result.fun, 6)  # the smallest eigenvalue of A x = mu B x
    0.5
    """

    def __init__(self, B: Any, form: str | None = None) -> None:
        self.B = check_form(B)
        if form not in (None, "landing", "cholesky"):
            raise ValueError(f"form must be 'landing', 'cholesky' or None, got {form!r}.")
        if form == "cholesky" and not is_dense(self.B):
            raise ValueError(
                f"form='cholesky' needs a dense B, got {type(B).__name__}. Use form='landing', "
                "which needs products with B only, or make B dense: B.toarray()."
            )
        self.form = form
        self._converted: dict[Any, list[Any]] = {}  # factors by type and device

    @property
    def changes_variables(self) -> bool:
        if self.form is None:
            return is_dense(self.B) and len(self.B) <= CHOLESKY_UP_TO
        return self.form == "cholesky"

    @cached_property
    def _in_double(self) -> tuple[Any, Any]:
        return cholesky(self.B)

    def _factors(self, X: Any) -> list[Any]:
        """L with ``B = L L^H``, and its inverse, in the library and type of X."""
        check_kinds(self.B, X)
        key = (X.dtype, str(getattr(X, "device", "")))
        if key not in self._converted:
            self._converted[key] = [from_numpy(factor, X) for factor in self._in_double]
        return self._converted[key]

    def inward(self, x: Any, gradient: bool = False) -> Any:
        """``L^H x`` of a point, ``L^-1 x`` of a gradient."""
        if not self.changes_variables:
            return x
        L, inverse = self._factors(x)
        return inverse @ x if gradient else adjoint(L) @ x

    def outward(self, X: Any, shape: tuple[int, ...], gradient: bool = False) -> Any:  # noqa: ARG002
        """``L^-H X`` of a point, ``L X`` of a gradient."""
        if not self.changes_variables:
            return X
        L, inverse = self._factors(X)
        return L @ X if gradient else adjoint(inverse) @ X

    def missed_by(self, X: Any) -> tuple[float, float] | None:
        """The residual of X itself, not of the new variables, and 100 roundings of it."""
        if not self.changes_variables:
            return None
        operator = operator_for(self.B, X, isinstance(X, np.ndarray))
        residual = sym(adjoint(X) @ operator.apply(X)) - identity(X)
        columns = X.shape[-1] * int(np.prod(X.shape[:-2]))
        largest = float(np.linalg.norm(to_numpy(self.B)))
        return norm(residual), roundings(X) * max(1.0, largest * inner(X, X) / columns)

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        check_size(self.B, shape, name)

    def nearness(self, shape: tuple[int, ...], numpy: bool) -> tuple[str, str]:  # noqa: ARG002
        return (
            "satisfy X^H B X = I up to ||X^H B X - I||",
            "Take the nearest such matrix: x0 = manifold.project(x0).",
        )

    def geometry(self, X: Any, numpy: bool) -> Geometry:
        if self.changes_variables:
            return SquareStiefel() if X.shape[-1] == X.shape[-2] else TallStiefel()
        operator = operator_for(self.B, X, numpy)
        operator.check(X, definite=isinstance(self.B, Covariance) and self.B.ridge > 0)
        return GeneralizedColumns(operator)

    def project(self, x: Any) -> Any:
        """``X (X^H B X)^(-1/2)``: the nearest matrix of the manifold in the metric of B.

        Takes any x of full rank, by one product with B and p x p algebra.
        """
        if not isinstance(x, (np.ndarray, torch.Tensor)):
            raise TypeError(f"x must be a NumPy array or a tensor, got {type(x).__name__}.")
        self.check_shape(tuple(x.shape), "x")
        BX = operator_for(self.B, x, isinstance(x, np.ndarray)).apply(x)
        with np.errstate(all="ignore"):
            landed = x @ inverse_root(adjoint(x) @ BX)
        if not all_finite(landed):
            raise ValueError(
                "x must be finite and of full rank, with X^H B X positive definite, but it is not. "
                "Start from random numbers, and check B."
            )
        return landed

    def __repr__(self) -> str:
        kind = type(self.B).__name__
        return f"ol.GeneralizedStiefel({kind}{'' if self.form is None else f', {self.form!r}'})"


@dataclass(eq=False)
class Known:
    """What was computed at a point."""

    X: Any
    Y: Any  # B X
    eigen: tuple[Any, Any] | None = None  # eigenvalues and eigenvectors of Y^H Y


class GeneralizedColumns(MatrixGeometry):
    """The landing form, for one matrix or a stack; ``D = X^H B X - I``."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.known: list[Known] = []
        self.lines = 0

    def product(self, X: Array) -> Any:
        """``B X``, computed once for each point."""
        return self._known(X).Y

    def know(self, X: Array, Y: Any) -> None:
        self.known = [one for one in self.known if not _same(one.X, X)][-KEPT + 1 :]
        self.known.append(Known(X, Y))

    def _known(self, X: Array) -> Known:
        for one in self.known:
            if _same(one.X, X):
                return one
        self.know(X, self.operator.apply(X))
        return self.known[-1]

    def _eigen(self, X: Array) -> tuple[Any, Any]:
        one = self._known(X)
        if one.eigen is None:
            one.eigen = _eigh(adjoint(one.Y) @ one.Y)
        return one.eigen

    def columns(self, X: Array) -> float:
        return inner(X, X)

    def residual(self, X: Array) -> Array:
        self.know(X, self.operator.apply(X))
        return self._residual(X)

    def _residual(self, X: Array) -> Array:
        return sym(adjoint(X) @ self.product(X)) - identity(X)

    def normal_norm(self, X: Array, multiplier: Any, size: float) -> float:  # noqa: ARG002
        return norm(self.product(X) @ multiplier)

    def feasible(self, X: Array) -> float:
        columns = X.shape[-1] * math.prod(X.shape[:-2])
        return roundings(X) * max(1.0, self.operator.norm * inner(X, X) / columns)

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, Array, float]:
        """Tangent part of G, multiplier M; exact at every X of full rank."""
        M = self._multiplier(X, G)
        return minus_product(G, self.product(X), M), M, half_inner(M, D)

    def _multiplier(self, X: Array, G: Array) -> Array:
        P = adjoint(self.product(X)) @ G
        w, Q = self._eigen(X)
        rotated = adjoint(Q) @ (P + adjoint(P)) @ Q
        return Q @ (rotated / (w[..., :, None] + w[..., None, :])) @ adjoint(Q)

    def tangent(self, X: Array, A: Array) -> Array:
        return minus_product(A, self.product(X), self._multiplier(X, A))

    def hessian(self, X: Array, multiplier: Any, A: Array, W: Array) -> Array:
        return self.tangent(X, minus_product(W, self.operator.apply(A), multiplier))

    def line(self, X: Array, D: Any, A: Array) -> "GeneralizedLine":
        self.lines += 1
        return GeneralizedLine(self, X, self.residual(X) if self.lines % MEASURED == 0 else D, A)

    def field_scale(self, X: Array) -> float:
        """The largest eigenvalue of K, by which the landing field is longer than the gradient."""
        return float(to_numpy(self._eigen(X)[0]).max())

    def landing_step(
        self, X: Array, G: Array, eta: float, lam: float, eps: float, spectral: bool
    ) -> tuple[Array, bool]:
        """``X - eta L``, no further than is safe; whether that is finite."""
        L, longest = self.safe_field(X, G, lam, eps, spectral)
        step = longest.clamp(max=eta)[..., None, None]
        moved = as_tensor(X) - step * as_tensor(L)
        finite = bool(moved.isfinite().all()) and bool(longest.isfinite().all())
        return (moved if isinstance(X, Tensor) else moved.numpy()), finite

    def safe_field(
        self, X: Array, G: Array, lam: float, eps: float, spectral: bool
    ) -> tuple[Array, Tensor]:
        """The landing field ``L = Skew(G Y^H) Y + lam Y D`` and the safe step, for each matrix.

        ``D' = D - eta T + eta^2 L^H B L`` with ``T = Y^H L + L^H Y``, which is
        ``lam (K D + D K)`` up to rounding, because ``Y^H Skew(.) Y`` is skew; and with
        ``t = eta lam``, ``D - t (K D + D K)`` is the mean of ``(I - 2 t K) D`` and its adjoint. Let
        k1 and k2 be K's extreme eigenvalues. If ``t (k1 + k2) <= 1``, the spectral norm of
        ``I - 2 t K`` is ``1 - 2 t k1``, so that in every unitarily invariant norm
        ``d' <= (1 - 2 eta lam k1) d + eta^2 q`` with any q that is at least that of ``L^H B L``.
        """
        Y, D = self.product(X), self._residual(X)
        K = adjoint(Y) @ Y
        L = 0.5 * (G @ K - Y @ (adjoint(G) @ Y)) + lam * (Y @ D)
        unit = norm(L) or 1.0  # so that squares do not overflow
        V = L / unit
        T, KD = adjoint(Y) @ V, K @ D * (lam / unit)
        rounding = T + adjoint(T) - KD - adjoint(KD)
        squares = adjoint(V) @ self.operator.apply(V)
        d, q, error = (_size(M, spectral) for M in (D, squares, rounding))
        w = as_tensor(self._eigen(X)[0])
        low, high = w.amin(-1).clamp(min=0), w.amax(-1)
        room = eps * (1 - MARGIN) - d
        longest = largest_root(q.sqrt(), lam / unit * low * d - error / 2, room) / unit
        # Only up to here is ||I - 2 t K|| = 1 - 2 t low; a 1e-4 less, because K is rounded.
        cap = (1 - MARGIN) / (lam * (low + high)) if lam > 0 else math.inf * torch.ones_like(d)
        return L, torch.minimum(longest, cap)


class GeneralizedLine(LandedLine):
    """``(X + t V) C``, and the product of B with it."""

    def __init__(self, geometry: GeneralizedColumns, X: Array, D: Any, V: Array) -> None:
        super().__init__(X, V)
        self.geometry, self.S0 = geometry, D + self.eye
        self.BX, self.BV = geometry.product(X), geometry.operator.apply(V)
        M = adjoint(self.BX) @ V
        self.linear = M + adjoint(M)
        self.quadratic = sym(adjoint(V) @ self.BV)

    def gram(self, t: float) -> Any:
        """``I + D + t (X^H B V + V^H B X) + t^2 V^H B V``."""
        return combine(combine(self.S0, t * t, self.quadratic), t, self.linear)

    def at(self, t: float, near: float) -> tuple[Array, Any]:
        C, E = self.landing(t, near)
        X = combine(self.X, t, self.V) @ C
        self.geometry.know(X, combine(self.BX, t, self.BV) @ C)
        return X, E


def _same(X: Any, other: Any) -> bool:
    """Whether two arrays share memory. One is kept alive, so its memory cannot be reused."""
    return X is other or _place(X) == _place(other)


def _place(X: Any) -> Any:
    if isinstance(X, np.ndarray):
        return X.__array_interface__["data"][0], X.shape, X.strides
    return X.data_ptr(), tuple(X.shape), X.stride()


def _eigh(K: Any) -> tuple[Any, Any]:
    """Eigenvalues and eigenvectors in the library of K; NaN if K is not finite."""
    library: Any = np if isinstance(K, np.ndarray) else torch
    K = sym(K)
    if all_finite(K):
        w, Q = library.linalg.eigh(K)
        return w, Q
    return library.full_like(K[..., 0].real, math.nan), K


def inverse_root(S: Any) -> Any:
    """``S^(-1/2)`` of p x p matrices; NaN where S is not positive definite."""
    w, Q = _eigh(S)
    return (Q * (w[..., None, :] ** -0.5)) @ adjoint(Q)


def _size(M: Any, spectral: bool) -> Tensor:
    return torch.linalg.matrix_norm(as_tensor(M), ord=2 if spectral else "fro")


def cholesky(B: Any) -> tuple[Any, Any]:
    """L with ``B = L L^H``, and its inverse, in double precision; raises if there is none."""
    import scipy.linalg  # here: importing ortholand must stay cheap

    given = to_numpy(B)
    dense = given.astype(np.result_type(given, np.float64), copy=False)
    try:
        L = np.linalg.cholesky(dense)
        smallest = (np.abs(np.diagonal(L)) ** 2).min()
    except np.linalg.LinAlgError:
        L, smallest = dense, 0.0
    # A pivot is at least the smallest eigenvalue, up to rounding.
    if not smallest > len(dense) * np.finfo(np.float64).eps * np.abs(dense).max():
        values = np.linalg.eigvalsh(dense)
        raise ValueError(not_definite(float(values[0]), float(values[-1])))
    return L, scipy.linalg.solve_triangular(L, np.eye(len(dense)), lower=True)
