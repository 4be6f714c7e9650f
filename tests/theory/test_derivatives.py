"""Relative and Riemannian derivatives (the paper's section 2), against Taylor expansions.

A wrong coefficient in a term of order k shows as a remainder of order k instead of k + 1.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ortholand import random_orthogonal
from ortholand.geometry import (
    polar_projection,
    relative_gradient,
    relative_gradient_times_x,
    relative_hessian,
    riemannian_gradient,
    riemannian_hessian,
    skew,
)

DTYPES = [torch.float64, torch.complex128]
SHAPES = [(4, 4), (7, 3), (3, 7)]
SLACK = 0.15  # see the fixture ``order``


@dataclass
class Quartic:
    """``f(X) = Re <C, X> + 1/4 sum |X_ij|^4``: no symmetry that could hide a wrong term."""

    C: Tensor

    def fun(self, X: Tensor) -> Tensor:
        return (self.C.conj() * X).real.sum((-2, -1)) + (X * X.conj()).real.square().sum(
            (-2, -1)
        ) / 4

    def grad(self, X: Tensor) -> Tensor:
        return self.C + X * X.conj() * X

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        return 2 * X * X.conj() * V + X * X * V.conj()


def inner(U: Tensor, V: Tensor) -> Tensor:
    return (U.conj() * V).real.sum()


def norm(M: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(M)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_gradient_is_the_first_order_term_anywhere(dtype, randn, order):
    """Prop. "Relative from Euclidean": f(X + A X) = f(X) + <A, psi> + O(A^2), X not orthogonal."""
    X, f = randn(4, 4, seed=0, dtype=dtype), Quartic(randn(4, 4, seed=1, dtype=dtype))
    A = skew(randn(4, 4, seed=2, dtype=dtype))
    slope = inner(A, relative_gradient(X, f.grad(X)))
    assert abs(slope) > 0.1
    remainder = lambda t: abs(f.fun(X + t * A @ X) - f.fun(X) - t * slope)  # noqa: E731
    assert order(remainder) == pytest.approx(2, abs=SLACK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_hessian_is_the_first_order_term_of_the_relative_gradient(dtype, randn, order):
    """Prop. "Relative from Euclidean": psi(X + A X) = psi(X) + H_X(A) + O(A^2)."""
    X, f = randn(4, 4, seed=0, dtype=dtype), Quartic(randn(4, 4, seed=1, dtype=dtype))
    A = skew(randn(4, 4, seed=2, dtype=dtype))
    H = relative_hessian(X, A, gradient=f.grad(X), hessian_product=f.hessp(X, A @ X))
    psi = lambda Y: relative_gradient(Y, f.grad(Y))  # noqa: E731
    assert norm(H) > 0.1
    assert norm(H + H.mH) == 0
    remainder = lambda t: norm(psi(X + t * A @ X) - psi(X) - t * H)  # noqa: E731
    assert order(remainder) == pytest.approx(2, abs=SLACK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hessians_from_fun_equal_those_from_products(dtype, randn):
    """Autograd on ``fun`` and the analytic gradient and Hessian give the same operators."""
    f = Quartic(randn(5, 3, seed=1, dtype=dtype))
    X, A = randn(5, 3, seed=0, dtype=dtype), skew(randn(5, 5, seed=2, dtype=dtype))
    given = dict(gradient=f.grad(X), hessian_product=f.hessp(X, A @ X))
    for hessian, direction in ((relative_hessian, A), (riemannian_hessian, A @ X)):
        torch.testing.assert_close(
            hessian(X, direction, fun=f.fun), hessian(X, direction, **given), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_riemannian_derivatives_are_a_second_order_expansion(shape, dtype, randn, order):
    """f(R(t xi)) = f + t <grad, xi> + t^2/2 <xi, Hess xi> + O(t^3), R the polar retraction.

    The polar retraction is of second order for the Euclidean metric.
    """
    X, f = (
        random_orthogonal(*shape, seed=0, dtype=dtype),
        Quartic(randn(*shape, seed=1, dtype=dtype)),
    )
    G = f.grad(X)
    xi = riemannian_gradient(X, randn(*shape, seed=2, dtype=dtype))  # tangent
    slope = inner(riemannian_gradient(X, G), xi)
    H = riemannian_hessian(X, xi, gradient=G, hessian_product=f.hessp(X, xi))
    curvature = inner(xi, H)
    assert min(abs(slope), abs(curvature)) > 0.1

    def remainder(t):
        return abs(
            f.fun(polar_projection(X + t * xi)) - f.fun(X) - t * slope - t**2 / 2 * curvature
        )

    assert order(remainder) == pytest.approx(3, abs=SLACK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_and_riemannian_derivatives_along_geodesics(dtype, randn, order):
    """Prop. "Riemannian from relative", with Sym(G X^T) A in the appendix's Hessian.

    grad = psi X, Hess[A X] = H_X(A) X + Skew(psi A) X; along exp(t A) X, to second order.
    """
    X, f = random_orthogonal(4, 4, seed=0, dtype=dtype), Quartic(randn(4, 4, seed=1, dtype=dtype))
    A, G = skew(randn(4, 4, seed=2, dtype=dtype)), f.grad(X)
    psi, HAX = relative_gradient(X, G), f.hessp(X, A @ X)
    H = relative_hessian(X, A, gradient=G, hessian_product=HAX) + skew(psi @ A)
    riemannian = riemannian_hessian(X, A @ X, gradient=G, hessian_product=HAX)
    torch.testing.assert_close(psi @ X, riemannian_gradient(X, G), rtol=0, atol=1e-13)
    torch.testing.assert_close(H @ X, riemannian, rtol=0, atol=1e-13)

    def remainder(t):
        f_t = f.fun(torch.linalg.matrix_exp(t * A) @ X)
        return abs(f_t - f.fun(X) - t * inner(A, psi) - t**2 / 2 * inner(A, H))

    assert order(remainder) == pytest.approx(3, abs=SLACK)


def test_at_a_critical_point_the_hessians_agree_up_to_remapping(randn):
    """Where psi = 0: Hess f[A X] = H_X(A) X."""
    X, S = random_orthogonal(4, 4, seed=0, dtype=torch.float64), randn(4, 4, seed=1)
    f = Quartic((S + S.mT) @ X - X**3)  # so that G X^T = S + S^T is symmetric
    G, A = f.grad(X), skew(randn(4, 4, seed=2))
    given = dict(gradient=G, hessian_product=f.hessp(X, A @ X))
    torch.testing.assert_close(
        relative_hessian(X, A, **given) @ X, riemannian_hessian(X, A @ X, **given)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_psi_x_is_half_the_canonical_gradient_on_stiefel(dtype, randn):
    """Corrected: <grad_c, xi>_c = <G, xi> with <u, v>_c = Re Tr u^H (I - X X^H / 2) v."""
    X, G = random_orthogonal(7, 3, seed=0, dtype=dtype), randn(7, 3, seed=1, dtype=dtype)
    xi = riemannian_gradient(X, randn(7, 3, seed=2, dtype=dtype))
    canonical = riemannian_gradient(X, G, metric="canonical")
    lowered = xi - X @ (X.mH @ xi) / 2
    torch.testing.assert_close(inner(canonical, lowered), inner(G, xi))
    torch.testing.assert_close(2 * relative_gradient_times_x(X, G), canonical)
