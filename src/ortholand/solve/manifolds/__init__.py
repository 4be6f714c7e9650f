"""Manifolds that a block of ``x0`` may lie on, as users of ``minimize`` name them.

Each says which matrices a block stands for, whether a start is acceptable, and which geometry a
solver uses. A new manifold is a class like these, and a geometry (:mod:`.geometry`).
"""

from typing import Any

import numpy as np
import torch

from ortholand.solve.arrays import Array
from ortholand.solve.manifolds.constraint import Constraint as Constraint
from ortholand.solve.manifolds.generalized import GeneralizedStiefel as GeneralizedStiefel
from ortholand.solve.manifolds.geometry import (
    FARTHEST_START,
    Geometry,
    SquareStiefel,
    Subspaces,
    TallStiefel,
)
from ortholand.solve.manifolds.product import Product
from ortholand.solve.variables import Manifold, Variables


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

    def inward(self, x: Any, gradient: bool = False) -> Any:  # noqa: ARG002
        return x.swapaxes(-1, -2) if _wide(x.shape) else x

    def outward(self, X: Any, shape: tuple[int, ...], gradient: bool = False) -> Any:  # noqa: ARG002
        """The matrices as wide as x0; contiguous, because not every function accepts a view."""
        if not _wide(shape):
            return X
        X = X.swapaxes(-1, -2)
        return np.ascontiguousarray(X) if isinstance(X, np.ndarray) else X.contiguous()

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        if len(shape) < 2 or 0 in shape:
            raise ValueError(
                f"{name} must be one matrix (n, p), or a stack (..., n, p) of them, got shape "
                f"{shape}. For a vector of norm 1 pass manifold=ol.Sphere(), for one without "
                "constraint ol.Euclidean()."
            )

    def nearness(self, shape: tuple[int, ...], numpy: bool) -> tuple[str, str]:
        side = "rows" if _wide(shape) else "columns"
        svd = "U, _, Vh = numpy.linalg.svd(x0, full_matrices=False); x0 = U @ Vh"
        nearest = svd if numpy else "x0 = ortholand.geometry.polar_projection(x0)"
        return (
            f"have orthonormal {side} up to ||X^H X - I||",
            f"Take the nearest such matrix: {nearest}.",
        )

    def geometry(self, X: Any, numpy: bool) -> Geometry:  # noqa: ARG002
        return SquareStiefel() if X.shape[-1] == X.shape[-2] else TallStiefel()


class Grassmann(Stiefel):
    """Subspaces: the cost depends on the span of the columns alone, ``f(X Q) = f(X)``.

    A solver then leaves out the ``p (p - 1) / 2`` directions in which f is constant. X itself stays
    a matrix with orthonormal columns; the basis of the subspace that it ends with is arbitrary.
    """

    def geometry(self, X: Any, numpy: bool) -> Geometry:  # noqa: ARG002
        return Subspaces()


class Rotations(Stiefel):
    """Square matrices with determinant 1, or stacks of them: steps never change the sign."""

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        super().check_shape(shape, name)
        if shape[-1] != shape[-2]:
            raise ValueError(f"{name} on ol.Rotations() must be square, got shape {shape}.")

    def check_component(self, X: Any, name: str) -> None:
        library: Any = np if isinstance(X, np.ndarray) else torch
        determinant = library.linalg.det(X)
        if bool((abs(determinant - abs(determinant)) > 0.1).any()):
            raise ValueError(
                f"{name} on ol.Rotations() must have determinant 1, but one has "
                f"{determinant.real.min():.2g}. Change the sign of one column."
            )


class Sphere(Manifold):
    """Arrays of any shape with Euclidean norm 1."""

    def inward(self, x: Any, gradient: bool = False) -> Any:  # noqa: ARG002
        return x.reshape(-1, 1)

    def outward(self, X: Any, shape: tuple[int, ...], gradient: bool = False) -> Any:  # noqa: ARG002
        return X.reshape(shape)

    def nearness(self, shape: tuple[int, ...], numpy: bool) -> tuple[str, str]:  # noqa: ARG002
        library = "numpy" if numpy else "torch"
        return (
            "have length 1 up to | ||x||^2 - 1 |",
            f"Divide by its norm: x0 / {library}.linalg.norm(x0).",
        )

    def geometry(self, X: Any, numpy: bool) -> Geometry:  # noqa: ARG002
        return TallStiefel()


class Euclidean(Manifold):
    """Arrays of any shape without a constraint, for the rest of a product."""

    def geometry(self, X: Any, numpy: bool) -> Geometry:  # noqa: ARG002
        return Geometry()


def default_manifold(x: Array, alone: bool) -> Manifold:
    """Matrices have orthonormal columns; in a product, vectors and numbers are free."""
    return Euclidean() if x.ndim < 2 and not alone else Stiefel()


def variables_on(x0: Any, manifold: Any = None, *, torch_inside: bool = False) -> Variables:
    return Variables(x0, manifold, default_manifold, torch_inside=torch_inside)


def one_matrix(x0: Any, manifold: Any = None) -> Variables:
    """Variables for solvers of one matrix only, in torch."""
    variables = variables_on(x0, manifold, torch_inside=True)
    if not variables.single or len(variables.shape) != 2:
        found = variables.shape if variables.single else type(x0).__name__
        raise ValueError(f"x0 must be one matrix (n, p) here, got {found}.")
    return variables


def geometry_of(variables: Variables) -> Geometry:
    """The geometry around a start, or the product of several; raises unless the start is near."""
    variables.check_finite()
    geometries = []
    for block, X in zip(variables.blocks, variables.split(variables.start), strict=True):
        geometry = block.manifold.geometry(X, variables.numpy)
        far = geometry.far(X)
        if not far <= FARTHEST_START:
            rule, advice = block.manifold.nearness(block.shape, variables.numpy)
            raise ValueError(
                f"{block.name} must {rule} <= {FARTHEST_START}, but it is {far:.2g} away. {advice}"
            )
        block.manifold.check_component(X, block.name)
        geometries.append(geometry)
    return geometries[0] if variables.single else Product(geometries, variables.packing)


def _wide(shape: Any) -> bool:
    return shape[-2] < shape[-1]
