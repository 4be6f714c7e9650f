"""Where the optimizers meet what others do: autocast, casts, hooks, checkpoints, fakes, memory.

Run as a script it tries the scenarios that may end a process, each in a process of its own.
"""

import copy
import json
import math
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.adam import adam

import ortholand as ol
from ortholand.geometry import potential
from tests.optim.cases import Case, each_case

SHAPES = {
    "small": ((4, 4), "matrix"),
    "medium": ((40, 40), "matrix"),
    "large": ((150, 150), "matrix"),
    "tall": ((50, 8), "matrix"),
    "wide": ((8, 50), "matrix"),
    "stack": ((5, 3, 3), "kernel"),
    "conv": ((6, 2, 3, 3), "matrix"),
}
each_shape = pytest.mark.parametrize("name", SHAPES)
each_engine = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])

MOMENTUM = {"lr": 0.1, "momentum": 0.9}
METHODS = {
    "LandingSGD": (ol.LandingSGD, MOMENTUM),
    "LandingSGD-plain": (ol.LandingSGD, {"lr": 0.1}),
    "LandingSGD-decoupled": (ol.LandingSGD, {**MOMENTUM, "attraction": "decoupled"}),
    "LandingSGD-after": (ol.LandingSGD, {**MOMENTUM, "attraction": "after"}),
    "LandingAdam": (ol.LandingAdam, {"lr": 0.01}),
    "LandingMuon": (ol.LandingMuon, {"lr": 0.05}),
    "RiemannianSGD": (ol.RiemannianSGD, MOMENTUM),
    "PLAM": (ol.PLAM, {**MOMENTUM, "lr": 0.01}),
    "PenaltySGD": (ol.PenaltySGD, {**MOMENTUM, "lr": 0.01}),
}
LANDING = [name for name in METHODS if name.startswith("Landing")]
each_method = pytest.mark.parametrize("method", METHODS)


def orthogonal(shape, view="matrix", dtype=torch.float32, seed=0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1000 + seed)
    return nn.Parameter(
        ol.orthogonalize_(torch.randn(shape, generator=generator, dtype=dtype), view=view)
    )


def group_of(name, dtype=torch.float32, seed=0, **options) -> dict:
    shape, view = SHAPES[name]
    return {"params": [orthogonal(shape, view, dtype, seed)], "view": view, **options}


def plain_group(dtype=torch.float32, **options) -> dict:
    generator = torch.Generator().manual_seed(9)
    params = [
        nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in ((6, 5), (7,))
    ]
    return {"params": params, "orthogonal": False, "weight_decay": 0.1, **options}


def mixed(dtype=torch.float32, names=("small", "tall", "wide", "stack")) -> list[dict]:
    return [*(group_of(name, dtype, seed=i) for i, name in enumerate(names)), plain_group(dtype)]


def make(method, groups, **options) -> torch.optim.Optimizer:
    optimizer, defaults = METHODS[method]
    return optimizer(groups, **{**defaults, **options})


def parameters(optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer, seed, scale=1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters(optimizer):
        kind = torch.complex64 if p.is_complex() else torch.float32
        p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=kind)).to(p.dtype)


def run(optimizer, steps, first_seed=0, scale=1.0) -> None:
    for k in range(steps):
        set_gradients(optimizer, first_seed + k, scale)
        optimizer.step()


def everything(optimizer) -> tuple[list[torch.Tensor], list[dict]]:
    """Copies of the weights and their states."""
    weights = [p.detach().clone() for p in parameters(optimizer)]
    return weights, [copy.deepcopy(optimizer.state.get(p, {})) for p in parameters(optimizer)]


def assert_equal(one, other, but=()) -> None:
    (weights, states), (other_weights, other_states) = one, other
    for a, b in zip(weights, other_weights, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    for a, b in zip(states, other_states, strict=True):
        assert a.keys() - set(but) == b.keys() - set(but)
        for name in a.keys() - set(but):
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name], b[name]), name


def distance(p, view="matrix") -> float:
    """The largest ||X^H X - I||_2 of the matrices of a weight, in double precision."""
    exact = torch.complex128 if p.is_complex() else torch.float64
    return ol.orthogonality_error(p.detach().to(exact), view=view, spectral=True)


# Autocast


AUTOCAST = [
    *((method, name) for method in METHODS for name in ("stack", "medium", "large")),
    *((method, name) for method in METHODS for name in ("tall 300", "wide 300", "plain")),
    ("LandingSGD", "512"),
]
AUTOCAST_SHAPES = {
    "512": ((512, 512), "matrix"),
    "tall 300": ((300, 20), "matrix"),
    "wide 300": ((20, 300), "matrix"),
}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(("method", "name"), AUTOCAST)
def test_a_step_under_autocast_is_the_step_without_bit_for_bit(method, name):
    def start():
        if name == "plain":
            return make(method, [plain_group()])
        shape, view = {**SHAPES, **AUTOCAST_SHAPES}[name]
        return make(method, [{"params": [orthogonal(shape, view)], "view": view}])

    inside, outside = start(), start()
    for k in range(3):
        for optimizer in (inside, outside):
            set_gradients(optimizer, k)
        with autocast():
            inside.step()
        outside.step()
    assert_equal(everything(inside), everything(outside))


@each_method
def test_many_weights_step_under_autocast_as_without(method):
    """Batches of small weights take other ways than single ones."""
    inside, outside = make(method, mixed()), make(method, mixed())
    with autocast():
        run(inside, 3)
    run(outside, 3)
    assert_equal(everything(inside), everything(outside))


