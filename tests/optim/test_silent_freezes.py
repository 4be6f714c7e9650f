"""Nothing stands still in silence: mistakes are errors, what cannot step is counted and said."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ortholand as ol
from ortholand.optim import journal

SHAPES = {
    "small": ((4, 4), "matrix"),
    "medium": ((20, 20), "matrix"),
    "large": ((140, 140), "matrix"),
    "tall": ((50, 8), "matrix"),
    "wide": ((8, 50), "matrix"),
    "stack": ((5, 3, 3), "kernel"),
}
METHODS = {
    "coupled": (ol.LandingSGD, {"lr": 0.1}),
    "momentum": (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9}),
    "decoupled": (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9, "attraction": "decoupled"}),
    "after": (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9, "attraction": "after"}),
    "adam": (ol.LandingAdam, {"lr": 0.01}),
    "muon": (ol.LandingMuon, {"lr": 0.05}),
    "adam after": (ol.LandingAdam, {"lr": 0.01, "attraction": "after"}),
}
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_method = pytest.mark.parametrize("method", METHODS)
each_engine = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])


def landing(method, shape, **options) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An optimizer of one weight that is called "layer.weight"."""
    size, view = SHAPES[shape]
    generator = torch.Generator().manual_seed(1000)
    start = ol.orthogonalize_(torch.randn(size, generator=generator), view=view)
    make, defaults = METHODS[method]
    X = nn.Parameter(start)
    return make([("layer.weight", X)], view=view, **{**defaults, **options}), X


def matrices(shape) -> int:
    return 5 if shape == "stack" else 1


