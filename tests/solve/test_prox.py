"""Proximal landing: f + g with kinks, exact zeros, orthonormal to rounding, and optimal."""

import numpy as np
import pytest
import torch

import ortholand as ol


def pca(n, p, seed=0):
    random = np.random.default_rng(seed)
    B = random.standard_normal((50, n))
    B = (B - B.mean(0)) / np.linalg.norm(B - B.mean(0), axis=0)
    A = B.T @ B
    both = lambda X: (-np.sum(X * (A @ X)), -2 * A @ X)  # noqa: E731
    return both, np.linalg.qr(random.standard_normal((n, p)))[0]


def off_optimal(X, G, prox, t):
    """How far X is from a fixed point of the proximal step with the best multiplier, by SciPy."""
    from scipy.optimize import least_squares

    p = X.shape[1]
    upper = np.triu_indices(p)

    def step(m):
        M = np.zeros((p, p))
        M[upper] = m
        M = M + M.T - np.diag(np.diag(M))
        return (prox.prox(X - t * (G - X @ M), t) - X) / t

    M = X.T @ G
    start = ((M + M.T) / 2)[upper]
    least = least_squares(lambda m: step(m).ravel(), start, xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return np.linalg.norm(least.fun)


@pytest.mark.parametrize("weight", [0.1, 0.5])
def test_sparse_pca(weight):
    both, x0 = pca(100, 4)
    prox = ol.L1(weight)
    result = ol.minimize(both, x0, jac=True, prox=prox, gtol=0, options={"atol": 1e-8})
    assert result.success, result.message
    assert result.method == "proximal"
    assert result.distance < 1e-13
    assert result.fun == pytest.approx(both(result.x)[0] + weight * np.abs(result.x).sum())
    assert (result.x == 0).mean() > (0.5 if weight == 0.5 else 0.1)  # exactly
    assert off_optimal(result.x, both(result.x)[1], prox, 0.01) < 1e-6


def test_rows_of_zeros():
    both, x0 = pca(60, 3)
    result = ol.minimize(both, x0, jac=True, prox=ol.L21(2.0))
    assert result.success
    rows = (result.x != 0).any(1)
    assert 0 < rows.sum() < 60


def test_a_nonnegative_principal_component():
    both, _ = pca(30, 1)
    x0 = np.abs(np.random.default_rng(0).standard_normal(30))
    result = ol.minimize(
        both, x0 / np.linalg.norm(x0), jac=True, prox=ol.Nonnegative(), manifold=ol.Sphere()
    )
    assert result.success, result.message
    assert (result.x >= 0).all()
    assert (result.x == 0).any()
    draws = [np.abs(np.random.default_rng(k).standard_normal(30)) for k in range(100)]
    assert result.fun < min(both(x / np.linalg.norm(x))[0] for x in draws)


def test_lasso_and_box_in_flat_space():
    """Against the closed form of a separable problem."""
    b = np.array([3.0, -0.5, 0.2, -4.0])
    fun = lambda x: (np.sum((x - b) ** 2) / 2, x - b)  # noqa: E731
    result = ol.minimize(fun, np.zeros(4), jac=True, prox=ol.L1(1.0), manifold=ol.Euclidean())
    assert result.success
    np.testing.assert_allclose(result.x, [2, 0, 0, -3], atol=1e-7)
    result = ol.minimize(fun, np.zeros(4), jac=True, prox=ol.Box(-1, 2), manifold=ol.Euclidean())
    np.testing.assert_allclose(result.x, [2, -0.5, 0.2, -1], atol=1e-7)


def test_a_product_in_torch():
    """A sparse U and free s, on tensors, by autograd."""
    generator = torch.Generator().manual_seed(0)
    U = torch.zeros(30, 2, dtype=torch.float64)
    U[:4, 0] = U[4:8, 1] = 0.5
    noise = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    M = U * torch.tensor([3.0, 2.0]) + 0.01 * noise
    fun = lambda x: ((x["U"] * x["s"]) - M).square().sum()  # noqa: E731
    x0 = {
        "U": ol.random_orthogonal(30, 2, seed=1, dtype=torch.float64),
        "s": torch.ones(2, dtype=torch.float64),
    }
    result = ol.minimize(fun, x0, prox={"U": ol.L1(0.1), "s": None})
    assert result.success, result.message
    assert ((result.x["U"].abs() > 1e-8) == (U != 0))[:8].all()
    assert (result.x["U"][8:].abs() > 1e-8).sum() < 4


def test_a_map_of_ones_own():
    both, x0 = pca(40, 2)
    shrink = lambda V, t: np.sign(V) * np.maximum(abs(V) - 0.2 * t, 0)  # noqa: E731
    own = ol.Prox(lambda X: 0.2 * abs(X).sum(), shrink)
    first, second = (ol.minimize(both, x0, jac=True, prox=g) for g in (own, ol.L1(0.2)))
    assert first.success
    np.testing.assert_allclose(first.x, second.x, atol=1e-6)


def test_the_scale_of_f_does_not_matter():
    both, x0 = pca(40, 2)
    scaled = lambda X: tuple(1e-9 * part for part in both(X))  # noqa: E731
    first = ol.minimize(both, x0, jac=True, prox=ol.L1(0.2))
    second = ol.minimize(scaled, x0, jac=True, prox=ol.L1(0.2e-9))
    assert first.success
    assert second.success
    assert second.fun == pytest.approx(1e-9 * first.fun)


def test_without_g_it_is_smooth_minimisation():
    both, x0 = pca(40, 2)
    result = ol.minimize(both, x0, jac=True, prox=ol.L1(0.0))
    assert result.fun == pytest.approx(ol.minimize(both, x0, jac=True).fun)


def test_bad_arguments():
    both, x0 = pca(10, 2)
    with pytest.raises(ValueError, match="one method"):
        ol.minimize(both, x0, jac=True, prox=ol.L1(1.0), method="bb")
    with pytest.raises(TypeError, match="prox"):
        ol.minimize(both, x0, jac=True, prox=lambda V, t: V)
    general = ol.GeneralizedStiefel(np.eye(10), "landing")
    with pytest.raises(ValueError, match="prox= is for"):
        ol.minimize(both, x0, jac=True, prox=ol.L1(1.0), manifold=general)
    with pytest.raises(ValueError, match="bounds"):
        ol.minimize(both, x0, jac=True, prox=ol.Nonnegative())
    with pytest.raises(ValueError, match="weight"):
        ol.L1(-1)
    with pytest.raises(ValueError, match="low"):
        ol.Box(2, 1)
