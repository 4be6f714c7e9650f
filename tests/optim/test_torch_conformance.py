"""What torch asks of its own optimizers: inputs, errors, hooks, states, schedules."""

import copy
import io
import itertools
import math
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ortholand as ol

METHODS = {
    "LandingSGD": (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9}),
    "LandingAdam": (ol.LandingAdam, {"lr": 0.01}),
    "LandingMuon": (ol.LandingMuon, {"lr": 0.05}),
    "RiemannianSGD": (ol.RiemannianSGD, {"lr": 0.1, "momentum": 0.9}),
    "PLAM": (ol.PLAM, {"lr": 0.01, "momentum": 0.9}),
}
each_method = pytest.mark.parametrize("method", METHODS)
SHAPES = [((4, 4), "matrix"), ((7, 3), "matrix"), ((3, 7), "matrix"), ((5, 3, 3), "kernel")]


def groups(dtype=torch.float32) -> list[dict]:
    """Orthogonal weights and two plain parameters."""
    weights = [
        {"params": [nn.Parameter(ol.random_orthogonal(*shape, seed=i, dtype=dtype))], "view": view}
        for i, (shape, view) in enumerate(SHAPES)
    ]
    generator = torch.Generator().manual_seed(50)
    plain = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in ((3, 4), (5,))]
    return [*weights, {"params": plain, "orthogonal": False, "weight_decay": 0.1}]


def make(method, params=None, **options) -> torch.optim.Optimizer:
    optimizer, defaults = METHODS[method]
    return optimizer(groups() if params is None else params, **{**defaults, **options})


def parameters(optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator, dtype=_wide(p)).to(p.dtype)


def _wide(p) -> torch.dtype:
    return torch.complex128 if p.is_complex() else torch.float64


def run(optimizer, steps, first_seed=100) -> None:
    for k in range(steps):
        set_gradients(optimizer, first_seed + k)
        optimizer.step()


def weights_of(optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters(optimizer)]


def assert_same_weights(one, other) -> None:
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(p, q)


def assert_same_states(one, other) -> None:
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert one.state[p].keys() == other.state[q].keys()
        for name, value in one.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name])


def options_of(optimizer) -> list[dict]:
    """The options of each group. torch adds one when it loads: ``differentiable``."""
    return [
        {k: v for k, v in group.items() if k not in ("params", "differentiable")}
        for group in optimizer.param_groups
    ]


# torch's own inputs


ASK_TORCH = """
import sys, types, unittest
import torch

def stand_in(name, **content):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)

# Modules that only torch's own tests need: a package of theirs, and a table of all operators.
stand_in("expecttest", TestCase=unittest.TestCase)
stand_in("torch.testing._internal.common_methods_invocations", DecorateInfo=lambda *a, **k: None)
from torch.testing._internal import common_optimizers as common

def told(entry):
    return {"params": entry.params, "kwargs": entry.kwargs, "desc": entry.desc}

def inputs(name):
    function = getattr(common, f"optim_inputs_func_{name}")
    return [told(entry) for entry in function(device="cpu", dtype=torch.float32)]

def errors(name):
    function = getattr(common, f"optim_error_inputs_func_{name}")
    return [
        {**told(entry.optimizer_error_input), "error": entry.error_type.__name__}
        for entry in function("cpu", torch.float32)
    ]

answer = {
    name: {"inputs": inputs(name), "errors": errors(name)} for name in ("sgd", "adamw", "adam")
}
torch.save(answer, sys.stdout.buffer)
"""


@pytest.fixture(scope="module")
def torchs_own() -> dict:
    """The inputs and bad inputs that torch tests SGD and Adam with.

    Asked for in another process: what torch's tests import switches global flags of torch.
    """
    command = [sys.executable, "-W", "ignore", "-c", ASK_TORCH]
    finished = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr.decode()
    told = torch.load(io.BytesIO(finished.stdout), weights_only=False)
    return {**told, "muon": told["adamw"]}


