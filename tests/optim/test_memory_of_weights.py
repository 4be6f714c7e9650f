"""Weights that cannot be stepped are refused before anything has moved, whenever they come."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ortholand as ol

OPTIMIZERS = (
    lambda params, **options: ol.LandingSGD(params, lr=0.1, momentum=0.9, **options),
    lambda params, **options: ol.LandingSGD(params, lr=0.1, **options),
    lambda params, **options: ol.LandingAdam(params, lr=0.1, **options),
    lambda params, **options: ol.LandingMuon(params, lr=0.1, **options),
    lambda params, **options: ol.RiemannianSGD(params, lr=0.1, **options),
    lambda params, **options: ol.PLAM(params, lr=0.1, **options),
    lambda params, **options: ol.PenaltySGD(params, lr=0.1, **options),
)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS)
OVERLAPPING = {
    "expanded": lambda: torch.eye(3).expand(4, 3, 3),
    "expanded inside": lambda: torch.eye(1).expand(4, 3, 1),
    "Hankel": lambda: torch.rand(5).as_strided((3, 3), (1, 1)),
    "shifted": lambda: torch.rand(20).as_strided((4, 3), (2, 1)),
    "shifted stack": lambda: torch.rand(20).as_strided((3, 2, 2), (3, 2, 1)),
    "interleaved": lambda: torch.rand(20).as_strided((4, 2), (2, 4)),
}
APART = {
    "transposed": lambda: torch.eye(3).mT,
    "with gaps": lambda: torch.eye(6)[::2, ::2],
    "interleaved": lambda: torch.zeros(20).as_strided((3, 2), (2, 3)),
    "one row": lambda: torch.ones(1).expand(1, 1),
}


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("memory", OVERLAPPING)
@every_optimizer
def test_overlapping_entries_are_refused_at_construction(make, memory, orthogonal):
    p = nn.Parameter(OVERLAPPING[memory]())
    with pytest.raises(ValueError, match=r"memory of its own.*share some.*clone\(\)"):
        make([p], view="kernel", orthogonal=orthogonal)


@pytest.mark.parametrize("memory", APART)
def test_entries_apart_are_accepted(memory):
    p = nn.Parameter(APART[memory]())
    optimizer = ol.PenaltySGD([p], lr=0.1)
    p.grad = torch.ones(p.shape)
    optimizer.step()
    assert optimizer.skipped_steps() == 0


def check_error_moves_nothing(optimizer, match, kind=ValueError):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    states = copy.deepcopy([optimizer.state[p] for p in params])
    with pytest.raises(kind, match=match):
        optimizer.step()
    assert all(torch.equal(p, X) for p, X in zip(params, before, strict=True))
    for p, state in zip(params, states, strict=True):
        assert all(torch.equal(optimizer.state[p][name], state[name]) for name in state)


def stepped(make, orthogonal, **options):
    first, second = (nn.Parameter(ol.random_orthogonal(4, 4, seed=k)) for k in range(2))
    vector = nn.Parameter(torch.ones(3))
    groups = [
        {"params": [first]},
        {"params": [vector], "orthogonal": False},
        {"params": [second], "orthogonal": orthogonal},
    ]
    optimizer = make(groups, **options)
    for p in (first, second, vector):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    return optimizer, second


@pytest.mark.parametrize("orthogonal", [True, False])
@every_optimizer
def test_weight_that_becomes_expanded(make, orthogonal):
    optimizer, p = stepped(make, orthogonal)
    p.data = torch.full((4, 1), 0.5).expand(4, 4)
    check_error_moves_nothing(optimizer, "share some")


@pytest.mark.parametrize("orthogonal", [True, False])
@every_optimizer
def test_state_that_becomes_expanded(make, orthogonal):
    """Torch's operations cannot write to it. (Compiled code steps a copy, which is kept.)"""
    optimizer, p = stepped(make, orthogonal, foreach=True)
    buffers = [name for name, value in optimizer.state[p].items() if value.shape == p.shape]
    for name in buffers:
        optimizer.state[p][name] = torch.zeros(1).expand(4, 4)
    if buffers:
        check_error_moves_nothing(optimizer, "share some")


@pytest.mark.parametrize("count", [1, 2])
def test_conjugated_weights_step_as_others(count):
    X = ol.random_orthogonal(6, 3, seed=0, dtype=torch.complex64).conj()
    start, weights = X.resolve_conj(), [nn.Parameter(X), nn.Parameter(X.resolve_conj())]
    assert weights[0].is_conj()
    for weight in weights:
        group = [weight, *(nn.Parameter(weight.detach().clone()) for _ in range(count - 1))]
        for p in group:
            p.grad = torch.ones(6, 3, dtype=torch.complex64)
        ol.LandingAdam(group, fused=False).step()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    assert (weights[0] - start).abs().max() > 0


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        (torch.empty(0, 6), ValueError, r"at least one entry, but .* has shape \(0, 6\)"),
        (torch.empty(6, 0), ValueError, r"at least one entry, but .* has shape \(6, 0\)"),
        (torch.ones(6), ValueError, r"at least 2 dimensions, but .* has shape \(6,\)"),
        (torch.tensor(1.0), ValueError, "at least 2 dimensions"),
    ],
    ids=["no rows", "no columns", "a vector", "a number"],
)
@every_optimizer
def test_weight_of_another_shape(make, data, kind, match):
    optimizer, p = stepped(make, orthogonal=True)
    optimizer.state.pop(p)
    p.data = data.clone()
    p.grad = torch.zeros_like(p)
    check_error_moves_nothing(optimizer, match, kind)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("make", OPTIMIZERS[:5])
def test_copies_check_weights_that_had_no_values(make, copied):
    """At their first step, like the optimizer that they were copied from."""
    p = nn.Parameter(torch.empty(4, 4, device="meta"))
    optimizer = make([p])
    p_with_values = nn.Parameter(3 * torch.eye(4))
    optimizer.param_groups[0]["params"][0] = p_with_values
    for each in (copied(optimizer), optimizer):
        (q,) = each.param_groups[0]["params"]
        q.grad = torch.ones(4, 4)
        with pytest.raises(ValueError, match="must start within"):
            each.step()
        with torch.no_grad():
            q.copy_(torch.eye(4))
        each.step()
        assert not copied(each)._awaits_values
