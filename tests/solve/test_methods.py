"""What sets the methods apart, and what their options do."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch

from ortholand import (
    LandingSGD,
    distance,
    minimize,
    random_orthogonal,
)
from ortholand.solve import METHODS, Method
from tests.solve import promises
from tests.solve.promises import iterates

METHOD_NAMES = tuple(METHODS)
SCALES = [1e-200, 1e-30, 1e150]

methods = pytest.mark.parametrize("method", METHOD_NAMES)


class TestLanding:
    """The paper's Algorithm 1: what LandingSGD does with full gradients."""

    @pytest.mark.parametrize("shape", [(4, 4), (6, 2), (2, 6)])
    @pytest.mark.parametrize("rule", ["frobenius", "spectral"])
    @pytest.mark.parametrize("momentum", [0.0, 0.8])
    @pytest.mark.parametrize("eta", [0.01, 10.0])
    def test_iterates_are_those_of_the_optimizer(
        self, shape, rule, momentum, eta, brockett, at_distance_of
    ):
        """Also where the safe step is shorter than eta, and from outside of the manifold.

        ``A <- momentum A + (1 - momentum) psi`` is the optimizer's on (1 - momentum) f.
        """
        cost = brockett(shape, torch.complex128 if momentum else torch.float64)
        x0 = at_distance_of(0.2, cost.start)
        X = torch.nn.Parameter(x0.clone())
        optimizer = LandingSGD(
            [X], lr=eta, momentum=momentum, lam=0.7, eps=0.4, safe_step=rule, fused=False
        )
        seen, _ = iterates(
            cost.fun,
            x0,
            jac=cost.jac,
            method="landing",
            lam=0.7,
            maxiter=12,
            gtol=0,
            options=dict(step=eta, momentum=momentum, eps=0.4, safe_step=rule),
        )
        assert len(seen) == 12
        for Y in seen:
            X.grad = (1 - momentum) * cost.jac(X.detach())
            optimizer.step()
            torch.testing.assert_close(Y, X.detach(), rtol=0, atol=1e-12)
        if eta == 10.0:  # the safe step was at work: much shorter than eta
            assert (seen[0] - x0).norm() < 0.2 * eta * cost.jac(x0).norm()

    def test_first_step_with_momentum(self, brockett):
        """A_0 = 0: the first step is (1 - momentum) times one without."""
        cost = brockett((5, 5))
        options = dict(jac=cost.jac, method="landing", lam=1.0, maxiter=1, gtol=0)
        (plain,), _ = iterates(cost.fun, cost.start, options=dict(step=1e-3), **options)
        (damped,), _ = iterates(
            cost.fun, cost.start, options=dict(step=1e-3, momentum=0.9), **options
        )
        torch.testing.assert_close(
            damped - cost.start, 0.1 * (plain - cost.start), rtol=1e-9, atol=1e-14
        )

    def test_step_sequence_starts_at_one(self, brockett):
        cost, asked = brockett(), []

        def step(k):
            asked.append(k)
            return 0.05 / k

        _, result = iterates(
            cost.fun, cost.start, method="landing", lam=1.0, maxiter=4, options=dict(step=step)
        )
        assert result.nit == 4
        assert list(dict.fromkeys(asked)) == [1, 2, 3, 4]

    def test_constant_sequence_is_a_number(self, brockett):
        cost = brockett()
        options = dict(method="landing", lam=1.0, maxiter=20)
        first, _ = iterates(cost.fun, cost.start, options=dict(step=0.02), **options)
        second, _ = iterates(cost.fun, cost.start, options=dict(step=lambda k: 0.02), **options)
        assert all(torch.equal(X, Y) for X, Y in zip(first, second, strict=True))

    @pytest.mark.parametrize("rule", ["frobenius", "spectral"])
    @pytest.mark.parametrize("eps", [0.05, 0.5, 0.9])
    def test_stays_in_the_ball(self, eps, rule, brockett):
        """Whatever the step; here it is far too long."""
        cost = brockett((6, 3))
        options = dict(step=100.0, eps=eps, safe_step=rule)
        points, _ = iterates(cost.fun, cost.start, method="landing", maxiter=50, options=options)
        distances = [float(distance(X, spectral=rule == "spectral")) for X in points]
        assert max(distances) <= eps * (1 + 1e-12)
        assert max(distances) > 0.5 * eps

    @pytest.mark.parametrize("d", [0.3, -0.3, 0.499])
    def test_x0_off_the_manifold_is_not_moved_there_first(self, d, brockett):
        """It is Algorithm 1 to the letter: attraction does it, at its own rate."""
        cost = brockett((5, 3))
        x0 = cost.start * math.sqrt(1 + d / math.sqrt(3))
        result = minimize(cost.fun, x0, method="landing")
        distances = result.history["distance"]
        assert distances[0] == pytest.approx(abs(d))
        assert distances[1] < distances[0]
        assert result.success
        assert result.fun == pytest.approx(cost.optimum)