TWINS = {
    "sgd": (ol.LandingSGD, torch.optim.SGD),
    "adamw": (ol.LandingAdam, torch.optim.AdamW),
    "adam": (ol.LandingAdam, torch.optim.Adam),
    "muon": (ol.LandingMuon, torch.optim.AdamW),
}
each_twin = pytest.mark.parametrize("name", TWINS)
NOT_OURS = {"amsgrad", "capturable", "differentiable"}


def model_parameters() -> list[nn.Parameter]:
    """Matrices, vectors, a number, an empty one, several types, complex ones among them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(10, 4), (4,), (), (2, 3, 3), (0,)]
    types = [torch.float32, torch.float64, torch.complex64, torch.complex128]
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for dtype, shape in itertools.product(types, shapes)
    ]


def ours(name, params, options) -> torch.optim.Optimizer:
    """Our optimizer with the options that torch's one of that name is given."""
    options = {"adam_eps" if key == "eps" else key: value for key, value in options.items()}
    if name != "sgd":
        options = {"weight_decay": 0.0 if name == "adam" else 0.01, **options}
        options["decoupled_weight_decay"] = name != "adam"
    return TWINS[name][0](params, orthogonal=False, **options)


@each_twin
@pytest.mark.parametrize("foreach", [None, True, False])
def test_plain_groups_step_as_torch_does_on_torchs_own_inputs(name, foreach, torchs_own):
    tried = 0
    for entry in torchs_own[name]["inputs"]:
        options = entry["kwargs"]
        tensor_lr = isinstance(options.get("lr"), torch.Tensor)
        if NOT_OURS & options.keys() or (tensor_lr and foreach):
            continue
        one = ours(name, model_parameters(), {**copy.deepcopy(options), "foreach": foreach})
        twin = TWINS[name][1](model_parameters(), foreach=foreach, **copy.deepcopy(options))
        run(one, 5)
        run(twin, 5)
        for p, q in zip(parameters(one), parameters(twin), strict=True):
            assert torch.equal(p, q), entry["desc"]
        assert one.skipped_steps() == 0
        tried += 1
    assert tried >= (4 if name != "sgd" else 8)


@each_twin
def test_torchs_own_inputs_as_group_options(name, torchs_own):
    """All of them at once, a group for each."""
    entries = [entry["kwargs"] for entry in torchs_own[name]["inputs"]]
    entries = [options for options in entries if not NOT_OURS & options.keys()]

    def in_groups(key_of_eps):
        return [
            {
                "params": model_parameters(),
                **{key_of_eps if k == "eps" else k: v for k, v in copy.deepcopy(options).items()},
            }
            for options in entries
        ]

    one = ours(name, in_groups("adam_eps"), {})
    twin = TWINS[name][1](in_groups("eps"))
    run(one, 3)
    run(twin, 3)
    assert_same_weights(one, twin)


# Limits of torch's ways to compute rather than mistakes: refused here too, or done right.
LIMITS = ("foreach", "both floats or both Tensors")


@each_twin
def test_torchs_own_errors_are_errors_here(name, torchs_own):
    refused = 0
    for entry in torchs_own[name]["errors"]:
        params = entry["params"]
        if params is None:
            params = [nn.Parameter(torch.ones(2, 2))]
        if any(word in entry["desc"] for word in LIMITS):
            continue
        if entry["error"] == "UserWarning":
            with pytest.warns(UserWarning, match="duplicate parameters"):
                ours(name, params, entry["kwargs"])
        else:
            with pytest.raises((ValueError, TypeError)) as caught:
                ours(name, params, entry["kwargs"])
            assert caught.typename in (entry["error"], "TypeError"), entry["desc"]
        refused += 1
    assert refused >= 7


