"""What every method must do, whatever the shape and type; and what a result holds."""

import math
import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch

from ortholand import minimize
from ortholand.geometry import riemannian_gradient
from ortholand.solve import METHODS

METHOD_NAMES = tuple(METHODS)
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
SHAPES = [(3, 3), (4, 2), (2, 4), (4, 1), (1, 4), (1, 1)]
FIELDS = (
    *("x", "fun", "jac", "grad_norm", "distance", "nit", "nfev", "njev", "nhev"),
    *("success", "status", "message", "history"),
)
RECORDED = ("fun", "grad_norm", "distance", "nfev", "njev", "nhev", "time")

methods = pytest.mark.parametrize("method", METHOD_NAMES)


@methods
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_finds_the_minimum(method, shape, dtype, brockett, verified, distance):
    """By autograd, from a random start, to the sum that eigh gives; x is what x0 is."""
    cost = brockett(shape, dtype)
    result = minimize(cost.fun, cost.start, method=method)
    assert verified(result, cost.fun, cost.jac)
    error = 4e-6 if torch.finfo(dtype).eps > 1e-10 else 1e-13  # as the default gtol implies
    assert result.fun == pytest.approx(cost.optimum, rel=error)
    assert type(result.x) is torch.Tensor
    assert (result.x.shape, result.x.dtype) == (shape, dtype)
    assert not result.x.requires_grad


@methods
@pytest.mark.parametrize("shape", [(4, 4), (6, 2), (2, 6)])
@pytest.mark.parametrize("maxiter", [0, 1, 3])
def test_x_is_feasible_however_short_the_run(method, shape, maxiter, brockett, verified):
    """Also from a start at a distance of 0.4; the status says why, the message what to do."""
    cost = brockett(shape)
    x0 = cost.start * math.sqrt(1 + 0.4 / math.sqrt(min(shape)))
    result = minimize(cost.fun, x0, method=method, maxiter=maxiter)
    assert not verified(result, cost.fun, cost.jac)
    assert result.nit == maxiter
    assert result.status == 1
    assert "maxiter" in result.message
    assert result.fun <= cost.fun(x0 / x0.norm() * min(shape) ** 0.5) + 1e-12


@methods
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("maxiter", [2, 10_000])
def test_fields_agree_with_each_other(method, dtype, maxiter, brockett, distance, norm):
    """Fun, jac, grad_norm and distance are those at x, also where x was landed last."""
    cost = brockett((4, 2), dtype)
    result = minimize(cost.fun, cost.start, jac=cost.jac, method=method, maxiter=maxiter)
    assert set(result) >= set(FIELDS)
    rounding = 4 * torch.finfo(dtype).eps
    scale = norm(cost.jac(result.x))
    assert result.success is (maxiter > 2)
    assert result.fun == pytest.approx(float(cost.fun(result.x)), rel=rounding)
    assert norm(result.jac - cost.jac(result.x)) <= rounding * scale
    expected = norm(riemannian_gradient(result.x, result.jac))
    assert result.grad_norm == pytest.approx(expected, rel=10 * rounding, abs=rounding * scale)
    assert result.distance == pytest.approx(distance(result.x), abs=10 * rounding)
    for name in ("fun", "grad_norm", "distance"):
        assert type(result[name]) is float, name
    for name in ("nit", "nfev", "njev", "nhev", "status"):
        assert type(result[name]) is int, name


@methods
def test_history_has_an_entry_per_iteration_and_one_for_the_start(method, brockett):
    cost = brockett()
    result = minimize(cost.fun, cost.start, jac=cost.jac, method=method, gtol=1e-4)
    assert set(result.history) == set(RECORDED)
    for name in RECORDED:
        assert len(result.history[name]) == result.nit + 1, name
    for name in ("nfev", "njev", "nhev", "time"):
        values = result.history[name]
        assert all(np.diff(values) >= 0), name
    assert result.history["nfev"][-1] <= result.nfev
    first = cost.start
    assert result.history["fun"][0] == pytest.approx(float(cost.fun(first)))
    expected = float(riemannian_gradient(first, cost.jac(first)).norm())
    assert result.history["grad_norm"][0] == pytest.approx(expected)
    assert result.history["fun"][-1] == pytest.approx(result.fun, abs=1e-3)
    assert result.grad_norm <= 1e-4 * expected