class TestDescent:
    @pytest.mark.parametrize("method", ["lbfgs", "newton"])
    @pytest.mark.parametrize("shape", [(5, 5), (7, 3)])
    def test_the_cost_falls_monotonically(self, method, shape, brockett):
        promises.the_cost_falls_monotonically(brockett(shape), method)

    @methods
    def test_trial_points_stay_near_the_manifold(self, method, brockett, distance):
        """Fun is never asked far out, where it may mean nothing."""
        cost, farthest = brockett((6, 3)), []

        def both(X):
            farthest.append(distance(X))
            return cost.both(X)

        minimize(both, cost.start, jac=True, method=method)
        assert max(farthest) <= (0.5 if method == "landing" else 0.011)

    @methods
    @pytest.mark.parametrize("lam", [0.1, 1e3])
    def test_lam_decides_about_the_way_not_the_goal(self, method, lam, brockett):
        cost = brockett()
        maxiter = 20 if method == "landing" and lam == 1e3 else None
        result = minimize(cost.fun, cost.start, method=method, lam=lam, maxiter=maxiter, gtol=1e-5)
        assert result.success is (maxiter is None)
        if result.success:
            assert result.fun == pytest.approx(cost.optimum)

    @pytest.mark.parametrize("method", ["lbfgs", "bb", "newton"])
    @pytest.mark.parametrize("c", [1e4, 1e8, -1e4, -1e8])
    def test_costs_that_are_steep_off_the_manifold(self, method, c, brockett, verified):
        promises.steepness_off_the_manifold_does_not_matter(brockett((5, 2)), c, method, verified)

    @methods
    @pytest.mark.parametrize("c", [1e6, -1e6])
    def test_a_large_normal_gradient(self, method, c, brockett):
        """F + c Tr(X^T X - I) is f, too; its gradient is c X, almost all of it normal."""
        cost = brockett((5, 2))
        fun = lambda X: cost.fun(X) + c * ((X * X).sum() - 2)  # noqa: E731
        result = minimize(fun, cost.start, method=method, maxiter=2000)
        assert result.fun == pytest.approx(cost.optimum, rel=1e-7)

    @methods
    def test_huge_offset(self, method, brockett, verified):
        promises.a_huge_offset_does_not_matter(brockett((5, 2)), method, verified)

    @pytest.mark.parametrize("method", ["lbfgs", "newton"])
    def test_a_minimum_of_zero(self, method):
        """F = ||X A - B||^2 summed up from its terms: 0 at the solution, but for cancellation."""
        generator = torch.Generator().manual_seed(0)
        A = torch.randn(4, 9, generator=generator, dtype=torch.float64)
        target = random_orthogonal(4, 4, seed=1, dtype=torch.float64)
        B = target @ A
        fun = lambda X: (A * A).sum() + (B * B).sum() - 2 * ((X @ A) * B).sum()  # noqa: E731
        jac = lambda X: -2 * B @ A.mT  # noqa: E731
        x0 = random_orthogonal(4, 4, seed=3, dtype=torch.float64)
        x0 = x0 * 1.0 if torch.linalg.det(x0) * torch.linalg.det(target) > 0 else x0[[1, 0, 2, 3]]
        result = minimize(fun, x0, jac=jac, method=method, gtol=1e-9)
        assert result.success, result.message
        assert (result.x - target).norm() < 1e-7