@each_twin
def test_what_torch_refuses_for_its_ways_to_compute_is_refused_or_done_right(name, torchs_own):
    for entry in torchs_own[name]["errors"]:
        if not any(word in entry["desc"] for word in LIMITS):
            continue
        try:
            one = ours(name, model_parameters(), entry["kwargs"])
            run(one, 3)
        except (ValueError, TypeError):
            continue
        numbers = {
            key: float(value) if isinstance(value, torch.Tensor) else value
            for key, value in entry["kwargs"].items()
        }
        if "betas" in numbers:
            numbers["betas"] = tuple(float(beta) for beta in numbers["betas"])
        twin = TWINS[name][1](model_parameters(), **numbers)
        run(twin, 3)
        for p, q in zip(parameters(one), parameters(twin), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@each_twin
def test_plain_states_are_exchanged_with_torch_both_ways(name):
    options = {"momentum": 0.9} if name == "sgd" else {}
    one = ours(name, model_parameters(), {"lr": 0.01, **options})
    twin = TWINS[name][1](model_parameters(), lr=0.01, **options)
    for source, target in ((twin, one), (one, twin)):
        run(source, 3)
        run(target, 2)
        state = copy.deepcopy(source.state_dict()["state"])
        target.load_state_dict({**target.state_dict(), "state": state})
        with torch.no_grad():
            for p, q in zip(parameters(source), parameters(target), strict=True):
                q.copy_(p)
        run(source, 3, first_seed=200)
        run(target, 3, first_seed=200)
        assert_same_weights(source, target)


# How parameters are handed over


@each_method
def test_every_way_to_hand_over_parameters(method):
    def start():
        return [nn.Parameter(ol.random_orthogonal(4, 4, seed=i)) for i in range(2)]

    ways = {
        "list": lambda p: p,
        "tuple": tuple,
        "iterator": iter,
        "generator": lambda p: (member for member in p),
        "dictionary's values": lambda p: dict(enumerate(p)).values(),
        "named": lambda p: [(f"w{i}", member) for i, member in enumerate(p)],
        "named, from a generator": lambda p: ((f"w{i}", member) for i, member in enumerate(p)),
        "one group": lambda p: [{"params": p}],
        "groups": lambda p: [{"params": member} for member in p],
        "groups from a generator": lambda p: ({"params": member} for member in p),
        "group of a generator": lambda p: [{"params": (member for member in p)}],
        "named groups": lambda p: [{"params": [(f"w{i}", m)]} for i, m in enumerate(p)],
        "ordered": lambda p: [OrderedDict(params=p)],
    }
    results = {}
    for name, way in ways.items():
        params = start()
        optimizer = make(method, way(params))
        run(optimizer, 2)
        results[name] = params
    for name, params in results.items():
        for p, q in zip(params, results["list"], strict=True):
            torch.testing.assert_close(p, q, msg=name)  # alone or in a batch: rounding


@each_method
def test_what_torch_refuses_as_parameters_is_refused(method):
    X = nn.Parameter(torch.eye(3))
    Y = nn.Parameter(torch.eye(3))
    with pytest.raises(ValueError, match="empty parameter list"):
        make(method, [])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        make(method, X)
    with pytest.raises(ValueError, match="more than one parameter group"):
        make(method, [{"params": [X]}, {"params": [X]}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        make(method, [X, X])
    with pytest.raises(ValueError, match="non-leaf"):
        make(method, [X * 1.0])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        make(method, [X, "Y"])
    with pytest.raises(TypeError, match="ordered collection"):
        make(method, [{"params": {X, Y}}])
    with pytest.raises(ValueError, match="with/without names"):
        make(method, [("x", X), Y])
    with pytest.raises(ValueError, match="with/without names"):
        make(method, [{"params": [X]}, {"params": [("y", Y)]}])
    with pytest.raises(TypeError):
        METHODS[method][0]([X], no_such_option=1)


@each_method
def test_frozen_leaves_and_unused_parameters_are_left_alone(method):
    optimizer = make(method)
    before = weights_of(optimizer)
    optimizer.step()
    for p, old in zip(parameters(optimizer), before, strict=True):
        assert torch.equal(p, old)
    frozen = nn.Parameter(torch.eye(3), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    run_without = parameters(optimizer)[:-1]
    for p in run_without:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(frozen, torch.eye(3))
    assert not torch.equal(parameters(optimizer)[0], before[0])


@each_method
def test_an_optimizer_can_be_printed(method):
    optimizer = make(method)
    text = repr(optimizer)
    assert method in text
    assert text.count("Parameter Group") == 5
    for name in ("lr", "orthogonal", "view", "weight_decay"):
        assert f"{name}: " in text


@each_method
def test_zero_grad_both_ways(method):
    optimizer = make(method)
    set_gradients(optimizer, 0)
    kept = [p.grad for p in parameters(optimizer)]
    optimizer.zero_grad(set_to_none=False)
    for p, grad in zip(parameters(optimizer), kept, strict=True):
        assert p.grad is grad
        assert not grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in parameters(optimizer))
    set_gradients(optimizer, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters(optimizer))


@each_method
def test_steps_go_the_right_way(method):
    """As torch does it: a quadratic comes down, a negated one goes up under maximize."""
    for maximize in (False, True):
        optimizer = make(method, maximize=maximize)
        target = [torch.zeros_like(p) for p in parameters(optimizer)]
        for p, goal in zip(parameters(optimizer), target, strict=True):
            if p.ndim > 1 and p.shape != (3, 4):
                view = "kernel" if p.ndim == 3 else "matrix"
                goal.copy_(ol.orthogonalize_(p.detach() + 0.3 * torch.cos(p.detach()), view=view))

        def loss(optimizer=optimizer, target=target, sign=-1 if maximize else 1):
            pairs = zip(parameters(optimizer), target, strict=True)
            return sign * sum((p - goal).square().sum() for p, goal in pairs)

        first = loss().item()
        for _ in range(50):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        assert loss().item() > first if maximize else loss().item() < first
        assert abs(loss().item()) < abs(first) / 2


@each_method
def test_a_closure_is_called_once_with_gradients_enabled(method):
    optimizer = make(method)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(p.square().sum() + p.sum() for p in parameters(optimizer))
        loss.backward()
        return loss

    before = weights_of(optimizer)
    with torch.no_grad():
        value = optimizer.step(closure)
    assert calls == [True]
    assert isinstance(value, torch.Tensor)
    assert optimizer.step(lambda: 7.5) == 7.5
    assert optimizer.step() is None
    assert all(not torch.equal(p, q) for p, q in zip(parameters(optimizer), before, strict=True))


# Hooks of a step


@each_method
def test_hooks_around_a_step(method):
    optimizer, calls = make(method), []
    set_gradients(optimizer, 0)
    before = weights_of(optimizer)

    def pre(hooked, args, kwargs):
        assert hooked is optimizer
        assert torch.equal(parameters(optimizer)[0], before[0])
        calls.append("pre")

    def post(hooked, args, kwargs):
        assert not torch.equal(parameters(optimizer)[0], before[0])
        calls.append("post")

    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
        optimizer.register_step_pre_hook(pre),
        optimizer.register_step_post_hook(post),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post", "global post"]
    optimizer.step()
    assert len(calls) == 4


@each_method
def test_a_hook_before_a_step_may_give_it_a_closure(method):
    optimizer = make(method)
    values = []

    def closure():
        values.append(1)
        return 3.0

    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, closure), {}))
    assert optimizer.step() == 3.0
    handle.remove()
    assert optimizer.step() is None
    assert values == [1]


