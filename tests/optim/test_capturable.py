"""``capturable``: with a tensor lr a step reads nothing on the host and makes no new state.

Both are what a CUDA graph needs. They are counted on meta tensors, where torch is told that they
can be captured.
"""

import sys

import pytest
import torch
from torch import nn

import ortholand as ol
from tests.optim.counting import Counted

METHODS = {
    "sgd": (ol.LandingSGD, {}),
    "momentum": (ol.LandingSGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (ol.LandingAdam, {"weight_decay": 0.1}),
    "adam of one decay": (ol.LandingAdam, {"weight_decay": 0.1, "decoupled_weight_decay": False}),
    "muon": (ol.LandingMuon, {}),
}
every_method = pytest.mark.parametrize("method", METHODS)
each_way = pytest.mark.parametrize("foreach", [None, False, True])
SHAPES = [(40, 40), (60, 20), (20, 60)]


def made(method, foreach, device, **options):
    cls, own = METHODS[method]
    orthogonal = [ol.random_orthogonal(*shape, seed=0).to(device) for shape in SHAPES]
    plain = [torch.ones(shape, device=device) for shape in ((7,), (3, 4))]
    groups = [
        {"params": [nn.Parameter(X) for X in orthogonal]},
        {"params": [nn.Parameter(X) for X in plain], "orthogonal": False, "scale": 1.0},
        {"params": [nn.Parameter(2 * X) for X in orthogonal], "scale": 2.0},
    ]
    return cls(groups, foreach=foreach, **own, **options)


def set_gradients(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device)


@pytest.fixture
def meta_can_be_captured(monkeypatch):
    module = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["meta"])


@every_method
@each_way
@pytest.mark.usefixtures("meta_can_be_captured")
def test_nothing_is_read_and_no_state_is_new(method, foreach):
    lr = torch.tensor(0.1, device="meta")
    optimizer = made(method, foreach, "meta", lr=lr, capturable=True)
    optimizer._awaits_values = False  # meta tensors have none
    for seed in range(2):  # as before a capture
        set_gradients(optimizer, seed)
        optimizer.step()
    states = [dict(state) for state in optimizer.state.values()]
    with Counted() as counts:
        optimizer.step()
    assert not counts.reads
    for state, before in zip(optimizer.state.values(), states, strict=True):
        assert state.keys() == before.keys()
        assert all(state[name] is before[name] for name in state)
        assert all(value.is_meta for value in state.values())


@every_method
@each_way
def test_steps_are_the_same(method, foreach):
    ours = made(method, foreach, "cpu", lr=torch.tensor(0.01), capturable=True)
    plain = made(method, foreach, "cpu", lr=0.01, fused=False)
    for seed in range(4):
        for optimizer in (ours, plain):
            set_gradients(optimizer, seed)
            optimizer.step()
    for group, twin in zip(ours.param_groups, plain.param_groups, strict=True):
        for p, q in zip(group["params"], twin["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
    assert ours.skipped_steps() == 0


@every_method
def test_a_step_that_is_not_finite_is_skipped(method):
    optimizer = made(method, None, "cpu", lr=torch.tensor(0.01), capturable=True)
    set_gradients(optimizer, 0)
    optimizer.step()
    vector = optimizer.param_groups[1]["params"][0]
    before = {name: value.clone() for name, value in optimizer.state[vector].items()}
    weight = vector.detach().clone()
    vector.grad[0] = torch.nan
    optimizer.step()
    assert torch.equal(vector, weight)
    assert optimizer.skipped_steps() == 1
    for name, value in optimizer.state[vector].items():
        assert torch.equal(value, before[name] + (name == "skipped"))


def test_it_must_be_true_or_false():
    with pytest.raises(TypeError, match="capturable must be True or False"):
        ol.LandingSGD([nn.Parameter(torch.eye(3))], capturable=1)


@pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon, ol.PLAM])
def test_options_that_a_constructor_does_not_have(make):
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'omga'"):
        make([nn.Parameter(torch.eye(3))], omga=0.5)


@pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam])
def test_fused_plain_steps_are_torchs(make):
    ours, theirs = ([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))] for _ in range(2))
    options = {"lr": 0.1, "fused": True}
    torchs = torch.optim.SGD if make is ol.LandingSGD else torch.optim.AdamW
    own = {"momentum": 0.9} if make is ol.LandingSGD else {}
    optimizer = make(ours, orthogonal=False, **own, **options)
    twin = torchs(theirs, weight_decay=0.0, **own, **options)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = q.grad = torch.linspace(-1, 1, p.numel()).reshape(p.shape)
    ours[0].grad = theirs[0].grad = None
    for k in range(3):
        if k == 1:
            ours[0].grad, theirs[0].grad = torch.ones(3, 4), torch.ones(3, 4)
        versions = [p.grad._version for p in ours if p.grad is not None]
        optimizer.step()
        if make is ol.LandingAdam or k == 0:  # torch's fused SGD cannot take a new weight later
            twin.step()
            assert torch.equal(ours[1], theirs[1])
        assert versions == [p.grad._version for p in ours if p.grad is not None]
