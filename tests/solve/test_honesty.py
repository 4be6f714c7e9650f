"""Attempts to make ``success`` lie, and to make a run raise or lose its best point.

Whenever success is claimed, x, fun and jac are looked at independently (fixture ``verified``).
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortholand import minimize, random_orthogonal
from ortholand.solve import METHODS

METHOD_NAMES = tuple(METHODS)
LINE_SEARCHES = tuple(name for name in METHOD_NAMES if name != "landing")
NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

methods = pytest.mark.parametrize("method", METHOD_NAMES)


def autograd(fun, X):
    Y = X.clone().requires_grad_()
    return torch.autograd.grad(fun(Y), Y)[0]


class Breaking:
    """Cost and gradient that are not finite from some call on: for ever, or now and then."""

    def __init__(self, cost, after, value, part="both", share=1.0):
        self.cost, self.after, self.value, self.part = cost, after, value, part
        self.calls, self.share, self.random = 0, share, np.random.default_rng(0)
        self.lowest = math.inf

    def __call__(self, X):
        self.calls += 1
        value, G = self.cost.both(X)
        if self.calls > self.after and self.random.random() < self.share:
            value = value * 0 + self.value if self.part in ("fun", "both") else value
            G = G * 0 + self.value if self.part in ("jac", "both") else G
        elif torch.linalg.matrix_norm(X.mT @ X - torch.eye(X.shape[1])) < 1e-3:
            self.lowest = min(self.lowest, float(value))
        return value, G


class TestNonFinite:
    @methods
    @pytest.mark.parametrize("value", NUMBERS)
    @pytest.mark.parametrize("part", ["fun", "jac", "both"])
    def test_at_x0(self, method, value, part, brockett, verified, at_distance_of):
        """A status, no error; x0 itself is returned, on the manifold."""
        cost = brockett((5, 2))
        fun = Breaking(cost, 0, NUMBERS[value], part)
        x0 = at_distance_of(0.3, cost.start)
        result = minimize(fun, x0, jac=True, method=method)
        assert not verified(result, cost.fun, cost.jac)
        assert result.status == 4
        assert "not finite at x0" in result.message
        assert result.nit == 0
        U, _, Vh = torch.linalg.svd(x0, full_matrices=False)
        torch.testing.assert_close(result.x, U @ Vh, rtol=0, atol=1e-12)

    @methods
    @pytest.mark.parametrize("value", ["nan", "-inf"])
    @pytest.mark.parametrize("part", ["fun", "jac", "both"])
    @pytest.mark.parametrize("after", [1, 14])
    def test_from_some_call_on(self, method, value, part, after, brockett, verified):
        """The best point so far, with what fun said there while it still could."""
        cost = brockett((5, 2))
        fun = Breaking(cost, after, NUMBERS[value], part)
        result = minimize(fun, cost.start, jac=True, method=method, gtol=1e-12)
        assert not verified(result, cost.fun, cost.jac)
        assert result.status == 4
        assert "not finite near" in result.message
        assert all(math.isfinite(v) for v in (result.fun, result.grad_norm, result.distance))
        assert bool(result.jac.isfinite().all())
        # Values were taken at most 1e-2 off the manifold.
        assert result.fun == pytest.approx(float(cost.fun(result.x)), rel=0.02)
        assert result.fun <= float(cost.fun(cost.start)) + 1e-9
        if method != "landing":
            assert float(cost.fun(result.x)) <= fun.lowest + 0.05 * abs(fun.lowest)

    @pytest.mark.parametrize("method", LINE_SEARCHES)
    @pytest.mark.parametrize("part", ["fun", "jac", "both"])
    def test_now_and_then(self, method, part, brockett, verified):
        """Every tenth call: line searches step back and go on."""
        cost = brockett((5, 2))
        fun = Breaking(cost, 1, math.nan, part, share=0.1)
        result = minimize(fun, cost.start, jac=True, method=method, gtol=1e-4, maxiter=300)
        verified(result, cost.fun, cost.jac, gtol=1e-4)
        assert result.status in (0, 4)
        assert result.fun == pytest.approx(cost.optimum, rel=1e-2)

    @pytest.mark.parametrize("method", LINE_SEARCHES)
    @pytest.mark.parametrize("value", ["inf", "nan"])
    def test_a_barrier(self, method, value, verified):
        """F = Tr(X^T A X) - c log x_11, infinite or NaN for x_11 <= 0: never crossed."""
        A = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
        mu = torch.tensor([2.0, 1.0], dtype=torch.float64)

        def fun(X):
            inside = X[0, 0] > 0
            if inside:
                return (X * (A @ X) * mu).sum() - 0.1 * X[0, 0].log()
            return X.sum() * NUMBERS[value]

        x0 = random_orthogonal(5, 2, seed=3, dtype=torch.float64)
        x0 = x0 * x0[0, 0].sign()
        result = minimize(fun, x0, method=method, gtol=1e-6)
        assert verified(result, fun, lambda X: autograd(fun, X), gtol=1e-6), result.message
        assert result.x[0, 0] > 0

    def test_a_barrier_touched_once_is_no_excuse_later(self, brockett, verified):
        """A run that stalls long after a non-finite trial is stalled, not non-finite."""
        cost, calls = brockett((5, 2)), []

        def both(X):
            calls.append(X)
            value, G = cost.both(X)
            return (value * math.nan if len(calls) == 3 else value), G

        result = minimize(both, cost.start, jac=True, gtol=0)
        assert result.status in (0, 3)

    @methods
    def test_overflow_on_the_way(self, method, verified):
        """Gradients that grow by many orders of magnitude raise nothing."""
        x0 = random_orthogonal(4, 2, seed=0, dtype=torch.float64)
        fun = lambda X: (300 * X[0, 0]).exp() ** 4 * 1e-10 - (300 * X[1, 1]).exp() ** 4 * 1e-10  # noqa: E731
        result = minimize(fun, x0, method=method, maxiter=50)
        verified(result, fun, lambda X: autograd(fun, X))


class TestWrongGradients:
    @pytest.mark.parametrize("method", LINE_SEARCHES)
    @pytest.mark.parametrize("shape", [(4, 4), (6, 2)])
    def test_of_the_wrong_sign(self, method, shape, brockett, verified):
        """Noticed soon, with the advice to check the gradient; f is not made worse."""
        cost = brockett(shape)
        jac = lambda X: -cost.jac(X)  # noqa: E731
        result = minimize(cost.fun, cost.start, jac=jac, method=method)
        assert not verified(result, cost.fun, jac)
        assert result.status == 3
        assert "check_gradient" in result.message
        assert result.nfev < 500
        assert result.fun <= cost.fun(cost.start) + 1e-10

    @methods
    @pytest.mark.parametrize("kind", ["half", "shifted", "random", "transposed", "noisy"])
    def test_that_are_not_of_this_cost(self, method, kind, brockett, verified):
        """Nothing can be promised but an end, a feasible x, and no success without a small jac."""
        cost = brockett((4, 4))
        generator = torch.Generator().manual_seed(0)
        noise = lambda: torch.randn(4, 4, generator=generator, dtype=torch.float64)  # noqa: E731
        mask, shift = noise() > 0, noise()
        jac = {
            "half": lambda X: cost.jac(X) * mask,
            "shifted": lambda X: cost.jac(X) + 0.1 * shift,
            "random": lambda X: noise(),
            "transposed": lambda X: cost.jac(X).mT,
            "noisy": lambda X: cost.jac(X) + 1e-3 * noise(),
        }[kind]
        result = minimize(cost.fun, cost.start, jac=jac, method=method, maxiter=50)
        last = lambda X: result.jac if kind in ("random", "noisy") else jac(X)  # noqa: E731
        verified(result, cost.fun, last)
        assert result.nfev < 2500

    @methods
    @pytest.mark.parametrize("scale", [0.01, 100.0])
    def test_of_the_wrong_length(self, method, scale, brockett, verified):
        """The direction is right; the solution is found all the same, or success is not claimed."""
        cost = brockett((5, 2))
        jac = lambda X: scale * cost.jac(X)  # noqa: E731
        result = minimize(cost.fun, cost.start, jac=jac, method=method, maxiter=2000)
        if verified(result, cost.fun, jac):
            assert result.fun == pytest.approx(cost.optimum, rel=1e-6)

    @methods
    @pytest.mark.parametrize("kind", ["zero", "normal part only"])
    def test_that_vanish_are_believed_with_a_warning(self, method, kind, brockett, verified):
        """Jac says that x0 is stationary. What else could one do: the message says so."""
        cost = brockett((5, 2))
        jac = {
            "zero": torch.zeros_like,
            "normal part only": lambda X: X @ (X.mT @ cost.jac(X) + cost.jac(X).mT @ X) / 2,
        }[kind]
        result = minimize(cost.fun, cost.start, jac=jac, method=method)
        if "jac is not fun's gradient" in result.message:
            return  # better than a warning
        assert verified(result, cost.fun, jac)
        assert result.nit == 0
        assert "x0 was stationary" in result.message


class TestStationaryStarts:
    @methods
    @pytest.mark.parametrize("columns", [(3, 0), (5, 4), (0, 1)], ids=["saddle", "max", "min"])
    def test_the_message_says_so(self, method, columns, brockett, verified):
        cost = brockett((6, 2))
        x0 = torch.linalg.eigh(cost.A).eigenvectors[:, list(columns)]
        result = minimize(cost.fun, x0, method=method)
        assert verified(result, cost.fun, cost.jac)
        assert result.fun == pytest.approx(cost.optimum)
        assert "smallest curvature" in result.message
        without = minimize(cost.fun, x0, jac=cost.jac, method=method)
        assert without.nit == 0
        assert "x0 was stationary" in without.message
        assert "saddle" in without.message

    @methods
    def test_constant_functions(self, method, verified, brockett):
        x0 = brockett((6, 2)).start
        result = minimize(lambda X: 3.0, x0, jac=torch.zeros_like, method=method)
        assert verified(result, lambda X: 3.0, torch.zeros_like)
        assert result.fun == 3.0
        assert "x0 was stationary" in result.message

    @methods
    def test_functions_that_are_constant_on_the_manifold(self, method, verified, brockett):
        """F = ||X||^2 = p: its gradient 2 X is normal, what is left is rounding."""
        x0 = brockett((6, 2)).start
        fun = lambda X: (X * X).sum()  # noqa: E731
        result = minimize(fun, x0, method=method)
        assert verified(result, fun, lambda X: 2 * X)
        assert result.fun == pytest.approx(2.0)

    @methods
    def test_linear_functions(self, method, verified):
        """The minimum is minus the sum of the singular values."""
        C = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x0 = random_orthogonal(5, 2, seed=1, dtype=torch.float64)
        result = minimize(lambda X: (C * X).sum(), x0, method=method)
        assert verified(result, lambda X: (C * X).sum(), lambda X: C)
        assert result.fun == pytest.approx(-float(torch.linalg.svdvals(C).sum()))

    @methods
    def test_a_loose_tolerance_is_not_called_stationary(self, method, brockett):
        cost = brockett()
        result = minimize(cost.fun, cost.start, method=method, options={"atol": 1e9})
        assert result.success
        assert "stationary" not in result.message

    @pytest.mark.parametrize("method", ["lbfgs", "bb", "newton"])
    def test_started_once_more_from_the_solution(self, method, brockett, verified):
        """No fraction of so small a gradient can be reached; it ends soon all the same."""
        cost = brockett((6, 3))
        first = minimize(cost.fun, cost.start, method=method, gtol=1e-9)
        again = minimize(cost.fun, first.x, method=method)
        verified(again, cost.fun, cost.jac)
        assert again.fun <= first.fun + 1e-12
        assert again.grad_norm <= 1.01 * first.grad_norm
        assert again.nfev < 500


KINKS = {
    "l1": lambda X: X.abs().sum(),
    "max": lambda X: X.max(),
    "root": lambda X: (X.abs() + 1e-300).sqrt().sum(),
    "relu": lambda X: torch.relu(X - 0.3).sum(),
    "rounded": lambda X: (X * 1e3).sum() + (X * 1e3).round().detach().sum(),
}


class TestHardCosts:
    @methods
    @pytest.mark.parametrize("kind", KINKS)
    def test_kinks(self, method, kind, verified):
        fun = KINKS[kind]
        x0 = random_orthogonal(5, 2, seed=0, dtype=torch.float64)
        result = minimize(fun, x0, method=method, maxiter=30)
        verified(result, fun, lambda X: autograd(fun, X))
        assert result.fun <= float(fun(x0)) + 1e-9

    @methods
    @pytest.mark.parametrize("noise", [1e-9, 1e-1])
    def test_noise_in_the_cost(self, method, noise, brockett, verified):
        cost = brockett((5, 2))
        generator = torch.Generator().manual_seed(0)
        fun = lambda X: cost.fun(X) + noise * torch.randn((), generator=generator)  # noqa: E731
        result = minimize(fun, cost.start, jac=cost.jac, method=method, maxiter=40)
        verified(result, cost.fun, cost.jac)
        assert cost.fun(result.x) <= cost.fun(cost.start) + 10 * noise

    @methods
    def test_a_cost_that_changes_from_call_to_call(self, method, brockett, verified):
        cost, calls = brockett((5, 2)), []

        def both(X):
            calls.append(X)
            value, G = cost.both(X)
            factor = 1 + 0.3 * math.sin(len(calls))
            return factor * value, factor * G

        result = minimize(both, cost.start, jac=True, method=method, maxiter=30)
        # Somewhere between 0.7 and 1.3 times jac.
        verified(result, cost.fun, lambda X: 0.7 * cost.jac(X))

    @methods
    def test_more_precision_than_there_is(self, method, brockett, verified):
        """Float32 and gtol = 1e-12: it ends, and success would have to be true of rounding."""
        cost = brockett((5, 2), torch.float32)
        result = minimize(cost.fun, cost.start, method=method, gtol=1e-12, maxiter=2000)
        verified(result, cost.fun, cost.jac, gtol=1e-12)
        assert result.nit < 2000 or method == "landing"
        assert result.grad_norm < 1e-3
        if not result.success:
            assert "float64" in result.message

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_a_gradient_lost_in_its_normal_part(self, method, brockett, distance, norm):
        """F + 1e13 Tr(X^T X - I): of the tangent gradient 1e-2 is rounding; no success at that."""
        cost = brockett((5, 2))
        fun = lambda X: cost.fun(X) + 1e13 * ((X * X).sum() - 2)  # noqa: E731
        result = minimize(fun, cost.start, method=method, maxiter=40)
        if result.success:
            G = cost.jac(result.x)
            tangent = G - result.x @ (result.x.mT @ G + G.mT @ result.x) / 2
            assert norm(tangent) < 1e-5 * result.history["grad_norm"][0]


# The fixture holds no state.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(METHOD_NAMES),
    shape=st.sampled_from([(3, 3), (5, 2), (2, 4), (4, 1), (2, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128]),
    seed=st.integers(0, 10_000),
    exponent=st.integers(-25, 25),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    d=st.floats(-0.45, 0.45),
    gtol=st.sampled_from([None, 0.0, 1e-3, 1e-10]),
)
def test_no_lie_about_random_quadratics(
    method, shape, dtype, seed, exponent, offset, d, gtol, verified
):
    """``scale (<X, H X> + <C, X> + offset)`` with an indefinite H, of any scale."""
    generator = torch.Generator().manual_seed(seed)
    n = shape[0]
    H = torch.randn(n, n, generator=generator, dtype=dtype)
    C = torch.randn(shape, generator=generator, dtype=dtype)
    H, scale = H + H.mH, 10.0**exponent

    def fun(X):
        return scale * ((X.conj() * (H @ X + C)).sum().real + offset)

    jac = lambda X: scale * (2 * H @ X + C)  # noqa: E731
    x0 = random_orthogonal(*shape, seed=seed, dtype=dtype) * (1 + d / min(shape) ** 0.5) ** 0.5
    result = minimize(fun, x0, jac=jac, method=method, gtol=gtol, maxiter=150)
    verified(result, fun, jac, gtol=gtol)
    assert result.status in (0, 1, 3)
    first = result.history["fun"][0]
    if abs(d) < 1e-3 and method != "landing":
        assert result.fun <= first + 1e-4 * abs(first) + 1e-3 * scale
