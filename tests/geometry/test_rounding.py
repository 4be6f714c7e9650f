"""Numbers of half precision, and what they leave over."""

from unittest import mock

import pytest
import torch

from ortholand.geometry import rounding
from ortholand.geometry.rounding import (
    COMPENSATION,
    HALF_TYPES,
    SEED,
    check_rounding,
    exact_value,
    keep_,
    prepare_rounding,
    random_bits,
    rounded,
    rounded_at_random,
    with_rest,
)

each_type = pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)


def numbers(dtype) -> torch.Tensor:
    """Numbers of all sizes that the type can hold, ties, powers of two and both ends."""
    generator = torch.Generator().manual_seed(0)
    largest = torch.finfo(dtype).max
    decades = torch.arange(-9.0, 4.5, 0.5) if dtype == torch.float16 else torch.arange(-42.0, 38.0)
    x = (torch.randn(len(decades), 300, generator=generator) * 10 ** decades[:, None]).flatten()
    exact = x.to(dtype).float()
    unit = (rounding_unit(exact, dtype) / 2).nan_to_num()
    powers = 2.0 ** torch.arange(-24.0, 15.0)
    beside = [powers * (1 + s * 2.0**-k) for s in (-1, 1) for k in (8, 9, 10, 11, 12, 13, 20, 23)]
    ends = torch.tensor([0.0, -0.0, largest, -largest, 6e-8, 2.9e-8, 3e-8, 1.5 * 2.0**-24])
    everything = torch.cat([x, exact, exact + unit, exact - unit, powers, *beside, ends])
    return everything[torch.isfinite(everything.to(dtype))]


def rounding_unit(x: torch.Tensor, dtype) -> torch.Tensor:
    """The distance to the next number of the type, from zero on."""
    bits = x.to(dtype).view(torch.int16)
    return ((bits + 1).view(dtype).float() - x.to(dtype).float()).abs()


@each_type
def test_bits_are_rounded_as_torch_rounds(dtype):
    """Compiled steps round by bits."""
    largest, bad = torch.finfo(dtype).max, float("inf")
    x = torch.cat([numbers(dtype), torch.tensor([bad, -bad, largest * 1.0038, -3.4e38, 65519.9])])
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        by_bits = rounded(x, dtype)
        assert rounded(torch.tensor([float("nan")]), dtype).isnan().all()
    assert torch.equal(by_bits, x.to(dtype).float())


@each_type
def test_a_number_and_its_rest_give_themselves_again(dtype):
    x = numbers(dtype)
    kept, rest = with_rest(x, dtype)
    for part in (kept, rest):
        assert torch.equal(part.to(dtype).float(), part)
    again = with_rest(kept + rest, dtype)
    assert torch.equal(again[0], kept)
    assert torch.equal(again[1], rest)
    # The rest is half a unit at most, and known to as many bits again.
    bits = torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal * bits
    assert ((kept + rest - x).abs() <= x.abs() * bits**2 / 2 + smallest / 2).all()
    assert ((kept + rest - x).abs() <= (x.to(dtype).float() - x).abs()).all()


@each_type
def test_random_rounding_is_to_a_neighbour_and_right_in_the_mean(dtype):
    x = numbers(dtype)
    draws = [rounded_at_random(x, dtype, torch.tensor(10**12 + k)) for k in range(500)]
    total, low, high = torch.zeros_like(x, dtype=torch.float64), draws[0], draws[0]
    for draw in draws:
        assert torch.equal(draw.to(dtype).float(), draw)
        total += draw.double()
        low, high = torch.minimum(low, draw), torch.maximum(high, draw)
    assert ((low <= x) & (x <= high) | (low == high)).all()
    exact = x.to(dtype).float() == x
    assert (low[exact] == x[exact]).all()
    assert (high[exact] == x[exact]).all()
    assert torch.isfinite(high).all()
    # Far from both neighbours, so that the number of crossings is almost normal.
    share = (x - low).double() / (high - low).double()
    between = (share > 0.1) & (share < 0.9)
    gap, position = (high - low)[between].double(), share[between]
    deviation = (total[between] / 500 - low[between]) / gap - position
    standard = (position * (1 - position) / 500).sqrt()
    assert between.sum() > 1000
    scores = deviation / standard
    assert scores.abs().max() < 6
    assert abs(scores.mean()) * between.sum() ** 0.5 < 4
    assert 0.9 < scores.std() < 1.1


