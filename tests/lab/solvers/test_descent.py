"""Conjugate gradients and retractions, in the loop and with the line search of the library."""

import pytest
import torch

import ortholand as ol
from ortholand import minimize, random_orthogonal, retract
from ortholand.retractions import RETRACTIONS
from ortholand_lab.solvers import METHODS, ConjugateGradient, RetractionCG, RetractionGD
from tests.solve import promises
from tests.solve.promises import iterates
from tests.solve.test_generalized import cost as eigen_cost
from tests.solve.test_generalized import eigenproblem
from tests.solve.test_products import LowRank, is_feasible

NAMES = tuple(RETRACTIONS)  # other tests may add functions to the registry
methods = pytest.mark.parametrize("method", METHODS.values())
conjugate = pytest.mark.parametrize("method", [ConjugateGradient, RetractionCG])


class TestRetractions:
    @pytest.mark.parametrize("retraction", NAMES)
    @pytest.mark.parametrize("method", [RetractionGD, RetractionCG])
    @pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 4)])
    def test_iterates_are_on_the_manifold(
        self, retraction, method, shape, brockett, distance, roundings
    ):
        cost = brockett(shape)
        options = {"retraction": retraction}
        seen, result = iterates(cost.fun, cost.start, method=method, options=options, gtol=1e-4)
        assert result.success
        assert result.fun == pytest.approx(cost.optimum, rel=1e-5)
        assert max(distance(X) for X in seen) < roundings(cost.start)

    def test_they_differ(self, brockett):
        """Each name leads elsewhere from the second step on, so each is used."""
        cost = brockett((5, 3))
        first = {
            name: iterates(
                cost.fun,
                cost.start,
                method=RetractionGD,
                maxiter=1,
                options={"retraction": name},
            )[0][0]
            for name in NAMES
        }
        names = list(first)
        for i, name in enumerate(names):
            for other in names[:i]:
                assert (first[name] - first[other]).norm() > 1e-6, (name, other)

    def test_polar_is_the_default(self, brockett):
        cost = brockett()
        results = [
            minimize(cost.fun, cost.start, method=RetractionCG, options=options)
            for options in ({}, {"retraction": "polar"})
        ]
        assert torch.equal(results[0].x, results[1].x)

    def test_a_function_may_stand_for_a_name(self, brockett):
        cost = brockett((4, 4))
        options = [{"retraction": "cayley"}, {"retraction": lambda X, A: retract(X, A, "cayley")}]
        first, second = (
            minimize(cost.fun, cost.start, method=RetractionCG, options=o) for o in options
        )
        assert torch.equal(first.x, second.x)


class TestAll:
    @methods
    @pytest.mark.parametrize("shape", [(5, 5), (7, 3)])
    def test_the_cost_falls_monotonically(self, method, shape, brockett):
        promises.the_cost_falls_monotonically(brockett(shape), method)

    @methods
    @pytest.mark.parametrize("scale", [1e-200, 1.0, 1e150])
    def test_success_is_verified_in_every_unit(self, method, scale, brockett, verified):
        cost = brockett((4, 2))
        fun, jac = lambda X: scale * cost.fun(X), lambda X: scale * cost.jac(X)
        result = minimize(fun, cost.start, jac=jac, method=method)
        assert verified(result, fun, jac)
        assert result.method == method.name
        assert result.fun == pytest.approx(scale * cost.optimum, rel=1e-10, abs=0)

    @methods
    def test_huge_offset(self, method, brockett, verified):
        promises.a_huge_offset_does_not_matter(brockett((5, 2)), method, verified)

    @pytest.mark.parametrize("c", [1e4, 1e8, -1e4, -1e8])
    def test_costs_that_are_steep_off_the_manifold(self, c, brockett, verified):
        promises.steepness_off_the_manifold_does_not_matter(
            brockett((5, 2)), c, ConjugateGradient, verified
        )

    @methods
    def test_the_wrong_sign_is_noticed(self, method, brockett):
        cost = brockett((5, 2))
        result = minimize(cost.fun, cost.start, jac=lambda X: -cost.jac(X), method=method)
        assert not result.success
        assert result.nfev < 2000

    @methods
    def test_a_low_rank_model_is_as_easy_as_one_matrix(self, method):
        problem = LowRank()
        result = minimize(problem.fun, problem.start, method=method, gtol=1e-7)
        assert result.success, result.message
        assert result.fun < 1e-10
        assert is_feasible(result.x["U"])

    @conjugate
    def test_minimisers_that_are_not_isolated(self, method):
        promises.minimisers_need_not_be_isolated(method)

    def test_leaves_a_saddle_point(self, brockett):
        promises.a_saddle_point_is_left(brockett((6, 2)), ConjugateGradient)


