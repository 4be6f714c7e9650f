import pytest
import torch

from ortholand.fields import plam_field
from ortholand.flow import landing_flow
from ortholand.geometry import skew
from ortholand_lab.problems import Procrustes


def test_flow_reaches_the_solution_of_a_planted_problem():
    problem = Procrustes.planted(4, seed=0)
    start = problem.solution() @ torch.linalg.matrix_exp(
        0.3 * skew(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).double()
    )
    path = landing_flow(problem.grad, start, torch.linspace(0, 60, 5))
    assert path.A is None
    assert path.X.shape == (5, 4, 4)
    torch.testing.assert_close(path.X[-1], problem.solution(), atol=1e-6, rtol=0)


def test_momentum_flow_reaches_it_too():
    problem = Procrustes.planted(3, seed=1)
    path = landing_flow(problem.grad, problem.solution(), torch.linspace(0, 5, 3), momentum=True)
    assert path.A is not None
    torch.testing.assert_close(path.X[-1], problem.solution(), atol=1e-8, rtol=0)


def test_an_exploding_flow_is_an_error():
    """PLAM with 2 alpha^2 > lam from 1 + delta (the corrected example of the appendix)."""
    B = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    with pytest.raises(RuntimeError, match="could not be followed"):
        landing_flow(
            lambda X: 2 * 0.9 * (0.9 * X - B),
            torch.diag(torch.tensor([1.0, 1.5])),
            torch.linspace(0, 100, 3),
            field=plam_field,
        )


@pytest.mark.parametrize("x0", [torch.zeros(2, 3, 3), torch.eye(2, dtype=torch.complex64)])
def test_one_real_matrix_only(x0):
    with pytest.raises(ValueError, match="one real matrix"):
        landing_flow(lambda X: X, x0, torch.linspace(0, 1, 2))
