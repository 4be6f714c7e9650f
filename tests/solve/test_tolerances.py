"""Tolerances that no start spoils, and what SciPy's users are used to."""

import math

import numpy as np
import pytest
import scipy.optimize
import torch

import ortholand as ol
from ortholand.geometry import riemannian_gradient
from ortholand.native import why_no_code
from ortholand.solve import METHODS
from ortholand_lab.problems import Procrustes

METHOD_NAMES = (None, *(name for name in METHODS if name != "landing"))
methods = pytest.mark.parametrize("method", METHOD_NAMES)


class TestWarmStarts:
    @methods
    @pytest.mark.parametrize("shape", [(6, 3), (4, 4), (3, 6)])
    def test_solving_again_from_a_solution(self, method, shape, brockett, verified):
        """It is one, and this costs next to nothing."""
        cost = brockett(shape)
        first = ol.minimize(cost.fun, cost.start, method=method, gtol=1e-9)
        again = ol.minimize(cost.fun, first.x, method=method)
        assert first.success
        assert verified(again, cost.fun, cost.jac)
        assert again.nit == 0
        assert again.nfev <= 4
        assert again.fun <= first.fun + 1e-12

    @methods
    def test_where_the_euclidean_gradient_vanishes_too(self, method):
        """F = ||X A - B||^2 / p with a minimum of zero: all norms are small at a solution."""
        problem = Procrustes.planted(5, columns=20, seed=0)
        x0 = problem.start(0)
        x0[:, 0] *= torch.linalg.det(x0 @ problem.solution()).sign()
        first = ol.minimize(problem.fun, x0, method=method, gtol=1e-8)
        again = ol.minimize(problem.fun, first.x, method=method)
        assert first.success
        assert again.success, again.message

    @methods
    def test_going_on_does_not_move_the_goal_far(self, method, brockett):
        """Stopped half way and started anew: as many iterations more as were missing, nearly."""
        cost = brockett((8, 3))
        whole = ol.minimize(cost.fun, cost.start, method=method, gtol=1e-6)
        half = ol.minimize(
            cost.fun, cost.start, method=method, gtol=1e-6, maxiter=(2 * whole.nit) // 3
        )
        rest = ol.minimize(cost.fun, half.x, method=method, gtol=1e-6)
        assert rest.success
        assert rest.grad_norm > 1e-9 * whole.history["grad_norm"][0]
        assert rest.nit < 0.8 * whole.nit + 8

    def test_a_continuation_gains_from_its_warm_start(self, brockett):
        cost = brockett((10, 3))
        moved = brockett((10, 3))
        moved.A = moved.A + 1e-3 * torch.diag(torch.linspace(0, 1, 10, dtype=torch.float64))
        cold = ol.minimize(moved.fun, moved.start, method="lbfgs")
        first = ol.minimize(cost.fun, cost.start, method="lbfgs")
        warm = ol.minimize(moved.fun, first.x, method="lbfgs")
        assert warm.success
        assert warm.nit < 0.8 * cold.nit


class TestPoles:
    @methods
    def test_a_pole_near_x0_is_no_scale(self, method):
        """F = Tr X^T A X + 1e-6 / (1 - x_11): steep at x0, 1e-6 of that where it ends."""
        A = torch.diag(torch.arange(1.0, 7, dtype=torch.float64))
        x0 = torch.eye(6, 2, dtype=torch.float64)
        angle = 1e-4
        x0[0, 0], x0[5, 0] = math.cos(angle), math.sin(angle)
        fun = lambda X: -(X * (A @ X)).sum() + 1e-6 / (1 - X[0, 0])  # noqa: E731
        result = ol.minimize(fun, x0, method=method, gtol=1e-6)
        first = result.history["grad_norm"][0]
        assert first > 1e4
        Y = result.x.clone().requires_grad_()
        G = torch.autograd.grad(fun(Y), Y)[0]
        size = float(riemannian_gradient(result.x, G).norm())
        assert result.success, result.message
        assert size < 1e-4  # and not 1e-6 first
        assert result.grad_norm == pytest.approx(size, rel=1e-3, abs=1e-12)


