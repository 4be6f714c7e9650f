"""Weights that are a number times orthonormal: ``W = s Z``, and Z steps by ``lr / s``."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry.scales import scale_of
from ortholand.landing import ATTRACTIONS
from ortholand.safe_step import RULES
from tests.distributed.toys import register_toys
from tests.optim.cases import Case, each_case

# By name: shape, view.
WEIGHTS = {
    "small square": ((4, 4), "matrix"),
    "square": ((20, 20), "matrix"),
    "large square": ((140, 140), "matrix"),
    "tall": ((30, 4), "matrix"),
    "very tall": ((200, 9), "matrix"),
    "large tall": ((200, 140), "matrix"),
    "wide": ((4, 30), "matrix"),
    "convolution": ((24, 2, 3, 3), "matrix"),
    "kernels": ((6, 2, 5, 3), "kernel"),
    "stack": ((5, 3, 3), "kernel"),
}
SCALES = [0.1, 3.7, "fan"]
each_scale = pytest.mark.parametrize("scale", SCALES)
each_weight = pytest.mark.parametrize("name", WEIGHTS)


def number_of(scale, name):
    shape, view = WEIGHTS[name]
    return scale_of(scale, torch.Size(shape), view)


def start(name, dtype=torch.float64, seed=0):
    """Orthonormal matrices of that shape, and a little beside the manifold."""
    shape, view = WEIGHTS[name]
    matrix = shape if view == "kernel" else (shape[0], math.prod(shape[1:]))
    X = ol.random_orthogonal(*matrix, seed=seed, dtype=dtype)
    return (1.002 * X).reshape(shape)


def noise(like, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex128 if like.is_complex() else torch.float64
    G = torch.randn(like.shape, generator=generator, dtype=kind)
    return (size * G / like.shape[-1] ** 0.5).to(like.dtype)


def run(optimizer, steps=3, size=1.0):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for k in range(steps):
        for i, p in enumerate(weights):
            p.grad = noise(p, 100 * k + i, size)
        optimizer.step()


def assert_close(W, expected, tolerance=1e-13):
    torch.testing.assert_close(W, expected, rtol=tolerance, atol=tolerance * float(expected.norm()))


def assert_twins(case, name, scale, dtype=torch.float64, tolerance=1e-13, size=1.0, **options):
    """Steps of ``W = s Z`` are s times those of Z with ``lr / s``; with lr, if that is an angle."""
    s, view = number_of(scale, name), WEIGHTS[name][1]
    Z, W = (nn.Parameter(factor * start(name, dtype)) for factor in (1.0, s))
    lr = case.options.get("lr", 0.1)
    own = lr if case.make is ol.LandingMuon else lr / s
    unscaled = case([Z], view=view, **{**options, "lr": own})
    scaled = case([W], view=view, scale=scale, **{**options, "lr": lr})
    for optimizer in (unscaled, scaled):
        run(optimizer, size=size)
    assert not torch.equal(W, s * start(name, dtype))
    assert_close(W / s, Z.detach(), tolerance)
    for key, value in unscaled.state[Z].items():
        assert_close(scaled.state[W][key].to(W.dtype), value.to(W.dtype), tolerance)


@each_scale
@each_weight
@each_case
def test_a_scaled_step_is_the_step_of_the_orthonormal_factor(case: Case, name, scale):
    assert_twins(case, name, scale)


@each_scale
@pytest.mark.parametrize("name", ["square", "tall", "wide", "kernels"])
def test_complex_weights(name, scale):
    for case in (Case("", ol.LandingSGD, {"momentum": 0.9}), Case("", ol.LandingAdam)):
        assert_twins(case, name, scale, torch.complex128)


@pytest.mark.parametrize("name", ["square", "tall", "large square", "stack"])
@pytest.mark.parametrize("fused", [True, False])
def test_where_the_safe_step_binds(name, fused):
    """It is relative to the scale: the same ball around ``s Z``."""
    for attraction, rule in itertools.product(
        ("coupled", "decoupled", "after"), ("frobenius", "spectral")
    ):
        options = {"attraction": attraction, "safe_step": rule, "fused": fused, "lr": 3.7 * 10}
        assert_twins(Case("", ol.LandingSGD, options), name, 3.7, tolerance=1e-12, size=10.0)


@pytest.mark.parametrize("fused", [True, False])
def test_decoupled_pull_does_not_shrink_with_the_scale(fused):
    errors = []
    for s in (0.1, 1.0, 10.0):
        W = nn.Parameter(s * start("square"))
        optimizer = ol.LandingSGD([W], lr=1e-6, attraction="decoupled", scale=s, fused=fused)
        W.grad = torch.zeros_like(W)
        optimizer.step()
        errors.append(ol.orthogonality_error(optimizer))
    assert errors == pytest.approx([errors[0]] * 3, rel=1e-6)
    assert errors[0] < 0.05 * 0.004 * 20**0.5


@pytest.mark.parametrize("attraction", ["lazy", "tangent only"])
@pytest.mark.parametrize("name", ["square", "tall", "very tall", "wide", "stack"])
def test_attractions_of_ones_own(name, attraction):
    known, rules = dict(ATTRACTIONS), dict(RULES)
    try:
        register_toys()
        for scale, rule in itertools.product(SCALES, ["spectral", "cautious"]):
            options = {"attraction": attraction, "safe_step": rule, "lr": 0.01, "momentum": 0.9}
            assert_twins(Case("", ol.LandingSGD, options), name, scale, tolerance=1e-12)
    finally:
        for registry, before in ((ATTRACTIONS, known), (RULES, rules)):
            registry.clear()
            registry.update(before)


def test_overridden_methods_see_the_orthonormal_factor():
    seen = []

    class Watched(ol.LandingSGD):
        def move(self, X, B, group):
            seen.append((X.clone(), group["lr"]))
            return super().move(X, B, group)

    for name, scale in itertools.product(("square", "tall", "wide", "stack"), SCALES):
        assert_twins(Case("", Watched), name, scale)
        s, (X, rate) = number_of(scale, name), seen[-3]
        assert rate == 0.1 / s
        assert ol.orthogonality_error(X, view="kernel") < 0.1


def test_an_optimizer_whose_rate_is_an_angle():
    """Redefining one method is all that such an optimizer needs."""

    class Turning(ol.LandingAdam):
        def options_at_scale(self, group, scale):
            return group

    for fused, name in itertools.product((True, False), ("square", "tall")):
        Z, W = nn.Parameter(start(name)), nn.Parameter(3.7 * start(name))
        for optimizer in (Turning([Z], fused=fused), Turning([W], scale=3.7, fused=fused)):
            run(optimizer)
        assert_close(W / 3.7, Z.detach())


class TestWhatStays:
    """Bit for bit, which a division and a product would not leave."""

    @each_scale
    @each_case
    def test_with_lr_zero(self, case: Case, scale):
        for name, dtype in itertools.product(WEIGHTS, (torch.float32, torch.float64)):
            W = nn.Parameter((number_of(scale, name) * start(name)).to(dtype))
            before = W.detach().clone()
            run(case([W], view=WEIGHTS[name][1], scale=scale, lr=0.0))
            assert torch.equal(W, before)

    @each_scale
    @each_case
    def test_when_skipped(self, case: Case, scale):
        for name, dtype in itertools.product(WEIGHTS, (torch.float32, torch.float64)):
            W = nn.Parameter((number_of(scale, name) * start(name)).to(dtype))
            before = W.detach().clone()
            optimizer = case([W], view=WEIGHTS[name][1], scale=scale)
            W.grad = torch.full_like(W, torch.nan)
            optimizer.step()
            assert torch.equal(W, before)
            assert optimizer.skipped_steps() == ol.explain(optimizer)[0].matrices

    @pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_in_half_precision(self, dtype, rounding):
        for name, scale in itertools.product(("square", "tall", "wide", "stack"), SCALES):
            W = nn.Parameter((number_of(scale, name) * start(name)).to(dtype))
            view = WEIGHTS[name][1]
            optimizer = ol.LandingSGD([W], 0.01, 0.9, scale=scale, rounding=rounding, view=view)
            run(optimizer, 2)
            before = W.detach().clone()
            rest = copy.deepcopy(optimizer.state[W].get("compensation"))
            W.grad = torch.full_like(W, torch.nan)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.0
            run(optimizer, 2)
            assert torch.equal(W, before)
            assert rest is None or torch.equal(optimizer.state[W]["compensation"], rest)

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
    def test_no_weight_creeps(self, attraction, fused):
        """A step far below rounding moves nothing, however often it is taken."""
        for name in WEIGHTS:
            if attraction != "coupled" and name.startswith("large"):
                continue
            X = start(name) / 1.002
            W = nn.Parameter((3.7 * X).float())
            before = W.detach().clone()
            optimizer = ol.LandingSGD(
                [W], lr=1e-12, attraction=attraction, scale=3.7, fused=fused, view=WEIGHTS[name][1]
            )
            run(optimizer, 30)
            # The pull undoes rounding of W where it does not shrink with lr.
            allowed = 0.0 if attraction == "coupled" else 2e-7 * 3.7
            assert (W - before).abs().max() <= allowed


def test_tall_and_wide_weights_of_one_group_have_their_own_fan():
    """Though they are tall matrices of one shape, and step in one batch else."""
    for fused in (True, False):
        tall = nn.Parameter(ol.random_orthogonal(16, 4, seed=0, scale="fan"))
        wide = nn.Parameter(ol.random_orthogonal(4, 16, seed=0, scale="fan"))
        optimizer = ol.LandingSGD([tall, wide], lr=0.1, scale="fan", fused=fused)
        run(optimizer)
        assert [row.scale for row in ol.explain(optimizer)] == [2.0, 1.0]
        assert ol.orthogonality_error(optimizer) < 0.1
        sizes = [float(W.detach().norm()) for W in (tall, wide)]
        assert sizes == pytest.approx([4, 2], rel=0.02)


@pytest.mark.parametrize("shape", [(8, 2, 3, 3), (2, 8, 5, 3), (2, 2, 3, 5), (10, 5)], ids=str)
def test_fan_is_of_the_matrices_in_their_view(shape):
    expected = {
        "matrix": math.sqrt(max(1, shape[0] / math.prod(shape[1:]))),
        "kernel": math.sqrt(max(1, shape[-2] / shape[-1])),
    }
    for view, s in expected.items():
        W = nn.Parameter(ol.orthogonalize_(torch.randn(shape), view=view, scale="fan"))
        (row,) = ol.explain(ol.LandingSGD([W], view=view, scale="fan"))
        assert row.scale == s


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_stays_at_its_scale(dtype, fused):
    for make, scale in itertools.product((ol.LandingSGD, ol.LandingAdam), (0.1, 3.7, "fan")):
        weights = [nn.Parameter(start(name).to(dtype)) for name in ("square", "tall", "wide")]
        groups = ol.orthogonalize_([{"params": weights, "scale": scale}])
        optimizer = make(groups, lr=1e-3, attraction="after", fused=fused)
        run(optimizer, 100)
        assert ol.orthogonality_error(optimizer) < (1e-5 if dtype == torch.float32 else 0.1)
        assert optimizer.skipped_steps() == 0


def test_a_tensor_lr_is_read_in_every_step():
    for name, s in itertools.product(("square", "tall"), (0.1, 3.7)):
        Z, W = nn.Parameter(start(name)), nn.Parameter(s * start(name))
        rates = [
            torch.tensor(0.1 / s, dtype=torch.float64),
            torch.tensor([0.1], dtype=torch.float64),
        ]
        unscaled = ol.LandingSGD([Z], lr=rates[0])
        scaled = ol.LandingSGD([W], lr=rates[1], scale=s)
        for _ in range(3):
            for optimizer in (unscaled, scaled):
                run(optimizer, 1)
            for rate in rates:
                rate.mul_(0.5)
        assert_close(W / s, Z.detach())


class TestErrors:
    def test_a_forgotten_scale_is_named(self):
        for name, make in itertools.product(WEIGHTS, (ol.LandingSGD, ol.LandingAdam)):
            W = nn.Parameter(3.7 * start(name) / 1.002)
            with pytest.raises(
                ValueError, match=r"at distance .* 3\.7 times orthonormal.* scale=3\.7"
            ):
                make([W], view=WEIGHTS[name][1])
        with pytest.raises(ValueError, match=r"looks like 0\.02 times .* scale=0\.02 in its group"):
            ol.RiemannianSGD([nn.Parameter(0.02 * torch.eye(5))])

    def test_fan_is_named_where_it_would_do(self):
        W = nn.Parameter(ol.random_orthogonal(50, 5, seed=0, scale="fan"))
        with pytest.raises(ValueError, match=r'scale=3\.162 or scale="fan" in its group'):
            ol.LandingSGD([W])

    def test_a_scale_too_many(self):
        message = r"of X = weight / 2; .* looks like 1 times orthonormal, not 2 times.*scale=1"
        with pytest.raises(ValueError, match=message):
            ol.LandingSGD([nn.Parameter(torch.eye(5))], scale=2)

    @pytest.mark.parametrize("weight", [torch.zeros(5, 5), torch.full((5, 3), torch.nan)])
    def test_no_scale_is_named_that_does_not_help(self, weight):
        generator = torch.Generator().manual_seed(0)
        for W in (weight, 5 * torch.randn(20, 20, generator=generator)):
            with pytest.raises(ValueError, match="at distance") as error:
                ol.LandingSGD([nn.Parameter(W)])
            assert "scale=" not in str(error.value)

    def test_what_a_type_cannot_hold(self):
        W = nn.Parameter(torch.eye(3, dtype=torch.float16))
        for s in (1e5, 1e-6):
            with pytest.raises(ValueError, match=r"scale must be from .* for weights of .*float16"):
                ol.LandingSGD([W], scale=s)
            with pytest.raises(ValueError, match=r"scale must be from .* for weights of .*float16"):
                ol.orthogonalize_(W, scale=s)
            with pytest.raises(ValueError, match=r"scale must be from .* for weights of .*float16"):
                ol.random_orthogonal(3, 3, seed=0, dtype=torch.float16, scale=s)

    @each_case
    def test_plain_groups_have_none(self, case: Case):
        p = nn.Parameter(torch.ones(3, 3))
        twin = nn.Parameter(torch.ones(3, 3))
        optimizers = [case([p], orthogonal=False, scale="fan"), case([twin], orthogonal=False)]
        for optimizer in optimizers:
            run(optimizer)
        assert torch.equal(p, twin)


class TestChanges:
    @each_case
    def test_weights_must_follow(self, case: Case):
        if case.radius == math.inf:
            return  # they may start anywhere
        W, other = nn.Parameter(start("square")), nn.Parameter(start("square"))
        groups = [{"params": [other]}, {"params": [W]}]
        optimizer = case(groups, lr=0.01)
        run(optimizer, 1)
        before = [p.detach().clone() for p in (W, other)]
        optimizer.param_groups[1]["scale"] = 3.7
        for _ in range(2):  # and still is one the second time
            with pytest.raises(
                ValueError, match=r"was 1\.0 and is 3\.7 now.*scale=1\S* in its group"
            ):
                optimizer.step()
        assert torch.equal(W, before[0])
        assert torch.equal(other, before[1])
        optimizer.param_groups[1]["scale"] = 1.0
        optimizer.step()
        assert not torch.equal(W, before[0])

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam])
    def test_weights_that_do_go_on(self, make, fused):
        W, Z = nn.Parameter(start("tall")), nn.Parameter(start("tall"))
        optimizers = make([W], lr=0.01, fused=fused), make([Z], lr=0.01, fused=fused)
        for optimizer in optimizers:
            run(optimizer, 2)
        with torch.no_grad():
            W.mul_(3.7)
        optimizers[0].param_groups[0].update(scale=3.7, lr=0.037)
        for optimizer in optimizers:
            run(optimizer, 2)
        assert_close(W / 3.7, Z.detach())

    def test_loading_the_state_of_another_scale(self):
        W, other = nn.Parameter(3.7 * start("square")), nn.Parameter(start("square"))
        first = ol.LandingSGD([W], lr=0.1, momentum=0.9, scale=3.7)
        run(first, 2)
        second = ol.LandingSGD([other], lr=0.1, momentum=0.9)
        second.load_state_dict(first.state_dict())
        other.grad = noise(other, 0)
        with pytest.raises(ValueError, match=r"scale=1\S* in its group"):
            second.step()
        assert torch.equal(other, start("square"))
        with torch.no_grad():
            other.copy_(W)  # weights may be loaded last
        for optimizer in (first, second):
            run(optimizer, 2)
        assert torch.equal(W, other)


class TestStates:
    @pytest.mark.parametrize("scale", [*SCALES, 1, 1.0])
    def test_round_trip(self, scale):
        for name, make in itertools.product(("square", "tall"), (ol.LandingSGD, ol.LandingAdam)):
            W = nn.Parameter(number_of(scale, name) * start(name))
            optimizer = make([W], lr=0.01, scale=scale)
            run(optimizer, 2)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            copied = nn.Parameter(W.detach().clone())
            resumed = make([copied], lr=0.5, scale=scale)
            resumed.load_state_dict(torch.load(file, weights_only=True))
            assert resumed.param_groups[0]["scale"] == scale
            unpickled = pickle.loads(pickle.dumps(optimizer))
            for o in (optimizer, resumed, unpickled):
                run(o, 2)
            assert torch.equal(W, copied)
            assert torch.equal(W, unpickled.param_groups[0]["params"][0])

    def test_states_from_before_there_were_scales(self):
        W = nn.Parameter(3.7 * start("square"))
        optimizer = ol.LandingSGD([W], lr=0.01, momentum=0.9, scale=3.7)
        state = optimizer.state_dict()
        del state["param_groups"][0]["scale"]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["scale"] == 3.7
        old = ol.LandingSGD([nn.Parameter(start("square"))])
        del old.defaults["scale"], old.param_groups[0]["scale"]
        old = pickle.loads(pickle.dumps(old))
        assert old.param_groups[0]["scale"] == 1.0
        run(old, 1)

    def test_a_buffer_of_torch_becomes_that_of_the_orthonormal_factor(self):
        W, Z = nn.Parameter(3.7 * start("square")), nn.Parameter(start("square"))
        buffers = []
        for weight, scale in ((W, 3.7), (Z, 1.0)):
            plain = torch.optim.SGD([weight], lr=0.0, momentum=0.9)
            run(plain, 2)
            optimizer = ol.LandingSGD([weight], momentum=0.9, scale=scale)
            optimizer.load_state_dict(plain.state_dict())
            buffers.append(optimizer.state[weight]["momentum_buffer"])
        assert_close(*buffers)
        assert_close(buffers[0], -buffers[0].mT)


def test_explain_shows_scales_where_there_are_some():
    weights = [nn.Parameter(torch.eye(4)), nn.Parameter(2 * torch.eye(4))]
    bias = nn.Parameter(torch.zeros(3))
    plain = {"params": [bias], "orthogonal": False}
    assert "scale" not in str(ol.explain(ol.LandingSGD([{"params": weights[:1]}, plain])))
    groups = [{"params": weights[:1]}, {"params": weights[1:], "scale": 2}, plain]
    table = ol.explain(ol.LandingSGD(groups))
    assert [row.scale for row in table] == [1.0, 2.0, 1.0]
    assert "scale" in str(table).splitlines()[1]
