"""What every descent method must do, whether it is the library's or the laboratory's."""

import math
from itertools import pairwise

import pytest
import torch

from ortholand import minimize, random_orthogonal


def iterates(fun, x0, **options):
    """X after each iteration, and the result."""
    seen = []
    result = minimize(fun, x0, callback=lambda X: seen.append(X.clone()), **options)
    return seen, result


def the_cost_falls_monotonically(cost, method):
    """But for what the distance from the manifold does to it: f(X) landed is compared."""
    seen, _ = iterates(cost.fun, cost.start, method=method)
    values = []
    for X in seen:
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        values.append(float(cost.fun(U @ Vh)))
    rounding = 1e-13 * abs(cost.optimum)
    assert len(values) > 4
    assert all(b <= a + rounding for a, b in pairwise(values))


def steepness_off_the_manifold_does_not_matter(cost, c, method, verified):
    """F + c ||X^T X - I||^2 is f on the manifold, and must be minimised as f is."""
    identity = torch.eye(cost.start.shape[1], dtype=torch.float64)
    fun = lambda X: cost.fun(X) + c * (X.mT @ X - identity).square().sum()  # noqa: E731
    result = minimize(fun, cost.start, method=method)
    assert verified(result, cost.fun, cost.jac)
    assert result.fun == pytest.approx(cost.optimum, rel=1e-10)
    assert result.nfev < 1500


def a_huge_offset_does_not_matter(cost, method, verified):
    """F + 1e12: no decrease is seen any more, but slopes are."""
    fun = lambda X: cost.fun(X) + 1e12  # noqa: E731
    result = minimize(fun, cost.start, method=method)
    assert verified(result, fun, cost.jac)
    assert float(cost.fun(result.x)) == pytest.approx(cost.optimum, rel=1e-10)


def minimisers_need_not_be_isolated(method):
    """Equal weights: any basis of the subspace is a minimiser, and the Hessian is singular."""
    A = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    x0 = random_orthogonal(8, 3, seed=0, dtype=torch.float64)
    result = minimize(lambda X: (X * (A @ X)).sum(), x0, method=method, gtol=1e-9)
    assert result.success
    assert result.fun == pytest.approx(6.0)
    assert result.nit < 150


def a_saddle_point_is_left(cost, method):
    """From 1e-4 beside one: eigenvectors, but not those of the smallest eigenvalues."""
    X = torch.linalg.eigh(cost.A).eigenvectors[:, [3, 0]]
    noise = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(X + 1e-4 * noise, full_matrices=False)
    result = minimize(cost.fun, U @ Vh, method=method, gtol=1e-4)
    assert result.success
    assert result.fun == pytest.approx(cost.optimum, rel=1e-6)


def a_preconditioner_saves_work(method):
    """The inverse Hessian of a badly scaled cost, f = Tr X^T A X with one steep direction."""
    d = torch.logspace(0, 4, 30, dtype=torch.float64)
    x0 = random_orthogonal(30, 1, seed=0, dtype=torch.float64)
    options = [{"preconditioner": lambda X, V: V / d[:, None]}, {"preconditioner": None}]
    with_it, without = (
        minimize(lambda X: (X * d[:, None] * X).sum(), x0, method=method, options=o, maxiter=200)
        for o in options
    )
    assert with_it.success
    assert with_it.njev + with_it.nhev < 0.7 * (without.njev + without.nhev)
    assert with_it.fun == pytest.approx(1.0)


not_positive = pytest.mark.parametrize("sign", [-1.0, math.nan])


def a_preconditioner_that_is_not_positive_is_an_error(cost, sign, method):
    """An error that says so; no creeping."""
    options = {"preconditioner": lambda X, V: sign * V}
    with pytest.raises(ValueError, match="preconditioner"):
        minimize(cost.fun, cost.start, method=method, options=options, maxiter=200)
