import pytest
import torch

import ortholand as ol
from ortholand.geometry import gram_residual, polar_projection, potential

SHAPES = [(4, 4), (7, 3), (3, 7), (5, 6, 2), (2, 3, 4, 4), (1, 1)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_matrices_have_the_shape_and_lie_on_the_manifold(shape, dtype):
    X = ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    assert X.shape == shape
    assert X.dtype == dtype
    assert ol.distance(X).shape == shape[:-2]
    assert ol.distance(X).max() < 100 * torch.finfo(dtype).eps


def test_same_seed_same_matrix_and_a_generator_advances():
    assert torch.equal(ol.random_orthogonal(4, 4, seed=3), ol.random_orthogonal(4, 4, seed=3))
    generator = torch.Generator().manual_seed(3)
    first = ol.random_orthogonal(4, 4, seed=generator)
    assert not torch.equal(first, ol.random_orthogonal(4, 4, seed=generator))


def test_global_random_state_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ol.random_orthogonal(4, 4, seed=1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("shape", "scale", "expected"),
    [((8, 2), 3.7, 3.7), ((8, 2), "fan", 2.0), ((2, 8), "fan", 1.0), ((5, 9, 4), "fan", 1.5)],
)
def test_scaled_matrices_are_the_same_ones_times_a_number(shape, scale, expected):
    X = ol.random_orthogonal(*shape, seed=0, dtype=torch.float64)
    scaled = ol.random_orthogonal(*shape, seed=0, dtype=torch.float64, scale=scale)
    torch.testing.assert_close(scaled, expected * X, rtol=1e-15, atol=0)


def test_haar_measure_moments():
    """Haar: E X = 0, E X_ij^2 = 1/n, E (tr X)^2 = 1; both determinants equally likely."""
    X = ol.random_orthogonal(20_000, 3, 3, seed=0, dtype=torch.float64)
    assert X.mean(0).abs().max() < 0.02
    assert (X.square().mean(0) - 1 / 3).abs().max() < 0.02
    trace = X.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.square().mean() - 1) < 0.05
    assert abs((torch.linalg.det(X) > 0).double().mean() - 0.5) < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_special_gives_determinant_one(dtype):
    X = ol.random_orthogonal(50, 4, 4, seed=0, special=True, dtype=dtype)
    assert (torch.linalg.det(X) - 1).abs().max() < 1e-12
    assert ol.distance(X).max() < 1e-12


def test_special_haar_moments():
    """On SO(3): E (tr X)^2 = 1, E tr X = 0."""
    X = ol.random_orthogonal(20_000, 3, 3, seed=1, special=True, dtype=torch.float64)
    trace = X.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.mean()) < 0.03
    assert abs(trace.square().mean() - 1) < 0.05


@pytest.mark.parametrize(
    ("shape", "special", "message"),
    [
        ((4,), False, "shape"),
        ((0, 3), False, "positive"),
        ((5, 3), True, "square"),
    ],
)
def test_bad_shapes(shape, special, message):
    with pytest.raises(ValueError, match=message):
        ol.random_orthogonal(*shape, seed=0, special=special)


def test_distance_of_known_matrices():
    assert ol.distance(torch.eye(3)) == 0
    assert ol.distance(torch.diag(torch.tensor([1.0, 0.0]))) == 1
    assert ol.distance(2 * torch.eye(2, 5)) == pytest.approx(3 * 2**0.5)
    assert potential(torch.diag(torch.tensor([1.0, 0.0]))) == 0.25


def test_distance_is_accurate_for_small_residuals():
    X = torch.eye(2, dtype=torch.float64)
    X[0, 1] = 1e-9
    assert ol.distance(X) == pytest.approx(2**0.5 * 1e-9, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype):
    X = ol.random_orthogonal(8, 8, seed=0, dtype=dtype)
    d = ol.distance(X)
    assert d.dtype == torch.float32
    assert 0 < d < 0.05
    assert polar_projection(X).dtype == dtype


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_polar_projection_is_the_nearest_point(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(*shape, generator=generator, dtype=dtype)
    P = polar_projection(M)
    assert ol.distance(P).max() < 200 * torch.finfo(dtype).eps
    for seed in range(5):
        other = ol.random_orthogonal(*shape, seed=seed, dtype=dtype)
        gap = torch.linalg.matrix_norm(M - other) - torch.linalg.matrix_norm(M - P)
        assert (gap > -1e-5).all()


def test_gram_residual_takes_the_short_side():
    assert gram_residual(torch.ones(2, 5)).shape == (2, 2)
    assert gram_residual(torch.ones(5, 2)).shape == (2, 2)
