import pytest
import torch

import ortholand as ol
from ortholand.geometry import skew
from ortholand_lab.problems import Procrustes


def test_gradient_and_hessian_are_those_of_the_cost():
    problem = Procrustes.gaussian(5, seed=0)
    X = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    V = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(problem.grad(X), torch.func.grad(problem.fun)(X))
    _, product = torch.autograd.functional.hvp(problem.fun, X, V)
    torch.testing.assert_close(problem.hessp(X, V), product)


def test_no_random_rotation_is_better_than_the_solution():
    problem = Procrustes.gaussian(4, seed=0)
    for sign in (1, -1):
        best = problem.solution(determinant=sign)
        assert torch.linalg.det(best).sign() == sign
        assert ol.distance(best) < 1e-13
        others = ol.random_orthogonal(2000, 4, 4, seed=0, dtype=torch.float64)
        others = others[torch.linalg.det(others).sign() == sign]
        near = best @ torch.linalg.matrix_exp(0.01 * skew(others))
        assert (problem.fun(others) > problem.fun(best)).all()
        assert (problem.fun(near) >= problem.fun(best)).all()
    assert problem.fun(problem.solution()) <= problem.fun(problem.solution(determinant=1))
    assert problem.fun(problem.solution()) <= problem.fun(problem.solution(determinant=-1))


def test_planted_solution_is_found():
    problem = Procrustes.planted(6, seed=0)
    assert problem.fun(problem.solution()) < 1e-24


def test_planted_data_may_have_more_columns():
    problem = Procrustes.planted(4, columns=40, seed=0)
    assert problem.A.shape == (4, 40)
    assert problem.shape == (4, 4)
    assert problem.optimum() < 1e-24
    square = Procrustes.planted(4, columns=4, seed=0)
    assert torch.equal(square.A, Procrustes.planted(4, seed=0).A)


def test_the_unitary_solution_is_the_best_and_has_no_determinant_to_choose():
    problem = Procrustes.gaussian(4, seed=0, dtype=torch.complex128)
    others = ol.random_orthogonal(500, 4, 4, seed=0, dtype=torch.complex128)
    assert (problem.fun(others) > problem.optimum()).all()
    with pytest.raises(ValueError, match="needs real data"):
        problem.solution(determinant=1)


def test_matrices_need_not_be_square():
    A = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Q = ol.random_orthogonal(3, 3, seed=0, dtype=torch.float64)
    problem = Procrustes(A, Q @ A)
    assert problem.shape == (3, 3)
    torch.testing.assert_close(problem.solution(), Q)
