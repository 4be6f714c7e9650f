import pytest
import torch

import ortholand as ol
from ortholand_lab.problems import PCA

KINDS = pytest.mark.parametrize("diagonal", [True, False], ids=["diagonal", "dense"])


def randn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@KINDS
def test_gradient_and_hessian_are_those_of_the_cost(diagonal):
    problem = PCA.with_gap(7, 3, diagonal=diagonal)
    X, V = randn(7, 3, seed=0), randn(7, 3, seed=1)
    torch.testing.assert_close(problem.grad(X), torch.func.grad(problem.fun)(X))
    _, product = torch.autograd.functional.hvp(problem.fun, X, V)
    torch.testing.assert_close(problem.hessp(X, V), product)


@KINDS
def test_the_cost_is_the_variance_that_is_kept(diagonal):
    problem = PCA.with_gap(6, 2, diagonal=diagonal)
    C = torch.diag(problem.C) if diagonal else problem.C
    X = randn(6, 2, seed=0)
    torch.testing.assert_close(problem.fun(X), -torch.trace(X.mT @ C @ X))
    torch.testing.assert_close(problem.times(X), C @ X)


@KINDS
def test_no_subspace_keeps_more_than_the_solution(diagonal):
    problem = PCA.with_gap(6, 2, diagonal=diagonal)
    best = problem.solution()
    assert ol.distance(best) < 1e-13
    torch.testing.assert_close(problem.fun(best), torch.tensor(-1.5, dtype=torch.float64))
    others = ol.random_orthogonal(2000, 6, 2, seed=0, dtype=torch.float64)
    assert (problem.fun(others) > problem.fun(best)).all()


@KINDS
@pytest.mark.parametrize("gap", [0.1, 0.5])
def test_eigenvalues_are_as_asked_for(diagonal, gap):
    problem = PCA.with_gap(8, 3, gap=gap, diagonal=diagonal, seed=1)
    values = problem.C if diagonal else torch.linalg.eigvalsh(problem.C).flip(0)
    expected = [1, 0.75, 0.5, *((0.5 - gap) * (1 - i / 4) for i in range(5))]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64))


def test_the_leading_eigenvalues_of_a_diagonal_may_be_anywhere():
    problem = PCA(torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64), 2)
    X = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(problem.solution(), X[:, [1, 3]])
    assert problem.subspace_error(X[:, [3, 1]]) == 0
    assert problem.subspace_error(X[:, [0, 1]]) == 1


@KINDS
def test_the_subspace_error_is_that_of_the_angles(diagonal):
    problem = PCA.with_gap(9, 3, diagonal=diagonal)
    X = randn(9, 3, seed=2)
    Q, _ = torch.linalg.qr(X)
    cosines = torch.linalg.svdvals(problem.solution().mT @ Q)
    expected = (1 - cosines.square()).sum().sqrt()
    torch.testing.assert_close(problem.subspace_error(X), expected)
    rotation = ol.random_orthogonal(3, 3, seed=0, dtype=torch.float64)
    assert problem.subspace_error(problem.solution() @ rotation) < 1e-7


def test_a_rotation_of_the_problem_is_the_diagonal_one():
    dense, diagonal = PCA.with_gap(6, 2, seed=3), PCA.with_gap(6, 2, diagonal=True)
    Q = ol.random_orthogonal(6, 6, seed=3, dtype=torch.float64)
    X = randn(6, 2, seed=0)
    torch.testing.assert_close(dense.grad(Q @ X), Q @ diagonal.grad(X))


@pytest.mark.parametrize("wrong", [dict(p=5), dict(p=0), dict(gap=0.0), dict(gap=0.6)], ids=str)
def test_sizes_that_make_no_sense_are_an_error(wrong):
    with pytest.raises(ValueError, match="0 < p < n"):
        PCA.with_gap(5, **{"p": 2, **wrong})


def test_hermitian_matrices_have_real_costs_and_errors():
    problem = PCA.with_gap(6, 2, seed=0, dtype=torch.complex128)
    torch.testing.assert_close(problem.optimum(), torch.tensor(-1.5, dtype=torch.float64))
    rotation = ol.random_orthogonal(2, 2, seed=0, dtype=torch.complex128)
    error = problem.subspace_error(problem.solution() @ rotation)
    assert not error.is_complex()
    assert error < 1e-7
    assert problem.subspace_error(problem.start(0)) > 0.1


def test_any_spectrum_can_be_asked_for():
    values = torch.tensor([2.0, -1.0, 0.5, 7.0], dtype=torch.float64)
    problem = PCA.with_spectrum(values, 2, seed=0)
    torch.testing.assert_close(torch.linalg.eigvalsh(problem.C), values.sort().values)
    torch.testing.assert_close(problem.optimum(), torch.tensor(-9.0, dtype=torch.float64))
