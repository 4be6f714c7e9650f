"""Manifolds that a block of ``x0`` may lie on: what a user of ``minimize`` names.

Each says which matrices a block stands for, whether a start will do, and which geometry a solver
is to use. A new manifold is a class like these, and a geometry (:mod:`.geometry`).
"""

from typing import Any

import numpy as np
import torch

from ortholand.solve.arrays import Array, adjoint, identity, largest_norm
from ortholand.solve.manifolds.euclidean import Flat
from ortholand.solve.manifolds.geometry import FARTHEST_START, Geometry
from ortholand.solve.manifolds.product import Packing, Product
from ortholand.solve.manifolds.stiefel import SquareStiefel, Subspaces, TallStiefel

__all__ = [
    "Euclidean",
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
        """The user's array as the solver has it."""
        return x

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:  # noqa: ARG002
        """The solver's array as the user has it."""
        return X

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise if no array of this shape can be such a block."""
        if 0 in shape:
            raise ValueError(f"{name} must have entries, got shape {shape}.")

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:
        """Raise unless X, as the solver has it, is near the manifold."""

    def geometry(self, X: Any) -> Geometry:
        """How a solver moves on it."""
        raise NotImplementedError

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
        """Tall."""
        return x.swapaxes(-1, -2) if _wide(x.shape) else x

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:
        """Wide again; contiguous, as x0 most likely was: not every function likes a view."""
        if not _wide(shape):
            return X
        X = X.swapaxes(-1, -2)
        return np.ascontiguousarray(X) if isinstance(X, np.ndarray) else X.contiguous()

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """A matrix, or a stack of them."""
        if len(shape) < 2 or 0 in shape:
            raise ValueError(
                f"{name} must be one matrix (n, p), or a stack (..., n, p) of them, got shape "
                f"{shape}. For a vector of length one pass manifold=ol.Sphere(), for one without "
                "constraint ol.Euclidean()."
            )

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:
        """At most 1/2 away."""
        far = largest_norm(adjoint(X) @ X - identity(X))
        if not far <= FARTHEST_START:
            side = "rows" if _wide(shape) else "columns"
            raise ValueError(
                f"{name} must have orthonormal {side} up to ||X^H X - I|| <= {FARTHEST_START}, but "
                f"it is {far:.2g} away. Take the nearest such matrix: {_projection(numpy)}."
            )

    def geometry(self, X: Any) -> Geometry:
        """Square matrices have coordinates of their own."""
        return SquareStiefel() if X.shape[-1] == X.shape[-2] else TallStiefel()


class Grassmann(Stiefel):
    """Subspaces: the cost depends on the span of the columns alone, ``f(X Q) = f(X)``.

    A solver then leaves out the ``p (p - 1) / 2`` directions in which f is constant. X itself stays
    a matrix with orthonormal columns; which basis of the subspace it ends with means nothing.
    """

    def geometry(self, X: Any) -> Geometry:  # noqa: ARG002
        """Without rotations of the columns."""
        return Subspaces()


class Rotations(Stiefel):
    """Square matrices with determinant 1, or stacks of them: steps never change its sign."""

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Square."""
        super().check_shape(shape, name)
        if shape[-1] != shape[-2]:
            raise ValueError(f"{name} on ol.Rotations() must be square, got shape {shape}.")

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:
        """Of determinant 1."""
        super().check_start(X, shape, name, numpy)
        library: Any = np if isinstance(X, np.ndarray) else torch
        determinant = library.linalg.det(X)
        if bool((abs(determinant - abs(determinant)) > 0.1).any()):
            raise ValueError(
                f"{name} on ol.Rotations() must have determinant 1, but there is "
                f"{determinant.real.min():.2g}. Change the sign of one column."
            )


class Sphere(Manifold):
    """Arrays of any shape whose entries have squares that sum to 1."""

    def inward(self, x: Any) -> Any:
        """One column."""
        return x.reshape(-1, 1)

    def outward(self, X: Any, shape: tuple[int, ...]) -> Any:
        """In its own shape."""
        return X.reshape(shape)

    def check_start(self, X: Any, shape: tuple[int, ...], name: str, numpy: bool) -> None:  # noqa: ARG002
        """At most 1/2 away."""
        far = largest_norm(adjoint(X) @ X - 1)
        if not far <= FARTHEST_START:
            raise ValueError(
                f"{name} must have length 1 up to | ||x||^2 - 1 | <= {FARTHEST_START}, but it is "
                f"{far:.2g} away. Divide by its norm: x0 / {'numpy' if numpy else 'torch'}"
                ".linalg.norm(x0)."
            )

    def geometry(self, X: Any) -> Geometry:  # noqa: ARG002
        """One column."""
        return TallStiefel()


class Euclidean(Manifold):
    """Arrays of any shape, without a constraint: the rest of a product."""

    def geometry(self, X: Any) -> Geometry:  # noqa: ARG002
        """Flat."""
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
