import pytest
import torch

from ortholand.geometry import riemannian_gradient
from ortholand.problems import JointDiagonalization, amari_distance
from ortholand.problems.joint_diagonalization import without_diagonal

KINDS = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])


@KINDS
def test_the_cost_is_what_is_off_the_diagonals(dtype):
    problem = JointDiagonalization.planted(4, 3, noise=0.5, seed=0, dtype=dtype)
    X = torch.randn(4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for C in problem.C:
        M = (X.mH @ C @ X).abs()
        expected += sum(float(M[i, j]) ** 2 for i in range(4) for j in range(4) if i != j)
    assert abs(float(problem.fun(X)) - expected) < 1e-12 * expected


@KINDS
def test_on_the_manifold_it_trades_with_the_diagonals(dtype):
    problem = JointDiagonalization.planted(5, 4, noise=0.3, seed=0, dtype=dtype)
    X = problem.start(0)
    M = X.mH @ problem.C @ X
    diagonals = M.diagonal(dim1=-2, dim2=-1).abs().square().sum()
    torch.testing.assert_close(problem.fun(X), problem.C.abs().square().sum() - diagonals)


@KINDS
def test_order_and_phases_of_the_columns_do_not_matter(dtype):
    problem = JointDiagonalization.planted(5, 4, noise=0.3, seed=0, dtype=dtype)
    X = problem.start(0)
    phases = torch.randn(5, dtype=dtype, generator=torch.Generator().manual_seed(0)).sgn()
    torch.testing.assert_close(problem.fun((X * phases)[:, [3, 1, 0, 4, 2]]), problem.fun(X))


@KINDS
def test_without_noise_the_planted_matrix_diagonalises_all(dtype):
    problem = JointDiagonalization.planted(6, 5, seed=0, dtype=dtype)
    assert problem.optimum() < 1e-26
    assert problem.solution() is problem.truth
    _, vectors = torch.linalg.eigh(problem.C[0])  # they have all eigenvectors in common
    assert amari_distance(vectors.mH, problem.truth) < 1e-12


def test_noise_moves_the_minimum_away_from_the_planted_matrix():
    problem = JointDiagonalization.planted(6, 5, noise=0.01, seed=0)
    assert not problem.exact
    X = problem.truth
    assert 1e-4 < problem.fun(X) < 1e-1
    assert riemannian_gradient(X, problem.grad(X)).norm() > 1e-2


@KINDS
def test_off_leaves_all_but_the_diagonal(dtype):
    M = torch.randn(2, 3, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    off = without_diagonal(M)
    assert (off.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert torch.equal(off.tril(-1) + off.triu(1), M.tril(-1) + M.triu(1))