class TestScale:
    """A cost times a number has the same minimisers, and the same way there."""

    @methods
    @pytest.mark.parametrize("scale", SCALES)
    def test_of_the_cost(self, method, scale, brockett, verified):
        cost = brockett((4, 2))
        plain = minimize(cost.fun, cost.start, jac=cost.jac, method=method)
        fun, jac = lambda X: scale * cost.fun(X), lambda X: scale * cost.jac(X)
        result = minimize(fun, cost.start, jac=jac, method=method)
        assert verified(result, fun, jac)
        assert result.fun == pytest.approx(scale * cost.optimum, rel=1e-10, abs=0)
        assert result.grad_norm > 0
        assert result.nfev <= 1.5 * plain.nfev + 10

    @methods
    @pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e18, 1e30])
    def test_in_single_precision(self, method, scale, brockett, verified):
        """Squares over- and underflow much earlier there."""
        cost = brockett((5, 2), torch.float32)
        fun, jac = lambda X: scale * cost.fun(X), lambda X: scale * cost.jac(X)
        result = minimize(fun, cost.start, jac=jac, method=method)
        assert verified(result, fun, jac)
        assert result.fun == pytest.approx(scale * cost.optimum, rel=1e-5, abs=0)

    @methods
    def test_powers_of_two_change_nothing(self, method, brockett):
        """They are exact: the iterates are the same to the last bit."""
        cost = brockett((5, 2))
        plain, _ = iterates(cost.fun, cost.start, jac=cost.jac, method=method, maxiter=15)
        for scale in (2.0**-80, 2.0**80):
            fun, jac = lambda X, s=scale: s * cost.fun(X), lambda X, s=scale: s * cost.jac(X)
            scaled, _ = iterates(fun, cost.start, jac=jac, method=method, maxiter=15)
            for X, Y in zip(plain, scaled, strict=True):
                torch.testing.assert_close(X, Y, rtol=0, atol=1e-10)

    def test_hessp_atol_and_lam_are_in_the_users_unit(self, brockett, verified):
        cost, s = brockett((5, 2)), 1e40
        fun, jac = lambda X: s * cost.fun(X), lambda X: s * cost.jac(X)
        hessp = lambda X, V: s * cost.hessp(X, V)  # noqa: E731
        result = minimize(fun, cost.start, jac=jac, hessp=hessp, method="newton", gtol=1e-10)
        plain = minimize(
            cost.fun, cost.start, jac=cost.jac, hessp=cost.hessp, method="newton", gtol=1e-10
        )
        assert verified(result, fun, jac, gtol=1e-10)
        assert abs(result.nit - plain.nit) <= 1
        loose = minimize(fun, cost.start, jac=jac, gtol=0, options={"atol": 1e-2 * s})
        assert loose.success
        assert 1e-8 * s < loose.grad_norm <= 1e-2 * s
        options = dict(method="landing", maxiter=30, gtol=0)
        first, _ = iterates(cost.fun, cost.start, lam=2.0, options={"step": 0.02}, **options)
        second, _ = iterates(
            fun, cost.start, jac=jac, lam=2.0 * s, options={"step": 0.02 / s}, **options
        )
        torch.testing.assert_close(first[-1], second[-1], rtol=0, atol=1e-10)