@pytest.mark.parametrize("method", ["lbfgs", "bb"])
def test_a_history_can_be_stored_and_copied(method, brockett):
    """It is put together when it is read: nobody may notice."""
    cost = brockett()
    result = minimize(cost.fun, cost.start, method=method)
    stored, copied = pickle.loads(pickle.dumps(result)), deepcopy(result)
    for history in (stored.history, copied.history, dict(result.history)):
        assert list(history) == list(RECORDED)
        for name, values in result.history.items():
            assert isinstance(values, np.ndarray)
            assert np.array_equal(history[name], values), name
            assert history[name].dtype == values.dtype
    with pytest.raises(KeyError):
        result.history["temperature"]


@methods
def test_a_start_on_the_manifold_is_evaluated_as_it_is(method):
    seen = []
    x0 = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 2)))[0]

    def fun(X):
        seen.append(X.copy())
        return float(X[0].sum()), np.eye(6, 1) * np.ones((1, 2))

    minimize(fun, x0, jac=True, method=method, maxiter=1)
    assert np.array_equal(seen[0], x0)


def test_a_result_fits_on_a_screen(brockett):
    """Print(result) shows what SciPy's shows, not thousands of recorded numbers."""
    cost = brockett()
    result = minimize(cost.fun, cost.start, method="landing")
    assert result.nit > 100
    assert len(repr(result)) < 2000


@methods
@pytest.mark.parametrize("way", ["callable", "pair", "autograd"])
def test_counters_are_the_calls_made(method, way, brockett, counted):
    cost = brockett()
    fun, jac = counted(cost.both if way == "pair" else cost.fun), counted(cost.jac)
    result = minimize(
        fun,
        cost.start,
        jac={"callable": jac, "pair": True, "autograd": None}[way],
        method=method,
        gtol=1e-4,
    )
    assert result.success
    assert result.nfev == fun.calls
    assert result.njev == (jac.calls if way == "callable" else fun.calls)
    assert (result.nhev > 0) is (method == "newton")


def test_hessian_products_are_counted(brockett, counted):
    cost = brockett()
    fun, jac, hessp = counted(cost.fun), counted(cost.jac), counted(cost.hessp)
    result = minimize(fun, cost.start, jac=jac, hessp=hessp, method="newton")
    assert result.success
    assert (result.nfev, result.njev, result.nhev) == (fun.calls, jac.calls, hessp.calls)
    assert result.nhev >= result.nit


@methods
def test_the_same_call_gives_the_same_result(method, brockett):
    cost = brockett((5, 3))
    first, second = (minimize(cost.fun, cost.start, method=method, gtol=1e-3) for _ in range(2))
    assert torch.equal(first.x, second.x)
    assert np.array_equal(first.history["grad_norm"], second.history["grad_norm"])
    assert (first.nfev, first.njev, first.nhev) == (second.nfev, second.njev, second.nhev)


@methods
def test_the_problem_is_the_same_for_a_matrix_and_its_transpose(method, brockett):
    """Wide X are the transposes of tall ones, iterate by iterate."""
    tall, wide = brockett((6, 2)), brockett((2, 6))
    result = minimize(tall.fun, tall.start, jac=tall.jac, method=method, gtol=1e-3)
    other = minimize(wide.fun, tall.start.mT, jac=wide.jac, method=method, gtol=1e-3)
    # The strides of what jac sees differ, and with them rounding.
    assert other.fun == pytest.approx(result.fun, rel=1e-6)
    np.testing.assert_allclose(
        other.history["fun"][:8], result.history["fun"][:8], rtol=1e-10, err_msg=method
    )


