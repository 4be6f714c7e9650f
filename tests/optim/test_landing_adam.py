import math

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import skew, sym


def gaussian(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (7, 3)])
def test_steps_equal_adam_written_out(shape, dtype):
    """With lam = 0 and a step that is never cut, X moves along the Adam direction alone."""
    X = ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    weight = nn.Parameter(X.clone())
    optimizer = ol.LandingAdam(
        [weight], lr=0.01, betas=(0.8, 0.95), lam=0.0, eps=0.9, attraction="coupled"
    )
    m, v = torch.zeros_like(X), 0.0
    for t in range(1, 8):
        G = gaussian(*shape, seed=t, dtype=dtype)
        S = X.mH @ X
        square = shape[0] == shape[1]
        B = skew(G @ X.mH) if square else G - X @ sym(torch.linalg.solve(S, X.mH @ G))
        m = 0.8 * m + 0.2 * B
        v = 0.95 * v + 0.05 * torch.linalg.matrix_norm(B).item() ** 2 / shape[1]
        A = m / (1 - 0.8**t) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8)
        X = X - 0.01 * (A @ X if square else (A @ S - X @ (A.mH @ X)) / 2)
        weight.grad = G
        optimizer.step()
    torch.testing.assert_close(weight.detach(), X, rtol=1e-9, atol=1e-11)


def test_lr_is_the_angle_of_a_column_whatever_the_size():
    for p in (5, 50):
        X = nn.Parameter(ol.random_orthogonal(p, p, seed=0, dtype=torch.float64))
        before = X.detach().clone()
        optimizer = ol.LandingAdam([X], lr=0.01)
        X.grad = 1e3 * gaussian(p, p, seed=0)
        optimizer.step()
        moved = torch.linalg.vector_norm(X.detach() - before, dim=0)
        assert moved.square().mean().sqrt().item() == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9)])
def test_directions_turn_with_the_coordinates(shape):
    """Rotating X and G on the left by Q rotates all iterates: no entry is special."""
    n = shape[0]
    Q = ol.random_orthogonal(n, n, seed=5, dtype=torch.float64)
    start = ol.random_orthogonal(*shape, seed=0, dtype=torch.float64)
    first, second = nn.Parameter(start.clone()), nn.Parameter(Q @ start)
    optimizers = [ol.LandingAdam([p], lr=0.05) for p in (first, second)]
    for k in range(10):
        first.grad = gaussian(*shape, seed=k)
        second.grad = Q @ first.grad
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(second.detach(), Q @ first.detach())


def test_normal_gradients_do_not_slow_it_down():
    """The second moment sees the tangent part only, not the multiplier."""
    start = ol.random_orthogonal(8, 3, seed=0, dtype=torch.float64)
    results = []
    for normal in (0.0, 1e4):
        X = nn.Parameter(start.clone())
        optimizer = ol.LandingAdam([X], lr=0.01)
        X.grad = gaussian(8, 3, seed=1) + normal * start
        optimizer.step()
        results.append(X.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
def test_it_solves_procrustes_and_lands(attraction):
    from ortholand_lab.problems import Procrustes

    problem = Procrustes.planted(8, seed=0)
    start = problem.solution() @ torch.linalg.matrix_exp(0.5 * skew(gaussian(8, 8, seed=3)))
    X = nn.Parameter(start)
    optimizer = ol.LandingAdam([X], lr=0.05, attraction=attraction)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
    for _ in range(3000):
        X.grad = problem.grad(X.detach())
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(X.detach(), problem.solution(), rtol=0, atol=1e-3)
    assert ol.orthogonality_error(X) < {"coupled": 1e-3}.get(attraction, 1e-10)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("shape", [(6, 6), (20, 4)])
def test_extreme_gradients_in_float32(shape, scale):
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = ol.LandingAdam([X], lr=0.01, attraction="after")
    for k in range(20):
        X.grad = scale * gaussian(*shape, seed=k, dtype=torch.float32)
        optimizer.step()
    assert torch.isfinite(X).all()
    assert ol.orthogonality_error(X, spectral=True) <= 0.5
    assert optimizer.skipped_steps() == 0
    for state in optimizer.state.values():
        assert all(torch.isfinite(value).all() for value in state.values())


def test_each_matrix_counts_its_own_steps():
    X = nn.Parameter(ol.random_orthogonal(3, 4, 4, seed=0))
    optimizer = ol.LandingAdam([X], lr=0.01, view="kernel")
    for k in range(4):
        X.grad = gaussian(3, 4, 4, seed=k, dtype=torch.float32)
        if k < 2:
            X.grad[1] = math.nan
        optimizer.step()
    assert optimizer.state[X]["step"].tolist() == [4, 2, 4]
    assert optimizer.skipped_steps() == 2
