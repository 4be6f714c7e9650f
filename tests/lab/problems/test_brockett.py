import pytest
import torch

from ortholand_lab.problems import PCA, Brockett

F64, C128 = torch.float64, torch.complex128


@pytest.mark.parametrize("dtype", [F64, C128], ids=["real", "complex"])
def test_the_cost_is_a_weighted_sum_of_rayleigh_quotients(dtype):
    problem = Brockett.gaussian(6, 3, seed=0, dtype=dtype)
    X = problem.start(0)
    N = torch.diag(problem.mu).to(dtype)
    torch.testing.assert_close(problem.fun(X), torch.trace(X.mH @ problem.A @ X @ N).real)


@pytest.mark.parametrize("dtype", [F64, C128], ids=["real", "complex"])
@pytest.mark.parametrize(("n", "p"), [(9, 1), (9, 4), (5, 5)])
def test_the_linear_spectrum_is_as_it_says(n, p, dtype):
    problem = Brockett.linear(n, p, seed=0, dtype=dtype)
    expected = torch.arange(1, n + 1, dtype=F64)
    torch.testing.assert_close(torch.linalg.eigvalsh(problem.A), expected)
    assert problem.mu.tolist() == list(range(p, 0, -1))
    optimum = sum(i * (p + 1 - i) for i in range(1, p + 1))
    torch.testing.assert_close(problem.optimum(), torch.tensor(float(optimum), dtype=F64))


def test_the_largest_weight_gets_the_smallest_eigenvalue_whatever_the_order():
    A = torch.diag(torch.tensor([3.0, -1.0, 2.0, 5.0], dtype=F64))
    problem = Brockett(A, torch.tensor([1.0, 7.0, 4.0], dtype=F64))
    E = torch.eye(4, dtype=F64)
    torch.testing.assert_close(problem.solution().abs(), E[:, [0, 1, 2]])
    assert problem.optimum() == 1 * 3 + 7 * -1 + 4 * 2


def test_the_order_of_the_weights_is_that_of_the_columns():
    problem = Brockett.gaussian(5, 3, seed=0)
    order = [2, 0, 1]
    other = Brockett(problem.A, problem.mu[order])
    X = problem.start(0)
    torch.testing.assert_close(other.fun(X[:, order]), problem.fun(X))
    torch.testing.assert_close(other.optimum(), problem.optimum())


@pytest.mark.parametrize("dtype", [F64, C128], ids=["real", "complex"])
def test_the_order_of_the_eigenvectors_is_seen_but_not_their_phases(dtype):
    problem = Brockett.linear(6, 3, seed=0, dtype=dtype)
    X = problem.solution()
    phases = torch.randn(3, dtype=dtype, generator=torch.Generator().manual_seed(0)).sgn()
    torch.testing.assert_close(problem.fun(X * phases), problem.optimum())
    # Neighbours exchanged: a difference of eigenvalues, 1, times one of weights, 1.
    torch.testing.assert_close(problem.fun(X[:, [1, 0, 2]]), problem.optimum() + 1)


def test_its_subspace_is_that_of_pca():
    problem = Brockett.gaussian(8, 3, seed=0)
    assert PCA(-problem.A, 3).subspace_error(problem.solution()) < 1e-7


def test_gaussian_matrices_are_symmetric_with_the_right_variance():
    A = Brockett.gaussian(300, 2, seed=0).A
    assert torch.equal(A, A.mT)
    assert abs(float(A.triu(1).square().sum()) / (300 * 299 / 2) - 0.5) < 0.01
    assert not torch.equal(A, Brockett.gaussian(300, 2, seed=1).A)