class TestScipysHabits:
    """What works with scipy.optimize.minimize works here."""

    def test_the_same_call(self, brockett):
        """Positional args and method; tol; options."""
        cost = brockett((6, 2))
        A, mu = cost.A.numpy(), cost.mu.numpy()
        x0 = cost.start.numpy()

        def fun(x, A, mu):
            X = x.reshape(6, 2)
            return np.sum(X * (A @ X) * mu), (2 * A @ X * mu).reshape(x.shape)

        for call in (scipy.optimize.minimize, ol.minimize):
            start = x0.reshape(-1) if call is scipy.optimize.minimize else x0
            name = "BFGS" if call is scipy.optimize.minimize else "bb"
            result = call(
                fun, start, (A, mu), name, True, tol=1e-5, options={"maxiter": 2, "disp": False}
            )
            assert result.nit <= 2
            assert not result.success

    def test_tol_is_gtol(self, brockett):
        cost = brockett()
        for given in (dict(tol=1e-3), dict(options={"gtol": 1e-3}), dict(gtol=1e-3)):
            result = ol.minimize(cost.fun, cost.start, method="bb", **given)
            assert result.grad_norm > 1e-8
            assert result.success

    def test_once_is_enough(self, brockett):
        cost = brockett()
        for twice in (
            dict(tol=1e-3, gtol=1e-4),
            dict(gtol=1e-3, options={"gtol": 1e-4}),
            dict(maxiter=3, options={"maxiter": 4}),
            dict(disp=True, options={"disp": False}),
        ):
            with pytest.raises(ValueError, match="once"):
                ol.minimize(cost.fun, cost.start, **twice)

    @pytest.mark.parametrize("given", [dict(disp=True), dict(options={"disp": 1})])
    def test_disp_prints_how_it_goes(self, given, brockett, capsys):
        cost = brockett()
        result = ol.minimize(cost.fun, cost.start, method="bb", **given)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == result.message
        assert 3 < len(lines) < 20
        assert "gradient" in lines[0]
        ol.minimize(cost.fun, cost.start, method="bb")
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_a_gradient_of_double_precision_for_single(self, kind, brockett):
        cost = brockett((6, 2), torch.float32)
        A, mu = cost.A.numpy().astype(float), cost.mu.numpy().astype(float)
        if kind == "numpy":
            x0, both = cost.start.numpy(), lambda X: (np.sum(X * (A @ X) * mu), 2 * A @ X * mu)
        else:
            T, m = torch.from_numpy(A), torch.from_numpy(mu)
            x0 = cost.start

            def both(X):
                X = X.double()
                return (X * (T @ X) * m).sum(), 2 * T @ X * m

        result = ol.minimize(both, x0, jac=True, method="lbfgs")
        assert result.success
        assert result.x.dtype == x0.dtype
        assert result.fun == pytest.approx(cost.optimum, rel=1e-5)

    def test_a_list_of_rows_is_a_matrix(self, brockett, numpy_version):
        cost = brockett()
        result = ol.minimize(numpy_version(cost.both), cost.start.tolist(), jac=True)
        assert type(result.x) is np.ndarray
        assert result.fun == pytest.approx(cost.optimum)

    def test_warnings_of_the_users_own_stay_the_users(self, brockett, numpy_version):
        """The solver is silent about overflow; what fun does is under the caller's settings."""
        cost, seen = brockett(), []
        both = numpy_version(cost.both)

        def watched(X):
            seen.append(np.geterr()["over"])
            return both(X)

        with np.errstate(over="raise"):
            ol.minimize(watched, cost.start.numpy(), jac=True, maxiter=3)
        assert set(seen) == {"raise"}


