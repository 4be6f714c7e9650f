"""The three attractions: what each does in one step and in the long run."""

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import gram_residual
from ortholand.geometry.matrices import newton_schulz
from ortholand.landing import ATTRACTIONS
from ortholand.safe_step import farthest_before_landing


def gaussian(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def near_manifold(*shape, seed=0, dtype=torch.float64):
    return ol.random_orthogonal(*shape, seed=seed, dtype=dtype) + 0.01 * gaussian(
        *shape, seed=seed, dtype=dtype
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8)])
def test_decoupled_is_its_formula(shape, dtype):
    X, G = near_manifold(*shape, dtype=dtype), gaussian(*shape, seed=1, dtype=dtype)
    weight = nn.Parameter(X.clone())
    optimizer = ol.LandingSGD([weight], lr=0.01, attraction="decoupled", omega=0.3)
    weight.grad = G
    optimizer.step()
    tangent = ol.landing_field(X, G, lam=0.0)
    normal = ol.landing_field(X, 0 * G, lam=1.0)
    torch.testing.assert_close(weight.detach(), X - 0.01 * tangent - 0.3 * normal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8)])
def test_after_is_a_move_and_a_scaled_newton_schulz_step(shape, dtype):
    X, G = near_manifold(*shape, dtype=dtype), gaussian(*shape, seed=1, dtype=dtype)
    weight = nn.Parameter(X.clone())
    optimizer = ol.LandingSGD([weight], lr=0.05, attraction="after")
    weight.grad = G
    optimizer.step()
    wide, identity = shape[0] < shape[1], torch.eye(min(shape), dtype=dtype)
    X, G = (X.mT, G.mT) if wide else (X, G)
    R = ol.landing_field(X, G, lam=0.0)
    if X.shape[0] > X.shape[1]:  # tangent but for terms of order D, without the multiplier K of G
        S, M = X.mH @ X, X.mH @ G
        K = torch.linalg.solve(S, M)
        K = (K + K.mH) / 2
        R = (G - X @ (K + (M - S @ K).mH)) / 2
    Y = X - 0.05 * R
    scaled = Y / (Y.abs().square().sum() / min(shape)).sqrt().clamp(min=1)
    landed = scaled @ (3 * identity - scaled.mH @ scaled) / 2
    torch.testing.assert_close(weight.detach(), landed.mT if wide else landed)


def test_landing_after_the_move_leaves_an_error_of_fourth_order():
    errors = []
    for lr in (0.04, 0.02, 0.01):
        X = nn.Parameter(ol.random_orthogonal(20, 20, seed=0, dtype=torch.float64))
        optimizer = ol.LandingSGD([X], lr=lr, attraction="after")
        X.grad = gaussian(20, 20, seed=1)
        optimizer.step()
        errors.append(ol.orthogonality_error(X))
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(16, rel=0.1)


def test_scaling_first_halves_the_error_of_a_move_from_the_manifold():
    start, G = ol.random_orthogonal(30, 30, seed=0, dtype=torch.float64), gaussian(30, 30, seed=1)
    X = nn.Parameter(start.clone())
    optimizer = ol.LandingSGD([X], lr=0.01, attraction="after")
    X.grad = G
    optimizer.step()
    plain = newton_schulz(start - 0.01 * ol.landing_field(start, G, lam=0.0))
    assert ol.distance(X.detach()) < 0.6 * ol.distance(plain)


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 2, 5, 3)])
def test_newton_schulz_squares_the_error(shape):
    Y = near_manifold(*shape)
    torch.testing.assert_close(newton_schulz(Y), Y - Y @ gram_residual(Y) / 2)
    assert (ol.distance(newton_schulz(Y)) <= ol.distance(Y) ** 2).all()


@pytest.mark.parametrize("eps", [0.05, 0.5, 0.9, 1.0])
def test_how_far_a_move_may_lead(eps):
    e = farthest_before_landing(eps)
    assert 0.75 * e**2 + 0.25 * e**3 == pytest.approx(eps)
    if eps == 0.5:
        assert e == pytest.approx(3**0.5 - 1)


def test_errors_under_noise_are_ordered():
    """`benchmarks/orthogonality.py noise` in small: each attraction well below the one before."""
    errors = {}
    for attraction in ATTRACTIONS:
        X = nn.Parameter(ol.random_orthogonal(40, 40, seed=0))
        optimizer = ol.LandingSGD([X], lr=0.1, attraction=attraction)
        for k in range(200):
            X.grad = gaussian(40, 40, seed=k, dtype=torch.float32) / 40**0.5
            optimizer.step()
        errors[attraction] = ol.orthogonality_error(X)
    assert errors["decoupled"] < 0.5 * errors["coupled"]
    assert errors["after"] < 0.05 * errors["decoupled"]


def test_a_shrinking_lr_does_not_weaken_the_pull_of_the_new_attractions():
    errors = {}
    for attraction in ATTRACTIONS:
        X = nn.Parameter(near_manifold(10, 10))
        optimizer = ol.LandingSGD([X], lr=1e-5, attraction=attraction)
        for _ in range(5):
            X.grad = torch.zeros(10, 10, dtype=torch.float64)
            optimizer.step()
        errors[attraction] = ol.orthogonality_error(X)
    assert errors["coupled"] > 0.05
    assert errors["decoupled"] < 1e-12
    assert errors["after"] < 1e-12


@pytest.mark.parametrize("optimizer_type", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon])
@pytest.mark.parametrize("attraction", ATTRACTIONS)
@pytest.mark.parametrize("lr", [1.0, 10.0, 1000.0])
def test_large_steps_on_a_linear_problem_stay_finite_and_in_the_ball(
    optimizer_type, attraction, lr
):
    """POGO, which has no safe step, becomes NaN here (linear cost, p = 10, lr >= 1)."""
    C = 10 * gaussian(10, 10, seed=0, dtype=torch.float32)
    X = nn.Parameter(torch.eye(10))
    optimizer = optimizer_type([X], lr=lr, attraction=attraction)
    for _ in range(300):
        X.grad = C.clone()
        optimizer.step()
        assert ol.orthogonality_error(X, spectral=True) <= 0.5 + 1e-5
    assert torch.isfinite(X).all()
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("shape", [(6, 6), (9, 6)])
@pytest.mark.parametrize("scale", [0.0, 1e-3])
@pytest.mark.parametrize("attraction", ATTRACTIONS)
def test_what_someone_else_moved_out_of_the_ball_comes_back(attraction, scale, shape):
    """Up to distance 1, with gradients and without."""
    X = nn.Parameter(torch.eye(*shape, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.1, attraction=attraction)
    with torch.no_grad():
        X.mul_(1.17)
    assert 0.9 < ol.orthogonality_error(X) < 1
    for k in range(100):
        X.grad = scale * gaussian(*shape, seed=k)
        optimizer.step()
    assert ol.orthogonality_error(X) < 1e-3
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("shape", [(6, 6), (9, 6)])
@pytest.mark.parametrize("attraction", ATTRACTIONS)
def test_what_is_too_far_away_is_left_alone(attraction, shape):
    """From distance 1 on no rule holds: better unchanged than led anywhere."""
    X = nn.Parameter(torch.eye(*shape, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.1, attraction=attraction)
    with torch.no_grad():
        X.mul_(2)
    far = X.detach().clone()
    for k in range(3):
        X.grad = gaussian(*shape, seed=k)
        optimizer.step()
    assert torch.equal(X.detach(), far)