def steps(optimizer, count, gradient) -> list[str]:
    """The user warnings of so many steps with the gradients ``gradient(p, k)``."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(count):
            for p in params:
                p.grad = gradient(p, k)
            optimizer.step()
    assert all(issubclass(w.category, UserWarning) for w in caught)
    return [str(w.message) for w in caught]


def noise(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return lambda p, k: scale * torch.randn(p.shape, generator=generator).to(p.dtype)


def tells_what_is_wrong(message) -> bool:
    names = any(word in message for word in ("layer.weight", "frozen", "skipped"))
    return names and "orthogonalize_" in message


# Errors at construction


@pytest.mark.parametrize("shape", [(8, 4, 1, 1), (3, 2, 5, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "make", [ol.LandingSGD, ol.LandingAdam, ol.RiemannianSGD], ids=lambda make: make.__name__
)
def test_kernels_of_one_entry_are_refused_in_the_view_kernel(make, shape):
    X = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=r"'pointwise\.weight'") as caught:
        make([("pointwise.weight", X)], view="kernel")
    message = str(caught.value)
    assert "1 x 1" in message
    assert "cannot move" in message
    assert "view=" in message
    assert "matrix" in message


def test_a_model_with_pointwise_convolutions_is_refused_in_the_view_kernel_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    groups = ol.orthogonalize_(ol.param_groups(model, nn.Conv2d, view="kernel"))
    with pytest.raises(ValueError, match=r"2\.weight"):
        ol.LandingSGD(groups)
    optimizer = ol.LandingSGD(ol.param_groups(model, model[0], view="kernel"), lr=0.1)
    pointwise = nn.Parameter(torch.ones(4, 4, 1, 1))
    with pytest.raises(ValueError, match="cannot move"):
        optimizer.add_param_group({"params": [("pointwise", pointwise)], "view": "kernel"})


@pytest.mark.parametrize(
    "make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon], ids=lambda make: make.__name__
)
def test_a_weight_of_one_entry_is_allowed_in_the_view_matrix(make):
    X = nn.Parameter(torch.ones(1, 1))
    optimizer = make([X], lr=0.1)
    assert steps(optimizer, 3, noise()) == []
    assert X.item() == pytest.approx(1)
    conv = nn.Parameter(ol.orthogonalize_(torch.randn(8, 4, 1, 1)))
    make([conv], lr=0.1)


@pytest.mark.parametrize("make", [ol.LandingAdam, ol.LandingMuon])
def test_an_eps_that_is_meant_for_adam_is_refused_with_the_name_of_that_option(make):
    X = nn.Parameter(torch.eye(3))
    with pytest.raises(ValueError, match="adam_eps"):
        make([X], eps=1e-8)
    with pytest.raises(ValueError, match="adam_eps"):
        make([{"params": [X], "eps": 1e-8}])
    make([X], adam_eps=1e-8)


# Half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attraction", ["coupled", "after"])
def test_a_half_precision_model_trains_with_landing_adam(dtype, attraction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(dtype)
    groups = ol.orthogonalize_(ol.param_groups(model, "0.weight"))
    optimizer = ol.LandingAdam(groups, lr=0.01, attraction=attraction)
    data = torch.randn(64, 8)
    target = torch.stack([data[:, 0] + data[:, 1], data[:, 2]], dim=1).to(dtype)
    data = data.to(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        # A small loss: its gradients' squares vanish in float16.
        loss = (model(data) - target).square().mean() / 64
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    for p, old in zip(model.parameters(), start, strict=True):
        assert torch.isfinite(p).all()
        assert not torch.equal(p, old)
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_plain_half_precision_parameter_follows_adam_in_float32(dtype):
    half = nn.Parameter(torch.linspace(-1, 1, 9).to(dtype))
    full = nn.Parameter(half.detach().float())
    optimizer = ol.LandingAdam([half], lr=0.01, orthogonal=False)
    reference = torch.optim.AdamW([full], lr=0.01, weight_decay=0.0)
    for k in range(100):
        G = 1e-4 * torch.randn(9, generator=torch.Generator().manual_seed(k)).to(dtype)
        G[3] = 0.0
        half.grad, full.grad = G, G.float()
        optimizer.step()
        reference.step()
    assert optimizer.skipped_steps() == 0
    torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.1)
    assert half[3] == torch.linspace(-1, 1, 9).to(dtype)[3]


# Weights that someone else has moved out of reach


def replaced(p, far) -> None:
    p.data = far


def copied(p, far) -> None:
    with torch.no_grad():
        p.copy_(far)


@each_engine
@each_method
@each_shape
def test_weights_out_of_reach_stay_are_counted_and_said_once(shape, method, fused):
    optimizer, X = landing(method, shape, fused=fused)
    steps(optimizer, 2, noise())
    put = replaced if fused else copied
    put(X, 3 * X.detach())
    far = X.detach().clone()
    messages = steps(optimizer, 100, noise())
    assert torch.equal(X, far)
    assert optimizer.skipped_steps() == 100 * matrices(shape)
    assert len(messages) == 1
    assert tells_what_is_wrong(messages[0])
    ol.orthogonalize_(optimizer)
    landed = X.detach().clone()
    assert steps(optimizer, 5, noise()) == []
    assert optimizer.skipped_steps() == 100 * matrices(shape)
    assert not torch.equal(X, landed)
    assert ol.orthogonality_error(optimizer, spectral=True) <= 0.5 * (1 + 1e-5)


@each_engine
@each_method
def test_one_matrix_of_a_stack_out_of_reach_is_counted_and_the_others_step(method, fused):
    optimizer, X = landing(method, "stack", fused=fused)
    copied(X[2], 3 * X[2])
    before = X.detach().clone()
    assert len(steps(optimizer, 100, noise())) <= 1
    assert torch.equal(X[2], before[2])
    assert all(not torch.equal(X[i], before[i]) for i in (0, 1, 3, 4))
    assert optimizer.skipped_steps() == 100


@each_engine
@each_method
@each_shape
def test_weights_of_zeros_are_out_of_reach_like_any_other(shape, method, fused):
    """Their landing field is zero: every step is as good as taken, and yet nothing will move."""
    optimizer, X = landing(method, shape, fused=fused)
    copied(X, torch.zeros(()))
    messages = steps(optimizer, 40, noise())
    assert not X.any()
    assert optimizer.skipped_steps() == 40 * matrices(shape)
    assert len(messages) == 1
    assert tells_what_is_wrong(messages[0])


def test_a_weight_out_of_reach_for_long_is_said_once_and_not_again():
    optimizer, X = landing("momentum", "small")
    copied(X, 2 * torch.eye(4))
    assert len(steps(optimizer, 300, noise())) == 1
    assert steps(optimizer, 300, noise()) == []


@pytest.mark.parametrize("good_steps", [7, 30, 95, 130, 170])
def test_it_is_said_whenever_it_happens(good_steps):
    optimizer, X = landing("momentum", "small")
    assert steps(optimizer, good_steps, noise()) == []
    copied(X, 2 * torch.eye(4))
    assert len(steps(optimizer, 200, noise())) == 1


def test_each_optimizer_says_it_for_itself():
    for _ in range(2):
        optimizer, X = landing("momentum", "tall")
        copied(X, 0 * X)
        assert len(steps(optimizer, 100, noise())) == 1


def test_one_weight_out_of_reach_among_many_is_said():
    params = [nn.Parameter(ol.random_orthogonal(4, 4, seed=i)) for i in range(20)]
    optimizer = ol.LandingSGD(params, lr=0.1)
    copied(params[7], 5 * torch.eye(4))
    messages = steps(optimizer, 100, noise(0.1))
    assert len(messages) == 1
    assert optimizer.skipped_steps() == 100


@each_engine
@each_shape
def test_weights_within_reach_are_brought_back_without_a_word(shape, fused):
    size, view = SHAPES[shape]
    optimizer, X = landing("coupled", shape, fused=fused)
    columns = min(size[-2:]) if view == "kernel" else min(size[0], math.prod(size[1:]))
    copied(X, math.sqrt(1 + 0.8 / math.sqrt(columns)) * X.detach())
    assert ol.orthogonality_error(optimizer) == pytest.approx(0.8, rel=1e-3)
    assert steps(optimizer, 100, noise(0.01)) == []
    assert optimizer.skipped_steps() == 0
    assert ol.orthogonality_error(optimizer) < 0.1


# Steps that nothing allows


@each_engine
@each_shape
def test_steps_at_the_edge_of_the_ball_without_attraction_are_counted(shape, fused):
    optimizer, X = landing("coupled", shape, fused=fused, lam=0.0, lr=10.0)
    messages = steps(optimizer, 200, noise(100.0))
    assert optimizer.skipped_steps() > 0
    assert len(messages) <= 1
    assert torch.isfinite(X).all()
    assert ol.orthogonality_error(optimizer, spectral=True) <= 0.5 * (1 + 1e-5)


# What is no reason to speak


@each_engine
@each_shape
def test_a_few_bad_gradients_among_good_ones_are_counted_without_a_word(shape, fused):
    optimizer, _ = landing("momentum", shape, fused=fused)
    bias = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("bias", bias)], "orthogonal": False})
    good = noise()

    def gradient(p, k):
        return torch.full_like(p, math.nan) if k % 20 == 13 else good(p, k)

    assert steps(optimizer, 100, gradient) == []
    assert optimizer.skipped_steps() == 5 * (matrices(shape) + 1)


@each_engine
@each_method
def test_good_steps_are_taken_without_a_word(method, fused):
    for shape in ("small", "medium", "tall", "stack"):
        optimizer, _ = landing(method, shape, fused=fused)
        assert steps(optimizer, 100, noise()) == []
        assert optimizer.skipped_steps() == 0


def test_zero_gradients_and_a_zero_lr_are_no_skipped_steps():
    for method in METHODS:
        for lr in (0.0, 0.1):
            optimizer, _ = landing(method, "small", lr=lr)
            gradient = noise() if lr == 0 else (lambda p, k: torch.zeros_like(p))
            assert steps(optimizer, 100, gradient) == []
            assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("fused", [None, False])
def test_the_root_of_what_rounding_leaves_at_the_edge_is_no_step(fused):
    """Without a pull: at 4 units of rounding from the edge nothing moves, and it is counted."""
    eps = torch.finfo(torch.float64).eps
    X = nn.Parameter(torch.eye(4, dtype=torch.float64))
    with torch.no_grad():
        X[0, 0] = (1 + 0.5 - 4 * eps) ** 0.5
    optimizer = ol.LandingSGD([X], lr=0.1, lam=0.0, safe_step="frobenius", fused=fused)
    start = X.detach().clone()
    X.grad = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert optimizer.skipped_steps() == 1
    assert torch.equal(X.detach(), start)


class Device(TorchFunctionMode):
    """Lets meta tensors stand in for a device with values: answers reads, and notes them."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.reads = answer, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            self.reads.append(args[0].shape)
            return [self.answer] * args[0].numel()
        return func(*args, **(kwargs or {}))  # any other read of a meta tensor raises


@pytest.mark.parametrize("capturable", [False, True])
def test_a_device_is_read_once_after_20_steps_and_after_each_100(monkeypatch, capturable):
    monkeypatch.setattr(journal, "is_readable", lambda count: isinstance(count, torch.Tensor))
    weights = [nn.Parameter(torch.eye(n, device="meta")) for n in (4, 7, 7)]
    optimizer = ol.LandingSGD(weights, lr=0.1, capturable=capturable)
    optimizer._awaits_values = False  # meta tensors have none
    with Device(answer=0) as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = []
        for k in range(1, 301):
            for p in weights:
                p.grad = torch.ones_like(p)
            device.answer = 99 * (k > 200)
            optimizer.step()
            seen += [k] * len(device.reads)
            device.reads.clear()
    assert seen == ([] if capturable else [20, 100, 200, 300])
    assert [str(w.message).split(",")[0] for w in caught] == [
        "parameter 0 of the group of shape (4"
    ] * (not capturable)
