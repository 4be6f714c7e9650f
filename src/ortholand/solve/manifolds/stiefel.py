"""Matrices with orthonormal columns, in three forms: tall, square, and up to rotations."""

import math
from typing import Any

from ortholand.solve.arrays import (
    Array,
    adjoint,
    gram_product,
    identity,
    minus_product,
    norm,
    precision,
    product,
    skew,
    sym,
    turned,
)
from ortholand.solve.manifolds.geometry import LandedLine, MatrixGeometry, half_inner, roundings


class OrthonormalColumns(MatrixGeometry):
    """What the three share; stacks of matrices are one point."""

    def columns(self, X: Array) -> int:
        return X.shape[-1] * math.prod(X.shape[:-2])

    def residual(self, X: Array) -> Array:
        return gram_product(X, X) - identity(X)

    def feasible(self, X: Array) -> float:
        return roundings(X)


class TallStiefel(OrthonormalColumns):
    """Tall X: a tangent vector is its own coordinates; products of size n x p x p only."""

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, Array, float]:
        """Riemannian gradient and multiplier, ``Sym(X^H G)`` on the manifold.

        Off the manifold G's tangent part is ``G - X M`` with ``Sym(X^H X M) = Sym(X^H G)``. M is
        taken to first order in D, or a large normal part of G would pass for a tangent one.
        """
        P = gram_product(X, G)
        multiplier = sym(minus_product(P, D, P))
        return minus_product(G, X, multiplier), multiplier, half_inner(multiplier, D)

    def tangent(self, X: Array, A: Array) -> Array:
        return minus_product(A, X, sym(gram_product(X, A)))

    def hessian(self, X: Array, multiplier: Any, A: Array, W: Array) -> Array:
        return self.tangent(X, minus_product(W, A, multiplier))

    def line(self, X: Array, D: Any, A: Array) -> LandedLine:  # noqa: ARG002
        return LandedLine(X, A)


class SquareStiefel(OrthonormalColumns):
    """Square X: the coordinates of a tangent vector ``A X`` are the skew A, the paper's left form.

    The relative gradients of all points live in one vector space: nothing is transported.
    """

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, Array, float]:
        """Relative gradient and multiplier ``Sym(G X^H)``."""
        P = 0.5 * product(G, adjoint(X))
        Q = turned(P)
        # <Sym(G X^H), X X^H - I> = <G, X (X^H X - I)>
        return P - Q, P + Q, half_inner(G, product(X, D))

    def ambient(self, X: Array, A: Array) -> Array:
        return product(A, X)

    def coordinates(self, X: Array, A: Array) -> Array:
        return skew(product(A, adjoint(X)))

    def hessian(self, X: Array, multiplier: Any, A: Array, W: Array) -> Array:
        """``Skew(W X^H - multiplier A)``: the relative Hessian has ``G X^H`` for the multiplier."""
        return skew(minus_product(product(W, adjoint(X)), multiplier, A))

    def line(self, X: Array, D: Any, A: Array) -> LandedLine:  # noqa: ARG002
        return LandedLine(X, product(A, X))


class Subspaces(TallStiefel):
    """Costs of the span alone: the p (p - 1) / 2 rotations of the columns are left out."""

    def differentiate(self, X: Array, D: Any, G: Array) -> tuple[Array, Array, float]:
        """``G - X X^H G``, off the manifold to first order."""
        P = gram_product(X, G)
        P = minus_product(P, D, P)
        multiplier = sym(P)
        return minus_product(G, X, P), multiplier, half_inner(multiplier, D)

    def tangent(self, X: Array, A: Array) -> Array:
        return minus_product(A, X, gram_product(X, A))

    def check_first(self, X: Array, G: Array) -> None:
        """Raise if a part of the gradient rotates columns: a cost of the span has none."""
        turn, size = norm(skew(adjoint(X) @ G)), norm(G)
        if turn > 10 * math.sqrt(precision(X)) * size and math.isfinite(size):
            raise ValueError(
                "On ol.Grassmann() the cost must depend on the span of X alone, f(X Q) = f(X), but "
                f"{turn / size:.1e} of its gradient at x0 rotates columns. Use ol.Stiefel(), or "
                "correct jac."
            )
