"""A step that finds everything as in the last one is quick, and the same as one that asks anew.

Whatever is done to weights, gradients, state and options between two steps must have the same
consequences, errors included, as where the quick way is closed.
"""

import copy

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.optim import engines, weights
from ortholand.optim.engines import compiled

METHODS = {
    "sgd": lambda groups: ol.LandingSGD(groups, lr=0.1),
    "momentum": lambda groups: ol.LandingSGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: ol.LandingAdam(groups, lr=0.01),
}
SHAPES = [(5, 5), (5, 5), (9, 4), (3, 7), (16, 16)]


def made(method, dtype=torch.float32):
    params = [nn.Parameter(ol.random_orthogonal(*shape, seed=3).to(dtype)) for shape in SHAPES]
    stack = nn.Parameter(torch.stack([ol.random_orthogonal(4, 4, seed=i) for i in range(6)]))
    stack.data = stack.data.to(dtype)
    return METHODS[method]([{"params": params}, {"params": [stack], "view": "kernel"}])


def set_gradients(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def first(optimizer):
    return optimizer.param_groups[0]["params"][0]


def all_weights(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.fixture
def prepared(monkeypatch):
    """The weights whose state was prepared: those that did not step in the quick way."""
    seen, prepare = [], weights.prepare_state

    def note(p, *arguments):
        seen.append(p)
        prepare(p, *arguments)

    monkeypatch.setattr("ortholand.optim.engines.prepare_state", note)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_the_second_step_asks_nothing_anew(method, prepared):
    optimizer = made(method)
    set_gradients(optimizer, 0)
    if engines.COMPILED.claim([], optimizer.plan(optimizer.param_groups[0]))[1]:
        pytest.skip("no compiled code")
    optimizer.step()
    assert len(prepared) == len(SHAPES) + 1
    for seed in range(1, 4):
        set_gradients(optimizer, seed)
        optimizer.step()
    assert len(prepared) == len(SHAPES) + 1
    first(optimizer).grad = None
    optimizer.step()
    set_gradients(optimizer, 9)
    optimizer.step()
    assert len(prepared) == len(SHAPES) + 1


def pop_state(o):
    o.state.pop(first(o))


def pop_one_state(o):
    o.state[first(o)].popitem()


def pop_counts(o):
    for name in ("skipped", "limited"):
        o.state[first(o)].pop(name)


def other_names_for_counts(o):
    state = o.state[first(o)]
    state["a"], state["b"] = state.pop("skipped"), state.pop("limited")


def add_state(o):
    o.state[first(o)]["of mine"] = 1


def state_in(change):
    def act(o):
        state = o.state[first(o)]
        for name, value in state.items():
            if name not in ("skipped", "limited"):
                state[name] = change(value)

    return act


def gradient(change):
    def act(o):
        first(o).grad = change(first(o).grad)

    return act


def of_another_type(o):
    p = first(o)
    p.grad = None
    p.data = p.data.double()
    p.grad = torch.ones_like(p)


def of_another_shape(o):
    p = first(o)
    p.grad = None
    p.data = ol.random_orthogonal(6, 6, seed=0)
    p.grad = torch.ones_like(p)


def transposed(o):
    first(o).data = first(o).data.mT


def free_weight(o):
    first(o).untyped_storage().resize_(0)


def cut_state(o):
    for value in o.state[first(o)].values():
        if value.ndim:
            value.untyped_storage().resize_(8)


def in_inference_mode(o):
    with torch.inference_mode():
        first(o).data = first(o).data.clone()


def override(o):
    kept = o.matrix_step
    o.matrix_step = lambda *arguments: kept(*arguments)


def one_weight_less(o):
    o.param_groups[0]["params"].pop(0)


def one_weight_more(o):
    p = nn.Parameter(ol.random_orthogonal(5, 5, seed=8))
    p.grad = torch.ones(5, 5)
    o.param_groups[0]["params"].append(p)


def another_weight(o):
    p = nn.Parameter(ol.random_orthogonal(5, 5, seed=8))
    p.grad = torch.ones(5, 5)
    o.param_groups[0]["params"][0] = p


def large_weight(o):
    p = nn.Parameter(ol.random_orthogonal(140, 140, seed=8))
    p.grad = torch.ones(140, 140)
    o.param_groups[0]["params"].append(p)


def set_option(name, value):
    def act(o):
        o.param_groups[0][name] = value

    return act


CHANGES = {
    "nothing": lambda _: None,
    "state popped": pop_state,
    "one state popped": pop_one_state,
    "counts popped": pop_counts,
    "counts renamed": other_names_for_counts,
    "state of mine": add_state,
    "state cleared": lambda o: o.state.clear(),
    "state double": state_in(lambda value: value.double()),
    "state flat": state_in(lambda value: value.reshape(1, -1)),
    "state transposed": state_in(lambda value: value.mT if value.ndim else value),
    "state negated": state_in(lambda value: torch._neg_view(value)),
    "state with offset": state_in(lambda value: torch.stack([value, value])[1]),
    "state cut": cut_state,
    "gradient None": gradient(lambda G: None),
    "gradient NaN": gradient(lambda G: G * torch.nan),
    "gradient huge": gradient(lambda G: G * 1e30),
    "gradient column-major": gradient(lambda G: G.mT.contiguous().mT),
    "gradient negated": gradient(lambda G: torch._neg_view(G)),
    "gradient freed": gradient(lambda G: (G.untyped_storage().resize_(0), G)[1]),
    "gradient a parameter": gradient(lambda G: nn.Parameter(G)),
    "type": of_another_type,
    "shape": of_another_shape,
    "layout": transposed,
    "freed": free_weight,
    "inference": in_inference_mode,
    "override": override,
    "less": one_weight_less,
    "more": one_weight_more,
    "another": another_weight,
    "large": large_weight,
    "lr": set_option("lr", 0.05),
    "lr negative": set_option("lr", -1.0),
    "lr tensor": set_option("lr", torch.tensor(0.05)),
    "fused": set_option("fused", False),
    "maximize": set_option("maximize", True),
    "scale": set_option("scale", 2.0),
}  # fmt: skip


def outcome(method, change, groups, seeds=6):
    """What has become of weights and state, and of the errors, step by step."""
    optimizer, seen = made(method), []
    del optimizer.param_groups[groups:]
    for seed in range(seeds):
        set_gradients(optimizer, seed)
        try:
            if seed == 3:
                change(optimizer)
            optimizer.step()
            seen.append(None)
        except (ValueError, TypeError, RuntimeError) as error:
            seen.append((type(error), str(error)))
            break
        if seed == 3:
            seen.append([p.detach().clone() for p in all_weights(optimizer)])
    states = [dict(optimizer.state.get(p, {})) for p in all_weights(optimizer)]
    return seen, all_weights(optimizer), states


def has_memory(x):
    return x.untyped_storage().nbytes() >= x.numel() * x.element_size()


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert has_memory(a) == has_memory(b)
        if not has_memory(a):
            return
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_changed_between_steps_counts(method, change, groups, monkeypatch):
    """One group is checked and stepped in one call, several are all checked first."""
    quick = outcome(method, CHANGES[change], groups)
    monkeypatch.setattr(compiled.CompiledEngine, "gathered", lambda *_: None)
    assert_same(quick, outcome(method, CHANGES[change], groups))


def test_an_error_in_one_group_leaves_the_others():
    optimizer = made("adam")
    set_gradients(optimizer, 0)
    optimizer.step()
    before = copy.deepcopy([p.data for p in all_weights(optimizer)])
    all_weights(optimizer)[-1].grad = torch.ones(6, 4, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert_same([p.data for p in all_weights(optimizer)], before)


def test_autograd_is_told_of_quick_steps():
    optimizer = made("momentum")
    X = first(optimizer)
    for seed in range(3):
        set_gradients(optimizer, seed)
        before, of_gradient = X._version, X.grad._version
        optimizer.step()
        assert X._version > before
        assert X.grad._version == of_gradient
    Y = (X**2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.backward()


@pytest.mark.parametrize("cut", [lambda G: G, lambda G: G.mT, lambda G: G[:, ::2]])
def test_memory_that_was_cut_is_refused_by_torchs_operations_too(cut):
    optimizer = ol.LandingSGD([nn.Parameter(torch.eye(6)[:, :3])], lr=0.1, fused=False)
    X = optimizer.param_groups[0]["params"][0]
    G = cut(torch.ones(6, 6))[:6, :3]
    X.grad = G
    optimizer.step()
    before = X.detach().clone()
    G.untyped_storage().resize_(60)
    with pytest.raises(ValueError, match="freed or cut"):
        optimizer.step()
    assert torch.equal(X, before)


def test_gradients_whose_entries_share_memory_are_whole():
    X = nn.Parameter(ol.random_orthogonal(4, 4, seed=0))
    optimizer = ol.LandingSGD([X], lr=0.1, fused=False)
    for G in (torch.ones(1).expand(4, 4), torch.arange(7.0).unfold(0, 4, 1)):
        before = X.detach().clone()
        X.grad = G
        optimizer.step()
        assert not torch.equal(X, before)
