"""A step depends on no default that is set around it: device, type, modes, number of threads."""

import contextlib

import pytest
import torch
from torch import nn

import ortholand as ol

CPU = torch.device("cpu")


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic(fill):
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


AMBIENTS = {
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "deterministic": lambda: deterministic(fill=False),
    "deterministic, filled": lambda: deterministic(fill=True),
}
OPTIMIZERS = {
    "sgd": lambda groups: ol.LandingSGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "sgd reference": lambda groups: ol.LandingSGD(groups, lr=0.1, momentum=0.9, fused=False),
    "sgd batches": lambda groups: ol.LandingSGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "sgd limited": lambda groups: ol.LandingSGD(groups, lr=10.0, safe_step="spectral"),
    "sgd decoupled": lambda groups: ol.LandingSGD(groups, lr=0.1, attraction="decoupled"),
    "sgd after": lambda groups: ol.LandingSGD(groups, lr=0.1, attraction="after"),
    "sgd tensor": lambda groups: ol.LandingSGD(
        groups, lr=torch.tensor(0.1, device="cpu", dtype=torch.float64), momentum=0.5
    ),
    "adam": lambda groups: ol.LandingAdam(groups, lr=0.05),
    "adam reference": lambda groups: ol.LandingAdam(groups, lr=0.05, fused=False),
    "adam coupled": lambda groups: ol.LandingAdam(groups, lr=0.05, attraction="coupled"),
    "muon": lambda groups: ol.LandingMuon(groups, lr=0.05),
    **{
        retraction: lambda groups, retraction=retraction: ol.RiemannianSGD(
            groups, lr=0.1, momentum=0.9, retraction=retraction
        )
        for retraction in ("exponential", "polar", "cayley", "qr")
    },
    "plam": lambda groups: ol.PLAM(groups, lr=0.01, momentum=0.9),
    "penalty": lambda groups: ol.PenaltySGD(groups, lr=0.01),
}
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def shaped(shape, dtype, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    data = torch.randn(shape, generator=generator, dtype=torch.complex128, device="cpu")
    data = data if dtype.is_complex else data.real
    if len(shape) < 2:
        return data.to(dtype)
    flat = data.flatten(1) if len(shape) == 4 else data
    factors = torch.linalg.svd(flat, full_matrices=False)
    return (factors[0] @ factors[2]).reshape(shape).to(dtype)


def scene(dtype, large):
    """Weights, plain and orthogonal, and gradients, in several memory layouts."""
    shapes = [(130, 130), (140, 131)] if large else [(5, 5), (5, 5), (9, 4), (40, 3), (3, 7)]
    weights = [shaped(shape, dtype, k) for k, shape in enumerate(shapes)]
    weights[-1] = weights[-1].mT.contiguous().mT
    if not large:
        convolution = shaped((4, 3, 3, 3), dtype, 6)
        weights.append(convolution.contiguous(memory_format=torch.channels_last))
        weights.append(shaped((8, 6), dtype, 7).mT)
    gradients = [
        [shaped(W.shape, dtype, 10 * k + i + 100) for i, W in enumerate(weights)] for k in range(3)
    ]
    kernels = [] if large else [shaped((6, 4, 4), dtype, 8), 2 * shaped((5, 3), dtype, 9)]
    plain = [shaped((5,), dtype, 11)]
    return weights, kernels, plain, gradients


def made(make, weights, kernels, plain):
    groups = [
        {"params": [nn.Parameter(W.clone()) for W in weights]},
        {"params": [nn.Parameter(W.clone()) for W in kernels[:1]], "view": "kernel"},
        {"params": [nn.Parameter(W.clone()) for W in kernels[1:]], "scale": 2.0},
        {"params": [nn.Parameter(W.clone()) for W in plain], "orthogonal": False},
    ]
    return make([group for group in groups if group["params"]])


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer, gradients):
    for i, p in enumerate(parameters(optimizer)):
        G = gradients[i] if i < len(gradients) else p.detach().roll(1, 0)
        p.grad = G.clone(memory_format=torch.contiguous_format)
    optimizer.step()


