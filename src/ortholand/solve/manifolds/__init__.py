"""Manifolds that a block of ``x0`` may lie on, as users of ``minimize`` name them.

Each says which matrices a block stands for, whether a start is acceptable, and which geometry a
solver uses. A new manifold is a class like these, and a geometry (:mod:`.geometry`).
"""

from typing import Any

import numpy as np
import torch

from ortholand.solve.arrays import (
    Array,
    adjoint,
    gram_product,
    identity,
    largest_norm,
    norm,
    sym,
    to_numpy,
)
from ortholand.solve.manifolds.euclidean import Flat
from ortholand.solve.manifolds.generalized import Cholesky, GeneralizedColumns, inverse_root
from ortholand.solve.manifolds.geometry import FARTHEST_START, Geometry, roundings
from ortholand.solve.manifolds.operators import (
    Covariance,
    Operator,
    check_form,
    check_kinds,
    check_size,
    is_dense,
    operator_for,
    spread,
)
from ortholand.solve.manifolds.product import Packing, Product
from ortholand.solve.manifolds.stiefel import SquareStiefel, Subspaces, TallStiefel

CHOLESKY_UP_TO = 2000  # rows of a dense B that is factorised by default

__all__ = [
    "Covariance",
    "Euclidean",
    "GeneralizedStiefel",
    "Geometry",
    "Grassmann",
    "Manifold",
    "Packing",
    "Product",
    "Rotations",
    "Sphere",
    "Stiefel",
]


class Manifold:
    """What a block of ``x0`` is constrained to."""

    def inward(self, x: Any) -> Any:
        """The user's array in the solver's form."""
        return x

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:  # noqa: ARG002
        """The solver's array in the user's form."""
        return X

    def inward_gradient(self, G: Any) -> Any:
        """The user's gradient in the solver's form."""
        return self.inward(G)

    def outward_gradient(self, G: Any, shape: tuple[int, ...]) -> Any:
        """The solver's gradient in the user's form."""
        return self.outward(G, shape)

    def missed_by(self, X: Any) -> tuple[float, float] | None:  # noqa: ARG002
        """How far the user's array misses the constraint, and may; None: as the solver's does."""
        return None

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise if no array of this shape can be such a block."""
        if 0 in shape:
            raise ValueError(f"{name} must have entries, got shape {shape}.")

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:
        """Raise unless X, in the solver's form, is near the manifold."""

    def geometry(self, X: Any) -> Geometry:
        """How a solver moves on the manifold."""
        raise NotImplementedError

    def geometry_for(self, X: Any, numpy: bool) -> Geometry:  # noqa: ARG002
        """The geometry, for a user of NumPy or of torch."""
        return self.geometry(X)

    def __repr__(self) -> str:
        return f"ol.{type(self).__name__}()"