class TestArguments:
    def test_args_reach_every_function(self, brockett):
        cost = brockett()
        A, mu = cost.A, cost.mu
        result = minimize(
            lambda X, A, mu: (X * (A @ X) * mu).sum(),
            cost.start,
            jac=lambda X, A, mu: 2 * A @ X * mu,
            hessp=lambda X, V, A, mu: 2 * A @ V * mu,
            args=(A, mu),
            method="newton",
        )
        assert result.success
        assert result.fun == pytest.approx(cost.optimum)

    def test_args_reach_autograd_and_pairs(self, brockett):
        cost = brockett()
        result = minimize(lambda X, c: c * cost.fun(X), cost.start, args=(2.0,))
        assert result.fun == pytest.approx(2 * cost.optimum)
        pair = lambda X, c: (c * cost.fun(X), c * cost.jac(X))  # noqa: E731
        result = minimize(pair, cost.start, jac=True, args=(2.0,))
        assert result.fun == pytest.approx(2 * cost.optimum)

    def test_what_is_no_tuple_is_the_only_argument(self, brockett):
        """As in SciPy: a matrix is not split into its rows."""
        cost = brockett()
        fun = lambda X, A: (X * (A @ X) * cost.mu).sum()  # noqa: E731
        assert minimize(fun, cost.start, args=cost.A).fun == pytest.approx(cost.optimum)

    def test_gtol_is_relative_and_atol_absolute(self, brockett):
        cost = brockett()
        first = float(riemannian_gradient(cost.start, cost.jac(cost.start)).norm())
        loose, tight = (minimize(cost.fun, cost.start, gtol=gtol) for gtol in (1e-2, 1e-10))
        assert 1e-4 * first < loose.grad_norm <= 1e-2 * first
        assert tight.grad_norm <= 1e-10 * first
        assert loose.nit < tight.nit
        absolute = minimize(cost.fun, cost.start, gtol=0, options={"atol": 1e-3})
        assert absolute.success
        assert 1e-8 < absolute.grad_norm <= 1e-3

    @methods
    def test_gtol_zero_comes_to_an_end(self, method, brockett, verified):
        """By rounding or for want of progress; the result is as good as float64 allows."""
        cost = brockett((4, 2))
        result = minimize(cost.fun, cost.start, gtol=0, method=method, maxiter=5000)
        verified(result, cost.fun, cost.jac, gtol=0)
        assert result.nit < 5000
        assert result.grad_norm < 1e-10 * result.history["grad_norm"][0]

    @pytest.mark.parametrize("method", ["lbfgs", "bb", "newton", "landing"])
    def test_gtol_zero_where_the_euclidean_gradient_vanishes_too(self, method, brockett, verified):
        """F = ||X - X*||^2 / 2: no rounding of jac to compare with, so it has to notice a stall.

        Landing does not look at f, and goes on until maxiter.
        """
        target, x0 = brockett((4, 2)).start, brockett((4, 2)).solution()
        fun, jac = lambda X: ((X - target) ** 2).sum() / 2, lambda X: X - target
        result = minimize(fun, x0, jac=jac, gtol=0, method=method, maxiter=600)
        verified(result, fun, jac, gtol=0)
        assert result.nit < 600 or method == "landing"
        assert result.grad_norm < 1e-12

    @methods
    def test_maxtime_ends_the_run(self, method, brockett, verified):
        cost = brockett()
        result = minimize(cost.fun, cost.start, method=method, options={"maxtime": 0})
        assert not verified(result, cost.fun, cost.jac)
        assert result.status == 5
        assert "maxtime" in result.message


