"""The default method: its choice, its way back, and that compiled code does not matter."""

import itertools

import numpy as np
import pytest

import ortholand as ol
from ortholand.solve.methods import search


def quadratic(n, p, seed=0):
    random = np.random.default_rng(seed)
    A = random.standard_normal((n, n))
    A, W = A + A.T, np.arange(p, 0, -1.0)
    both = lambda X: (np.sum(X * (A @ X) * W), 2 * (A @ X) * W)  # noqa: E731
    return both, lambda X, V: 2 * (A @ V) * W, np.linalg.qr(random.standard_normal((n, p)))[0]


def penalised(seed=1, n=300, p=10):
    """Orthogonal factors with a penalty on negative entries: Newton's model is poor."""
    random = np.random.default_rng(seed)
    W = np.zeros((n, p))
    W[np.arange(n), random.integers(0, p, n)] = random.uniform(0.5, 1.5, n)
    M = W @ random.uniform(size=(p, 50)) + 0.05 * random.uniform(size=(n, 50))
    S = M @ M.T / n

    def both(X):
        N, SX = np.minimum(X, 0), S @ X
        return -np.sum(X * SX) / 2 + 25 * np.sum(N * N), -SX + 50 * N

    def hessp(X, V):
        return -(S @ V) + 50 * V * (X < 0)

    return both, hessp, np.linalg.qr(abs(random.standard_normal((n, p))))[0]


def ticking():
    """A clock by which everything takes equally long."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("shape", [(20, 3), (100, 8), (30, 30)])
def test_compiled_code_changes_no_decision(shape, products, monkeypatch):
    both, hessp, x0 = quadratic(*shape)
    options = {"jac": True, "hessp": hessp if products else None}
    first = ol.minimize(both, x0, **options, options={"clock": ticking()})
    monkeypatch.setattr(search, "library_for", lambda X: None)
    second = ol.minimize(both, x0, **options, options={"clock": ticking()})
    assert first.success
    assert second.success
    assert first.choice == second.choice
    np.testing.assert_allclose(first.x, second.x, atol=1e-6)


def test_it_goes_back_from_newton():
    both, hessp, x0 = penalised()
    result = ol.minimize(both, x0, jac=True, hessp=hessp, gtol=1e-6, options={"clock": ticking()})
    assert result.success
    assert "newton, lbfgs" in result.method
    assert any("digits" in reason for reason in result.choice)
    without = ol.minimize(both, x0, jac=True, gtol=1e-6)
    assert result.nhev + result.nfev < 3 * without.nfev


def test_a_fake_clock_makes_runs_reproducible():
    both, hessp, x0 = penalised()
    runs = [
        ol.minimize(both, x0, jac=True, hessp=hessp, maxiter=300, options={"clock": ticking()})
        for _ in range(2)
    ]
    assert runs[0].choice == runs[1].choice
    assert runs[0].nfev == runs[1].nfev
    np.testing.assert_array_equal(runs[0].x, runs[1].x)


def test_a_wrong_clock():
    both, _, x0 = quadratic(8, 2)
    with pytest.raises(TypeError, match="clock"):
        ol.minimize(both, x0, jac=True, options={"clock": 3})