class TestCurvature:
    def test_lbfgs_remembers(self, brockett):
        """One pair is less than ten."""
        cost = brockett((12, 4))
        short, long = (
            minimize(cost.fun, cost.start, options={"memory": m}, gtol=1e-8) for m in (1, 10)
        )
        assert short.success
        assert long.success
        assert long.nit < short.nit

    @pytest.mark.parametrize("method", ["bb", "newton"])
    def test_a_preconditioner_saves_work(self, method):
        promises.a_preconditioner_saves_work(method)

    @pytest.mark.parametrize("method", ["bb", "newton"])
    def test_a_preconditioner_may_return_its_argument(self, method, brockett):
        """It makes tangent again what off the manifold is not quite so; all else is the same."""
        cost = brockett((5, 3))
        same, copy, none = (
            minimize(cost.fun, cost.start, method=method, options={"preconditioner": p})
            for p in (lambda X, V: V, lambda X, V: V.clone(), None)
        )
        assert same.success
        assert torch.equal(same.x, copy.x)
        assert same.nit < 1.5 * none.nit

    @pytest.mark.parametrize("method", ["bb", "newton"])
    @promises.not_positive
    def test_a_preconditioner_that_is_not_positive(self, method, sign, brockett):
        promises.a_preconditioner_that_is_not_positive_is_an_error(brockett((5, 3)), sign, method)

    @pytest.mark.parametrize("hessp", ["zero", "negative", "nan", "noise"])
    def test_newton_with_a_wrong_hessian(self, hessp, brockett, verified):
        """It is slow then, not wrong: gradient and cost decide."""
        cost = brockett((5, 2))
        generator = torch.Generator().manual_seed(0)
        wrong = {
            "zero": lambda X, V: 0 * V,
            "negative": lambda X, V: -cost.hessp(X, V),
            "nan": lambda X, V: math.nan * V,
            "noise": lambda X, V: torch.randn(5, 2, generator=generator, dtype=torch.float64),
        }[hessp]
        result = minimize(
            cost.fun, cost.start, jac=cost.jac, hessp=wrong, method="newton", maxiter=300
        )
        verified(result, cost.fun, cost.jac)
        assert result.fun < cost.fun(cost.start)

    def test_inner_maxiter_limits_the_products(self, brockett):
        cost = brockett((6, 3))
        result = minimize(
            cost.fun,
            cost.start,
            jac=cost.jac,
            hessp=cost.hessp,
            method="newton",
            options={"inner_maxiter": 3, "preconditioner": None},
        )
        assert result.success
        *steps, most = sorted(np.diff(result.history["nhev"]))
        assert steps[-1] <= 3
        assert most <= 4  # once hessp is checked, which takes a product

    @pytest.mark.parametrize("method", ["lbfgs", "newton", "bb"])
    def test_leaves_a_saddle_point(self, method, brockett):
        promises.a_saddle_point_is_left(brockett((6, 2)), method)

    @pytest.mark.parametrize("method", ["lbfgs", "bb", "newton"])
    def test_minimisers_that_are_not_isolated(self, method):
        promises.minimisers_need_not_be_isolated(method)


class Halving(Method):
    """A method of a user: gradient steps that are halved until f falls."""

    name = "halving"
    rules: ClassVar = {"first": ("a number > 0", lambda v: v > 0)}

    def __init__(self, lam=None, first=0.1):
        self.lam, self.first = lam, first

    def start(self, cost, point, targets):
        self.cost = cost

    def advance(self, point, progress):
        line, t = self.cost.line(point, -point.gradient), self.first
        for _ in range(30):
            after, t = self.cost.go(line, t, 0.0)
            if after.finite and after.value < point.value:
                return after
            t /= 2
        return None


class TestMethodsOfUsers:
    def test_a_class_is_a_method(self, brockett, verified):
        cost = brockett((6, 2))
        result = minimize(cost.fun, cost.start, method=Halving, gtol=1e-5, options={"first": 0.05})
        assert verified(result, cost.fun, cost.jac, gtol=1e-5)
        assert result.method == "halving"
        assert result.fun == pytest.approx(cost.optimum, rel=1e-6)

    def test_its_options_are_checked(self, brockett):
        cost = brockett()
        with pytest.raises(ValueError, match=r"options\['first'\] must be a number > 0"):
            minimize(cost.fun, cost.start, method=Halving, options={"first": -1.0})
        with pytest.raises(ValueError, match="has the options"):
            minimize(cost.fun, cost.start, method=Halving, options={"memory": 3})

    @pytest.mark.parametrize("method", [Halving(), dict, 3, "BFGS"])
    def test_nothing_else_is(self, method, brockett):
        cost = brockett()
        with pytest.raises(ValueError, match=r"one of .*'lbfgs'.* or a subclass"):
            minimize(cost.fun, cost.start, method=method)

    @pytest.mark.parametrize("method", ["cg", "retraction-gd", "retraction-cg"])
    def test_methods_that_have_moved_say_where(self, method, brockett):
        cost = brockett()
        with pytest.raises(ValueError, match=r"'bb'.*ortholand_lab\.solvers"):
            minimize(cost.fun, cost.start, method=method)