@each_method
def test_a_hook_before_a_step_may_change_gradients_and_options(method):
    optimizer, twin = make(method), make(method)

    def pre(hooked, args, kwargs):
        for p in parameters(hooked):
            p.grad.mul_(2)
        for group in hooked.param_groups:
            group["lr"] = 0.005

    optimizer.register_step_pre_hook(pre)
    set_gradients(optimizer, 0)
    set_gradients(twin, 0)
    for p in parameters(twin):
        p.grad.mul_(2)
    for group in twin.param_groups:
        group["lr"] = 0.005
    optimizer.step()
    twin.step()
    assert_same_weights(optimizer, twin)


@each_method
def test_a_hook_after_a_step_may_change_weights(method):
    optimizer = make(method)
    optimizer.register_step_post_hook(lambda o, *_: ol.orthogonalize_(o))
    run(optimizer, 3)
    assert ol.orthogonality_error(optimizer) < 1e-5
    assert optimizer.skipped_steps() == 0


@each_method
def test_a_step_is_told_to_the_profiler(method):
    optimizer = make(method)
    set_gradients(optimizer, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert f"Optimizer.step#{method}.step" in names
    assert f"Optimizer.zero_grad#{method}.zero_grad" in names


# States


@each_method
def test_hooks_of_state_dicts_run_in_their_order(method):
    optimizer, calls = make(method), []
    run(optimizer, 1)
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("second"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda o, s: calls.append("fourth"))
    optimizer.register_state_dict_post_hook(lambda o, s: calls.append("third"), prepend=True)
    saved = optimizer.state_dict()
    assert calls == ["first", "second", "third", "fourth"]

    calls.clear()
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append("second"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("fourth"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("third"), prepend=True)
    optimizer.load_state_dict(saved)
    assert calls == ["first", "second", "third", "fourth"]


@each_method
def test_hooks_that_return_state_dicts_follow_one_another(method):
    optimizer = make(method)
    run(optimizer, 1)

    def with_lr(lr):
        def hook(hooked, state_dict):
            groups = [{**group, "lr": group["lr"] + lr} for group in state_dict["param_groups"]]
            return {**state_dict, "param_groups": groups}

        return hook

    optimizer.register_state_dict_post_hook(with_lr(1))
    optimizer.register_state_dict_post_hook(with_lr(2))
    lr = optimizer.param_groups[0]["lr"]
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == pytest.approx(lr + 3)
    optimizer.register_load_state_dict_pre_hook(with_lr(4))
    optimizer.register_load_state_dict_pre_hook(with_lr(8))
    optimizer.load_state_dict(saved)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([lr + 15] * 5)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 2
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 0


@each_method
def test_a_state_dict_is_deterministic_and_a_copy_of_it_resumes(method):
    first, second = make(method), make(method)
    run(first, 3)
    saved = copy.deepcopy(first.state_dict())
    again = first.state_dict()
    assert saved["param_groups"] == again["param_groups"]
    assert saved["state"].keys() == again["state"].keys() == set(range(6))
    with torch.no_grad():
        for p, q in zip(parameters(first), parameters(second), strict=True):
            q.copy_(p)
    second.load_state_dict(saved)
    assert_same_states(first, second)
    run(first, 3, first_seed=200)
    run(second, 3, first_seed=200)
    assert_same_weights(first, second)
    # The copy was not written to.
    assert all(
        torch.equal(saved["state"][i][name], value)
        for i in saved["state"]
        for name, value in copy.deepcopy(saved)["state"][i].items()
    )


@each_method
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_all_public_attributes_and_goes_on_alike(method, duplicate):
    optimizer = make(method)
    run(optimizer, 2)
    twin = duplicate(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public == {name for name in vars(twin) if not name.startswith("_")}
    assert options_of(twin) == options_of(optimizer)
    run(optimizer, 3, first_seed=200)
    run(twin, 3, first_seed=200)
    assert_same_weights(optimizer, twin)
    assert_same_states(optimizer, twin)


@each_method
def test_saving_and_loading_with_weights_only(method):
    first, second = make(method), make(method)
    run(first, 3)
    stream = io.BytesIO()
    torch.save(first.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    second.load_state_dict(loaded)
    assert_same_states(first, second)
    assert options_of(second) == options_of(first)


@each_method
def test_an_older_state_dict_loads(method):
    """One from a version that did not have some of the options yet."""
    first, second = make(method), make(method)
    run(first, 3)
    saved = copy.deepcopy(first.state_dict())
    old = ("params", "lr", "momentum", "betas", "orthogonal", "view", "weight_decay")
    saved["param_groups"] = [
        {name: group[name] for name in old if name in group} for group in saved["param_groups"]
    ]
    with torch.no_grad():
        for p, q in zip(parameters(first), parameters(second), strict=True):
            q.copy_(p)
    second.load_state_dict(saved)
    run(first, 2, first_seed=200)
    run(second, 2, first_seed=200)
    assert_same_weights(first, second)


def test_a_number_of_steps_that_is_no_tensor_loads():
    """As checkpoints of torch before 1.12 have it."""
    first = ol.LandingAdam(groups()[-1]["params"], lr=0.01, orthogonal=False)
    second = ol.LandingAdam(groups()[-1]["params"], lr=0.01, orthogonal=False)
    run(first, 3)
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    with torch.no_grad():
        for p, q in zip(parameters(first), parameters(second), strict=True):
            q.copy_(p)
    second.load_state_dict(saved)
    run(first, 2, first_seed=200)
    run(second, 2, first_seed=200)
    assert_same_weights(first, second)


@each_method
def test_a_state_dict_of_another_size_is_refused_and_changes_nothing(method):
    optimizer = make(method)
    run(optimizer, 2)
    twin = copy.deepcopy(optimizer)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="must have the optimizer's groups"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][1:]})
    shorter = copy.deepcopy(saved)
    shorter["param_groups"][-1]["params"].pop()
    with pytest.raises(ValueError, match="must have the optimizer's groups"):
        optimizer.load_state_dict(shorter)
    assert_same_states(optimizer, twin)
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


@each_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_state_of_other_types_loads_and_goes_on(method, dtype):
    source, target = make(method), make(method, groups(dtype))
    run(source, 3)
    target.load_state_dict(source.state_dict())
    run(target, 2)
    for p in parameters(target):
        assert p.dtype == dtype
        assert torch.isfinite(p).all()
    assert target.skipped_steps() == 0


def named(method, prefix) -> torch.optim.Optimizer:
    weights = [(f"{prefix}{i}", nn.Parameter(ol.random_orthogonal(4, 4, seed=i))) for i in range(3)]
    bias = (f"{prefix}bias", nn.Parameter(torch.ones(3)))
    return make(method, [{"params": weights}, {"params": [bias], "orthogonal": False}])


@each_method
def test_names_are_saved_and_loaded(method):
    first, second = named(method, "old."), named(method, "new.")
    run(first, 2)
    saved = first.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["old.0", "old.1", "old.2"]
    second.load_state_dict(saved)
    assert second.param_groups[0]["param_names"] == ["old.0", "old.1", "old.2"]
    assert_same_states(first, second)
    assert set(ol.orthogonality_error(second, reduce=None)) == {"old.0", "old.1", "old.2"}


@each_method
def test_a_state_without_names_leaves_names_as_they_are(method):
    first, second = named(method, "old."), named(method, "new.")
    run(first, 2)
    saved = copy.deepcopy(first.state_dict())
    for group in saved["param_groups"]:
        del group["param_names"]
    second.load_state_dict(saved)
    assert second.param_groups[0]["param_names"] == ["new.0", "new.1", "new.2"]
    assert_same_states(first, second)


@each_method
def test_a_hook_may_load_by_name(method):
    """The recipe of torch's documentation: weights in another order, matched by their names."""
    first, second = named(method, "w"), named(method, "w")
    run(first, 2)
    saved = copy.deepcopy(first.state_dict())
    group = saved["param_groups"][0]
    group["params"], group["param_names"] = group["params"][::-1], group["param_names"][::-1]

    def by_name(optimizer, state_dict):
        by = {
            name: i
            for group in state_dict["param_groups"]
            for name, i in zip(group["param_names"], group["params"], strict=True)
        }
        for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            theirs["param_names"] = list(mine["param_names"])
            theirs["params"] = [by[name] for name in mine["param_names"]]
        return state_dict

    second.register_load_state_dict_pre_hook(by_name)
    second.load_state_dict(saved)
    assert_same_states(first, second)


# Schedules


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.05, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "PowerLawLR": lambda o: ol.PowerLawLR(o, alpha=2 / 3),
}


