import pytest
import torch

import ortholand as ol
from ortholand.fields import FIELDS, landing_along, penalty_field, plam_field, tangency_bound
from ortholand.geometry import (
    gram_residual,
    potential,
    relative_gradient,
    riemannian_gradient,
    skew,
    sym,
)
from ortholand.geometry.derivatives import tangent_from_gram


def point(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(*shape, generator=generator, dtype=dtype)
    return X, torch.randn(*shape, generator=generator, dtype=dtype)


def landing_as_printed(X, G, lam):
    """The paper's formula to the letter, n x n matrices and all."""
    identity = torch.eye(X.shape[-2], dtype=X.dtype)
    return skew(G @ X.mH) @ X + lam * (X @ X.mH - identity) @ X


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (2, 5, 2), (1, 1)])
def test_landing_is_the_papers_formula(shape, dtype):
    X, G = point(*shape, dtype=dtype)
    torch.testing.assert_close(ol.landing_field(X, G, 0.7), landing_as_printed(X, G, 0.7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_plam_and_penalty_are_their_formulas(dtype):
    X, G = point(5, 3, dtype=dtype)
    normal = (X @ X.mH - torch.eye(5, dtype=dtype)) @ X
    plam = G - sym(G @ X.mH) @ X + 0.7 * normal
    torch.testing.assert_close(plam_field(X, G, 0.7), plam)
    torch.testing.assert_close(penalty_field(X, G, 0.7), G + 0.7 * normal)


@pytest.mark.parametrize("name", FIELDS)
def test_wide_is_the_transpose_of_tall(name):
    X, G = point(6, 3)
    torch.testing.assert_close(FIELDS[name](X.mT, G.mT, 2.0), FIELDS[name](X, G, 2.0).mT)


def test_penalty_is_the_gradient_of_its_potential():
    X, M = point(4, 3)
    Y = X.clone().requires_grad_()
    ((M * Y).sum() + 0.7 * potential(Y)).backward()
    torch.testing.assert_close(penalty_field(X, M, 0.7), Y.grad)


def test_all_fields_agree_on_the_manifold_for_square_matrices():
    X, G = ol.random_orthogonal(4, 4, seed=0, dtype=torch.float64), point(4, 4)[1]
    torch.testing.assert_close(plam_field(X, G), ol.landing_field(X, G))
    torch.testing.assert_close(ol.landing_field(X, G), riemannian_gradient(X, G))


def test_left_and_right_form_agree_on_square_matrices():
    X, G = point(3, 4, 4)
    left = landing_along(X, relative_gradient(X, G), 0.3)
    right = tangent_from_gram(X, G, gram_residual(X), 0.3)
    torch.testing.assert_close(left, right)


def test_tangency_error_bounds_what_rounding_leaves():
    """A normal gradient: R is zero in exact arithmetic, and what is left of it is not tangent."""
    X = ol.random_orthogonal(200, 300, 7, seed=0)
    H = torch.randn(200, 7, 7, generator=torch.Generator().manual_seed(0))
    G = X @ sym(H) * 1e6
    left_over = torch.linalg.matrix_norm(sym(X.mT @ landing_along(X, G, 0.0)))
    bound = tangency_bound(300, X.dtype, ol.distance(X), torch.linalg.matrix_norm(G))
    assert (left_over > 0).any()
    assert (left_over <= bound).all()
    assert (bound <= 1e4 * left_over.median()).all()
