import copy

import pytest
import torch
from torch import nn

import ortholand as ol


def test_power_law_and_resume():
    optimizer = ol.LandingSGD([nn.Parameter(torch.eye(3))], lr=0.5)
    scheduler = ol.PowerLawLR(optimizer)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5 * k ** (-2 / 3) for k in range(1, 11)])
    other = ol.LandingSGD([nn.Parameter(torch.eye(3))], lr=0.5)
    resumed = ol.PowerLawLR(other)
    resumed.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    other.load_state_dict(optimizer.state_dict())
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.5 * 12 ** (-2 / 3))


def test_tensor_lr_is_scheduled_in_place():
    rate = torch.tensor(0.5)
    optimizer = ol.LandingSGD([nn.Parameter(torch.eye(3))], lr=rate)
    scheduler = ol.PowerLawLR(optimizer, alpha=1.0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.25)


@pytest.mark.parametrize(("alpha", "error"), [(-1.0, ValueError), ("fast", TypeError)])
def test_bad_exponents(alpha, error):
    with pytest.raises(error, match="alpha must be"):
        ol.PowerLawLR(ol.LandingSGD([nn.Parameter(torch.eye(3))], lr=0.5), alpha=alpha)
