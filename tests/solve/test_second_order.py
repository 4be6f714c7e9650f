"""Saddle points are left where Hessian products are at hand, and the result says what was found."""

import numpy as np
import pytest
import torch

import ortholand as ol


def rayleigh(A, W=1.0):
    fun = lambda X: (np.sum(X * (A @ X) * W), 2 * (A @ X) * W)  # noqa: E731
    return fun, lambda X, V: 2 * (A @ V) * W


def planted(seed):
    """A quadratic cost at eigenvectors that are not the lowest, exact or nearly so."""
    random = np.random.default_rng(seed)
    n, p = int(random.integers(6, 60)), int(random.integers(1, 6))
    Q = np.linalg.qr(random.standard_normal((n, n)))[0]
    B = (Q * np.sort(random.uniform(0, 10, n))) @ Q.T
    B = (B + B.T) / 2
    w, U = np.linalg.eigh(B)
    W = np.arange(p, 0, -1.0)
    noise = [0, 1e-12, 1e-9, 1e-6][seed % 4] * random.standard_normal((n, p))
    near = U[:, random.permutation(n)[:p]] + noise
    return *rayleigh(B, W), np.linalg.qr(near)[0], float(w[:p] @ W)


@pytest.mark.parametrize("method", [None, "newton", "bb", "lbfgs"])
def test_planted_saddles_are_left(method):
    for seed in range(25):
        fun, hessp, x0, lowest = planted(seed)
        result = ol.minimize(fun, x0, jac=True, hessp=hessp, method=method)
        assert result.success or method == "bb"  # which is slow on close eigenvalues
        assert result.fun == pytest.approx(lowest, rel=1e-6)
        assert result.min_curvature is None or result.min_curvature > -1e-5


def test_a_subspace_that_f_does_not_leave():
    A, x0 = np.diag(np.arange(1.0, 11)), np.zeros((10, 1))
    x0[3], x0[5] = 0.8, 0.6
    fun, hessp = rayleigh(A)
    assert ol.minimize(fun, x0, jac=True, hessp=hessp).fun == pytest.approx(1)


@pytest.mark.parametrize("manifold", [ol.Sphere(), ol.Constraint(lambda x: x @ x - 1)])
def test_a_maximum_whose_gradient_is_rounding(manifold):
    x0 = torch.ones(3000, dtype=torch.float64) / 3000**0.5
    result = ol.minimize(lambda x: (x**4).sum() + x.sum(), x0, manifold=manifold)
    assert result.success
    assert result.fun == pytest.approx(-(3000**0.5) + 1 / 3000)
    assert result.min_curvature > 1


def test_autograd_has_products_too():
    A = torch.diag(torch.arange(10.0, dtype=torch.float64))
    x0 = torch.eye(10, dtype=torch.float64)[:, [3, 5]]
    result = ol.minimize(lambda X: (X * (A @ X)).sum(), x0)
    assert result.fun == pytest.approx(1.0)


def test_the_curvature_is_that_of_the_riemannian_hessian():
    """At the lowest eigenvectors on Grassmann: twice the gap, in the user's unit of f."""
    A = 1e9 * np.diag([1.0, 2, 4, 8])
    fun, hessp = rayleigh(A)
    result = ol.minimize(fun, np.eye(4, 2), jac=True, hessp=hessp, manifold=ol.Grassmann())
    assert result.success
    assert result.min_curvature == pytest.approx(4e9, rel=1e-6)
    assert "smallest curvature" in result.message


def test_without_products_the_message_says_what_was_checked():
    fun, _ = rayleigh(np.diag(np.arange(6.0)))
    result = ol.minimize(fun, np.eye(6)[:, [2, 4]], jac=True)
    assert result.success
    assert result.min_curvature is None
    assert "only the gradient was checked" in result.message
    assert "saddle" in result.message


def test_few_products_are_spent():
    random = np.random.default_rng(0)
    A = random.standard_normal((100, 100))
    fun, hessp = rayleigh(A + A.T, np.arange(5, 0, -1.0))
    x0 = np.linalg.qr(random.standard_normal((100, 5)))[0]
    result = ol.minimize(fun, x0, jac=True, hessp=hessp, method="bb")
    assert result.success
    assert 1 < result.nhev <= 0.05 * result.nfev


def test_slow_gradients_buy_no_more_products():
    """Compiled L-BFGS times few calls of fun, which may be slow by chance."""
    random, now = np.random.default_rng(0), [0.0]
    A, W = random.standard_normal((20, 20)), np.arange(1, 4.0)
    A, x0 = A + A.T, np.linalg.qr(random.standard_normal((20, 3)))[0]

    def fun(X):
        now[0] += 1.0
        return np.sum(X * (A @ X) * W), 2 * (A @ X) * W

    def hessp(X, V):
        now[0] += 1e-4
        return 2 * (A @ V) * W

    options = {"clock": lambda: now[0]}
    result = ol.minimize(fun, x0, jac=True, hessp=hessp, options=options)
    assert result.success
    assert result.nhev <= 0.1 * result.nfev