class Stiefel(Manifold):
    """Matrices with orthonormal columns (rows, if they are wide); stacks ``(..., n, p)`` of them.

    >>> import numpy as np
    >>> import ortholand as ol
    >>> A = np.diag([1.0, 2, 3, 4])
    >>> def fun(x):  # a product: two subspaces that must not be the same
    ...     U, V = x["U"], x["V"]
    ...     value = np.sum(U * (A @ U)) - np.sum(V * (A @ V))
    ...     return value, {"U": 2 * A @ U, "V": -2 * A @ V}
    >>> x0 = {"U": np.eye(4, 2)[::-1] * 1.0, "V": np.eye(4, 2) * 1.0}
    >>> x0["U"][:2] = [[0.1, 0], [0, 0.1]]
    >>> x0["V"][2:] = [[0.1, 0], [0, 0.1]]
    >>> result = ol.minimize(fun, x0, jac=True, manifold=ol.Stiefel())
    >>> result.success, round(result.fun, 6)
    (True, -4.0)
    """

    def inward(self, x: Any) -> Any:
        """The matrices in tall form."""
        return x.swapaxes(-1, -2) if _wide(x.shape) else x

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:
        """The matrices as wide as x0; contiguous, because not every function accepts a view."""
        if not _wide(shape):
            return X
        X = X.swapaxes(-1, -2)
        return np.ascontiguousarray(X) if isinstance(X, np.ndarray) else X.contiguous()

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise unless the shape is that of a matrix or a stack of them."""
        if len(shape) < 2 or 0 in shape:
            raise ValueError(
                f"{name} must be one matrix (n, p), or a stack (..., n, p) of them, got shape "
                f"{shape}. For a vector of norm 1 pass manifold=ol.Sphere(), for one without "
                "constraint ol.Euclidean()."
            )

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:
        """Raise unless X is at most 1/2 away from the manifold."""
        far = largest_norm(gram_product(X, X) - identity(X))
        if not far <= FARTHEST_START:
            side = "rows" if _wide(shape) else "columns"
            raise ValueError(
                f"{name} must have orthonormal {side} up to ||X^H X - I|| <= {FARTHEST_START}, but "
                f"it is {far:.2g} away. Take the nearest such matrix: {_projection(numpy)}."
            )

    def geometry(self, X: Any) -> Geometry:
        """The geometry; square matrices have their own coordinates."""
        return SquareStiefel() if X.shape[-1] == X.shape[-2] else TallStiefel()


class Grassmann(Stiefel):
    """Subspaces: the cost depends on the span of the columns alone, ``f(X Q) = f(X)``.

    A solver then leaves out the ``p (p - 1) / 2`` directions in which f is constant. X itself stays
    a matrix with orthonormal columns; the basis of the subspace that it ends with is arbitrary.
    """

    def geometry(self, X: Any) -> Geometry:  # noqa: ARG002
        """The geometry without rotations of the columns."""
        return Subspaces()


class Rotations(Stiefel):
    """Square matrices with determinant 1, or stacks of them: steps never change the sign."""

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise unless the matrices are square."""
        super().check_shape(shape, name)
        if shape[-1] != shape[-2]:
            raise ValueError(f"{name} on ol.Rotations() must be square, got shape {shape}.")

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:
        """Raise unless X is near the manifold, with determinant 1."""
        super().check_start(X, shape, name, numpy)
        library: Any = np if isinstance(X, np.ndarray) else torch
        determinant = library.linalg.det(X)
        if bool((abs(determinant - abs(determinant)) > 0.1).any()):
            raise ValueError(
                f"{name} on ol.Rotations() must have determinant 1, but one has "
                f"{determinant.real.min():.2g}. Change the sign of one column."
            )


class Sphere(Manifold):
    """Arrays of any shape with Euclidean norm 1."""

    def inward(self, x: Any) -> Any:
        """The array as one column."""
        return x.reshape(-1, 1)

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:
        """The column in the user's shape."""
        return X.reshape(shape)

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:  # noqa: ARG002
        """Raise unless X is at most 1/2 away from the manifold."""
        far = largest_norm(adjoint(X) @ X - 1)
        if not far <= FARTHEST_START:
            raise ValueError(
                f"{name} must have length 1 up to | ||x||^2 - 1 | <= {FARTHEST_START}, but it is "
                f"{far:.2g} away. Divide by its norm: x0 / {'numpy' if numpy else 'torch'}"
                ".linalg.norm(x0)."
            )

    def geometry(self, X: Any) -> Geometry:  # noqa: ARG002
        """The geometry of a single column."""
        return TallStiefel()


