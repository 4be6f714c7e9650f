"""What a solver needs of a manifold, and landing moves, which all manifolds of matrices share.

A tangent vector is stored as its *coordinates*, an array of the shape of X. Methods add and scale
coordinates, and take inner products of them; everything else about the manifold is defined here.
"""

import math
from typing import Any

from ortholand.solve.arrays import (
    Array,
    adjoint,
    combine,
    gram_product,
    identity,
    inner,
    largest_norm,
    minus_product,
    norm,
    precision,
    product,
    skew,
    sym,
    turned,
)

NEAR = 1e-2  # largest distance of a trial point; one more Newton-Schulz step makes it 1e-4
FARTHEST = 2.0  # largest spectral norm of Y^H Y - I, half of which scaling removes
CUBIC = 1e-6  # residuals whose cubes are rounding
FARTHEST_START = 0.5  # the ball of the paper; Newton-Schulz steps lead back from there

Residual = Any  # by how much the constraint is missed: an array; a list of them for a product
Multiplier = Any  # likewise


class Line:
    """The curve of points along a tangent vector V at X; here the straight one."""

    def __init__(self, X: Array, V: Array) -> None:
        self.X, self.V = X, V

    def limit(self, t: float) -> float:
        """The largest step up to t from which landing works."""
        return t

    def at(self, t: float, near: float) -> tuple[Array, Residual]:  # noqa: ARG002
        """The point at t, at most ``near`` from the manifold, and its residual."""
        return combine(self.X, t, self.V), None


class Geometry:
    """How a solver moves: here in flat space. A manifold overrides what differs.

    ``D`` is the residual of X throughout. In flat space there is none, nor are there multipliers:
    both are None, and every array is a point and a tangent vector.
    """

    bounded = False  # whether steps can be too long, whatever the cost

    def columns(self, X: Array) -> float:
        """How many vectors of length 1 move, the scale of step lengths."""
        return math.prod(X.shape)

    def residual(self, X: Array) -> Residual:
        """How far X misses the constraint, measured."""

    def far(self, X: Array) -> float:
        """How far a start is from the manifold; at most 1/2 is allowed."""
        residual = self.residual(X)
        return 0.0 if residual is None else largest_norm(residual)

    def size(self, residual: Residual) -> float:  # noqa: ARG002
        """Frobenius norm of a residual or multiplier."""
        return 0.0

    def normal_norm(self, X: Array, multiplier: Multiplier, size: float) -> float:  # noqa: ARG002
        """Norm of the normal vector that a multiplier of this size stands for."""
        return size

    def feasible(self, X: Array) -> float:  # noqa: ARG002
        """The distance up to which X counts as on the manifold: 100 roundings."""
        return 0.0

    def differentiate(self, X: Array, D: Residual, G: Array) -> tuple[Array, Multiplier, float]:  # noqa: ARG002
        """Coordinates of the Riemannian gradient; multiplier; ``<multiplier, D> / 2``."""
        return G, None, 0.0

    def tangent(self, X: Array, A: Array) -> Array:  # noqa: ARG002
        """Coordinates from another point, for use at this one."""
        return A

    def ambient(self, X: Array, A: Array) -> Array:  # noqa: ARG002
        """The tangent vector with these coordinates."""
        return A

    def coordinates(self, X: Array, A: Array) -> Array:
        """Coordinates of the tangent part of any array A."""
        return self.tangent(X, A)

    def hessian(self, X: Array, multiplier: Multiplier, A: Array, W: Array) -> Array:  # noqa: ARG002
        """Riemannian Hessian along A, from the Euclidean one's product W with the tangent vector.

        Symmetric even where X is not critical: CG needs that.
        """
        return W

    def line(self, X: Array, D: Residual, A: Array) -> Line:  # noqa: ARG002
        return Line(X, A)

    def settle(self, X: Array) -> tuple[Array, Residual]:
        """The nearest point of the manifold, up to rounding, and its residual."""
        return X, None

    def check_first(self, X: Array, G: Array) -> None:
        """Raise if the cost does not suit this manifold."""


class MatrixGeometry(Geometry):
    """What manifolds of matrices share, whose residual is ``X^H B X - I``."""

    bounded = True

    def size(self, residual: Residual) -> float:
        return norm(residual)

    def settle(self, X: Array) -> tuple[Array, Residual]:
        """Land X by Newton-Schulz steps ``X (I - E / 2)``, as long as they bring it nearer."""
        E, enough = self.residual(X), roundings(X) / 20
        error = largest_norm(E)
        for _ in range(30):
            if error < enough:
                break
            Y = product(X, identity(X) - 0.5 * E)
            after = self.residual(Y)
            before, error = error, largest_norm(after)
            if not error < before:
                break  # rounding, or not a number: the last one was better
            X, E = Y, after
        return X, E


class LandedLine(Line):
    """``(X + t V) C``: a tangent move Y, then Newton-Schulz steps in p x p matrices.

    A Newton-Schulz step is ``Y (I - E / 2)`` with the residual ``E = Y^H Y - I``, which becomes
    ``(E^3 - 3 E^2) / 4``. Only the move, the product for its Gram matrix and the point itself are
    of size n x p; the point's residual follows.
    """

    def __init__(self, X: Array, V: Array) -> None:
        super().__init__(X, V)
        self.eye, self.t = identity(X), math.nan

    def limit(self, t: float) -> float:
        """Shorten a move so long that Newton-Schulz steps would not converge."""
        self._look(t)
        while self.error > 0.5 and self.spectral > FARTHEST:
            t *= 0.9 * math.sqrt(FARTHEST / self.spectral)
            self._look(t)
        return t

    def _look(self, t: float) -> None:
        self.t, self.S = t, self.gram(t)
        self.E = self.S - self.eye
        self.error = largest_norm(self.E)
        if self.error > 0.5:
            self.spectral = math.sqrt(largest_norm(self.E @ self.E))

    def gram(self, t: float) -> Any:
        """The Gram matrix of the point at t, before landing."""
        self.Y = combine(self.X, t, self.V)
        return gram_product(self.Y, self.Y)

    def at(self, t: float, near: float) -> tuple[Array, Any]:
        C, E = self.landing(t, near)
        return product(self.Y, C), E

    def landing(self, t: float, near: float) -> tuple[Any, Any]:
        """The matrix that lands the point at t, and the residual after landing."""
        if t != self.t:
            self._look(t)
        S, E, error, eye, C = self.S, self.E, self.error, self.eye, None
        if error > 0.5:
            shrink = 1 / (1 + self.spectral / 2)
            C, S = math.sqrt(shrink) * eye, shrink * S
            E = S - eye
            error = largest_norm(E)
        near = min(near, NEAR)
        for _ in range(20):
            step = eye - 0.5 * E
            C = step if C is None else product(C, step)
            if error < CUBIC:  # where I + E would lose digits of the next E
                E = -0.75 * product(E, E)
                S = eye + E
            else:
                S = product(product(step, S), step)
                E = S - eye
            if not error * error * (3 + error) / 4 > near:  # also if it is NaN
                break
            error = largest_norm(E)
        return C, E


def roundings(X: Array) -> float:
    """100 roundings of the columns of X."""
    return 100 * precision(X) * math.sqrt(X.shape[-1] * math.prod(X.shape[:-2]))


def half_inner(A: Any, B: Any) -> float:
    return inner(A, B) / 2


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
