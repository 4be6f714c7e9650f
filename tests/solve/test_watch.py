"""Who is to blame: each kind of fault is named soon, and a run goes on where it can."""

import math

import numpy as np
import pytest

import ortholand as ol

METHODS = (None, "lbfgs", "bb", "newton")
methods = pytest.mark.parametrize("method", METHODS)


class Quadratic:
    """``Tr(X^T A X W)`` with its derivatives."""

    def __init__(self, n=20, p=3, seed=1):
        random = np.random.default_rng(seed)
        A = random.standard_normal((n, n))
        self.A, self.W = A + A.T, np.arange(p, 0, -1.0)
        self.x0 = np.linalg.qr(random.standard_normal((n, p)))[0]

    def fun(self, X):
        return float(np.sum(X * (self.A @ X) * self.W))

    def jac(self, X):
        return 2 * (self.A @ X) * self.W

    def hessp(self, X, V):
        return self.jac(V)


@methods
@pytest.mark.parametrize("kind", ["sign", "factor", "entry", "a term less"])
def test_a_wrong_jac(method, kind):
    f = Quadratic()
    mask = np.ones_like(f.x0)
    mask[0, 0] = -1
    extra = (lambda X: 10 * np.sum(X**4)) if kind == "a term less" else lambda X: 0.0
    sign = {"sign": -1, "factor": 0.5, "entry": mask}.get(kind, 1.0)
    fun, jac = (lambda X: f.fun(X) + extra(X)), (lambda X: sign * f.jac(X))
    result = ol.minimize(fun, f.x0, jac=jac, method=method)
    assert result.status == 3
    assert "jac is not fun's gradient" in result.message
    assert "check_gradient" in result.message
    assert result.nfev <= (110 if kind == "entry" else 50)


@methods
@pytest.mark.parametrize("factor", [0.5, 1.5, math.nan])
def test_a_wrong_hessp(method, factor):
    """It is soon not called any more, differences of gradients take its place."""
    f = Quadratic(60, 8)
    calls = {"fun": 0, "hessp": 0, "until": 0}

    def fun(X):
        calls["fun"] += 1
        return f.fun(X)

    def wrong(X, V):
        calls["hessp"] += 1
        calls["until"] = calls["fun"] + calls["hessp"]
        return factor * f.hessp(X, V)

    result = ol.minimize(fun, f.x0, jac=f.jac, hessp=wrong, method=method)
    assert calls["until"] <= 50
    assert result.success
    assert result.fun == pytest.approx(ol.minimize(f.fun, f.x0, jac=f.jac).fun)
    assert "Hessp" in result.message
    assert "check_hessian" in result.message
    assert result.min_curvature is None
    if method == "newton":
        assert result.nfev < 60


def test_a_wrong_factor_of_jac_in_a_short_run():
    """It ends at the solution, which is no reason to claim success."""
    fun, jac = (lambda x: np.cosh(x).sum() + x @ x), (lambda x: (np.sinh(x) + 2 * x) / 2)
    x0 = np.random.default_rng(0).standard_normal(20)
    result = ol.minimize(fun, x0, jac=jac, manifold=ol.Euclidean())
    assert not result.success
    assert "jac is not fun's gradient" in result.message


@methods
def test_a_right_hessp_is_not_suspected(method):
    f = Quadratic(60, 8)
    result = ol.minimize(f.fun, f.x0, jac=f.jac, hessp=f.hessp, method=method)
    assert result.success
    assert "essp" not in result.message


@methods
@pytest.mark.parametrize("part", ["fun", "jac"])
def test_nan(method, part):
    f = Quadratic()
    broken = lambda X: math.nan if not np.array_equal(X, f.x0) else 1.0  # noqa: E731
    fun = (lambda X: f.fun(X) * broken(X)) if part == "fun" else f.fun
    jac = (lambda X: f.jac(X) * broken(X)) if part == "jac" else f.jac
    result = ol.minimize(fun, f.x0, jac=jac, method=method)
    assert result.status == 4
    assert "not finite" in result.message
    assert result.nfev <= 20


@methods
def test_kinks(method):
    f = Quadratic()
    result = ol.minimize(
        lambda X: f.fun(X) + 3 * np.abs(X).sum(),
        f.x0,
        jac=lambda X: f.jac(X) + 3 * np.sign(X),
        method=method,
    )
    assert result.status == 3
    assert "kink" in result.message
    assert "prox=" in result.message
    assert result.nfev <= 55


@methods
@pytest.mark.parametrize("kind", ["random", "fixed"])
def test_noise_in_fun(method, kind):
    """It is measured, and the gradient decides where differences of f mean nothing."""
    f, random = Quadratic(), np.random.default_rng(0)
    noise = random.standard_normal if kind == "random" else lambda X=None: 0.0
    fun = {
        "random": lambda X: f.fun(X) + 1e-3 * noise(),
        "fixed": lambda X: f.fun(X) + 1e-3 * np.sin(1e9 * X.sum()),
    }[kind]
    result = ol.minimize(fun, f.x0, jac=f.jac, method=method)
    assert result.success
    assert result.fun == pytest.approx(ol.minimize(f.fun, f.x0, jac=f.jac).fun, abs=0.01)
    assert "noisy" in result.message or result.nfev < 32


@methods
def test_noise_in_jac(method):
    f, random = Quadratic(), np.random.default_rng(0)
    noisy = lambda X: f.jac(X) + 1e-3 * random.standard_normal(X.shape)  # noqa: E731
    result = ol.minimize(f.fun, f.x0, jac=noisy, method=method)
    assert not result.success
    assert "jac is noisy" in result.message
    assert result.nfev < 300


@methods
@pytest.mark.parametrize("kind", ["linear", "concave", "quartic"])
def test_unbounded(method, kind):
    fun = {
        "linear": lambda x: (x.sum(), np.ones(5)),
        "concave": lambda x: (-x @ x, -2 * x),
        "quartic": lambda x: (-(x**4).sum(), -4 * x**3),
    }[kind]
    result = ol.minimize(fun, np.ones(5), jac=True, manifold=ol.Euclidean(), method=method)
    assert result.status == 7
    assert "unbounded" in result.message
    assert result.nfev <= 50


def test_a_cost_that_falls_for_ever():
    """Squares of its gradients' changes underflow."""
    fun = lambda x: (np.exp(-x).sum(), -np.exp(-x))  # noqa: E731
    result = ol.minimize(fun, np.ones(3), jac=True, manifold=ol.Euclidean(), gtol=0.0)
    assert result.x.min() > 100


def test_a_far_minimum_is_not_unbounded():
    far = np.full(3, 1e7)
    fun = lambda x: (np.sum((x - far) ** 2), 2 * (x - far))  # noqa: E731
    result = ol.minimize(fun, np.zeros(3), jac=True, manifold=ol.Euclidean())
    assert result.success
    np.testing.assert_allclose(result.x, far)


@methods
def test_smooth_costs_cost_little_more(method):
    """Looks at the functions are among the evaluations: few, and the history counts them."""
    f = Quadratic(40, 4)
    result = ol.minimize(f.fun, f.x0, jac=f.jac, method=method)
    assert result.success
    assert result.history["nfev"][-1] == result.nfev
    assert result.nfev <= 1.2 * result.nit + 10
