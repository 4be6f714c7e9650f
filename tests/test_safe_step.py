"""Behaviour of the function; that its steps are safe is in tests/theory and tests/optim."""

import math

import pytest
import torch

import ortholand as ol
from ortholand.safe_step import largest_root


@pytest.mark.parametrize("rule", ["frobenius", "spectral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_zero_tiny_and_huge_fields_give_finite_steps(rule, dtype):
    scales = torch.tensor([0.0, 1e-38, 1e-30, 1.0, 1e30, 1e36])
    field = scales[:, None, None] * torch.ones(6, 5, 3).to(dtype)
    for lam in (0.0, 1.0):
        for d in (0.0, 0.2, 0.5):
            step = ol.safe_step_size(field, torch.full((6,), d), lam=lam, rule=rule)
            assert torch.isfinite(step).all()
            assert (step >= 0).all()
            assert (step[1:] <= step[:-1]).all()


def test_cap_and_root_by_hand():
    L = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    d = torch.tensor(0.1)
    b, q = 0.5 * 0.1 * 0.9, 25.0
    root = (b + math.sqrt(b**2 + q * 0.4)) / q
    assert ol.safe_step_size(L, d, lam=0.5, rule="frobenius").item() == pytest.approx(root)
    q = (81**2 + 256**2) ** 0.25
    root = (b + math.sqrt(b**2 + q * (0.5 * (1 - 1e-4) - 0.1))) / q
    assert ol.safe_step_size(L, d, lam=0.5).item() == pytest.approx(root)
    assert ol.safe_step_size(1e-3 * L, d, lam=0.5).item() == 1.0


def test_wide_fields_use_the_small_gram_matrix():
    L = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    d = torch.tensor(0.1)
    for rule in ("frobenius", "spectral"):
        wide = ol.safe_step_size(L, d, rule=rule)
        torch.testing.assert_close(wide, ol.safe_step_size(L.mT, d, rule=rule))


def test_outside_the_ball_the_step_brings_nearer_and_stops_at_one():
    step = ol.safe_step_size(torch.ones(3, 2, 2), torch.tensor([0.6, 0.9, 1.0]), eps=0.5)
    assert (step[:2] > 0).all()
    assert step[2] == 0
    nan = ol.safe_step_size(torch.ones(2, 2), torch.tensor(math.nan))
    assert nan.isnan()


def test_rounding_of_the_tangent_part_shortens_the_step():
    L, d = torch.full((2, 2), 1e-9), torch.tensor(0.1)
    options = dict(lam=1e-3, rule="frobenius")
    free = ol.safe_step_size(L, d, **options)
    bounded = ol.safe_step_size(L, d, tangency_error=torch.tensor(1.0), **options)
    assert free == 500
    assert bounded.item() == pytest.approx(0.4 / (2 * (1 - 1e-3 * 0.09)), rel=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rule": "loose"}, r"one of \('frobenius', 'spectral'.*\), got 'loose'"),
        ({"eps": 0.0}, r"eps must be in \(0, 1\), got 0.0"),
        ({"eps": 1.0}, r"eps must be in \(0, 1\), got 1.0"),
        ({"eps": math.nan}, r"eps must be in \(0, 1\)"),
        ({"lam": -1.0}, "lam must be finite and at least 0, got -1.0"),
        ({"lam": math.inf}, "lam must be finite"),
    ],
)
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ol.safe_step_size(torch.eye(2), torch.tensor(0.0), **kwargs)


def test_without_room_there_is_no_step():
    d = torch.linspace(0, 1.2, 13, dtype=torch.float64).repeat(9)
    root_q = torch.logspace(-30, 30, 9, dtype=torch.float64).repeat_interleave(13)
    zero = torch.zeros_like(d)
    assert torch.equal(largest_root(root_q, zero, -d - 1), zero)
