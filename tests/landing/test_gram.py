"""Steps of tall matrices whose rows are apart: ranks are played one after the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ball import gradient_like, make_optimizer, scenes
from torch import nn

import ortholand as ol
from ortholand.geometry.matrices import real_dtype, to_working_dtype
from ortholand.landing.step import Rows
from ortholand.sharding.placement import chunk_sizes
from ortholand.sharding.steps import message_of, pack, sums_of, unpack


class Apart:
    """A tall matrix whose rows are shared out, with the state of each share."""

    def __init__(self, X, optimizer, ranks):
        self.optimizer, self.group = optimizer, optimizer.param_groups[0]
        self.sizes = chunk_sizes(X.shape[0], ranks)
        self.parts = [part.clone() for part in X.detach().split(self.sizes)]
        self.states = [self.new_state(part) for part in self.parts]
        self.summed = self.taken = None

    def new_state(self, part):
        working = to_working_dtype(part)[None]
        numbers = torch.zeros(1, dtype=real_dtype(working.dtype))
        kinds = self.optimizer.state_kinds(self.group)
        return {
            k: torch.zeros_like(working if v == "matrix" else numbers) for k, v in kinds.items()
        }

    def step(self, G):
        gram_step = self.optimizer.landing_step(self.group).gram_step
        steps = []
        G = to_working_dtype(-G if self.group["maximize"] else G)
        for X, G_part, state in zip(self.parts, G.split(self.sizes), self.states, strict=True):
            rows = Rows(X.shape[0], sum(self.sizes), apart=True)
            steps.append(gram_step(to_working_dtype(X)[None], G_part[None], state, rows))
        parts = list(zip(*[message_of(step.sums) for step in steps], strict=True))
        sums = [sum(tensors[1:], start=tensors[0]) for tensors in parts]
        self.summed = sum(tensor.numel() for tensor in sums)
        for i, step in enumerate(steps):
            self.keep(i, step.finish(sums_of([tensor.clone() for tensor in sums])))

    def keep(self, i, result):
        self.taken = bool(result.taken)
        if self.taken:
            self.parts[i] = result.moved[0].to(self.parts[i].dtype)
            for name, value in result.state.items():
                self.states[i][name] = value.to(self.states[i][name].dtype)

    def whole(self):
        return torch.cat(self.parts)


SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "safe_step": "tight"},
    {"momentum": 0.8, "dampening": 0.3},
    {"momentum": 0.8, "dampening": 0.3, "maximize": True, "safe_step": None, "lr": 0.01},
]
METHODS = [(ol.LandingSGD, {"lr": 0.1, **o}) for o in SGD]
METHODS += [(ol.LandingAdam, {"lr": 0.02}), (ol.LandingAdam, {"lr": 0.02, "safe_step": "tight"})]
each_attraction = pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
each_method = pytest.mark.parametrize(("make", "options"), METHODS)


def gaussian(shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@each_attraction
@each_method
@pytest.mark.parametrize(
    ("dtype", "tolerance", "steps"),
    [(torch.float32, 1e-5, 30), (torch.float64, 1e-11, 30), (torch.complex128, 1e-11, 10)],
)
def test_rows_apart_step_as_rows_together(make, options, attraction, dtype, tolerance, steps):
    X = nn.Parameter(ol.random_orthogonal(23, 6, seed=0, dtype=dtype))
    optimizer = make([X], attraction=attraction, fused=False, **options)
    apart = Apart(X, optimizer, ranks=4)
    target = gaussian(X.shape, 0, dtype)
    for k in range(steps):
        noise = 0.1 * gaussian(X.shape, k, dtype)
        X.grad = X.detach() - target + noise
        apart.step(apart.whole() - target + noise)
        optimizer.step()
        assert apart.taken
    assert (apart.whole() - X).abs().max() < tolerance


@each_method
def test_as_many_numbers_are_summed_as_the_choice_of_a_route_counts(make, options):
    X = ol.random_orthogonal(9, 4, seed=0)
    optimizer = make([nn.Parameter(X)], **options)
    apart = Apart(X, optimizer, ranks=2)
    apart.step(torch.ones_like(X))
    moments = optimizer.landing_step(optimizer.param_groups[0]).moments
    assert apart.summed == moments.summed_numbers(4)


def test_dampening_knows_the_first_gradient_where_a_rank_has_none_yet():
    X = nn.Parameter(ol.random_orthogonal(8, 3, seed=0, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, dampening=0.5)
    apart = Apart(X, optimizer, ranks=2)
    for k in range(3):
        X.grad = gaussian(X.shape, k, X.dtype)
        if k == 0:
            X.grad[4:] = 0  # the buffer of the second rank stays zero but for what is projected
        apart.step(X.grad)
        optimizer.step()
    assert torch.allclose(apart.whole(), X, rtol=0, atol=1e-14)


def test_a_dampening_of_one_is_not_stepped_by_rows():
    X = nn.Parameter(ol.random_orthogonal(8, 3, seed=0))
    optimizer = ol.LandingSGD([X], momentum=0.9, dampening=1.0)
    moments = optimizer.landing_step(optimizer.param_groups[0]).moments
    assert moments.why_not_apart == "dampening=1"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@each_method
def test_what_is_not_finite_on_one_rank_is_not_taken_on_any(make, options, bad):
    X = ol.random_orthogonal(8, 3, seed=0)
    optimizer = make([nn.Parameter(X)], **options)
    apart = Apart(X, optimizer, ranks=3)
    G = gaussian(X.shape, 0, X.dtype)
    G[-1, -1] = bad
    apart.step(G)
    assert not apart.taken
    apart.step(gaussian(X.shape, 1, X.dtype))
    assert apart.taken
    assert torch.isfinite(apart.whole()).all()


def test_two_hermitian_matrices_travel_as_one():
    M = gaussian((2, 5, 5), 0, torch.complex128)
    D, P = M + M.mH, M @ M.mH
    packed = pack(D, P)
    assert packed.shape == (2, 6, 5)
    assert all(torch.equal(a, b) for a, b in zip(unpack(packed), (D, P), strict=True))


@settings(max_examples=150)
@given(scene=scenes(), ranks=st.integers(1, 5))
def test_rows_apart_never_leave_the_ball(scene, ranks):
    n, p = sorted(scene["shape"], reverse=True)
    dtype, eps = scene["dtype"], scene["options"]["eps"]
    X = nn.Parameter(ol.random_orthogonal(n, p, seed=scene["seed"], dtype=dtype))
    if n == p or ol.distance(X) > eps:
        return
    apart = Apart(X, make_optimizer(X, scene), ranks)
    generator = torch.Generator().manual_seed(scene["seed"])
    exact = torch.complex128 if dtype.is_complex else torch.float64
    rounding = 8 * torch.finfo(dtype).eps * (math.sqrt(n) + math.sqrt(p))
    for k in range(5):
        current = apart.whole().to(torch.complex64 if dtype.is_complex else torch.float32)
        G = scene["scale"] * gradient_like(scene["kind"], current, generator, k)
        apart.step(G.to(dtype))
        assert ol.distance(apart.whole().to(exact)) <= eps + rounding
