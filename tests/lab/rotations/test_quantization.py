"""Fake quantisation and Hadamard starts, which need no other library."""

import pytest
import torch

from ortholand_lab.rotations import Quantization, fake_quantize


def rows(seed=0, scale=1.0):
    return scale * torch.randn(5, 40, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_rounded_to_few_numbers_and_not_far(bits, symmetric, scale):
    x = rows(scale=scale)
    rounded = fake_quantize(x, bits, symmetric=symmetric)
    for before, after in zip(x, rounded, strict=True):
        # x + (rounded - x) rounds once more, so equal levels may differ in the last digits.
        levels = torch.unique((after / scale).round(decimals=4))
        assert len(levels) <= 2**bits
        span = 2 * before.abs().max() if symmetric else before.max() - before.min()
        step = span / (2**bits - (2 if symmetric else 1))
        assert (after - before).abs().max() <= step * (0.5 if symmetric else 1.0) * (1 + 1e-4)


def test_more_bits_are_nearer():
    x = rows()
    errors = [float((fake_quantize(x, bits) - x).norm()) for bits in (2, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 30


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_stays_zero(symmetric):
    zero = torch.zeros(2, 8)
    assert torch.equal(fake_quantize(zero, 4, symmetric=symmetric), zero)
    positive = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    positive[:, 0] = 0  # an offset must not move it
    assert torch.equal(fake_quantize(positive, 4, symmetric=symmetric)[:, 0], torch.zeros(3))


def test_gradients_pass_straight_through():
    x = rows().requires_grad_()
    weights = rows(seed=1)
    (fake_quantize(x, 4) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_no_bits_leave_all_as_it_is():
    x = rows()
    assert Quantization().weight(x) is x
    assert Quantization().activation(x) is x


@pytest.mark.parametrize("bits", [1, 0, -4, 17, 4.0, True, "4"])
@pytest.mark.parametrize("name", ["weight_bits", "activation_bits"])
def test_numbers_of_bits_that_make_no_sense(name, bits):
    with pytest.raises(ValueError, match=f"{name} must be a whole number from 2 to 16"):
        Quantization(**{name: bits})