def advance(scheduler) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


# SequentialLR steps its parts by an epoch, of which torch 2.6 warns.
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step:UserWarning")
@each_method
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_sets_the_lr_that_steps_use(method, schedule):
    """Step by step as if the lr had been given by hand, and the schedule is that of torch's SGD."""
    optimizer, by_hand = make(method), make(method)
    lr = optimizer.param_groups[0]["lr"]
    torchs = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
    scheduler, expected = SCHEDULES[schedule](optimizer), SCHEDULES[schedule](torchs)
    rates = []
    for k in range(7):
        rate = torchs.param_groups[0]["lr"]
        rates.append(rate)
        for group in by_hand.param_groups:
            group["lr"] = rate
        set_gradients(optimizer, k)
        set_gradients(by_hand, k)
        optimizer.step()
        by_hand.step()
        torchs.step()
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([rate] * 5)
        advance(scheduler)
        advance(expected)
    assert len(set(rates)) > 1
    for p, q in zip(parameters(optimizer), parameters(by_hand), strict=True):
        torch.testing.assert_close(p, q)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)


@pytest.mark.parametrize(
    ("method", "schedule", "cycled"),
    [
        *((name, one_cycle, "momentum") for name in ("LandingSGD", "RiemannianSGD", "PLAM")),
        *(
            (name, lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.05, 2), "momentum")
            for name in ("LandingSGD", "RiemannianSGD", "PLAM")
        ),
        ("LandingAdam", one_cycle, "betas"),
    ],
)
def test_schedules_may_cycle_the_momentum(method, schedule, cycled):
    optimizer, by_hand = make(method), make(method)
    scheduler = schedule(optimizer)
    seen = set()
    for k in range(6):
        for mine, other in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
            mine["lr"], mine[cycled] = other["lr"], other[cycled]
        seen.add(optimizer.param_groups[0][cycled])
        set_gradients(optimizer, k)
        set_gradients(by_hand, k)
        optimizer.step()
        by_hand.step()
        scheduler.step()
    assert len(seen) >= 3
    assert_same_weights(optimizer, by_hand)


