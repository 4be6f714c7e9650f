import math

import numpy as np
import pytest
import torch

import ortholand as ol
from ortholand.geometry import polar_projection, riemannian_gradient
from ortholand_lab.problems import ICA, amari_distance, separate, whiten
from ortholand_lab.problems.ica import BLOCK, fast_tanh, log_cosh, mean_log_cosh

F32, F64 = torch.float32, torch.float64


def randn(*shape, seed, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def rand(*shape, seed):
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


# --- log cosh


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_log_cosh_is_accurate_and_does_not_overflow(dtype):
    Y = torch.tensor([0.0, 1e-3, -0.5, 3.0, -20.0, 40.0, 1e4, -1e30], dtype=dtype)
    wide = Y.numpy().astype(np.longdouble)
    expected = np.logaddexp(wide, -wide) - np.log(np.longdouble(2))
    eps = torch.finfo(dtype).eps
    error = np.abs(log_cosh(Y).numpy() - expected)
    assert (error <= 4 * eps * np.maximum(expected, 1)).all()


def test_log_cosh_is_smooth_at_zero():
    y = torch.zeros((), dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_cosh(y), y, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, y)
    assert slope == 0
    assert curvature == 1


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("samples", [1, BLOCK - 1, BLOCK, 5 * BLOCK, 1000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
def test_the_fast_mean_is_that_of_log_cosh(samples, scale, dtype):
    Y = scale * randn(2, 3, samples, seed=samples, dtype=dtype)
    expected = log_cosh(Y.double()).mean(-1)
    fast = mean_log_cosh(Y, fast_tanh(Y))
    assert fast.shape == (2, 3)
    eps = torch.finfo(dtype).eps
    assert ((fast - expected).abs() <= 4 * eps * expected.clamp(min=1)).all()


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_the_fast_tanh_is_tanh_to_the_rounding_of_one(dtype):
    Y = 5 * randn(10_000, seed=0, dtype=dtype)
    assert (fast_tanh(Y) - torch.tanh(Y)).abs().max() <= 4 * torch.finfo(dtype).eps
    assert fast_tanh(torch.tensor([0.0, 1e5, -1e5])).tolist() == [0, 1, -1]


# --- whitening


@pytest.mark.parametrize("components", [None, 3])
def test_white_signals_are_centred_uncorrelated_and_made_by_the_matrix(components):
    signals = randn(5, 5, seed=0) @ randn(5, 200, seed=1) + 7
    signals[2] *= 1e6
    Z, K = whiten(signals, components)
    count = components or 5
    assert Z.shape == (count, 200)
    assert K.shape == (count, 5)
    assert Z.mean(-1).abs().max() < 1e-12
    torch.testing.assert_close(Z @ Z.mT / 200, torch.eye(count, dtype=F64))
    torch.testing.assert_close(K @ (signals - signals.mean(-1, keepdim=True)), Z, rtol=0, atol=1e-8)


def test_the_first_white_signals_are_those_of_most_variance():
    signals = torch.diag(torch.tensor([1.0, 100.0, 10.0], dtype=F64)) @ randn(3, 1000, seed=0)
    _, K = whiten(signals, 2)
    assert K.abs().argmax(1).tolist() == [1, 2]
    assert (K.gather(1, K.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize(
    ("signals", "components", "message"),
    [
        (torch.cat([randn(3, 50, seed=0), randn(3, 50, seed=0)]), None, "only 3 independent"),
        (randn(6, 4, seed=0), None, "components=3"),
        (torch.ones(2, 9), None, "only 0 independent"),
        (randn(3, 9, seed=0), 4, "components must be from 1 to 3"),
        (randn(3, 9, seed=0), 0, "components must be from 1 to 3"),
        (torch.full((2, 9), torch.inf), None, "must be finite"),
        (randn(9, seed=0), None, "2 axes"),
    ],
    ids=["repeated", "short", "constant", "many", "none", "infinite", "vector"],
)
def test_signals_that_cannot_be_whitened_are_an_error(signals, components, message):
    with pytest.raises(ValueError, match=message):
        whiten(signals, components)


# --- Amari distance


def test_the_amari_distance_is_zero_at_scaled_permutations_only():
    A = randn(5, 5, seed=0)
    scaled = torch.tensor([2.0, -1.0, 0.1, 5.0, -3.0], dtype=F64)[:, None]
    W = (scaled * torch.linalg.inv(A))[[3, 1, 0, 4, 2]]
    assert amari_distance(W, A) < 1e-13
    assert amari_distance(ol.random_orthogonal(5, 5, seed=0, dtype=F64), A) > 0.2
    assert amari_distance(torch.ones(4, 4), torch.eye(4)) == 1


def test_the_amari_distance_grows_with_the_angle_and_takes_batches():
    angles = torch.tensor([0.0, 0.01, 0.1, math.pi / 4], dtype=F64)
    R = torch.stack(
        [
            torch.stack([angles.cos(), -angles.sin()], -1),
            torch.stack([angles.sin(), angles.cos()], -1),
        ],
        -2,
    )
    distances = amari_distance(R, torch.eye(2, dtype=F64))
    torch.testing.assert_close(distances, angles.tan())  # both rows and columns: tan / 1


def test_the_amari_distance_needs_square_products():
    with pytest.raises(ValueError, match="square"):
        amari_distance(torch.ones(2, 3), torch.ones(3, 3))
    with pytest.raises(ValueError, match="2 rows or more"):
        amari_distance(torch.ones(1, 1), torch.ones(1, 1))


# --- the problem


def test_the_cost_is_the_mean_of_log_cosh():
    problem = ICA.planted(3, 100, seed=0)
    X = problem.start(0)
    expected = torch.log(torch.cosh(X @ problem.Z)).mean(-1).sum()
    torch.testing.assert_close(problem.fun(X), expected)
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=F64)
    flipped = ICA(problem.Z, signs).fun(X)
    expected = (signs * torch.log(torch.cosh(X @ problem.Z)).mean(-1)).sum()
    torch.testing.assert_close(flipped, expected)


def test_both_ways_to_the_cost_agree():
    problem = ICA.planted(4, 333, sub_gaussian=1, seed=0)
    X = problem.start(0)
    recorded = problem.fun(X.clone().requires_grad_())
    torch.testing.assert_close(problem.fun(X), recorded.detach(), rtol=1e-14, atol=1e-15)


def test_order_within_a_sign_and_signs_of_the_rows_do_not_matter():
    problem = ICA.planted(4, 400, sub_gaussian=2, seed=0)
    X = problem.start(0)
    scaled = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=F64)[:, None] * X
    torch.testing.assert_close(problem.fun(scaled[[1, 0, 3, 2]]), problem.fun(X))
    assert abs(problem.fun(X[[2, 1, 0, 3]]) - problem.fun(X)) > 1e-4


@pytest.mark.parametrize("sub_gaussian", [0, 2])
def test_the_truth_unmixes_up_to_sampling_error(sub_gaussian):
    samples = 40_000
    problem = ICA.planted(4, samples, sub_gaussian=sub_gaussian, seed=0)
    X = problem.truth
    assert ol.distance(X) < 1e-13
    gradient = riemannian_gradient(X, problem.grad(X)).abs().max()
    assert 1e-5 < gradient < 5 * samples**-0.5
    excess = (X @ problem.Z).square().square().mean(-1) - 3
    expected = torch.tensor([3.0] * (4 - sub_gaussian) + [-1.2] * sub_gaussian, dtype=F64)
    torch.testing.assert_close(excess, expected, rtol=0.15, atol=0)


def test_signs_tell_super_from_sub_gaussian_sources():
    problem = ICA.planted(5, 4000, sub_gaussian=2, seed=0)
    expected = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=F64)
    assert torch.equal(problem.signs_at(problem.truth), expected)
    assert torch.equal(problem.signs, expected)
    order = [4, 0, 3, 1, 2]
    assert torch.equal(problem.signs_at(problem.truth[order]), expected[order])


def test_adapting_gives_the_problem_with_signs_that_suit():
    known = ICA.planted(4, 4000, sub_gaussian=1, seed=0)
    problem = ICA(known.Z)
    adapted = problem.adapted(known.truth)
    assert torch.equal(adapted.signs, known.signs)
    assert adapted.adapted(known.truth) is adapted
    super_gaussian = ICA.planted(3, 4000, seed=0)
    assert super_gaussian.adapted(super_gaussian.truth) is super_gaussian


def test_with_wrong_signs_uniform_sources_stay_mixed():
    problem = ICA.planted(2, 4096, sub_gaussian=2, seed=0)
    X = problem.truth
    angle = torch.tensor(math.pi / 4, dtype=F64)
    mixed = torch.stack(
        [angle.cos() * X[0] + angle.sin() * X[1], angle.cos() * X[1] - angle.sin() * X[0]]
    )
    assert problem.fun(mixed) > problem.fun(X)
    wrong = ICA(problem.Z)
    assert wrong.fun(mixed) < wrong.fun(X)


def test_the_stationary_points_are_fixed_points_of_fastica():
    problem = ICA.planted(4, 3200, sub_gaussian=2, seed=0)
    X = separate(problem, problem.truth, atol=1e-12).x
    assert riemannian_gradient(X, problem.grad(X)).norm() < 1e-12
    Y = X @ problem.Z
    T = torch.tanh(Y)
    step = T @ problem.Z.mT / problem.samples - (1 - T**2).mean(-1, keepdim=True) * X
    after = polar_projection(step)
    # FastICA does not tell a row from its negative: these are the signs of the sources.
    torch.testing.assert_close(after, -problem.signs[:, None] * X, rtol=0, atol=1e-10)


def test_the_contrast_is_the_distance_from_gaussian_whatever_the_signs():
    problem = ICA.planted(4, 20_000, sub_gaussian=2, seed=0)
    X = problem.truth
    grid = torch.linspace(-12, 12, 10_001, dtype=F64)
    density = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi)
    normal = torch.trapezoid(log_cosh(grid) * density, grid)
    expected = (log_cosh(X @ problem.Z).mean(-1) - normal).abs().sum()
    torch.testing.assert_close(problem.contrast(X), expected, rtol=1e-12, atol=0)
    assert problem.contrast(X) == ICA(problem.Z).contrast(X)
    others = ol.random_orthogonal(20, 4, 4, seed=0, dtype=F64)
    assert (problem.contrast(others) < problem.contrast(X)).all()


def test_signals_that_are_not_white_are_an_error_unless_asked_for():
    signals = 2 * randn(3, 500, seed=0)
    with pytest.raises(ValueError, match="Z must be white"):
        ICA(signals)
    ICA(signals, check=False)
    ICA(whiten(signals)[0])
    ICA(whiten(signals.float())[0])


@pytest.mark.parametrize(
    "signs", [torch.ones(2, dtype=F64), torch.zeros(3, dtype=F64), torch.ones(3)], ids=str
)
def test_signs_that_make_no_sense_are_an_error(signs):
    with pytest.raises(ValueError, match="signs must be 3 numbers 1 or -1"):
        ICA(ICA.planted(3, 100, seed=0).Z, signs)