class GeneralizedStiefel(Manifold):
    """Matrices with ``X^H B X = I``, B Hermitian and positive definite; stacks (..., n, p) of them.

    Args:
        B: n x n: a matrix of NumPy or torch, a SciPy sparse matrix, a LinearOperator,
            :class:`ortholand.Covariance` of data, or a function V -> B V of matrices (n, k)
            like x0. In :func:`ortholand.minimize_finite_sum` a function (V, batch) -> B_i V, the
            mean over a batch.
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
        self._factor: Cholesky | None = None

    @property
    def changes_variables(self) -> bool:
        """Whether this is the Cholesky form."""
        if self.form is None:
            return is_dense(self.B) and len(self.B) <= CHOLESKY_UP_TO
        return self.form == "cholesky"

    def _factors(self, X: Any) -> tuple[Any, Any]:
        """``L`` and its inverse, in the library and type of X."""
        check_kinds(self.B, X)
        if self._factor is None:
            self._factor = Cholesky(self.B, "B")
        return self._factor.like(X)

    def inward(self, x: Any) -> Any:
        """``L^H x``."""
        return adjoint(self._factors(x)[0]) @ x if self.changes_variables else x

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:  # noqa: ARG002
        """``L^-H X``."""
        return adjoint(self._factors(X)[1]) @ X if self.changes_variables else X

    def inward_gradient(self, G: Any) -> Any:
        """``L^-1 G``."""
        return self._factors(G)[1] @ G if self.changes_variables else G

    def outward_gradient(self, G: Any, shape: tuple[int, ...]) -> Any:  # noqa: ARG002
        """``L G``."""
        return self._factors(G)[0] @ G if self.changes_variables else G

    def missed_by(self, X: Any) -> tuple[float, float] | None:
        """The residual of X itself, not of the new variables, and 100 roundings of it."""
        if not self.changes_variables:
            return None
        operator = operator_for(self.B, X, isinstance(X, np.ndarray))
        residual = sym(adjoint(X) @ operator.apply(X)) - identity(X)
        columns = X.shape[-1] * int(np.prod(X.shape[:-2]))
        largest = float(np.linalg.norm(to_numpy(self.B)))
        return norm(residual), roundings(X) * max(1.0, largest * spread(X) / columns)

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise unless the shape is tall and fits B."""
        check_size(self.B, shape, name)

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:  # noqa: ARG002
        """Raise unless X is at most 1/2 away from the manifold."""
        BX = X if self.changes_variables else operator_for(self.B, X, numpy).apply(X)
        far = largest_norm(adjoint(X) @ BX - identity(X))
        if not far <= FARTHEST_START:
            raise ValueError(
                f"{name} must satisfy X^H B X = I up to ||X^H B X - I|| <= {FARTHEST_START}, but "
                f"it is {far:.2g} away. Take the nearest such matrix: x0 = manifold.project(x0)."
            )

    def geometry(self, X: Any) -> Geometry:
        """The geometry for a user of X's own library."""
        return self.geometry_for(X, isinstance(X, np.ndarray))

    def geometry_for(self, X: Any, numpy: bool) -> Geometry:
        """Orthonormal columns in new variables, or products with B."""
        if self.changes_variables:
            return SquareStiefel() if X.shape[-1] == X.shape[-2] else TallStiefel()
        return GeneralizedColumns(self.operator(X, numpy))

    def operator(self, X: Any, numpy: bool) -> Operator:
        """Products with B for arrays like X, after a check of B."""
        operator = operator_for(self.B, X, numpy)
        operator.check(X, "B", definite=isinstance(self.B, Covariance) and self.B.ridge > 0)
        return operator

    def project(self, x: Any) -> Any:
        """``X (X^H B X)^(-1/2)``: the nearest matrix of the manifold in the metric of B.

        Takes any x of full rank, by one product with B and p x p algebra.
        """
        if not isinstance(x, (np.ndarray, torch.Tensor)):
            raise TypeError(f"x must be a NumPy array or a tensor, got {type(x).__name__}.")
        self.check_shape(tuple(x.shape), "x")
        BX = operator_for(self.B, x, isinstance(x, np.ndarray)).apply(x)
        return landed(x, BX, "x")

    def __repr__(self) -> str:
        kind = type(self.B).__name__
        return f"ol.GeneralizedStiefel({kind}{'' if self.form is None else f', {self.form!r}'})"


def landed(X: Any, BX: Any, name: str) -> Any:
    """``X (X^H B X)^(-1/2)``; raises if X is not of full rank."""
    with np.errstate(all="ignore"):
        landed = X @ inverse_root(adjoint(X) @ BX)
    finite = np.isfinite(landed) if isinstance(landed, np.ndarray) else landed.isfinite()
    if not bool(finite.all()):
        raise ValueError(
            f"{name} must be finite and of full rank, with X^H B X positive definite, but it is "
            "not. Start from random numbers, and check B."
        )
    return landed


class Euclidean(Manifold):
    """Arrays of any shape without a constraint, for the rest of a product."""

    def geometry(self, X: Any) -> Geometry:  # noqa: ARG002
        """The geometry of flat space."""
        return Flat()


def default_manifold(x: Array, alone: bool) -> Manifold:
    """Matrices have orthonormal columns; in a product, vectors and numbers are free."""
    return Euclidean() if x.ndim < 2 and not alone else Stiefel()


def _wide(shape: Any) -> bool:
    return shape[-2] < shape[-1]


def _projection(numpy: bool) -> str:
    return (
        "U, _, Vh = numpy.linalg.svd(x0, full_matrices=False); x0 = U @ Vh"
        if numpy
        else "x0 = ortholand.geometry.polar_projection(x0)"
    )
