"""Where a solver stands, and how it goes from there.

A tangent vector is held by its *coordinates*. For square X they are the skew matrix A of ``A X``:
the relative gradients of all points live in one vector space, and nothing needs transporting from
point to point. For tall X they are the n x p tangent vector itself, made tangent again by a
projection where it is used at another point.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ortholand.geometry.derivatives import remove_normal
from ortholand.geometry.matrices import gram_minus_identity, is_square, skew, sym
from ortholand.retractions import find_retraction, retract
from ortholand.solve.objective import Objective


@dataclass(frozen=True)
class Point:
    """A point near the manifold with all that was computed there."""

    X: Tensor
    value: float  # f
    euclidean: Tensor  # G
    gradient: Tensor  # coordinates of the Riemannian gradient
    multiplier: Tensor  # Sym(X^H G), Sym(G X^H) if square: G = X multiplier at a critical point
    distance: float  # ||X^H X - I||
    correction: float  # <multiplier, X^H X - I> / 2
    gradient_norm: float

    def merit(self, lam: float) -> float:
        """``f - <Sym(X^H G), X^H X - I> / 2 + lam N``.

        The first two terms are f at the nearest point of the manifold, up to terms of second order
        in the distance, which the third outweighs: Fletcher's function for this constraint.
        """
        return self.value - self.correction + lam * self.distance * self.distance / 4

    @property
    def finite(self) -> bool:
        """Whether everything here is a number."""
        return math.isfinite(self.value + self.gradient_norm + self.distance + self.correction)


class SquareFrame:
    """Square X: a tangent vector ``A X`` by the skew A, in the paper's left form."""

    def residual(self, X: Tensor) -> Tensor:
        """``X X^H - I``."""
        return gram_minus_identity(X.mH)

    def newton_schulz(self, Y: Tensor, E: Tensor) -> Tensor:
        """``Y - E Y / 2`` for Y with residual E: what remains of E is of the order of E^2."""
        return torch.addmm(Y, E, Y, alpha=-0.5)

    def differentiate(self, X: Tensor, G: Tensor, _D: Tensor) -> tuple[Tensor, Tensor]:
        """Relative gradient and multiplier."""
        half = G @ X.mH / 2
        return half - half.mH, half + half.mH

    def tangent(self, _X: Tensor, A: Tensor) -> Tensor:
        """Coordinates in use at another point: the same."""
        return A

    def ambient(self, X: Tensor, A: Tensor) -> Tensor:
        """The tangent vector with these coordinates."""
        return A @ X

    def coordinates(self, X: Tensor, V: Tensor) -> Tensor:
        """Coordinates of V's tangent part."""
        return skew(V @ X.mH)

    def hessian(self, point: Point, A: Tensor, W: Tensor) -> Tensor:
        """Riemannian Hessian along A, from ``W = Hess f(X)[A X]``; symmetric also off critical X.

        The relative Hessian has ``G X^H A`` where this has its Hermitian part: the same at
        critical points, and CG needs symmetry.
        """
        return skew(torch.addmm(W @ point.X.mH, point.multiplier, A, alpha=-1))

    def generator(self, _X: Tensor, A: Tensor) -> Tensor:
        """What a retraction takes."""
        return A


