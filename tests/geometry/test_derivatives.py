"""Shapes, forms and errors; the propositions themselves are in tests/theory."""

import pytest
import torch

import ortholand as ol
from ortholand.geometry import (
    relative_gradient,
    relative_gradient_times_x,
    relative_hessian,
    remove_normal,
    riemannian_gradient,
    riemannian_hessian,
    skew,
)


def pair(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(*shape, generator=generator, dtype=dtype),
        torch.randn(*shape, generator=generator, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (2, 5, 2)])
def test_the_cheap_form_equals_the_definition(shape, dtype):
    X, G = pair(*shape, dtype=dtype)
    torch.testing.assert_close(relative_gradient_times_x(X, G), relative_gradient(X, G) @ X)


def test_on_square_matrices_the_riemannian_gradient_is_psi_x():
    X, G = ol.random_orthogonal(5, 5, seed=0, dtype=torch.float64), pair(5, 5)[1]
    psi_x = relative_gradient_times_x(X, G)
    torch.testing.assert_close(riemannian_gradient(X, G), psi_x)
    torch.testing.assert_close(riemannian_gradient(X, G, "canonical"), 2 * psi_x)


def test_wide_matrices_are_their_transposes():
    X, G = ol.random_orthogonal(6, 3, seed=0, dtype=torch.float64), pair(6, 3)[1]
    torch.testing.assert_close(riemannian_gradient(X.mT, G.mT), riemannian_gradient(X, G).mT)
    xi = riemannian_gradient(X, G)

    def fun(X):
        return (X**3).sum()

    torch.testing.assert_close(
        riemannian_hessian(X.mT, xi.mT, fun=fun), riemannian_hessian(X, xi, fun=fun).mT
    )


def test_removing_the_normal_part_leaves_the_relative_gradient_even_off_the_manifold():
    X, G = pair(6, 3)
    torch.testing.assert_close(relative_gradient(X, remove_normal(X, G)), relative_gradient(X, G))


@pytest.mark.parametrize("kwargs", [{}, {"gradient": torch.eye(2)}])
def test_a_hessian_says_what_it_needs(kwargs):
    with pytest.raises(ValueError, match="either fun, or both"):
        relative_hessian(torch.eye(2), torch.zeros(2, 2), **kwargs)


def test_hessian_of_a_linear_cost_and_inside_no_grad():
    X, A = ol.random_orthogonal(3, 3, seed=0, dtype=torch.float64), skew(pair(3, 3)[0])
    M = pair(3, 3)[1]
    with torch.no_grad():
        H = relative_hessian(X, A, fun=lambda X: (M * X).sum())
    torch.testing.assert_close(H, -skew(M @ X.mT @ A))
    assert not H.requires_grad


def test_unknown_metric():
    with pytest.raises(ValueError, match="metric must be"):
        riemannian_gradient(torch.eye(2), torch.eye(2), "hyperbolic")