@pytest.mark.parametrize("name", ["small", "large", "tall", "wide", "stack"])
def test_projection_and_error_are_the_same_under_autocast(name):
    shape, view = SHAPES[name]
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    inside, outside = start.clone(), start.clone()
    with autocast():
        before = ol.orthogonality_error(start, view=view)
        ol.orthogonalize_(inside, view=view)
        after = ol.orthogonality_error(inside, view=view)
    assert before == ol.orthogonality_error(start, view=view)
    ol.orthogonalize_(outside, view=view)
    assert torch.equal(inside, outside)
    assert after == ol.orthogonality_error(outside, view=view) < 1e-4


@each_method
def test_a_closure_computes_under_the_autocast_that_step_was_called_in(method):
    optimizer = make(method, [group_of("small")])
    (X,) = parameters(optimizer)
    data = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    seen = []

    def closure():
        optimizer.zero_grad()
        output = X @ data
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), output.dtype))
        loss = output.float().square().sum() + output[0, 0]
        loss.backward()
        return loss

    with autocast():
        expected = closure()
        result = optimizer.step(closure)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(True, True, torch.bfloat16)] * 2
    assert torch.equal(result, expected)
    assert not torch.equal(X, orthogonal((4, 4)))


# Another type, shape or view


CASTS = {
    **{name: ("LandingSGD", name) for name in SHAPES},
    "after": ("LandingSGD-after", "medium"),
    **{f"LandingAdam-{name}": ("LandingAdam", name) for name in SHAPES},
    **{f"LandingMuon-{name}": ("LandingMuon", name) for name in SHAPES},
    "RiemannianSGD": ("RiemannianSGD", "tall"),
    "PLAM": ("PLAM", "small"),
    "plain SGD": ("LandingSGD", None),
    "plain Adam": ("LandingAdam", None),
}


