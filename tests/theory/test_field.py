"""The landing field: its two orthogonal parts and its zeros."""

import pytest
import torch

from ortholand import distance, landing_field, random_orthogonal
from ortholand.geometry import potential, relative_gradient, riemannian_gradient, sym
from ortholand_lab.problems import Procrustes

DTYPES = [torch.float64, torch.complex128]
SHAPES = [(4, 4), (7, 3), (3, 7), (5, 1), (1, 1)]


def norm(M):
    return torch.linalg.matrix_norm(M)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tangent_and_normal_parts_are_orthogonal_everywhere(shape, dtype, randn):
    """<psi X, X D> = 0 exactly, so ||L||^2 = ||psi X||^2 + lam^2 ||X D||^2, however far X is."""
    X, G = randn(2, 200, *shape, seed=0, dtype=dtype)
    R, normal = landing_field(X, G, 0.0), landing_field(X, torch.zeros_like(G), 1.0)
    inner = (R.conj() * normal).real.sum((-2, -1))
    # Rounding of R is relative to G X^H X, not to R, which vanishes for real X with p = n = 1.
    assert (inner.abs() <= 1e-14 * norm(X) ** 2 * norm(G) * norm(normal)).all()
    L = landing_field(X, G, 0.3)
    torch.testing.assert_close(norm(L) ** 2, norm(R) ** 2 + 0.3**2 * norm(normal) ** 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (3, 7)])
def test_normal_part_is_the_gradient_of_the_potential(shape, dtype, randn):
    """Grad N = X D for N = d^2 / 4, on the Stiefel manifold too (the paper drops the 1/4 there)."""
    X = randn(*shape, seed=0, dtype=dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(potential(X), X)
    normal = landing_field(X.detach(), torch.zeros_like(X), 1.0)
    torch.testing.assert_close(gradient, normal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_field_is_bounded_below_by_criticality_and_distance(dtype, randn):
    """Prop. "Critical points": ||L|| >= sigma_min (||psi||^2 + lam^2 d^2)^(1/2) for square X.

    Hence, for invertible X, L = 0 only where psi = 0 and d = 0.
    """
    X, G = randn(2, 500, 4, 4, seed=0, dtype=dtype)
    lam, smallest = 0.3, torch.linalg.svdvals(X)[:, -1]
    psi = relative_gradient(X, G)
    lower = smallest * (norm(psi) ** 2 + lam**2 * distance(X) ** 2).sqrt()
    assert (norm(landing_field(X, G, lam)) >= lower * (1 - 1e-12)).all()


def test_field_vanishes_at_orthogonal_critical_points_only(at_distance, randn):
    """Prop. "Critical points": zero at X*; not at an orthogonal X, nor at a merely critical one."""
    problem = Procrustes.gaussian(4, seed=0)
    solution, other = problem.solution(), random_orthogonal(4, 4, seed=1, dtype=torch.float64)
    assert norm(landing_field(solution, problem.grad(solution))) < 1e-13
    assert norm(landing_field(other, problem.grad(other))) > 0.1
    X = at_distance(0.3, 4, 4, seed=2)
    G = sym(randn(4, 4, seed=3)) @ torch.linalg.inv(X).mT  # G X^T symmetric: psi = 0
    assert norm(relative_gradient(X, G)) < 1e-13
    assert norm(landing_field(X, G)) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_on_stiefel_the_field_is_between_half_and_all_of_the_gradient(shape, dtype, randn):
    """On the manifold ||grad|| / 2 <= ||L|| <= ||grad||: the zeros are the critical points."""
    X, G = (
        random_orthogonal(200, *shape, seed=0, dtype=dtype),
        randn(200, *shape, seed=1, dtype=dtype),
    )
    ratio = norm(landing_field(X, G)) / norm(riemannian_gradient(X, G))
    assert (ratio >= 0.5 - 1e-12).all()
    assert (ratio <= 1 + 1e-12).all()


def test_singular_matrix_can_be_a_spurious_zero(randn):
    """Why full rank is assumed: a partial isometry has X D = 0, though d >= 1."""
    U, V = random_orthogonal(2, 4, 4, seed=0, dtype=torch.float64)
    kernel = V[2:]
    X = U[:, :2] @ V[:2]  # singular values 1, 1, 0, 0
    G = randn(4, 2, seed=1) @ kernel  # G X^T = 0, so psi = 0
    assert distance(X) == pytest.approx(2**0.5)
    assert norm(landing_field(X, G)) < 1e-14
    assert norm(landing_field(X + 1e-3 * U[:, 2:] @ kernel, G)) > 1e-4  # full rank: no zero


def test_all_beta_metrics_agree_on_costs_of_the_span(randn):
    """The gradient in the beta-metric is (I - X X^T) G + X Skew(X^T G) / beta."""
    X, M = random_orthogonal(9, 4, seed=0, dtype=torch.float64), randn(9, 9, seed=1)
    spans, others = sym(M) @ X, randn(9, 4, seed=2)  # PCA's gradient, and any

    def gradient(G, beta):
        return G - X @ sym(X.mT @ G) - (1 - 1 / beta) * X @ (X.mT @ G - G.mT @ X) / 2

    for beta in (0.25, 0.5, 1.0):
        torch.testing.assert_close(gradient(spans, beta), 2 * landing_field(X, spans, 0.0))
    torch.testing.assert_close(gradient(others, 0.5), 2 * landing_field(X, others, 0.0))
    assert norm(gradient(others, 1.0) - gradient(others, 0.5)) > 0.1