class TestCallback:
    @methods
    def test_is_called_after_each_iteration(self, method, brockett):
        cost, seen = brockett(), []

        def callback(intermediate_result):
            seen.append(intermediate_result)

        result = minimize(cost.fun, cost.start, method=method, callback=callback, gtol=1e-4)
        assert [r.nit for r in seen] == list(range(1, result.nit + 1))
        for r, fun, grad_norm in zip(
            seen[:-1], result.history["fun"][1:], result.history["grad_norm"][1:], strict=False
        ):
            assert (r.fun, r.grad_norm) == (fun, grad_norm)
            assert float(cost.fun(r.x)) == pytest.approx(r.fun, rel=1e-14)

    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_may_take_x_alone(self, kind, brockett, numpy_version):
        cost, seen = brockett(), []
        x0 = cost.start.numpy() if kind == "numpy" else cost.start
        both = numpy_version(cost.both) if kind == "numpy" else cost.both
        result = minimize(both, x0, jac=True, callback=seen.append, maxiter=3)
        assert result.nit == 3
        assert len(seen) == 3
        assert all(type(x) is type(x0) and x.shape == x0.shape for x in seen)

    @methods
    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_what_it_keeps_does_not_change_later(self, method, kind, brockett, numpy_version):
        cost, kept, copies = brockett((5, 3)), [], []

        def callback(x):
            kept.append(x)
            copies.append(x.copy() if kind == "numpy" else x.clone())

        x0 = cost.start.numpy() if kind == "numpy" else cost.start
        both = numpy_version(cost.both) if kind == "numpy" else cost.both
        minimize(both, x0, jac=True, method=method, callback=callback, gtol=1e-3)
        assert len(kept) > 3
        for x, copy in zip(kept, copies, strict=True):
            assert (x == copy).all()

    @methods
    @pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True), StopIteration])
    def test_stops_the_run(self, method, answer, brockett, verified):
        cost, calls = brockett(), []

        def callback(x):
            calls.append(x)
            if len(calls) == 2:
                if answer is StopIteration:
                    raise StopIteration
                return answer
            return False

        result = minimize(cost.fun, cost.start, method=method, callback=callback)
        assert not verified(result, cost.fun, cost.jac)
        assert (result.status, result.nit, len(calls)) == (2, 2, 2)
        assert "callback" in result.message

    @pytest.mark.parametrize(
        "answer", [None, False, np.False_, torch.ones(4, 2), torch.tensor(0.5)]
    )
    def test_goes_on_otherwise(self, answer, brockett):
        """What is no truth value is not taken for one."""
        assert minimize(brockett().fun, brockett().start, callback=lambda x: answer).success

    @methods
    def test_may_not_write_into_x(self, method, brockett):
        """Torch has no read-only tensors: an error, or a copy that may be written to."""
        cost, plain = brockett(), minimize(brockett().fun, brockett().start, method=method)

        def write(X):
            X.zero_()

        try:
            result = minimize(cost.fun, cost.start, method=method, callback=write)
        except ValueError as error:
            assert "callback" in str(error)  # noqa: PT017
        else:
            assert torch.equal(result.x, plain.x)

    @pytest.mark.parametrize("method", ["lbfgs", "bb", "newton"])
    def test_is_called_as_often_as_there_are_iterations_however_it_ends(self, method, brockett):
        """Here the noise in jac ends the run, for want of progress, or maxiter does."""
        cost, calls = brockett(), []
        generator = torch.Generator().manual_seed(0)
        noise = lambda: 1e-3 * torch.randn(4, 2, generator=generator, dtype=torch.float64)  # noqa: E731
        result = minimize(
            cost.fun,
            cost.start,
            jac=lambda X: cost.jac(X) + noise(),
            method=method,
            callback=calls.append,
            maxiter=150,
        )
        assert not result.success
        assert len(calls) == result.nit
        assert all(len(values) == result.nit + 1 for values in result.history.values())

    def test_errors_are_the_users_own(self, brockett):
        def callback(x):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            minimize(brockett().fun, brockett().start, callback=callback)