def everything(optimizer):
    values = []
    for p in parameters(optimizer):
        values.append(p.detach())
        values += [optimizer.state[p][name] for name in sorted(optimizer.state[p])]
    assert all(value.device == CPU for value in values)
    return [value.clone() for value in values]


def run(make, scene, ambient):
    """All that a user does, some of it under the ambient default."""
    *tensors, gradients = scene
    optimizer = made(make, *tensors)
    others = [made(make, *tensors) for _ in range(2)]
    step(optimizer, gradients[0])
    for state in optimizer.state.values():  # as another program may have laid them out
        state.update({name: value.contiguous() for name, value in state.items()})
    with ambient():
        step(optimizer, gradients[1])
        for other in others:  # also a first step, and one after loading
            step(other, gradients[0])
        others[0].load_state_dict(optimizer.state_dict())
        step(others[0], gradients[2])
        error = ol.orthogonality_error(optimizer)
        ol.orthogonalize_(others[1].param_groups)
    for each in (optimizer, *others):  # what was made under the default serves without it
        step(each, gradients[2])
    values = [value for each in (optimizer, *others) for value in everything(each)]
    return values, error, optimizer.skipped_steps(), optimizer.limited_steps()


@contextlib.contextmanager
def several(*names):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(AMBIENTS[name]())
        yield


def everything_at_once():
    return several("deterministic, filled", "float64", "inference mode", "device meta")


def others_at_once():
    return several("bfloat16", "no grad", "default device meta")


def assert_same(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("ambient", AMBIENTS)
@pytest.mark.parametrize("method", ["sgd", "sgd reference", "adam", "muon"])
def test_no_default_matters(method, ambient):
    data = scene(torch.float32, large=False)
    expected = run(OPTIMIZERS[method], data, contextlib.nullcontext)
    assert_same(run(OPTIMIZERS[method], data, AMBIENTS[ambient]), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_no_combination_matters(method, dtype):
    data = scene(dtype, large=False)
    expected = run(OPTIMIZERS[method], data, contextlib.nullcontext)
    for ambient in (everything_at_once, others_at_once):
        assert_same(run(OPTIMIZERS[method], data, ambient), expected)


@pytest.mark.parametrize("method", [m for m in OPTIMIZERS if m.startswith(("sgd", "adam"))])
def test_no_default_matters_to_large_matrices(method):
    data = scene(torch.float64, large=True)
    expected = run(OPTIMIZERS[method], data, contextlib.nullcontext)
    assert_same(run(OPTIMIZERS[method], data, everything_at_once), expected)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("method", ["sgd", "sgd reference", "adam", "muon"])
def test_threads_matter_only_by_rounding(method, large):
    data = scene(torch.float64, large)
    one, three = (run(OPTIMIZERS[method], data, lambda n=n: threads(n)) for n in (1, 3))
    for found, expected in zip(three[0], one[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert three[2:] == one[2:]


def test_state_of_python_numbers_is_loaded_on_the_cpu():
    """torch once counted Adam's steps in Python's numbers, and keeps such counts on the host."""
    optimizer = ol.LandingAdam([nn.Parameter(torch.ones(3))], orthogonal=False)
    (p,) = parameters(optimizer)
    step(optimizer, [])
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 1
    with torch.device("meta"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"].device == CPU
    step(optimizer, [])
    assert optimizer.state[p]["step"] == 2


def test_closure_in_inference_mode():
    """It can differentiate, because a step leaves inference mode."""
    p = nn.Parameter(ol.random_orthogonal(4, 2, seed=0))
    optimizer = ol.LandingSGD([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p[0].sum()
        loss.backward()
        return loss

    before, calls = p.detach().clone(), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        optimizer.step(closure)
    assert not torch.equal(p, before)
    assert calls == [1]


def test_weights_made_in_inference_mode_step_there():
    with torch.inference_mode():
        p = nn.Parameter(ol.random_orthogonal(4, 2, seed=0))
        optimizer = ol.LandingSGD([p], lr=0.1, momentum=0.9)
        before = p.clone()
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert not torch.equal(p, before)