class TestPreconditioners:
    @conjugate
    def test_saves_work(self, method):
        promises.a_preconditioner_saves_work(method)

    @conjugate
    @promises.not_positive
    def test_one_that_is_not_positive(self, method, sign, brockett):
        promises.a_preconditioner_that_is_not_positive_is_an_error(brockett((5, 3)), sign, method)

    @pytest.mark.parametrize("form", ["cholesky", "landing"])
    def test_with_a_metric(self, form):
        A, B, x, best = eigenproblem(condition=1e3)
        manifold = ol.GeneralizedStiefel(B, form)
        result = minimize(
            eigen_cost(A),
            manifold.project(x),
            method=ConjugateGradient,
            jac=True,
            manifold=manifold,
        )
        assert result.success
        assert result.fun == pytest.approx(best, abs=1e-8)


class TestMisuse:
    def test_retractions_work_in_new_variables_only(self):
        A, B, x, best = eigenproblem()
        manifold = ol.GeneralizedStiefel(B, "cholesky")
        x0 = manifold.project(x)
        result = minimize(eigen_cost(A), x0, method=RetractionCG, jac=True, manifold=manifold)
        assert result.success
        assert result.fun == pytest.approx(best, abs=1e-9)
        landing = ol.GeneralizedStiefel(B, "landing")
        with pytest.raises(ValueError, match="form='cholesky'"):
            minimize(eigen_cost(A), x0, method=RetractionCG, jac=True, manifold=landing)

    @pytest.mark.parametrize(
        ("method", "name", "value"),
        [
            (RetractionGD, "retraction", "x"),
            (RetractionGD, "retraction", None),
            (RetractionCG, "retraction", "Polar"),
            (ConjugateGradient, "preconditioner", 3),
            (RetractionGD, "preconditioner", lambda X, V: V),
        ],
    )
    def test_options(self, method, name, value, brockett):
        cost = brockett()
        with pytest.raises(ValueError, match=name):
            minimize(cost.fun, cost.start, method=method, options={name: value})

    def test_the_callers_options_are_left_alone(self, brockett):
        cost, options = brockett(), {"maxtime": 100, "retraction": "qr"}
        minimize(cost.fun, cost.start, method=RetractionCG, options=options, maxiter=2)
        assert options == {"maxtime": 100, "retraction": "qr"}


def test_curvature_pays_on_an_ill_conditioned_problem():
    """Iterations: newton, then lbfgs and cg, then bb, and steepest descent last.

    From three starts together, because the number from one of them depends on rounding.
    """
    n, p = 20, 3
    A = torch.diag(torch.logspace(0, 2, n, dtype=torch.float64))
    mu = torch.arange(p, 0, -1, dtype=torch.float64)
    starts = [random_orthogonal(n, p, seed=seed, dtype=torch.float64) for seed in range(3)]
    count = {}
    for method in ("newton", "lbfgs", "bb", *METHODS.values()):
        results = [
            minimize(lambda X: (X * (A @ X) * mu).sum(), x0, method=method, gtol=1e-6, maxiter=600)
            for x0 in starts
        ]
        assert all(result.success is (method is not RetractionGD) for result in results)
        count[method] = sum(result.nit for result in results)
    assert 3 * count["newton"] < count["lbfgs"]
    assert 1.2 * count["lbfgs"] < count["bb"] < count[RetractionGD]
    assert 1.2 * count[ConjugateGradient] < count["bb"]
    assert 1.5 * count[RetractionCG] < count[RetractionGD]
