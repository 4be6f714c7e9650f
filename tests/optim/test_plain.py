"""Unconstrained groups take torch's own steps, quickly, and survive bad gradients."""

import pytest
import torch
from torch import nn

import ortholand as ol

TORCHS = {
    "sgd": (ol.LandingSGD, torch.optim.SGD, {}),
    "momentum": (ol.LandingSGD, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (ol.LandingSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (ol.LandingAdam, torch.optim.AdamW, {"fused": True}),
    "adam, not fused": (ol.LandingAdam, torch.optim.AdamW, {"fused": False}),
}
each_kind = pytest.mark.parametrize("kind", TORCHS)


def weights(dtype=torch.float32, **_):
    generator = torch.Generator().manual_seed(0)
    shapes = (1,), (7,), (3, 5), (40, 30), (8, 4, 3, 3), (0, 2), ()
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


def set_gradients(params, seed, bad=None):
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if i == bad:
            p.grad.view(-1)[-1] = torch.nan


def plain(kind, params, **more):
    make, _, options = TORCHS[kind]
    return make([{"params": params, "orthogonal": False}], lr=0.01, **options, **more)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_and_state_are_torchs_to_the_last_bit(kind, dtype, decay):
    ours, theirs = weights(dtype), weights(dtype)
    optimizer = plain(kind, ours, weight_decay=decay)
    _, torchs, options = TORCHS[kind]
    twin = torchs(theirs, lr=0.01, weight_decay=decay, **options)
    for k in range(6):
        for params in (ours, theirs):
            set_gradients(params, k)
        optimizer.step()
        twin.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for name, value in twin.state[q].items():
            if value is not None:
                assert torch.equal(optimizer.state[p][name], value)


@each_kind
@pytest.mark.parametrize("bad", range(5))
def test_a_weight_with_a_bad_gradient_stays_alone(kind, bad):
    ours, others = weights(), weights()
    optimizer, good = plain(kind, ours), plain(kind, others)
    for k in range(4):
        set_gradients(ours, k, bad if k == 2 else None)
        set_gradients(others, k)
        if k == 2:
            others[bad].grad = None
        optimizer.step()
        good.step()
    assert optimizer.skipped_steps() == 1
    for p, q in zip(ours, others, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [kind for kind in TORCHS if kind != "sgd"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_state_that_is_loaded_is_looked_at(kind, value):
    params = weights()
    optimizer = plain(kind, params)
    for k in range(3):
        set_gradients(params, k)
        optimizer.step()
    name = next(
        (n for n in ("exp_avg", "momentum_buffer") if n in optimizer.state[params[3]]), None
    )
    if name is None:
        return
    optimizer.state[params[3]][name] = torch.full_like(params[3], value)
    before = [p.detach().clone() for p in params]
    set_gradients(params, 3)
    optimizer.step()
    assert optimizer.skipped_steps() == 1
    moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True)]
    assert moved == [True, True, True, False, True, False, True]


@each_kind
def test_gradients_of_any_layout(kind):
    """torch's fused steps on the CPU take the memory of all tensors as it lies."""
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    G = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for layout in (lambda G: G.clone(), lambda G: G.mT.contiguous().mT):
        p = nn.Parameter(start.clone())
        optimizer = plain(kind, [p])
        for k in range(3):
            p.grad = layout(G.mT * (k + 1))
            optimizer.step()
        p.grad = torch.ones(1).expand(6, 4) if len(results) else torch.ones(6, 4)
        optimizer.step()
        results.append(p.detach().clone())
    assert torch.equal(*results)
