"""``ortholand.averages``: EMA and SWA whose orthogonal weights are orthogonal."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import ortholand as ol
from ortholand.averages import AveragedModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ol.orthogonal(nn.Conv2d(2, 6, 3), view="kernel")
        self.norm = nn.BatchNorm2d(6)
        self.mix = ol.orthogonal(nn.Linear(6, 6), scale=2.0)
        self.wide = ol.orthogonal(nn.Linear(6, 4))
        self.blocks = ol.orthogonal(nn.Linear(4, 12), blocks=(3, 1))
        self.rows = ol.orthogonal(nn.Linear(12, 4), view="rows", scale=0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).mean((-2, -1))
        x = torch.tanh(self.wide(torch.tanh(self.mix(x))))
        return self.head(self.rows(torch.tanh(self.blocks(x))))


MARKED = ["stem.weight", "mix.weight", "wide.weight", "blocks.weight", "rows.weight"]
RULES = {
    "decay": ({"decay": 0.9}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
    "ema": ({"multi_avg_fn": get_ema_multi_avg_fn(0.9)},) * 2,
    "one by one": ({"avg_fn": get_ema_avg_fn(0.9)},) * 2,
    "swa": ({}, {}),
}
each_rule = pytest.mark.parametrize("rule", RULES)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model, averages=(), steps=30, lr=0.05):
    optimizer = ol.LandingAdam(model.parameters(), lr=lr)
    for k in range(steps):
        x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        (model(x) - x.mean((1, 2, 3))[:, None].sign()).square().mean().backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)
    return optimizer


@each_rule
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_land_and_all_else_is_as_in_torch(rule, use_buffers):
    model, (own, theirs) = net(), RULES[rule]
    average = AveragedModel(model, use_buffers=use_buffers, **own)
    plain = swa_utils.AveragedModel(model, use_buffers=use_buffers, **theirs)
    train(model, [average, plain])
    errors = ol.orthogonality_error(average.module, reduce=None)
    assert list(errors) == MARKED
    assert max(errors.values()) < 1e-5
    assert ol.orthogonality_error(plain.module) > 0.03
    expected = plain.state_dict()
    assert list(average.state_dict()) == list(expected)
    for name, value in average.state_dict().items():
        if name.removeprefix("module.") not in MARKED:
            assert torch.equal(value, expected[name]), name
    # Near torch's average after it is projected, which differs in second order.
    ol.orthogonalize_(plain.module)
    for name in MARKED:
        ours, other = (a.module.get_parameter(name) for a in (average, plain))
        moved = (net().get_parameter(name) - other).norm()
        assert (ours - other).norm() < 0.2 * moved
    x = torch.randn(3, 2, 6, 6)
    assert torch.equal(average(x), average.module(x))


def test_the_average_of_one_weight_is_that_weight():
    model = net()
    average = AveragedModel(model, decay=0.5)
    for _ in range(3):
        average.update_parameters(model)
    for p, q in zip(average.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


@each_rule
def test_an_average_resumes_from_its_state(rule):
    own, _ = RULES[rule]
    model = net()
    average = AveragedModel(model, **own)
    train(model, [average], steps=5)
    resumed = AveragedModel(net(), **own)
    memory = io.BytesIO()
    torch.save(average.state_dict(), memory)
    resumed.load_state_dict(torch.load(io.BytesIO(memory.getvalue()), weights_only=True))
    train(model, [average, resumed], steps=5)
    for p, q in zip(average.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
@pytest.mark.parametrize("rule", ["decay", "swa"])
def test_averages_are_copied_and_pickled(change, rule):
    model = net()
    average = AveragedModel(model, **RULES[rule][0])
    train(model, [average], steps=3)
    other = change(average)
    train(model, [average, other], steps=3)
    for p, q in zip(average.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert ol.orthogonality_error(other.module) < 1e-5


def test_weights_that_selectors_groups_or_an_optimizer_name():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    which = {"orthogonal": ["0", model[1]], "scale": 2.0}
    groups = ol.orthogonalize_(ol.param_groups(model, **which))
    optimizer = ol.LandingSGD(groups, lr=0.1)
    plain = ol.LandingSGD(optimizer.param_groups[0]["params"], lr=0.1, scale=2.0)
    makers = [which, *({"orthogonal": each} for each in (groups, optimizer, plain))]
    averages = [AveragedModel(model, **options) for options in makers]
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)
    first = averages[0].module
    assert ol.orthogonality_error(first, orthogonal=["0", "1"], scale=2.0) < 1e-5
    for average in averages[1:]:
        for p, q in zip(first.parameters(), average.module.parameters(), strict=True):
            assert torch.equal(p, q)


def test_batch_norm_is_updated_as_in_torch():
    model = net()
    average = AveragedModel(model)
    train(model, [average], steps=3)
    before = average.module.norm.running_mean.clone()
    update_bn([torch.randn(8, 2, 6, 6)], average)
    assert not torch.equal(before, average.module.norm.running_mean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_types(dtype):
    model = ol.orthogonal(nn.Linear(6, 4, dtype=dtype))
    average = AveragedModel(model)
    for seed in range(3):
        ol.orthogonal(model, init="random", seed=seed)
        average.update_parameters(model)
    assert average.module.weight.dtype == dtype
    limit = {torch.float64: 1e-13, torch.bfloat16: 0.02}.get(dtype, 1e-5)
    assert ol.orthogonality_error(average.module) < limit


def test_what_cannot_be_averaged():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="say which parameters are orthogonal"):
        AveragedModel(model)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1.0"):
        AveragedModel(model, decay=1.0, orthogonal="0")
    with pytest.raises(ValueError, match="One rule makes the average"):
        AveragedModel(model, decay=0.9, avg_fn=get_ema_avg_fn(), orthogonal="0")
    groups = ol.orthogonalize_(ol.param_groups(nn.Linear(3, 3), "weight"))
    with pytest.raises(ValueError, match=r"shape \(3, 3\) in the groups is none of this Seq"):
        AveragedModel(model, orthogonal=ol.LandingSGD(groups, lr=0.1))
    with pytest.raises(ValueError, match="Groups state their own constraints"):
        AveragedModel(model, orthogonal=ol.param_groups(model, "0"), scale=2.0)


@pytest.mark.parametrize("shape", [(64, 64), (256, 256), (300, 128)])
def test_larger_matrices_are_as_near_as_they_can_be_stored(shape):
    model = nn.Linear(*shape, bias=False)
    average = AveragedModel(ol.orthogonal(model))
    for seed in range(3):
        ol.orthogonal(model, init="random", seed=seed)
        average.update_parameters(model)
    assert ol.orthogonality_error(average.module) < 1e-5
    assert not average.module.weight.grad_fn
