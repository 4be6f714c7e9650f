"""What someone who comes from SciPy, or JAX, expects of ``minimize``."""

import tracemalloc

import numpy as np
import pytest
import torch

import ortholand as ol

A = np.diag(np.arange(1.0, 13))
W = np.array([3.0, 2, 1])
X0 = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 3)))[0]
LOWEST = 3 * 1 + 2 * 2 + 3.0


def fun(X):
    return np.sum(X * (A @ X) * W)


def jac(X):
    return 2 * (A @ X) * W


def brockett(n, p, seed=0):
    random = np.random.default_rng(seed)
    B = random.standard_normal((n, n))
    B, weights = B + B.T, np.arange(p, 0, -1.0)
    both = lambda X: (np.sum(X * (B @ X) * weights), 2 * (B @ X) * weights)  # noqa: E731
    return both, np.linalg.qr(random.standard_normal((n, p)))[0]


@pytest.mark.parametrize("method", [None, "lbfgs", "bb", "newton", "landing"])
@pytest.mark.parametrize("most", [1, 2, 7, 20])
def test_maxfev(method, most, counted):
    cost = counted(fun)
    result = ol.minimize(cost, X0, jac=jac, method=method, options={"maxfev": most})
    assert result.nfev == cost.calls <= max(most, 4 if method == "landing" else most)
    assert result.success or (result.status == 6 and "maxfev" in result.message)
    assert result.distance < 1e-13
    assert result.fun <= fun(X0) + 1e-12


def test_a_wrong_maxfev():
    with pytest.raises(ValueError, match="maxfev"):
        ol.minimize(fun, X0, jac=jac, options={"maxfev": 0})


@pytest.mark.parametrize("flat", [True, False])
def test_hess(flat):
    H = np.kron(2 * A, np.diag(W))
    H = H if flat else H.reshape(12, 3, 12, 3)
    result = ol.minimize(fun, X0, jac=jac, hess=lambda X: H, method="newton")
    assert result.success
    assert result.fun == pytest.approx(LOWEST)
    assert result.nhev > 0
    with pytest.raises(TypeError, match="one of hess and hessp"):
        ol.minimize(fun, X0, jac=jac, hess=lambda X: H, hessp=lambda X, V: V)


@pytest.mark.parametrize("order", ["2-point", "3-point"])
@pytest.mark.parametrize("kind", ["matrix", "complex", "product"])
def test_differences(order, kind, counted):
    cost = counted(fun)
    x0 = X0
    if kind == "complex":
        x0 = X0 * np.exp(1j)
        cost = counted(lambda X: np.sum(X.conj() * (A @ X) * W).real)
    if kind == "product":
        x0 = {"X": X0, "s": np.zeros(2)}
        cost = counted(lambda x: fun(x["X"]) + np.sum((x["s"] - 1) ** 2))
    result = ol.minimize(cost, x0, jac=order)
    assert result.success, result.message
    assert result.fun == pytest.approx(LOWEST, rel=1e-6)
    assert result.nfev == cost.calls


def test_differences_are_for_few_numbers():
    with pytest.raises(ValueError, match="at most 1000"):
        ol.minimize(lambda X: X.sum(), np.eye(400, 3), jac="2-point")


def test_a_list_of_value_and_gradient():
    assert ol.minimize(lambda X: [fun(X), jac(X)], X0, jac=True).success


def test_single_precision_gradients():
    """They are converted, and the tolerance is theirs."""
    result = ol.minimize(fun, X0, jac=lambda X: jac(X).astype(np.float32))
    assert result.success, result.message
    assert result.x.dtype == np.float64
    assert result.fun == pytest.approx(LOWEST, rel=1e-6)


def test_inference_mode():
    B = torch.from_numpy(A)
    with torch.inference_mode():
        x0 = torch.from_numpy(X0).clone()
        result = ol.minimize(lambda X: (X * (B @ X)).sum(), x0)
    assert result.success