@each_method
@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR", "CosineAnnealingLR"])
def test_schedules_fill_a_tensor_lr(method, schedule):
    optimizer = make(method, lr=torch.tensor(0.01))
    by_hand = make(method, lr=0.01)
    scheduler, expected = SCHEDULES[schedule](optimizer), SCHEDULES[schedule](by_hand)
    for k in range(6):
        set_gradients(optimizer, k)
        set_gradients(by_hand, k)
        optimizer.step()
        by_hand.step()
        advance(scheduler)
        advance(expected)
        for one, other in zip(optimizer.param_groups, by_hand.param_groups, strict=True):
            assert isinstance(one["lr"], torch.Tensor)
            assert math.isclose(float(one["lr"]), other["lr"], rel_tol=1e-5)
    for p, q in zip(parameters(optimizer), parameters(by_hand), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@each_method
def test_groups_keep_their_own_lr_under_a_schedule(method):
    orthogonal, plain = groups()[0], groups()[-1]
    optimizer = make(method, [{**orthogonal, "lr": 0.02}, {**plain, "lr": 0.2}])
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for k in range(3):
        set_gradients(optimizer, k)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0025, 0.025])


@each_method
def test_weights_averaged_by_swa_are_those_of_the_optimizer(method):
    model = nn.Linear(4, 4, bias=False)
    ol.orthogonalize_(model.weight)
    optimizer = make(method, [model.weight])
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.005)
    seen = []
    for k in range(3):
        set_gradients(optimizer, k)
        optimizer.step()
        averaged.update_parameters(model)
        scheduler.step()
        seen.append(model.weight.detach().clone())
    torch.testing.assert_close(averaged.module.weight, torch.stack(seen).mean(0))
