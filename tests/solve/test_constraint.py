"""Constraints of one's own: landed to rounding, and no worse than SciPy's solvers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize

import ortholand as ol

methods = pytest.mark.parametrize("method", [None, "lbfgs", "bb", "newton"])


def ellipsoid():
    d = np.array([1.0, 2, 5, 10])
    b = np.array([1.0, -2, 0.5, 3])
    return (
        lambda x: (float(b @ x + np.sum(x**4)), b + 4 * x**3),
        lambda x: np.array([x @ (d * x) - 1]),
        lambda x: (2 * d * x)[None],
        np.array([1.0, 0, 0, 0]),
    )


def two_coupled_norms():
    """Both halves of x have the same length, and together length 2."""
    A = np.random.default_rng(0).standard_normal((6, 6))
    A = A + A.T
    return (
        lambda x: (float(x @ A @ x), 2 * A @ x),
        lambda x: np.array([x[:3] @ x[:3] - x[3:] @ x[3:], x @ x - 4]),
        lambda x: 2 * np.stack([np.concatenate([x[:3], -x[3:]]), x]),
        np.full(6, 2 / 6**0.5),
    )


def trace_one_factor():
    """Density matrices ``Y Y^T`` of trace 1: the least eigenvalue."""
    A = np.diag([1.0, 2, 3, 4, 5])
    return (
        lambda Y: (float(np.sum(Y * (A @ Y))), 2 * A @ Y),
        lambda Y: np.array([np.sum(Y * Y) - 1]),
        lambda Y: 2 * Y[None],
        np.full((5, 2), 10**-0.5) + 0.0,
    )


def fixed_sums():
    """Row and column sums of a 3 x 4 matrix, one of which follows from the others."""
    target = np.random.default_rng(1).standard_normal((3, 4))
    J = np.concatenate([np.kron(np.eye(3), np.ones(4)), np.kron(np.ones(3), np.eye(4))[:3]])
    return (
        lambda X: (float(np.sum((X - target) ** 4 + X**2)), 4 * (X - target) ** 3 + 2 * X),
        lambda X: J @ X.reshape(-1) - np.array([4.0, 4, 4, 3, 3, 3]),
        lambda X: J.reshape(6, 3, 4),
        np.ones((3, 4)),
    )


def flat_ellipsoid():
    """Axes from 1 to 30: Gauss-Newton's steps overshoot from far away."""
    random, d = np.random.default_rng(0), np.logspace(0, 3, 50)
    A, b, x0 = random.standard_normal((50, 50)), random.standard_normal(50), np.ones(50)
    A = A + A.T
    return (
        lambda x: (float(x @ A @ x / 2 + b @ x), A @ x + b),
        lambda x: np.array([x @ (d * x) - 1]),
        lambda x: (2 * d * x)[None],
        x0 / np.sqrt(x0 @ (d * x0)),
    )


PROBLEMS = [ellipsoid, two_coupled_norms, trace_one_factor, fixed_sums]


@pytest.mark.parametrize("method", [None, "lbfgs", "bb"])
def test_a_flat_ellipsoid(method):
    test_against_slsqp(method, flat_ellipsoid)


@methods
@pytest.mark.parametrize("problem", PROBLEMS)
def test_against_slsqp(method, problem):
    both, c, J, x0 = problem()
    result = ol.minimize(both, x0, jac=True, manifold=ol.Constraint(c, J), method=method)
    assert result.success, result.message
    assert np.abs(c(result.x)).max() < 1e-12
    flat = lambda f: lambda x: f(x.reshape(x0.shape))  # noqa: E731
    theirs = scipy_minimize(
        flat(lambda x: both(x)[0]),
        x0.ravel(),
        jac=flat(lambda x: both(x)[1].ravel()),
        constraints={"type": "eq", "fun": flat(c), "jac": flat(lambda x: J(x).reshape(-1, x.size))},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert result.fun <= theirs.fun + 1e-6
    # Stationary: the gradient is a combination of the rows of J.
    G, rows = both(result.x)[1].ravel(), J(result.x).reshape(-1, x0.size)
    rest = G - rows.T @ np.linalg.lstsq(rows.T, G, rcond=None)[0]
    assert np.linalg.norm(rest) < 1e-5 * max(1.0, np.linalg.norm(both(x0)[1]))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_differences_for_jac(problem):
    both, c, J, x0 = problem()
    first, second = (
        ol.minimize(both, x0, jac=True, manifold=ol.Constraint(*functions))
        for functions in ((c, J), (c,))
    )
    assert second.success, second.message
    assert second.fun == pytest.approx(first.fun, abs=1e-6)


def test_a_product_with_autograd():
    """A matrix with orthonormal columns beside a block on an ellipsoid, in torch."""
    d = torch.tensor([1.0, 2, 5], dtype=torch.float64)
    ellipsoid = ol.Constraint(lambda x: (d * x * x).sum() - 1)
    C = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fun = lambda v: (v["X"] @ v["s"]) @ C[:, 0] + (v["X"] * C[:, :3]).sum()  # noqa: E731
    x0 = {
        "X": ol.random_orthogonal(6, 3, seed=0, dtype=torch.float64),
        "s": torch.tensor([1.0, 0, 0], dtype=torch.float64),
    }
    result = ol.minimize(fun, x0, manifold={"s": ellipsoid})
    assert result.success, result.message
    s, X = result.x["s"], result.x["X"]
    assert abs((d * s * s).sum() - 1) < 1e-12
    assert torch.linalg.matrix_norm(X.mT @ X - torch.eye(3)) < 1e-12


def test_bad_constraints():
    twice = ol.Constraint(lambda x: np.array([x @ x - 1, 2 * x @ x - 2]))
    both = lambda x: (x.sum(), np.ones(3))  # noqa: E731
    with pytest.raises(ValueError, match="full rank"):
        ol.minimize(both, np.array([1.0, 0, 0]), jac=True, manifold=twice)
    sphere = ol.Constraint(lambda x: np.array([x @ x - 1]))
    with pytest.raises(ValueError, match="nearly satisfy"):
        ol.minimize(both, np.array([0.1, 0, 0]), jac=True, manifold=sphere)
    with pytest.raises(TypeError, match="functions"):
        ol.Constraint(3)
    with pytest.raises(TypeError, match="real"):
        ol.minimize(both, np.array([1.0 + 0j, 0, 0]), jac=True, manifold=sphere)