@pytest.mark.parametrize("shape", [(20, 3), (100, 6), (300, 10)])
@pytest.mark.parametrize("method", ["lbfgs", "bb", None])
def test_pieces_cost_no_more_than_one_run(shape, method):
    both, x0 = brockett(*shape)
    options = {"jac": True, "method": method, "gtol": 1e-6}
    once = ol.minimize(both, x0, **options)
    piece, evaluations = ol.minimize(both, x0, maxiter=10, **options), 0
    while not piece.success:
        evaluations += piece.nfev
        piece = ol.minimize(both, x0, maxiter=10, state=piece.state, **options)
        assert {len(column) for column in piece.history.values()} == {piece.nit + 1}
    assert piece.choice[0] == once.choice[0]
    assert piece.fun == pytest.approx(once.fun, rel=1e-9)
    assert evaluations + piece.nfev <= 1.15 * once.nfev


def test_pieces_change_the_method_too():
    random = np.random.default_rng(0)
    A, W = random.standard_normal((60, 60)), np.arange(5, 0, -1.0)
    A, x0 = A + A.T, np.linalg.qr(random.standard_normal((60, 5)))[0]
    both, hessp = (lambda X: (np.sum(X * (A @ X) * W), 2 * A @ X * W)), lambda X, V: 2 * A @ V * W
    once = ol.minimize(both, x0, jac=True, hessp=hessp)
    piece = ol.minimize(both, x0, jac=True, hessp=hessp, maxiter=10)
    while not piece.success:
        piece = ol.minimize(both, x0, jac=True, hessp=hessp, maxiter=10, state=piece.state)
    assert once.method == piece.method == "lbfgs, newton"


def test_a_state_of_something_else():
    with pytest.raises(TypeError, match="state"):
        ol.minimize(fun, X0, jac=jac, state={"x": 1})
    state = ol.minimize(fun, X0, jac=jac, maxiter=2).state
    with pytest.raises(ValueError, match="shapes"):
        ol.minimize(fun, X0[:, :2], jac=jac, state=state)


def test_memory_of_lbfgs():
    """At most thirty times x, the functions' own memory included; x is large beside modules."""
    n, p = 200_000, 5
    d = np.linspace(1, 100, n)[:, None]
    both = lambda X: (np.sum(X * X * d), 2 * X * d)  # noqa: E731
    x0 = np.linalg.qr(np.random.default_rng(0).standard_normal((n, p)))[0]
    ol.minimize(fun, X0, jac=jac, method="lbfgs", maxiter=2)  # imports what it needs
    tracemalloc.start()
    ol.minimize(both, x0, jac=True, method="lbfgs", maxiter=40)
    peak = tracemalloc.get_traced_memory()[1] / x0.nbytes
    tracemalloc.stop()
    assert peak <= 30


class TestJAX:
    """JAX is optional, and never imported by the library."""

    @pytest.fixture
    def jax(self):
        jax = pytest.importorskip("jax")
        jax.config.update("jax_enable_x64", True)
        return jax

    @pytest.mark.parametrize("method", [None, "newton"])
    def test_value_and_grad_is_the_default(self, jax, method):
        B, weights = jax.numpy.asarray(A), jax.numpy.asarray(W)
        cost = lambda X: (X * (B @ X) * weights).sum()  # noqa: E731
        result = ol.minimize(cost, jax.numpy.asarray(X0), method=method)
        assert result.success
        assert isinstance(result.x, jax.Array)
        assert isinstance(result.jac, jax.Array)
        assert result.fun == pytest.approx(LOWEST)

    def test_products_and_the_callback(self, jax):
        seen = []
        B = jax.numpy.asarray(A)
        cost = lambda x: (x["X"] * (B @ x["X"])).sum() + ((x["s"] - 1) ** 2).sum()  # noqa: E731
        x0 = {"X": jax.numpy.asarray(X0), "s": jax.numpy.zeros(2)}
        result = ol.minimize(cost, x0, callback=lambda x: seen.append(type(x["X"])))
        assert result.success
        assert issubclass(seen[0], jax.Array)

    def test_complex(self, jax):
        B = jax.numpy.asarray(A)
        cost = lambda X: (X.conj() * (B @ X)).sum().real  # noqa: E731
        result = ol.minimize(cost, jax.numpy.asarray(X0 * np.exp(1j)))
        assert result.success
        assert result.fun == pytest.approx(6.0)