class TallFrame:
    """Tall X: a tangent vector by itself; products of size n x p x p only."""

    def residual(self, X: Tensor) -> Tensor:
        """``X^H X - I``."""
        return gram_minus_identity(X)

    def newton_schulz(self, Y: Tensor, E: Tensor) -> Tensor:
        """``Y - Y E / 2``."""
        return torch.addmm(Y, Y, E, alpha=-0.5)

    def differentiate(self, X: Tensor, G: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        """Riemannian gradient and multiplier.

        Off the manifold G's tangent part is ``G - X M`` with ``Sym(X^H X M) = Sym(X^H G)``. M is
        taken to first order in D, or a large normal part of G would pass for a tangent one.
        """
        multiplier = sym(X.mH @ G)
        M = multiplier - sym(D @ multiplier)
        return torch.addmm(G, X, M, alpha=-1), multiplier

    def tangent(self, X: Tensor, V: Tensor) -> Tensor:
        """V without its normal part at X."""
        return remove_normal(X, V)

    def ambient(self, _X: Tensor, V: Tensor) -> Tensor:
        """V itself."""
        return V

    coordinates = tangent

    def hessian(self, point: Point, V: Tensor, W: Tensor) -> Tensor:
        """Riemannian Hessian along V, from ``W = Hess f(X)[V]``."""
        return remove_normal(point.X, torch.addmm(W, V, point.multiplier, alpha=-1))

    def generator(self, X: Tensor, V: Tensor) -> Tensor:
        """B with ``Skew(B X^H) X = V``."""
        return 2 * V - X @ (X.mH @ V)


Frame = SquareFrame | TallFrame
# (frame, X, coordinates A, t, near) to X', at most so far from the manifold, and the t it went
Move = Callable[[Frame, Tensor, Tensor, float, float], tuple[Tensor, float]]

NEAR = 1e-2  # as near as a trial point must be at least; a Newton-Schulz step later it is at 1e-4
FARTHEST = 2.0  # Y^H Y - I up to here in spectral norm, half of which scaling takes away


def land(frame: Frame, X: Tensor, A: Tensor, t: float, near: float = NEAR) -> tuple[Tensor, float]:
    """Move along a tangent vector, then land: by products only. Also how far it went.

    Y = X + t A X has ``Y^H Y - I = D + t^2 (A X)^H (A X)``. Each Newton-Schulz step squares it.
    Moves so long that these steps would not converge are shortened.
    """
    V = frame.ambient(X, A)
    Y = torch.add(X, V, alpha=t)
    E = frame.residual(Y)
    error = norm(E)
    while error > 0.5:
        spectral = math.sqrt(norm(E @ E))
        if spectral <= FARTHEST:
            Y = Y / math.sqrt(1 + spectral / 2)
        else:
            t *= 0.9 * math.sqrt(FARTHEST / spectral)
            Y = torch.add(X, V, alpha=t)
        E = frame.residual(Y)
        error = norm(E)
        if spectral <= FARTHEST:
            break
    return _schulz(frame, Y, E, error, min(near, NEAR)), t


def _schulz(frame: Frame, Y: Tensor, E: Tensor, error: float, near: float) -> Tensor:
    """Newton-Schulz steps until what the last one leaves is known to be small enough."""
    for _ in range(20):
        Y = frame.newton_schulz(Y, E)
        if not error * error * (3 + error) / 4 > near:  # also if it is NaN
            break
        E = frame.residual(Y)
        error = norm(E)
    return Y


def retraction(kind: str) -> Move:
    """Move by a retraction instead: the methods to compare with, in the same loop."""
    find_retraction(kind)

    def move(
        frame: Frame,
        X: Tensor,
        A: Tensor,
        t: float,
        near: float = NEAR,  # noqa: ARG001
    ) -> tuple[Tensor, float]:
        return retract(X, t * frame.generator(X, A), kind), t

    return move


class Terrain:
    """The problem as methods see it: points, and moves between them."""

    def __init__(self, objective: Objective, move: Move = land) -> None:
        self.objective = objective
        self.move = move
        self.frame: Frame = SquareFrame() if is_square(objective.door.start) else TallFrame()
        self.saw_non_finite = False
        self.goal = 0.0  # the gradient's norm at which the run will end
        self.magnitude = 0.0  # of f: what its rounding is relative to, also where f vanishes

    def at(self, X: Tensor) -> Point:
        """Evaluate everything at X."""
        value, G = self.objective.value_and_gradient(X)
        D = self.frame.residual(X)
        gradient, multiplier = self.frame.differentiate(X, G, D)
        point = Point(
            X, value, G, gradient, multiplier, norm(D), inner(multiplier, D) / 2, norm(gradient)
        )
        self.saw_non_finite |= not point.finite
        return point

    def go(
        self, point: Point, direction: Tensor, t: float, near: float = NEAR
    ) -> tuple[Point, float]:
        """Evaluate where the move of length t along a direction leads, and how far it went."""
        X, t = self.move(self.frame, point.X, direction, t, near)
        return self.at(X), t

    def settle(self, X: Tensor) -> Tensor:
        """The nearest point of the manifold to rounding, by Newton-Schulz steps."""
        E = self.frame.residual(X)
        error = norm(E)
        for _ in range(30):
            Y = self.frame.newton_schulz(X, E)
            E = self.frame.residual(Y)
            before, error = error, norm(E)
            if not error < before:
                break  # rounding, or not a number: the last one was better
            X = Y
            if error < feasible(X) / 20:
                break
        return X


def feasible(X: Tensor) -> float:
    """Up to which distance a tall X counts as on the manifold: 100 roundings."""
    return 100 * torch.finfo(X.dtype).eps * math.sqrt(X.shape[-1])


def inner(A: Tensor, B: Tensor) -> float:
    """``Re <A, B>``."""
    if A.is_complex():
        A, B = torch.view_as_real(A.resolve_conj()), torch.view_as_real(B.resolve_conj())
    return torch.dot(A.contiguous().view(-1), B.contiguous().view(-1)).item()


def norm(A: Tensor) -> float:
    """Frobenius norm."""
    return torch.linalg.vector_norm(A).item()
