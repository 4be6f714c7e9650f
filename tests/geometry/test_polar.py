"""Polar factors: msign against singular values, and the polynomials behind it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ortholand as ol
from ortholand.geometry import skew
from ortholand.geometry.matrices import wide_dtype
from ortholand.geometry.polar import (
    LEVELS,
    MOST_STEPS,
    SKEW_LEVELS,
    SKEW_STEPS,
    STEPS,
    levels,
    lowest,
    skew_polar_factor,
)
from tests.grids import examples

EXACT = torch.float64
TYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_singular_values(n, p, values, seed=0, dtype=torch.float32):
    """An n x p matrix with these singular values, and its polar factor, made in float64."""
    exact = torch.complex128 if dtype.is_complex else torch.float64
    U = ol.random_orthogonal(n, min(n, p), seed=seed, dtype=exact)
    V = ol.random_orthogonal(p, min(n, p), seed=seed + 1, dtype=exact)
    values = torch.as_tensor(values, dtype=torch.float64)
    return ((U * values) @ V.mH).to(dtype), (U * (values > 0)) @ V.mH


def composed(x, steps):
    for _, a, b, c in levels(steps, LEVELS):
        x = x * (a + x**2 * (b + c * x**2))
    return x


def seventh(level, x):
    return x * (x**2 + level.m) * (level.i + level.d * x**2 * (x**2 + level.e))


def composed_skew(x, steps):
    for level in levels(steps, SKEW_LEVELS):
        x = seventh(level, x)
    return x


# The quintics


@pytest.mark.parametrize("steps", range(1, MOST_STEPS + 1))
def test_what_is_above_the_lowest_becomes_one_and_nothing_becomes_more(steps):
    low = lowest(steps)
    x = torch.logspace(math.log10(low * 1.001), 0, 20001, dtype=torch.float64)
    reached = composed(x, steps)
    assert reached.min() > 1 - 1.1e-6
    everywhere = composed(torch.linspace(0, 1, 100001, dtype=torch.float64), steps)
    assert everywhere.min() >= 0
    assert everywhere.max() <= 1 + 1e-12


@pytest.mark.parametrize("k", range(len(LEVELS)))
def test_each_quintic_is_the_best_of_its_interval(k):
    """It is largest, smallest, largest and smallest in turn, at four points (Chebyshev)."""
    low, a, b, c = LEVELS[k]
    root = math.sqrt(9 * b * b - 20 * a * c)
    inner = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    values = [x * (a + x * x * (b + c * x * x)) for x in (low, *inner, 1.0)]
    assert low < inner[0] < inner[1] < 1
    assert values[1] == pytest.approx(values[3], abs=1e-15)
    assert values[0] == pytest.approx(values[2], rel=1e-4)  # low is written with four digits
    target = LEVELS[k - 1].low if k else 1 - 1e-6
    assert values[2] == pytest.approx(target, rel=1e-4)
    assert values[1] == pytest.approx(1 / (1 + 1 / 256) if k else 1.0, abs=1e-12)


# msign


@each_type
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 7), (5, 5), (40, 12), (12, 40), (130, 129)])
def test_msign_is_the_polar_factor(shape, dtype):
    values = torch.linspace(1, 0.01, min(shape))
    M, expected = with_singular_values(*shape, values, dtype=dtype)
    P = ol.msign(M)
    assert P.dtype == dtype
    tolerance = 5e-6 if torch.finfo(dtype).bits == 32 else 1e-12
    assert (P - expected).abs().max() < tolerance


def test_batches_are_matrices_one_by_one():
    M = gaussian(2, 3, 9, 4)
    one_by_one = torch.stack([ol.msign(m) for m in M.reshape(6, 9, 4)]).view_as(M)
    torch.testing.assert_close(ol.msign(M), one_by_one, rtol=0, atol=2e-6)
    assert ol.msign(torch.zeros(0, 3, 2)).shape == (0, 3, 2)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6)])
def test_what_is_zero_stays_zero_and_ranks_stay(shape):
    M, expected = with_singular_values(*shape, [3.0, 1.0, 0.0, 0.0] + [0.0] * (min(shape) - 4))
    assert (ol.msign(M) - expected).abs().max() < 3e-3  # rounding, enlarged by up to 5e3
    assert torch.equal(ol.msign(torch.zeros(shape)), torch.zeros(shape))
    assert torch.equal(ol.msign(-torch.zeros(2, *shape)).abs(), torch.zeros(2, *shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -30, 1, 30, 100, 124])
def test_powers_of_two_change_no_bit(exponent, dtype):
    M = gaussian(7, 3, dtype=dtype)
    scaled = M * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
    if exponent > -126:
        assert torch.equal(ol.msign(scaled), ol.msign(M))
    else:  # of a few bits only, but a polar factor all the same
        P = ol.msign(scaled).to(torch.complex128)
        assert torch.linalg.matrix_norm(P, ord=2) <= 1 + 1e-5


def test_float64_of_any_scale():
    M = gaussian(6, 3, dtype=torch.float64)
    for scale in (1e-300, 1e-160, 1e160, 1e300):
        assert (ol.msign(scale * M) - ol.msign(M)).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    M = gaussian(8, 5).to(dtype)
    P = ol.msign(M)
    assert P.dtype == dtype
    assert torch.equal(P, ol.msign(M.float()).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_matrix(bad):
    M = gaussian(3, 6, 4)
    spoilt = M.clone()
    spoilt[1, 2, 3] = bad
    P = ol.msign(spoilt)
    assert P[1].isnan().any()
    assert not P[1].isfinite().all()
    good = [0, 2]
    torch.testing.assert_close(P[good], ol.msign(M)[good], rtol=0, atol=1e-6)


@each_type
@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 200])
def test_skew_stays_skew_to_the_last_bit(n, dtype):
    P = ol.msign(skew(gaussian(2, n, n, dtype=dtype)))
    assert torch.equal(P, -P.mH)


def test_only_the_skew_matrices_of_a_batch_are_made_skew():
    M = gaussian(2, 5, 5)
    M[0] = skew(M[0])
    P = ol.msign(M)
    assert torch.equal(P[0], -P[0].mT)
    torch.testing.assert_close(P[1], ol.msign(M[1]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, STEPS, MOST_STEPS])
def test_fewer_steps_leave_small_singular_values_smaller(steps):
    M, _ = with_singular_values(60, 50, torch.logspace(0, -6, 50))
    reached = torch.linalg.svdvals(ol.msign(M, steps).double())
    assert reached.max() <= 1 + 1e-5
    bound = float((torch.logspace(0, -6, 50) ** 8).sum()) ** (1 / 8) * (1 + 1 / 256)
    large = int((torch.logspace(0, -6, 50) >= 1.01 * lowest(steps) * bound).sum())
    assert ((reached > 1 - 1e-5).sum()) >= large


def test_memory_and_autocast_change_nothing():
    M = gaussian(6, 4)
    scattered = torch.zeros(6, 8)[:, ::2].copy_(M)
    torch.testing.assert_close(ol.msign(scattered), ol.msign(M), rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ol.msign(M), ol.msign(M.clone()))
        assert (ol.msign(M).mT.double() @ ol.msign(M).double() - torch.eye(4)).abs().max() < 1e-5
    assert torch.equal(M, gaussian(6, 4))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(3),), ValueError, r"takes matrices \(..., n, p\), got shape \(3,\)"),
        ((torch.ones(3, 3, dtype=torch.int64),), TypeError, "floating or complex tensor, got"),
        (([[1.0]],), TypeError, "floating or complex tensor, got list"),
        ((torch.ones(2, 2), 0), ValueError, "steps must be from 1 to 11, got 0"),
        ((torch.ones(2, 2), 99), ValueError, "steps must be from 1 to 11, got 99"),
        ((torch.ones(2, 2), 5.0), TypeError, "steps must be an integer, got 5.0"),
        ((torch.ones(2, 2), True), TypeError, "steps must be an integer, got True"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ol.msign(*arguments)


@examples(100)
@given(
    n=st.integers(1, 30),
    p=st.integers(1, 30),
    seed=st.integers(0, 2**31),
    decades=st.floats(0, 7),
    scale=st.floats(-30, 30),
)
def test_no_singular_value_exceeds_one_and_the_nuclear_norm_is_reached(n, p, seed, decades, scale):
    k = min(n, p)
    exponents = torch.rand(k, generator=torch.Generator().manual_seed(seed)) * decades
    M, _ = with_singular_values(n, p, 10.0**-exponents, seed=seed)
    P = ol.msign(M * 10.0**scale).double()
    assert torch.linalg.matrix_norm(P, ord=2) <= 1 + 1e-5
    assert (M.double() * P).sum() >= 0.98 * torch.linalg.svdvals(M.double()).sum()


def test_it_has_a_derivative():
    M = gaussian(2, 5, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ol.msign, M, atol=1e-4)


# Skew matrices


@pytest.mark.parametrize("steps", range(1, MOST_STEPS + 1))
def test_polynomials_of_degree_seven_take_what_is_above_the_lowest_to_one(steps):
    x = torch.logspace(math.log10(lowest(steps, SKEW_LEVELS) * 1.001), 0, 20001, dtype=EXACT)
    assert composed_skew(x, steps).min() > 1 - 1.1e-6
    everywhere = composed_skew(torch.linspace(0, 1, 100001, dtype=EXACT), steps)
    assert everywhere.min() >= 0
    assert everywhere.max() <= 1 + 1e-12


@pytest.mark.parametrize("k", range(len(SKEW_LEVELS)))
def test_each_of_them_is_the_best_of_its_interval(k):
    """It is smallest and largest in turn, at five points (Chebyshev)."""
    y = seventh(SKEW_LEVELS[k], torch.linspace(SKEW_LEVELS[k].low, 1, 3001, dtype=EXACT))
    slope = y.diff()
    turns = torch.cat([y[:1], y[1:-1][slope[1:] * slope[:-1] < 0], y[-1:]])
    target = SKEW_LEVELS[k - 1].low if k else 1 - 1e-6
    assert turns.tolist() == pytest.approx(
        [target if i % 2 == 0 else 1 / (1 + bool(k) / 256) for i in range(5)], rel=3e-4
    )


@each_type
@pytest.mark.parametrize("n", [1, 2, 3, 8, 33, 200])
def test_polar_factors_of_skew_matrices(n, dtype):
    """Never longer than 1, and more accurate than by quintics."""
    M = skew(gaussian(2, n, n, dtype=dtype))
    P, wide = skew_polar_factor(M, MOST_STEPS, half=False), M.to(wide_dtype(M))
    U, s, V = torch.linalg.svd(wide)
    reached = (wide.conj() * P).real.sum((1, 2))
    torch.testing.assert_close(reached, s.sum(-1), rtol=3e-6, atol=1e-6)
    assert torch.linalg.matrix_norm(P.to(wide.dtype), ord=2).max() <= 1 + 1e-6
    assert (P + P.mH).abs().max() <= 1e-6
    regular = (s[:, -1] > 0.02 * s[:, 0])[:, None, None]
    assert ((P - U @ V) * regular).abs().max() < 5e-6


@pytest.mark.parametrize("n", [8, 60, 300])
@pytest.mark.parametrize("decades", [0, 1, 3])
def test_first_steps_in_half_precision_turn_planes_as_far(n, decades):
    """Singular vectors are those of rounded matrices; values are exact, and none exceeds 1."""
    s = torch.logspace(0, -decades, n // 2, dtype=EXACT)
    U = ol.random_orthogonal(n, n, seed=0, dtype=EXACT)
    turns = torch.zeros(n, n, dtype=EXACT)
    turns[range(0, n, 2), range(1, n, 2)] = s
    M = U @ (turns - turns.mT) @ U.mT
    both = [skew_polar_factor(M.float(), 4, half=half) for half in (False, True)]
    shares = [float((M * P).sum() / (2 * s.sum())) for P in both]
    assert shares[1] > shares[0] - 1e-3
    assert not torch.equal(*both)
    P = both[1].double()
    assert (P + P.mT).abs().max() < 1e-6
    assert torch.linalg.matrix_norm(P, ord=2) < 1 + 1e-6
    few = skew_polar_factor(M.float(), 4, columns=3, half=True)
    torch.testing.assert_close(few, both[1][:, :3], rtol=0, atol=1e-6)


@each_type
@pytest.mark.parametrize("steps", [1, 2, SKEW_STEPS])
def test_some_columns_of_a_polar_factor(steps, dtype):
    M = skew(gaussian(3, 6, 6, dtype=dtype))
    few = skew_polar_factor(M, steps, columns=2)
    torch.testing.assert_close(few, skew_polar_factor(M, steps)[..., :2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [30, 300])
@pytest.mark.parametrize("decades", [0, 2, 6])
def test_more_steps_reach_more_of_the_nuclear_norm(n, decades):
    s = torch.logspace(0, -decades, n // 2, dtype=EXACT)
    U = ol.random_orthogonal(n, n, seed=0, dtype=EXACT)
    turns = torch.zeros(n, n, dtype=EXACT)
    turns[range(0, n, 2), range(1, n, 2)] = s
    M = U @ (turns - turns.mT) @ U.mT
    shares = [float((M * skew_polar_factor(M.float(), k)).sum() / (2 * s.sum())) for k in (2, 4, 6)]
    assert shares == pytest.approx(sorted(shares), abs=1e-5)
    assert shares[-1] > 0.999


@pytest.mark.parametrize("scale", [1e-30, 1e30, 0.0])
def test_their_scale_does_not_matter_and_zero_stays_zero(scale):
    M = skew(gaussian(7, 7))
    expected = skew_polar_factor(M, SKEW_STEPS) * (scale > 0)
    assert (skew_polar_factor(scale * M, SKEW_STEPS) - expected).abs().max() < 5e-6
