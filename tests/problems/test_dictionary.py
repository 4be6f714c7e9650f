import pytest
import torch

import ortholand as ol
from ortholand.geometry import riemannian_gradient
from ortholand.problems import Dictionary

F64 = torch.float64


def test_the_cost_is_the_mean_of_fourth_powers():
    problem = Dictionary(torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=F64))
    assert problem.fun(torch.eye(2, dtype=F64)) == -(1 + 16 + 1) / (4 * 2)


def test_order_and_signs_of_the_atoms_do_not_matter():
    problem = Dictionary.planted(5, 300, seed=0)
    X = problem.start(0)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=F64)
    Y = (signs[:, None] * X)[[3, 1, 0, 4, 2]]
    torch.testing.assert_close(problem.fun(Y), problem.fun(X))
    torch.testing.assert_close(problem.recovery_error(Y), problem.recovery_error(X))


def test_the_recovery_error_is_zero_at_the_dictionary_only():
    problem = Dictionary.planted(6, 300, seed=0)
    X = problem.truth.mT[[3, 1, 0, 5, 2, 4]] * -1
    assert abs(problem.recovery_error(X)) < 1e-14
    others = ol.random_orthogonal(100, 6, 6, seed=0, dtype=F64)
    errors = problem.recovery_error(others)
    assert errors.shape == (100,)
    assert ((errors > 0.1) & (errors < 1)).all()
    with pytest.raises(ValueError, match="needs the true dictionary"):
        Dictionary(problem.Y).recovery_error(X)


@pytest.mark.parametrize("balanced", [False, True])
def test_codes_are_sparse_and_normal(balanced):
    problem = Dictionary.planted(4, 40_000, density=0.3, balanced=balanced, seed=0)
    S = problem.truth.mT @ problem.Y
    codes = S[S.abs() > 1e-12]
    assert abs(len(codes) / S.numel() - 0.3) < 0.01
    assert abs(codes.square().mean() - 1) < 0.03
    assert abs(codes.square().square().mean() - 3) < 0.3


def test_without_balance_the_dictionary_is_stationary_up_to_sampling_error():
    problem = Dictionary.planted(5, 40_000, seed=0)
    X = problem.truth.mT
    gradient = riemannian_gradient(X, problem.grad(X)).abs().max()
    assert 1e-4 < gradient < 5 * 40_000**-0.5
    assert not problem.exact


def test_minibatches_average_to_the_whole():
    problem = Dictionary.planted(4, 300, seed=0)
    X = problem.start(0)
    parts = [problem.minibatch(slice(i, i + 100)) for i in (0, 100, 200)]
    torch.testing.assert_close(sum(part.fun(X) for part in parts) / 3, problem.fun(X))
    index = torch.arange(299, -1, -1)
    torch.testing.assert_close(problem.minibatch(index).grad(X), problem.grad(X))