class TestChoice:
    """Method None."""

    def test_newton_where_products_are_at_hand(self, brockett):
        cost = brockett((40, 34))
        assert ol.minimize(cost.fun, cost.start).method == "bb, newton"
        with_hessp = ol.minimize(cost.fun, cost.start, jac=cost.jac, hessp=cost.hessp)
        assert with_hessp.method == "bb, newton"
        assert with_hessp.nhev > 0

    def test_lbfgs_where_there_are_few_numbers(self, brockett):
        cost = brockett((6, 2))
        assert ol.minimize(cost.fun, cost.start, jac=cost.jac).method == "lbfgs"
        result = ol.minimize(cost.fun, cost.start, jac=cost.jac, hessp=cost.hessp)
        assert (result.method, result.nhev) == ("lbfgs", 0)

    @staticmethod
    def _two(brockett, n, p):
        """An easy cost and an ill-conditioned one."""
        easy, hard = brockett((n, p)), brockett((n, p))
        easy.A = torch.diag(torch.cat([torch.zeros(p), torch.ones(n - p)]).double())
        easy.mu = torch.ones(p, dtype=torch.float64)
        hard.A = torch.diag(torch.logspace(-2.5, 0, n, dtype=torch.float64))
        return easy, hard

    @pytest.mark.skipif(why_no_code(torch.float64) is not None, reason="nothing is compiled")
    def test_what_the_first_iterations_of_compiled_code_show(self, brockett):
        """Newton goes on where the cost is ill conditioned, if there are products."""
        easy, hard = self._two(brockett, 60, 6)
        result = ol.minimize(easy.fun, easy.start, jac=easy.jac, hessp=easy.hessp)
        assert (result.success, result.method) == (True, "lbfgs")
        result = ol.minimize(hard.fun, hard.start, jac=hard.jac)
        assert (result.success, result.method) == (True, "lbfgs")
        result = ol.minimize(hard.fun, hard.start, jac=hard.jac, hessp=hard.hessp)
        assert result.success
        assert result.method.startswith("lbfgs, newton")
        assert result.nhev > 0
        assert len(result.history["fun"]) == result.nit + 1

    def test_what_the_first_iterations_show(self, brockett):
        """An easy cost stays with bb; an ill-conditioned one goes on with lbfgs."""
        easy, hard = self._two(brockett, 120, 34)
        result = ol.minimize(easy.fun, easy.start, jac=easy.jac)
        assert result.success
        assert result.method == "bb"
        result = ol.minimize(hard.fun, hard.start, jac=hard.jac, gtol=1e-4)
        assert result.success
        assert result.method == "bb, lbfgs, bb"  # which finds out that bb is faster here
        alone = [
            ol.minimize(hard.fun, hard.start, jac=hard.jac, gtol=1e-4, method=method).nfev
            for method in ("bb", "lbfgs")
        ]
        assert result.nfev < 1.2 * min(alone) < max(alone)

    def test_who_gets_far_goes_on(self, brockett):
        """Judged several times, and never slow."""
        cost, _ = self._two(brockett, 120, 34)
        cost.A = torch.diag(torch.cat([torch.zeros(34), torch.linspace(0.05, 1, 86)]).double())
        result = ol.minimize(cost.fun, cost.start, jac=cost.jac, gtol=1e-9)
        assert result.success
        assert result.method == "bb"
        assert result.nit > 60

    def test_an_option_names_its_method(self, brockett):
        cost = brockett((6, 2))
        assert ol.minimize(cost.fun, cost.start, options={"memory": 3}).method == "lbfgs"
        result = ol.minimize(
            cost.fun, cost.start, jac=cost.jac, options={"preconditioner": None}, maxiter=3
        )
        assert result.method == "newton"

    @pytest.mark.parametrize("method", METHODS)
    def test_the_result_says_what_was_used(self, method, brockett):
        cost = brockett()
        assert ol.minimize(cost.fun, cost.start, method=method, maxiter=2).method == method


class TestLimits:
    def test_maxtime_is_looked_at_inside_newtons_cg(self):
        """Each product takes 20 ms; the first system alone would take hundreds."""
        import time

        n = 60
        d = np.logspace(0, 6, n)
        x0 = np.linalg.qr(np.random.default_rng(0).standard_normal((n, 2)))[0]
        weights = np.array([2.0, 1.0])

        def hessp(X, V):
            time.sleep(0.02)
            return 2 * d[:, None] * V * weights

        result = ol.minimize(
            lambda X: (np.sum(d[:, None] * X**2 * weights), 2 * d[:, None] * X * weights),
            x0,
            jac=True,
            hessp=hessp,
            method="newton",
            gtol=1e-14,
            options={"maxtime": 0.3, "preconditioner": None},
        )
        assert result.status == 5
        assert result.nhev <= 30

    @pytest.mark.parametrize("method", ["lbfgs", "bb", "newton"])
    def test_noise_that_is_known_costs_little(self, method, brockett):
        cost = brockett((6, 2))
        generator = torch.Generator().manual_seed(0)
        noise = lambda: 1e-3 * torch.randn((), generator=generator, dtype=torch.float64)  # noqa: E731
        fun = lambda X: cost.fun(X) + noise()  # noqa: E731
        result = ol.minimize(fun, cost.start, jac=cost.jac, method=method, options={"noise": 1e-2})
        assert result.nfev < 400
        assert float(cost.fun(result.x)) < cost.optimum + 1e-2