@each_type
def test_random_rounding_makes_nothing_infinite_that_is_not(dtype):
    largest = torch.finfo(dtype).max
    edge = torch.tensor([largest * (1 + torch.finfo(dtype).eps / 5)]).repeat(1000)
    assert edge[0] > largest
    assert (rounded_at_random(edge, dtype, torch.tensor(1)) == largest).all()
    assert (rounded_at_random(-edge, dtype, torch.tensor(1)) == -largest).all()
    bad = torch.tensor([float("inf"), float("-inf"), float("nan")])
    after = rounded_at_random(bad, dtype, torch.tensor(1))
    assert torch.equal(after[:2], bad[:2])
    assert after[2].isnan()


def test_random_bits_depend_on_seed_and_place_only():
    x = torch.zeros(300, 200)
    before = torch.get_rng_state()
    one, again, other = (random_bits(x, torch.tensor(seed)) for seed in (2**40, 2**40, 2**40 + 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    assert 0 <= one.min() < 10**4 < 2**24 - 10**4 < one.max() < 2**24
    u, v = ((bits + 0.5) * 2.0**-24 - 0.5 for bits in (one, other))
    beside = [(u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], v[:-1, :-1])]
    for a, b in [(u, v), (u, torch.ones_like(u)), *beside]:
        correlation = (a * b).sum() / (a.norm() * b.norm())
        assert abs(correlation) * a.numel() ** 0.5 < 4
    assert len(torch.unique(one[0] ^ one[1])) > 100


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (5,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("way", rounding.ROUNDINGS)
@each_type
def test_any_shape_is_kept(dtype, way, shape):
    weight = torch.zeros(shape, dtype=dtype)
    state: dict = {}
    prepare_rounding(weight, state, way)
    keep_(weight, torch.full(shape, 1.0001), state)
    assert weight.shape == shape
    assert ((weight.float() - 1).abs() < 0.01).all()
    value = exact_value(weight, state)
    assert value.dtype == torch.float32
    if way == "compensated":
        torch.testing.assert_close(value, torch.full(shape, 1.0001), rtol=1e-5, atol=0)


@each_type
def test_a_weight_that_someone_has_set_has_no_rest(dtype):
    weight, state = torch.zeros(4, dtype=dtype), {}
    prepare_rounding(weight, state, None)
    keep_(weight, torch.full((4,), 1.0003), state)
    assert (state[COMPENSATION] != 0).all()
    weight[1], weight[2] = 0.0, 1e-4
    state[COMPENSATION][3] = float("nan")
    value = exact_value(weight, state)
    assert torch.equal(value[1:], weight[1:].float())
    assert value[0] != weight[0].float()


def test_a_way_has_its_own_state_and_no_other():
    half, full, state = torch.ones(3, dtype=torch.float16), torch.ones(3), {}
    for way, names in (
        (None, {COMPENSATION}),
        ("compensated", {COMPENSATION}),
        ("stochastic", {SEED}),
        ("nearest", set()),
    ):
        prepare_rounding(half, state, way)
        assert state.keys() == names
    for way in (None, *rounding.ROUNDINGS):
        state = {COMPENSATION: half, SEED: torch.tensor(1)}
        prepare_rounding(full, state, way)
        assert state == {}


@pytest.mark.parametrize("bad", ["up", "", "Nearest", 1, True, ["nearest"]], ids=repr)
def test_unknown_ways_are_refused_with_those_that_exist(bad):
    with pytest.raises(ValueError, match=r"one of \('nearest', 'stochastic', 'compensated'\), or"):
        check_rounding(bad)
