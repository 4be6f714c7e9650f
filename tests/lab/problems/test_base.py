"""What every problem must do, on a table of problems."""

import pickle
from copy import deepcopy

import pytest
import torch

import ortholand as ol
from ortholand.geometry import remove_normal, riemannian_gradient, riemannian_hessian, skew
from ortholand_lab.problems import (
    ICA,
    PCA,
    Brockett,
    KohnSham,
    Procrustes,
)
from ortholand_lab.problems.base import AtLastPoint

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128

# Name, constructor, whether there is a complex version.
PROBLEMS = {
    "pca": (lambda dtype: PCA.with_gap(7, 3, seed=0, dtype=dtype), True),
    "pca-diagonal": (lambda dtype: PCA.with_gap(7, 3, diagonal=True, dtype=dtype), False),
    "procrustes": (lambda dtype: Procrustes.gaussian(5, seed=0, dtype=dtype), True),
    "procrustes-planted": (lambda dtype: Procrustes.planted(5, seed=1, dtype=dtype), True),
    "brockett": (lambda dtype: Brockett.linear(7, 3, seed=0, dtype=dtype), True),
    "brockett-gaussian": (lambda dtype: Brockett.gaussian(6, 6, seed=1, dtype=dtype), True),
    "kohn-sham": (lambda dtype: KohnSham(7, 3, alpha=0.0, dtype=dtype), True),
    "ica": (lambda dtype: ICA.planted(4, 1200, seed=0, dtype=dtype), False),
    "ica-mixed": (
        lambda dtype: ICA.planted(5, 1600, sub_gaussian=2, seed=1, dtype=dtype),
        False,
    ),
}
CASES = [
    pytest.param(make, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, (make, has_complex) in PROBLEMS.items()
    for dtype in ((F64, C128) if has_complex else (F64,))
]
ALL = pytest.mark.parametrize(("make", "dtype"), CASES)
SOLVED = pytest.mark.parametrize(  # whose minimiser is known
    ("make", "dtype"), [case for case in CASES if not case.id.startswith("ica")]
)


def randn(*shape, dtype, seed):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inner(U, V):
    return (U.conj() * V).real.sum() if U.is_complex() else (U * V).sum()


def nearby(X, count, size, seed):
    """Points of the manifold at an angle of about ``size``."""
    n = X.shape[-2]
    A = skew(randn(count, n, n, dtype=X.dtype, seed=seed))
    return torch.linalg.matrix_exp(size * A / n**0.5) @ X


@ALL
def test_gradient_and_hessian_are_those_of_the_cost(make, dtype):
    problem = make(dtype)
    X, V = (randn(*problem.shape, dtype=dtype, seed=seed) for seed in (0, 1))
    X.requires_grad_()
    (G,) = torch.autograd.grad(problem.fun(X), X, create_graph=True)
    (product,) = torch.autograd.grad(inner(G, V), X)
    X = X.detach()
    torch.testing.assert_close(problem.grad(X), G.detach())
    torch.testing.assert_close(problem.hessp(X, V), product)


@ALL
def test_differences_of_the_cost_agree_without_autograd(make, dtype):
    # fun may take a faster way where no gradient is recorded.
    problem = make(dtype)
    X, V = problem.start(0), 1e-4 * randn(*problem.shape, dtype=dtype, seed=1)
    difference = problem.fun(X + V) - problem.fun(X - V)
    torch.testing.assert_close(difference, 2 * inner(problem.grad(X), V), rtol=1e-5, atol=1e-10)


@ALL
def test_fun_and_grad_are_fun_and_grad(make, dtype):
    problem = make(dtype)
    X = randn(*problem.shape, dtype=dtype, seed=0)
    value, G = problem.fun_and_grad(X)
    torch.testing.assert_close(value, problem.fun(X), rtol=1e-13, atol=0)
    torch.testing.assert_close(G, problem.grad(X), rtol=1e-13, atol=1e-13)
    assert not value.is_complex()


@ALL
def test_the_hessian_is_symmetric_and_linear(make, dtype):
    problem = make(dtype)
    X, U, V = (randn(*problem.shape, dtype=dtype, seed=seed) for seed in range(3))
    HU, HV = problem.hessp(X, U), problem.hessp(X, V)
    torch.testing.assert_close(inner(V, HU), inner(U, HV))
    torch.testing.assert_close(problem.hessp(X, U - 2 * V), HU - 2 * HV)


@SOLVED
def test_the_solution_is_a_stationary_minimum(make, dtype):
    problem = make(dtype)
    X = problem.solution()
    assert X.shape == problem.shape
    assert X.dtype == dtype
    assert ol.distance(X) < 1e-13
    G = problem.grad(problem.start(0))
    assert riemannian_gradient(X, problem.grad(X)).norm() < 1e-12 * G.norm()
    slack = 1e-14 * problem.fun(problem.start(0)).abs()
    assert problem.optimum() == problem.fun(X)
    for size in (1e-3, 1e-1, 1.0):
        assert (problem.fun(nearby(X, 300, size, seed=2)) >= problem.optimum() - slack).all()


@SOLVED
def test_no_start_is_better_than_the_solution(make, dtype):
    problem = make(dtype)
    others = ol.random_orthogonal(500, *problem.shape, seed=0, dtype=dtype)
    assert (problem.fun(others) > problem.optimum()).all()


@SOLVED
def test_the_riemannian_hessian_is_positive_at_the_solution(make, dtype):
    problem = make(dtype)
    X = problem.solution()
    G = problem.grad(X)
    for seed in range(20):
        xi = remove_normal(X, randn(*problem.shape, dtype=dtype, seed=seed))
        H = riemannian_hessian(X, xi, gradient=G, hessian_product=problem.hessp(X, xi))
        assert inner(xi, H) > 0


@ALL
def test_batches_are_what_their_matrices_are(make, dtype):
    problem = make(dtype)
    X, V = (randn(2, 3, *problem.shape, dtype=dtype, seed=seed) for seed in (0, 1))
    values, gradients = problem.fun_and_grad(X)
    products = problem.hessp(X, V)
    assert problem.fun(X).shape == values.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(values[i, j], problem.fun(X[i, j]))
            torch.testing.assert_close(gradients[i, j], problem.grad(X[i, j]))
            torch.testing.assert_close(products[i, j], problem.hessp(X[i, j], V[i, j]))


@ALL
def test_starts_are_random_points_of_the_manifold(make, dtype):
    problem = make(dtype)
    X = problem.start(3)
    assert X.shape == problem.shape
    assert X.dtype == dtype
    assert ol.distance(X) < 1e-13
    assert torch.equal(X, problem.start(3))
    assert not torch.equal(X, problem.start(4))
    generator = torch.Generator().manual_seed(3)
    first, second = problem.start(generator), problem.start(generator)
    assert not torch.equal(first, second)


def test_the_seed_that_made_a_problem_does_not_draw_its_solution_as_a_start():
    for problem in (
        Brockett.linear(4, 4, seed=0),
        Procrustes.planted(4, seed=0),
    ):
        gradient = riemannian_gradient(X := problem.start(0), problem.grad(X))
        assert gradient.norm() > 1e-2 * problem.grad(X).norm()


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_single_precision_is_the_same_problem_rounded(name):
    make, has_complex = PROBLEMS[name]
    for wide, narrow in ((F64, F32), (C128, C64))[: 1 + has_complex]:
        problem, rounded = make(wide), make(narrow)
        X, V = problem.start(0), randn(*problem.shape, dtype=wide, seed=1)
        value, G = rounded.fun_and_grad(X.to(narrow))
        assert G.dtype == rounded.start(0).dtype == narrow
        assert name.startswith("ica") or rounded.solution().dtype == narrow
        assert value.dtype == torch.float32
        close = dict(rtol=1e-4, atol=1e-4 * float(problem.grad(X).abs().max()))
        expected = problem.fun(X).to(torch.float32)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(rounded.fun(X.to(narrow)), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(G, problem.grad(X).to(narrow), **close)
        HV = rounded.hessp(X.to(narrow), V.to(narrow))
        torch.testing.assert_close(HV, problem.hessp(X, V).to(narrow), **close)


@ALL
def test_hessian_products_do_not_stick_to_the_last_point(make, dtype):
    problem, fresh = make(dtype), make(dtype)
    V = randn(*problem.shape, dtype=dtype, seed=1)
    X = problem.start(0)
    problem.hessp(X, V)
    X.mul_(1.5)  # in place: the same tensor, another point
    torch.testing.assert_close(problem.hessp(X, V), fresh.hessp(X.clone(), V))
    torch.testing.assert_close(problem.hessp(X, 2 * V), 2 * fresh.hessp(X, V))


@ALL
def test_transforms_of_torch_func_pass(make, dtype):
    problem = make(dtype)
    X = problem.start(0)
    V = randn(3, *problem.shape, dtype=dtype, seed=1)
    expected = torch.stack([problem.hessp(X, v) for v in V])
    torch.testing.assert_close(torch.func.vmap(lambda v: problem.hessp(X, v))(V), expected)
    points = torch.stack([problem.start(seed) for seed in range(3)])
    expected = problem.hessp(points, V)
    torch.testing.assert_close(torch.func.vmap(problem.hessp)(points, V), expected)
    torch.testing.assert_close(torch.func.vmap(problem.fun)(points), problem.fun(points))


@ALL
def test_problems_can_be_copied_and_pickled(make, dtype):
    problem = make(dtype)
    X = problem.start(0)
    problem.hessp(X, X)
    for other in (deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        assert torch.equal(other.grad(X), problem.grad(X))


def test_the_hessian_in_inference_mode_leaves_nothing_behind():
    problem = ICA.planted(3, 400, seed=0)
    with torch.inference_mode():
        X = problem.start(0)
        problem.hessp(X, X)
    V = torch.ones(3, 3, dtype=F64, requires_grad=True)
    problem.hessp(problem.start(0), V).sum().backward()
    assert V.grad is not None


def test_what_depends_on_the_point_alone_is_computed_once():
    calls = []
    memory = AtLastPoint()

    def compute(X):
        calls.append(X)
        return (X + 1,)

    X = torch.zeros(2, 2)
    for Y in (X, X, X.clone(), X.double(), X.double(), X):
        assert torch.equal(memory.get(Y, compute)[0], Y + 1)
    assert len(calls) == 3  # float, double, and float again


def symmetric(n):
    return torch.eye(n, dtype=F64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PCA([[1.0]], 1), TypeError, "C must be a torch.Tensor, got list"),
        (lambda: PCA(torch.eye(3, dtype=torch.int64), 1), TypeError, "got torch.int64"),
        (lambda: PCA(symmetric(3), 4), ValueError, "0 < p <= n"),
        (lambda: PCA(torch.ones(3, 2), 1), ValueError, "C must be square"),
        (lambda: PCA(torch.ones(2, 3, 3), 1), ValueError, "1 or 2 axes"),
        (lambda: PCA(torch.tensor([1.0, torch.nan]), 1), ValueError, "C must be finite, but 1"),
        (lambda: PCA(torch.ones(3, dtype=C64), 1), TypeError, "C must hold real floating"),
        (lambda: PCA.with_spectrum(symmetric(3), 1, seed=0), ValueError, "values must have 1"),
        (lambda: Brockett(torch.ones(2, 2).triu(), torch.ones(1)), ValueError, "symmetric"),
        (lambda: Brockett(1j * torch.ones(2, 2), torch.ones(1)), ValueError, "Hermitian"),
        (lambda: Brockett(symmetric(3), torch.ones(2, dtype=F64)), ValueError, "distinct"),
        (
            lambda: Brockett(symmetric(3), torch.tensor([1.0, -1.0], dtype=F64)),
            ValueError,
            "mu must be positive",
        ),
        (lambda: Brockett(symmetric(3), torch.ones(1)), ValueError, "of type torch.float64"),
        (lambda: Brockett.linear(3, 4, seed=0), ValueError, "0 < p <= n"),
        (lambda: Brockett.gaussian(3, 0, seed=0), ValueError, "0 < p <= n"),
        (lambda: Procrustes(symmetric(3), symmetric(4)), ValueError, "one shape and type"),
        (lambda: Procrustes(torch.eye(3), symmetric(3)), ValueError, "one shape and type"),
        (lambda: Brockett(torch.ones(3, 3).triu(), torch.ones(1)), ValueError, "symmetric"),
        (lambda: ICA(torch.ones(2, 0)), ValueError, "none empty"),
        (lambda: ICA(torch.ones(2, 3, dtype=C64)), TypeError, "Z must hold real"),
        (lambda: ICA.planted(3, 100, sub_gaussian=4, seed=0), ValueError, "from 0 to n=3"),
        (lambda: ICA(torch.ones(2, 3)), ValueError, r"Z must be white.*whiten"),
    ],
)
def test_data_that_make_no_sense_are_an_error(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("problem", [ICA.planted(3, 400, seed=0), KohnSham(7, 3)])
def test_a_solution_that_is_not_known_is_an_error(problem):
    for known in (problem.solution, problem.optimum):
        with pytest.raises(NotImplementedError, match="known"):
            known()