def in_type(optimizer, dtype) -> torch.optim.Optimizer:
    """The same optimizer with copies of its weights and states in another type."""
    groups = [
        {**group, "params": [nn.Parameter(p.detach().to(dtype)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin = type(optimizer)(groups)
    for p, q in zip(parameters(optimizer), parameters(twin), strict=True):
        twin.state[q] = {
            key: value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
            for key, value in optimizer.state[p].items()
        }
    return twin


@pytest.mark.parametrize("case", CASTS)
def test_a_weight_cast_in_mid_run_takes_its_state_with_it(case):
    method, name = CASTS[case]
    optimizer = make(method, [plain_group() if name is None else group_of(name)])
    run(optimizer, 3)
    for dtype in (torch.float64, torch.float32):
        twin = in_type(optimizer, dtype)
        for p in parameters(optimizer):
            p.grad = None
            p.data = p.data.to(dtype)
        for k in range(3):
            set_gradients(optimizer, 100 + k)
            set_gradients(twin, 100 + k)
            optimizer.step()
            twin.step()
        tolerance = 100 * torch.finfo(dtype).eps
        for p, q in zip(parameters(optimizer), parameters(twin), strict=True):
            assert p.dtype == dtype
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                assert key not in twin.state[q] or optimizer.state[p][key].dtype == dtype
        assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("method", ["LandingSGD", "LandingSGD-after", "LandingAdam", "LandingMuon"])
def test_a_model_cast_there_and_back_goes_on_training(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    groups = ol.orthogonalize_(ol.param_groups(model, nn.Linear))
    optimizer = make(method, groups)
    for cast in (model.float, model.double, model.float, model.half, model.double):
        cast()
        dtype = model[0].weight.dtype
        before = everything(optimizer)[0]
        for k in range(3):
            data = torch.randn(8, 6, generator=torch.Generator().manual_seed(k)).to(dtype)
            optimizer.zero_grad()
            model(data).square().sum().backward()
            optimizer.step()
        for p, old in zip(parameters(optimizer), before, strict=True):
            assert p.dtype == dtype
            assert not torch.equal(p, old)
        state = optimizer.state[model[0].weight]
        buffer = state["exp_avg" if method == "LandingAdam" else "momentum_buffer"]
        assert buffer.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        room = 0.05 if dtype == torch.float16 else 1e-5
        assert ol.orthogonality_error(optimizer, spectral=True) <= 0.5 * (1 + room)
    assert optimizer.skipped_steps() == 0


def named(method, name, **options) -> torch.optim.Optimizer:
    """Three good weights around one of the shape in question."""
    shape, view = SHAPES[name]
    groups = [
        {"params": [("first.weight", orthogonal((4, 4)))]},
        {"params": [("second.weight", orthogonal(shape, view))], "view": view},
        {"params": [("third.weight", orthogonal((9, 3)))]},
        {"params": [("bias", nn.Parameter(torch.ones(5)))], "orthogonal": False},
    ]
    return make(method, groups, **options)


def assert_refused_before_anything_changed(optimizer, name, *words) -> None:
    weights, states = everything(optimizer)
    with pytest.raises(ValueError, match=name) as caught:
        optimizer.step()
    for word in words:
        assert word in str(caught.value)
    for p, weight, before in zip(parameters(optimizer), weights, states, strict=True):
        assert torch.equal(p, weight)
        for key, value in optimizer.state[p].items():
            # State may have been made ready, as zeros, but none may have changed.
            assert torch.equal(value, before[key]) if key in before else not value.any()


def moved_out_of_the_way(shape):
    """Another shape of weight, in every dimension."""
    return tuple(size + 1 for size in shape)


@each_engine
@each_shape
def test_a_state_of_another_shape_is_refused_by_name_with_both_shapes(name, fused):
    shape, _ = SHAPES[name]
    optimizer = named("LandingSGD", name, fused=fused)
    run(optimizer, 2)
    set_gradients(optimizer, 5)
    optimizer.state[parameters(optimizer)[1]]["momentum_buffer"] = torch.zeros(2, 2)
    assert_refused_before_anything_changed(optimizer, "second.weight", "(2, 2)", str(shape))


@each_engine
@each_shape
def test_an_adam_state_of_another_shape_is_refused_by_name(name, fused):
    for key in ("exp_avg", "exp_avg_sq", "step"):
        optimizer = named("LandingAdam", name, fused=fused)
        run(optimizer, 2)
        set_gradients(optimizer, 5)
        optimizer.state[parameters(optimizer)[1]][key] = torch.zeros(7, 2)
        assert_refused_before_anything_changed(optimizer, "second.weight", "(7, 2)")


@pytest.mark.parametrize("method", ["LandingSGD", "LandingAdam", "LandingMuon"])
def test_a_plain_state_of_another_shape_is_refused_by_name(method):
    optimizer = named(method, "small")
    run(optimizer, 2)
    set_gradients(optimizer, 5)
    key = "exp_avg" if method == "LandingAdam" else "momentum_buffer"
    optimizer.state[parameters(optimizer)[3]][key] = torch.zeros(2, 2)
    assert_refused_before_anything_changed(optimizer, "bias", "(2, 2)", "(5,)")


@each_engine
@each_shape
def test_a_weight_of_another_shape_than_its_state_is_refused_by_name(name, fused):
    shape, view = SHAPES[name]
    other = moved_out_of_the_way(shape)
    optimizer = named("LandingSGD", name, fused=fused)
    run(optimizer, 2)
    weight = parameters(optimizer)[1]
    weight.grad = None
    weight.data = orthogonal(other, view).data
    set_gradients(optimizer, 5)
    assert_refused_before_anything_changed(optimizer, "second.weight", str(shape), str(other))


@each_shape
def test_a_gradient_of_another_shape_is_refused_by_name(name):
    shape, view = SHAPES[name]
    for method in ("LandingSGD-plain", "LandingSGD", "LandingAdam", "RiemannianSGD", "PLAM"):
        optimizer = named(method, name)
        set_gradients(optimizer, 5)
        weight = parameters(optimizer)[1]
        weight.data = orthogonal(moved_out_of_the_way(shape), view).data
        assert_refused_before_anything_changed(optimizer, "second.weight", str(shape))


def test_a_plain_gradient_of_another_shape_is_refused_by_name():
    for fits_by_broadcasting in (True, False):
        optimizer = named("LandingSGD", "small")
        set_gradients(optimizer, 5)
        bias = parameters(optimizer)[3]
        bias.data = torch.ones(3, 5) if fits_by_broadcasting else torch.ones(4)
        assert_refused_before_anything_changed(optimizer, "bias", "(5,)")


@pytest.mark.parametrize("method", ["LandingSGD", "LandingAdam", "LandingMuon", "RiemannianSGD"])
@pytest.mark.parametrize(("view", "other"), [("matrix", "kernel"), ("kernel", "matrix")])
def test_another_view_in_mid_run_is_refused(method, view, other):
    X = orthogonal((6, 2, 3, 3), view)
    optimizer = make(method, [{"params": [("conv.weight", X)], "view": view}])
    run(optimizer, 2)
    set_gradients(optimizer, 5)
    optimizer.param_groups[0]["view"] = other
    assert_refused_before_anything_changed(optimizer, "view")


# Checkpoints


@pytest.mark.parametrize("method", ["LandingSGD", "LandingAdam", "LandingMuon", "RiemannianSGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_of_a_float64_run_is_loaded_in_working_precision(method, dtype):
    source = make(method, mixed(torch.float64))
    run(source, 3)
    target, expected = make(method, mixed(dtype)), make(method, mixed(dtype))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for p, q, r in zip(*map(parameters, (source, target, expected)), strict=True):
        is_plain = any(p is member for member in source.param_groups[-1]["params"])
        for key, value in source.state[p].items():
            loaded = target.state[q][key]
            if not value.is_floating_point():
                assert torch.equal(loaded, value)
                assert loaded.dtype == value.dtype
            elif not is_plain:
                assert loaded.dtype == torch.float32
                assert torch.equal(loaded, value.float())
            elif key != "step":
                assert loaded.dtype in (torch.float32, dtype)
        # What the state should be, put there by hand.
        expected.state[r] = {key: value.clone() for key, value in target.state[q].items()}
    run(target, 3, first_seed=50)
    run(expected, 3, first_seed=50)
    assert_equal(everything(target), everything(expected))
    assert target.skipped_steps() == 0


@pytest.mark.parametrize("method", ["LandingSGD", "LandingAdam", "LandingMuon"])
def test_a_checkpoint_of_a_float32_run_is_loaded_into_a_float64_one(method):
    source, target = make(method, mixed()), make(method, mixed(torch.float64))
    run(source, 3)
    target.load_state_dict(source.state_dict())
    for p, q in zip(parameters(source), parameters(target), strict=True):
        key = "exp_avg" if "exp_avg" in source.state[p] else "momentum_buffer"
        assert target.state[q][key].dtype == torch.float64
        assert torch.equal(target.state[q][key], source.state[p][key].double())
    run(target, 3, first_seed=50)
    assert target.skipped_steps() == 0
    assert ol.orthogonality_error(target, spectral=True) <= 0.5


BUFFER = {"LandingSGD": "momentum_buffer", "LandingAdam": "exp_avg"}


def halved(states, key) -> dict:
    return {i: {**state, key: state[key] / 2} for i, state in states.items()}


def pre_hooks(key):
    """The ways in which a hook may change what is loaded."""

    def returns_another(optimizer, state_dict):
        return {**state_dict, "state": halved(state_dict["state"], key)}

    def replaces_the_states(optimizer, state_dict):
        state_dict["state"] = halved(state_dict["state"], key)

    def replaces_the_tensors(optimizer, state_dict):
        for state in state_dict["state"].values():
            state[key] = state[key] / 2

    def writes_to_the_tensors(optimizer, state_dict):
        for state in state_dict["state"].values():
            state[key].mul_(0.5)

    return [returns_another, replaces_the_states, replaces_the_tensors, writes_to_the_tensors]


@pytest.mark.parametrize("method", BUFFER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", range(4))
def test_what_a_hook_does_to_a_state_dict_before_loading_is_loaded(method, dtype, way):
    key = BUFFER[method]
    hook = pre_hooks(key)[way]
    source, target = make(method, mixed(dtype)), make(method, mixed(dtype))
    run(source, 3)
    handle = target.register_load_state_dict_pre_hook(hook)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for p, q in zip(parameters(source), parameters(target), strict=True):
        assert target.state[q][key].dtype == source.state[p][key].dtype
        assert torch.equal(target.state[q][key], source.state[p][key] / 2)
    handle.remove()
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert_equal(([], everything(target)[1]), ([], everything(source)[1]))


@pytest.mark.parametrize("method", BUFFER)
def test_a_hook_may_load_groups_in_another_order(method):
    key = BUFFER[method]
    groups = [group_of("small", seed=i) for i in range(3)]
    source, target = make(method, groups), make(method, [group_of("small") for _ in range(3)])
    run(source, 2)

    def turns_round(optimizer, state_dict):
        return {**state_dict, "param_groups": state_dict["param_groups"][::-1]}

    target.register_load_state_dict_pre_hook(turns_round)
    target.load_state_dict(source.state_dict())
    for p, q in zip(parameters(source), reversed(parameters(target)), strict=True):
        assert torch.equal(source.state[p][key], target.state[q][key])


@pytest.mark.parametrize("method", BUFFER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_hook_does_to_the_state_after_loading_stays(method, dtype, in_place):
    key = BUFFER[method]
    source, target = make(method, mixed(dtype)), make(method, mixed(dtype))
    run(source, 3)

    def post_hook(optimizer):
        for state in optimizer.state.values():
            if in_place:
                state[key].zero_()
            else:
                state[key] = torch.zeros_like(state[key])

    handle = target.register_load_state_dict_post_hook(post_hook)
    target.load_state_dict(source.state_dict())
    for p, q in zip(parameters(source), parameters(target), strict=True):
        assert source.state[p][key].any()
        assert not target.state[q][key].any()
        assert target.state[q][key].dtype == source.state[p][key].dtype
    handle.remove()
    target.load_state_dict(source.state_dict())
    assert_equal(([], everything(target)[1]), ([], everything(source)[1]))


@pytest.mark.parametrize("method", BUFFER)
def test_hooks_of_state_dict_act_until_they_are_removed(method):
    optimizer = make(method, mixed())
    run(optimizer, 2)
    calls = []

    def post_hook(optimizer, state_dict):
        return {**state_dict, "note": "kept"}

    handles = [
        optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("before")),
        optimizer.register_state_dict_post_hook(post_hook),
        optimizer.register_state_dict_post_hook(lambda o, s: calls.append("after")),
    ]
    saved = optimizer.state_dict()
    assert saved["note"] == "kept"
    assert calls == ["before", "after"]
    other = make(method, mixed())
    other.load_state_dict(saved)
    assert_equal(([], everything(other)[1]), ([], everything(optimizer)[1]))
    for handle in handles:
        handle.remove()
    assert "note" not in optimizer.state_dict()
    assert calls == ["before", "after"]


FOREIGN = {
    "small": ((4, 4), "matrix", torch.float32),
    "float64": ((4, 4), "matrix", torch.float64),
    "complex": ((4, 4), "matrix", torch.complex64),
    "medium": ((40, 40), "matrix", torch.float32),
    "large": ((150, 150), "matrix", torch.float32),
    "stack": ((5, 3, 3), "kernel", torch.float32),
    "conv": ((4, 2, 3, 3), "kernel", torch.float32),
    "square conv": ((18, 2, 3, 3), "matrix", torch.float32),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_euclidean_momentum_becomes_the_skew_matrix_that_it_stands_for(name):
    shape, view, dtype = FOREIGN[name]
    X = orthogonal(shape, view, dtype)
    foreign = torch.optim.SGD([nn.Parameter(X.detach().clone())], lr=0.1, momentum=0.9)
    run(foreign, 3)
    (M,) = (state["momentum_buffer"] for state in foreign.state.values())
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, view=view)
    optimizer.load_state_dict(foreign.state_dict())
    size = math.isqrt(X[0].numel() * X.shape[0]) if view == "matrix" else shape[-1]
    A, M, Y = (t.detach().reshape(-1, size, size) for t in (buffer_of(optimizer), M, X))
    assert torch.equal(A, -A.mH)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    psi = M.to(exact) @ Y.to(exact).mH
    torch.testing.assert_close(A.to(exact), (psi - psi.mH) / 2, rtol=1e-4, atol=1e-5)
    for k in range(50):
        set_gradients(optimizer, k, scale=1e3)
        optimizer.step()
        assert distance(X, view) <= 0.5 * (1 + 1e-5)
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("share", [1e-4, 1e-2])
def test_a_buffer_counts_as_skew_only_if_it_is_nearly(share):
    X = nn.Parameter(ol.random_orthogonal(6, 6, seed=0, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9)
    X.grad = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    saved = optimizer.state_dict()
    A = saved["state"][0]["momentum_buffer"].clone()
    B = A + share * torch.linalg.matrix_norm(A) * torch.eye(6) / 6**0.5
    saved["state"][0]["momentum_buffer"] = B
    optimizer.load_state_dict(saved)
    assert torch.equal(buffer_of(optimizer), B) == (share < 1e-3)


def buffer_of(optimizer) -> torch.Tensor:
    (state,) = optimizer.state.values()
    return state["momentum_buffer"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_momentum_of_our_own_is_loaded_bit_for_bit_wherever_the_weight_is(name):
    shape, view, dtype = FOREIGN[name]
    first = ol.LandingSGD([orthogonal(shape, view, dtype)], momentum=0.9, lr=0.1, view=view)
    second = ol.LandingSGD(
        [orthogonal(shape, view, dtype, seed=5)], momentum=0.9, lr=0.1, view=view
    )
    run(first, 4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(buffer_of(first), buffer_of(second))


# Learning rates


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("method", ["LandingSGD", "LandingAdam", "LandingMuon"])
def test_a_bad_lr_set_in_mid_run_is_refused_before_anything_changes(method, lr, fused):
    rule = "lr must be at least 0" if lr == -0.1 else "lr must be finite"
    for name in SHAPES:
        optimizer = named(method, name, fused=fused)
        run(optimizer, 2)
        set_gradients(optimizer, 5)
        optimizer.param_groups[1]["lr"] = lr  # not the first group that steps
        before = everything(optimizer)
        with pytest.raises(ValueError, match=rule):
            optimizer.step()
        assert_equal(everything(optimizer), before)
        optimizer.param_groups[1]["lr"] = 0.1
        optimizer.step()
        assert not torch.equal(parameters(optimizer)[1], before[0][1])


@each_case
@pytest.mark.parametrize("lr", [math.nan, -0.1])
def test_every_optimizer_refuses_a_bad_lr_in_mid_run(case: Case, lr):
    optimizer = case(mixed())
    run(optimizer, 2)
    for group in (0, -1):
        optimizer.param_groups[group]["lr"], good = lr, optimizer.param_groups[group]["lr"]
        set_gradients(optimizer, 5)
        before = everything(optimizer)
        with pytest.raises(ValueError, match="lr must be"):
            optimizer.step()
        assert_equal(everything(optimizer), before)
        optimizer.param_groups[group]["lr"] = good


@each_method
@pytest.mark.parametrize("bad", [math.nan, -0.1, -math.inf], ids=str)
def test_a_tensor_lr_gone_bad_moves_nothing_and_is_counted(method, bad):
    for name in SHAPES:
        lr = torch.tensor(0.1)
        optimizer = make(method, [group_of(name)], lr=lr)
        assert_nothing_moves_and_is_counted(optimizer, lr, bad, 5 if name == "stack" else 1)
        if method in LANDING:
            assert ol.orthogonality_error(optimizer, spectral=True) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("method", ["LandingSGD", "LandingAdam", "PLAM"])
@pytest.mark.parametrize("bad", [math.nan, -0.1, -math.inf], ids=str)
def test_a_tensor_lr_gone_bad_moves_nothing_in_plain_groups_either(method, bad):
    lr = torch.tensor(0.1)
    assert_nothing_moves_and_is_counted(make(method, [plain_group()], lr=lr), lr, bad, 2)


def assert_nothing_moves_and_is_counted(optimizer, lr, bad, count) -> None:
    run(optimizer, 2)
    before = everything(optimizer)
    assert optimizer.skipped_steps() == 0
    lr.fill_(bad)
    run(optimizer, 3, first_seed=20)
    assert_equal(everything(optimizer), before, but=("skipped",))
    assert optimizer.skipped_steps() == 3 * count
    lr.fill_(0.01)
    run(optimizer, 1)
    assert optimizer.skipped_steps() == 3 * count
    for p, old in zip(parameters(optimizer), before[0], strict=True):
        assert not torch.equal(p, old)


@each_case
def test_an_lr_of_one_entry_in_a_vector_is_a_number(case: Case):
    names = ("small", "medium", "large", "tall", "wide", "stack", "conv")
    vector, scalar, number = (
        case(mixed(names=names), lr=lr) for lr in (torch.tensor([0.1]), torch.tensor(0.1), 0.1)
    )
    for optimizer in (vector, scalar, number):
        run(optimizer, 3, scale=0.1)
    for p, q, r in zip(*map(parameters, (vector, scalar, number)), strict=True):
        assert p.shape == q.shape
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        torch.testing.assert_close(p, r, rtol=1e-5, atol=2e-5)
    assert vector.skipped_steps() == 0


@each_case
def test_an_lr_of_one_entry_in_a_vector_serves_a_single_weight(case: Case):
    """One weight steps as it is, not as a batch."""
    for name in (*SHAPES, "plain"):
        vector, number = (
            case([plain_group() if name == "plain" else group_of(name)], lr=lr)
            for lr in (torch.tensor([0.1]), 0.1)
        )
        run(vector, 2, scale=0.1)
        run(number, 2, scale=0.1)
        for p, q in zip(parameters(vector), parameters(number), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-5)


# Adam's eps


def adam_without_eps():
    """A gradient with a zero entry and adam_eps=0: 0 / 0."""
    p = nn.Parameter(torch.arange(1.0, 5.0))
    q = nn.Parameter(torch.ones(3))
    optimizer = ol.LandingAdam(
        [{"params": [p, q], "orthogonal": False}], lr=0.1, adam_eps=0.0, weight_decay=0.1
    )
    p.grad, q.grad = torch.tensor([1.0, 0.0, 2.0, -1.0]), torch.ones(3)
    optimizer.step()
    assert torch.equal(p, torch.arange(1.0, 5.0))
    assert not torch.equal(q, torch.ones(3))
    assert optimizer.skipped_steps() == 1
    p.grad = torch.ones(4)
    optimizer.step()
    twin = nn.Parameter(torch.arange(1.0, 5.0))
    twin.grad = torch.ones(4)
    torch.optim.AdamW([twin], lr=0.1, eps=0.0, weight_decay=0.1).step()
    torch.testing.assert_close(p, twin)  # as if the step not taken had never been
    assert optimizer.skipped_steps() == 1


def adam_with_a_tiny_eps():
    """Gradients of all sizes, zeros among them, whose squares vanish."""
    for eps in (0.0, 1e-38, 1e-30):
        p = nn.Parameter(torch.ones(200))
        X = orthogonal((4, 4))
        optimizer = ol.LandingAdam(
            [{"params": [p], "orthogonal": False}, {"params": [X]}], lr=0.1, adam_eps=eps
        )
        generator = torch.Generator().manual_seed(0)
        for k in range(100):
            decades = -44 * torch.rand(200, generator=generator)
            p.grad = torch.randn(200, generator=generator) * 10**decades
            p.grad[:k] = 0.0
            X.grad = 10.0 ** (-k / 2) * torch.ones(4, 4) if k % 3 else torch.zeros(4, 4)
            with warnings.catch_warnings():  # for eps = 0 no step will do, and that is said
                warnings.simplefilter("ignore", UserWarning)
                optimizer.step()
            assert torch.isfinite(p).all()
            assert torch.isfinite(X).all()
            for state in optimizer.state.values():
                assert all(torch.isfinite(value).all() for value in state.values())
        assert distance(X) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("check", [adam_without_eps, adam_with_a_tiny_eps])
def test_an_eps_of_adam_too_small_never_gives_what_is_not_finite(check):
    check()


# The edge of the ball


def at_the_edge(eps) -> nn.Parameter:
    """A float32 weight further away than eps by rounding, 3e-7 of it."""
    n = 16
    X = torch.eye(n) * math.sqrt(1 + eps)
    k = 0
    while distance(X) <= eps * (1 + 2e-7):
        entry = X[k % n, k % n]
        entry.copy_(torch.nextafter(entry, torch.tensor(2.0)))
        k += 1
    assert distance(X) <= eps * (1 + 4e-7)
    return nn.Parameter(X)


@pytest.mark.parametrize("method", LANDING)
def test_a_weight_left_at_the_edge_by_rounding_is_taken_up_again(method):
    X = at_the_edge(0.5)
    optimizer = make(method, [X], eps=0.5)
    run(optimizer, 5)
    assert optimizer.skipped_steps() == 0
    assert distance(X) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("method", LANDING)
def test_a_weight_beyond_the_edge_is_refused(method):
    X = nn.Parameter(torch.eye(16) * math.sqrt(1 + 0.5 * 1.01))
    assert distance(X) == pytest.approx(0.505, rel=1e-6)
    with pytest.raises(ValueError, match=r"distance 0\.505"):
        make(method, [X], eps=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lam", [1.0, 0.1])
@pytest.mark.parametrize("method", ["LandingSGD-plain", "LandingSGD"])
def test_a_run_that_ended_at_the_edge_can_be_resumed(method, lam, dtype):
    for shape, view in (
        ((200, 2, 2), "kernel"),
        ((200, 3, 3), "kernel"),
        ((30, 4, 4), "kernel"),
        ((40, 40), "matrix"),
        ((60, 20), "matrix"),
    ):
        group = {"params": [orthogonal(shape, view, dtype)], "view": view, "lr": 10.0, "lam": lam}
        first = make(method, [group])
        with warnings.catch_warnings():  # where rounding leaves no room for a step, that is said
            warnings.simplefilter("ignore", UserWarning)
            run(first, 100, scale=300.0)
        second = make(method, [group])
        second.load_state_dict(first.state_dict())
        run(second, 3, first_seed=500)


# torch 2.6


def adam_of_torch_2_6(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    foreach=None,
    capturable=False,
    differentiable=False,
    fused=None,
    grad_scale=None,
    found_inf=None,
    has_complex=False,
    *,
    amsgrad,
    beta1,
    beta2,
    lr,
    weight_decay,
    eps,
    maximize,
):
    adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        foreach=foreach,
        capturable=capturable,
        differentiable=differentiable,
        fused=fused,
        grad_scale=grad_scale,
        found_inf=found_inf,
        has_complex=has_complex,
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )


@pytest.mark.parametrize("lr", [0.03, torch.tensor(0.03)], ids=["number", "tensor"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_plain_adam_does_with_the_function_that_torch_2_6_has(
    monkeypatch, lr, decoupled, weight_decay, maximize
):
    monkeypatch.setattr("ortholand.optim.plain.adam", adam_of_torch_2_6)
    ours, theirs = plain_group()["params"], plain_group()["params"]
    options = {"fused": False, "lr": lr, "weight_decay": weight_decay, "maximize": maximize}
    optimizer = ol.LandingAdam(
        ours, orthogonal=False, decoupled_weight_decay=decoupled, betas=(0.8, 0.95), **options
    )
    twin_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    twin = twin_class(theirs, betas=(0.8, 0.95), **options)
    run(optimizer, 5)
    run(twin, 5)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], twin.state[q][key])


def test_decoupled_decay_of_torch_2_6_is_taken_back_with_the_step(monkeypatch):
    monkeypatch.setattr("ortholand.optim.plain.adam", adam_of_torch_2_6)
    p = nn.Parameter(torch.ones(3))
    optimizer = ol.LandingAdam([p], lr=0.1, weight_decay=0.5, orthogonal=False)
    p.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert torch.equal(p, torch.ones(3))
    assert optimizer.skipped_steps() == 1


# Weights without values


@each_case
def test_weights_without_values_are_checked_when_they_first_step(case: Case, monkeypatch):
    # As it is for DTensors: parameters get values rather than being replaced.
    monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", True)
    for shape, view in SHAPES.values():
        with torch.device("meta"):
            model = nn.ParameterDict({"weight": nn.Parameter(torch.empty(shape))})
        optimizer = case([{"params": list(model.named_parameters()), "view": view}])
        model.to_empty(device="cpu")
        weight = model["weight"]
        assert parameters(optimizer)[0] is weight
        nn.init.constant_(weight, 3.0)
        weight.grad = torch.ones(shape)
        if case.radius < math.inf:
            with pytest.raises(ValueError, match="'weight' of shape"):
                optimizer.step()
            assert (weight == 3).all()
        start = orthogonal(shape, view).detach()
        with torch.no_grad():
            weight.copy_(start)
        set_gradients(optimizer, 0)
        optimizer.step()
        assert not torch.equal(weight, start)
        assert optimizer.skipped_steps() == 0


# The other view


def refusal(case, groups) -> str:
    with pytest.raises(ValueError, match="must start within") as caught:
        case(groups)
    return str(caught.value)


def names_view(message, view) -> bool:
    return f'view="{view}"' in message or f"view='{view}'" in message


@each_case
@pytest.mark.parametrize(("given", "meant"), [("matrix", "kernel"), ("kernel", "matrix")])
def test_a_weight_orthogonal_in_the_other_view_is_refused_with_that_view(case, given, meant):
    if case.radius == math.inf:
        pytest.skip("starts anywhere")
    for shape in ((7, 3, 3), (2, 5, 4, 4), (6, 5, 2), (1, 3, 3)):
        X = orthogonal(shape, meant)
        options = {} if given == "matrix" else {"view": given}
        message = refusal(case, [{"params": [("conv.weight", X)], **options}])
        assert "conv.weight" in message
        assert names_view(message, meant)
        assert "project it first" not in message.lower()
        case([{"params": [X], "view": meant}])


@each_case
def test_a_weight_orthogonal_in_neither_view_is_to_be_projected(case):
    if case.radius == math.inf:
        pytest.skip("starts anywhere")
    message = refusal(case, [nn.Parameter(torch.ones(7, 3, 3))])
    assert "orthogonalize_" in message


# What may end a process: tried in processes of their own


def fake_tensors():
    """What is computed under a FakeTensorMode leaves nothing fake behind."""
    shapes = ((7, 3), (3, 3), (5, 4, 4), (150, 150), (20, 6))
    with FakeTensorMode():
        for shape in shapes:
            X, G = torch.empty(shape), torch.empty(shape)
            assert isinstance(ol.distance(X), FakeTensor)
            assert isinstance(ol.landing_field(X, G), FakeTensor)
            potential(X)
            ol.safe_step_size(ol.landing_field(X, G), ol.distance(X))
            for method in METHODS:
                try:
                    p = nn.Parameter(X)
                    optimizer = make(method, [p], view="kernel")
                    p.grad = G
                    optimizer.step()
                except Exception:  # fake weights have no distance to be checked
                    continue
    for shape in shapes:
        X, G = ol.random_orthogonal(*shape, seed=0), torch.ones(shape)
        for result in (ol.distance(X), ol.landing_field(X, G), potential(X)):
            assert type(result) is torch.Tensor
            assert torch.isfinite(result).all()
        assert ol.distance(X).max() < 1e-4
        p = nn.Parameter(X.clone())
        p.grad = G
        for method in METHODS:
            optimizer = make(method, [p], view="kernel")
            optimizer.step()
            assert type(p.data) is torch.Tensor
            assert optimizer.skipped_steps() == 0
            ol.orthogonalize_(p, view="kernel")


REFUSALS = (ValueError, TypeError, RuntimeError)


def lying(change):
    """A scenario: ``change(p, state, q, state_of_q)`` does something to p, and what it means to q.

    The next step of p is then that of q, or is refused.
    """

    def scenario():
        for name in ("small", "large", "tall", "stack"):
            for method in ("LandingSGD", "LandingAdam", "RiemannianSGD"):
                for fused in (None, False) if method in LANDING else (None,):
                    options = {"fused": fused} if method in LANDING else {}
                    optimizer = make(method, [group_of(name)], **options)
                    twin = make(method, [group_of(name)], **options)
                    run(optimizer, 2)
                    run(twin, 2)
                    set_gradients(optimizer, 7)
                    set_gradients(twin, 7)
                    (p,), (q,) = parameters(optimizer), parameters(twin)
                    change(p, optimizer.state[p], q, twin.state[q])
                    try:
                        optimizer.step()
                    except REFUSALS:
                        continue
                    twin.step()
                    run(optimizer, 1, first_seed=9)
                    run(twin, 1, first_seed=9)
                    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
                    assert optimizer.skipped_steps() == twin.skipped_steps()

    return scenario


def buffers(state) -> list[str]:
    return [key for key in ("momentum_buffer", "exp_avg") if key in state]


def expand_gradient(p, state, q, state_of_q):
    p.grad = torch.tensor(0.25).expand(p.shape)
    q.grad = torch.full(q.shape, 0.25)


def expand_rows_of_gradient(p, state, q, state_of_q):
    row = torch.arange(float(p.shape[-1]))
    p.grad = row.expand(p.shape)
    q.grad = row.expand(q.shape).contiguous()


def transpose_states(p, state, q, state_of_q):
    for key in buffers(state):
        state[key] = state[key].mT.contiguous().mT


def slice_states(p, state, q, state_of_q):
    for key in buffers(state):
        every_second = torch.zeros(*p.shape[:-1], 2 * p.shape[-1])[..., ::2]
        state[key] = every_second.copy_(state[key])


def round_states(p, state, q, state_of_q):
    for key in buffers(state):
        state[key] = state[key].half()
        state_of_q[key].copy_(state[key])


def free(tensor):
    tensor.untyped_storage().resize_(0)


def free_states(p, state, q, state_of_q):
    for value in state.values():
        free(value)


def free_gradient(p, state, q, state_of_q):
    free(p.grad)


def free_weight(p, state, q, state_of_q):
    free(p.data)


def halve_counts(p, state, q, state_of_q):
    """A count of half the bytes, and a step to be counted."""
    state["skipped"] = torch.zeros((), dtype=torch.int32)
    p.grad.fill_(math.nan)
    q.grad.fill_(math.nan)


def foreign_adam_state():
    """A checkpoint of torch's AdamW: its second moment is of the weight's shape."""
    for name in SHAPES:
        group = group_of(name)
        foreign = torch.optim.AdamW([nn.Parameter(group["params"][0].detach().clone())], lr=0.01)
        run(foreign, 3)
        for fused in (None, False):
            optimizer = make("LandingAdam", [group_of(name)], fused=fused)
            try:
                optimizer.load_state_dict(foreign.state_dict())
                run(optimizer, 2)
            except REFUSALS:
                continue
            assert ol.orthogonality_error(optimizer, spectral=True) <= 0.5 * (1 + 1e-5)


def without_compiled_code(check):
    def scenario():
        os.environ["ORTHOLAND_NATIVE"] = "0"  # early enough: this process has stepped nothing yet
        check()

    return scenario


SCENARIOS = {
    "fake tensors": fake_tensors,
    "expanded gradient": lying(expand_gradient),
    "expanded rows of a gradient": lying(expand_rows_of_gradient),
    "transposed states": lying(transpose_states),
    "sliced states": lying(slice_states),
    "freed states": lying(free_states),
    "freed gradient": lying(free_gradient),
    "freed weight": lying(free_weight),
    "counts of another type": lying(halve_counts),
    "states of another type": lying(round_states),
    "state of torch's AdamW": foreign_adam_state,
    "Adam without eps, nothing compiled": without_compiled_code(adam_without_eps),
    "Adam with a tiny eps, nothing compiled": without_compiled_code(adam_with_a_tiny_eps),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_nothing_ends_a_process_and_all_is_right_in_one_of_its_own():
    finished = subprocess.run(
        [sys.executable, "-m", "tests.optim.test_seams"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert finished.returncode == 0, finished.stderr
    outcomes = json.loads(finished.stdout)
    assert outcomes.keys() == SCENARIOS.keys()
    assert {name: answer for name, answer in outcomes.items() if answer != "right"} == {}


def outcome_in_a_process_of_its_own(scenario) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            scenario()
            answer = "right"
        except BaseException:
            answer = traceback.format_exc()
        with os.fdopen(writer, "w") as stream:
            stream.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    return answer or f"the process died: {os.waitstatus_to_exitcode(status)}"


def test_rates_may_be_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    X, Y = (nn.Parameter(ol.random_orthogonal(4, 4, seed=0)) for _ in range(2))
    optimizers = ol.LandingSGD([X], lr=np.float32(0.125)), ol.LandingSGD([Y], lr=0.125)
    for optimizer, weight in zip(optimizers, (X, Y), strict=True):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = np.float64(0.25)
        optimizer.step()
    assert torch.equal(X, Y)


if __name__ == "__main__":
    import torch._dynamo  # once, not in each of the processes

    torch.set_num_threads(1)
    found = {
        name: outcome_in_a_process_of_its_own(scenario) for name, scenario in SCENARIOS.items()
    }
    json.dump(found, sys.stdout)
