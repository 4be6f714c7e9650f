"""Steps of tall matrices whose rows are apart: ranks are played one after the other."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ortholand as ol
from ortholand.fields import product_roundoff
from ortholand.geometry import distance
from ortholand.geometry.matrices import real_dtype, to_working_dtype
from ortholand.landing.moments import tangent_norm
from ortholand.landing.step import GramSums, PendingStep, Rows
from ortholand.sharding.exchange import message_of, sums_of
from ortholand.sharding.placement import chunk_sizes
from tests.grids import examples
from tests.optim.scenes import gradient_like, make_optimizer, scenes


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
            rows = Rows(X.shape[0], sum(self.sizes))
            steps.append(gram_step(to_working_dtype(X)[None], G_part[None], state, rows))
        self.summed = 0
        while isinstance(steps[0], PendingStep):
            parts = zip(*[message_of(step.sums) for step in steps], strict=True)
            sums = [sum(tensors[1:], start=tensors[0]) for tensors in parts]
            self.summed += sum(tensor.numel() for tensor in sums)
            steps = [step.finish(sums_of([tensor.clone() for tensor in sums])) for step in steps]
        for i, step in enumerate(steps):
            self.keep(i, step)

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
    {"momentum": 0.9, "nesterov": True, "safe_step": "frobenius"},
    {"momentum": 0.9, "safe_step": "spectral"},
    {"momentum": 0.8, "dampening": 0.3},
    {"momentum": 0.8, "dampening": 0.3, "maximize": True, "safe_step": None, "lr": 0.01},
]
METHODS = [(ol.LandingSGD, {"lr": 0.1, **o}) for o in SGD]
METHODS += [
    (ol.LandingAdam, {"lr": 0.02}),
    (ol.LandingAdam, {"lr": 0.02, "safe_step": "frobenius"}),
]
METHODS += [(ol.LandingAdam, {"lr": 0.02, "safe_step": "spectral"})]
MUON = [(ol.LandingMuon, {"lr": 0.02, **o}) for o in ({}, {"momentum": 0.0})]
MUON += [(ol.LandingMuon, {"lr": 0.02, "nesterov": False, "safe_step": "frobenius"})]
each_attraction = pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
each_method = pytest.mark.parametrize(("make", "options"), METHODS)


def gaussian(shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@each_attraction
@pytest.mark.parametrize(("make", "options"), METHODS + MUON)
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


def ill_conditioned(shape, cond, seed, dtype):
    """A matrix with singular values from 1 down to ``1 / cond``."""
    p = shape[1]
    U, V = (ol.random_orthogonal(k, p, seed=seed + k, dtype=dtype) for k in shape)
    return (U * torch.logspace(0, -math.log10(cond), p, dtype=real_dtype(dtype))) @ V.mH


def difference(shape, ranks, gradient, dtype, steps=100, **options):
    """How far Muon's rows apart are from rows together after some steps."""
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0, dtype=dtype))
    optimizer = ol.LandingMuon([X], lr=0.02, **options)
    apart = Apart(X, optimizer, ranks)
    for k in range(steps):
        X.grad = gradient(X.detach(), k)
        apart.step(gradient(apart.whole(), k))
        optimizer.step()
        assert apart.taken
    return (apart.whole() - X.detach()).abs().max().item()


@pytest.mark.parametrize(
    ("shape", "ranks", "cond", "normal", "dtype", "options"),
    [
        ((24, 8), 3, 1e1, 0.0, torch.float64, {}),
        ((60, 20), 2, 1e6, 3.0, torch.float64, {"nesterov": False}),
        ((9, 7), 4, 1e6, 0.0, torch.float64, {"attraction": "coupled"}),
        ((5, 3), 4, 1e6, 3.0, torch.float64, {"momentum": 0.0}),  # the last rank has no rows
        ((3, 1), 5, 1e3, 3.0, torch.float64, {"attraction": "decoupled"}),
        ((24, 6), 2, 1e6, 0.0, torch.complex128, {}),
    ],
    ids=str,
)
def test_muon_loses_no_digit_apart(shape, ranks, cond, normal, dtype, options):
    targets = [ill_conditioned(shape, cond, 100 * k, dtype) for k in range(3)]

    def gradient(X, k):
        return targets[k % 3] + normal * X

    assert difference(shape, ranks, gradient, dtype, **options) < 1e-12


@pytest.mark.parametrize("ones", [1, 7])
def test_muon_loses_no_digit_apart_where_singular_values_have_a_gap(ones):
    values = torch.where(torch.arange(8) < ones, 1, 1e-6).to(torch.float64)
    U, V = (ol.random_orthogonal(3, n, 8, seed=n, dtype=torch.float64) for n in (24, 8))
    targets = (U * values) @ V.mT
    assert difference((24, 8), 3, lambda X, k: targets[k % 3] + X, torch.float64) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(("cond", "tolerance"), [(1e1, 2e-7), (1e5, 3e-6), (1e6, 3e-6)])
def test_muon_damps_what_single_precision_cannot_hold_apart_as_together(cond, tolerance, dtype):
    """Small singular values are damped by as much: one step differs by rounding only."""
    error = 0.0
    for seed in range(5):
        G = ill_conditioned((24, 8), cond, 100 * seed, dtype)
        error = max(error, difference((24, 8), 3, lambda _, __, G=G: G, dtype, steps=1))
    assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("apart", [True, False])
def test_muon_takes_half_of_a_singular_value_at_four_times_rounding(apart, dtype):
    """The two shifts of the Cholesky factors: ten times one of them would leave a tenth."""

    def turn(low, dtype):
        """By how much a singular value ``low`` turns, beside another one of 1."""
        X = nn.Parameter(torch.eye(6, 2, dtype=dtype))
        optimizer = ol.LandingMuon([X], lr=0.02, momentum=0.0)
        rows, X.grad = Apart(X, optimizer, ranks=2), torch.zeros_like(X)
        X.grad[2, 0], X.grad[3, 1] = 1.0, low
        rows.step(X.grad)
        optimizer.step()
        return (rows.whole() if apart else X.detach())[3, 1].item()

    low, undamped = 4 * product_roundoff(6, dtype), 1e-9
    share = (turn(low, dtype) / low) / (turn(undamped, torch.float64) / undamped)
    assert share == pytest.approx(0.5, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("make", "options"), METHODS + MUON)
def test_as_many_numbers_are_summed_as_the_choice_of_a_route_counts(make, options, dtype):
    X = ol.random_orthogonal(9, 4, seed=0, dtype=dtype)
    optimizer = make([nn.Parameter(X)], **options)
    apart = Apart(X, optimizer, ranks=2)
    apart.step(torch.ones_like(X))
    moments = optimizer.landing_step(optimizer.param_groups[0]).moments
    assert apart.summed == moments.summed_numbers(4, dtype)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("make", "options"), MUON)
def test_what_is_not_finite_on_one_rank_is_not_taken_by_muon_on_any(make, options, bad):
    test_what_is_not_finite_on_one_rank_is_not_taken_on_any(make, options, bad)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize(("make", "options"), MUON)
def test_gradients_of_any_size_turn_rows_apart_by_as_much(make, options, scale):
    """Sums in double precision neither over- nor underflow."""
    X = ol.random_orthogonal(12, 3, seed=0)
    runs = [Apart(X, make([nn.Parameter(X)], **options), ranks=3) for _ in range(2)]
    for k in range(3):
        G = gaussian(X.shape, 50 + k, X.dtype)
        for run, factor in zip(runs, (1.0, scale), strict=True):
            run.step(factor * G)
            assert run.taken
    torch.testing.assert_close(runs[0].whole(), runs[1].whole(), rtol=0, atol=1e-6)


@each_attraction
@pytest.mark.parametrize("safe_step", ["spectral", "frobenius"])
@pytest.mark.parametrize("shape", [(6, 1), (5, 4)])
def test_a_bound_that_overflows_where_the_norm_does_not_destroys_nothing(
    shape, safe_step, attraction
):
    """``(L^H L)^2`` of gradients of 4e18 in float32: more than it can hold."""
    X = ol.random_orthogonal(*shape, seed=0, dtype=torch.complex64)
    optimizer = ol.LandingSGD(
        [nn.Parameter(X)],
        lr=1e4,
        lam=0.04,
        momentum=0.99,
        attraction=attraction,
        safe_step=safe_step,
    )
    apart = Apart(X, optimizer, ranks=2)
    for k in range(3):
        noise = gaussian(shape, k, X.dtype)
        apart.step(10**18.6 * noise[:, :1] @ noise[:1])
        assert distance(apart.whole().to(torch.complex128), spectral=True) <= 0.5 + 1e-5


def test_a_tangent_norm_is_never_below_its_rounding_error():
    """The norm of a normal gradient is a difference of equal numbers, which may be negative."""
    roundoff = product_roundoff(20, torch.float64)
    for seed in range(20):
        X, C = (
            ol.random_orthogonal(20, 4, seed=seed, dtype=torch.float64),
            gaussian((4, 4), seed, torch.float64),
        )
        C, D = C + C.mT, X.mT @ X - torch.eye(4)
        size = torch.linalg.matrix_norm(X @ C)
        found = tangent_norm(C, D, X.mT @ (X @ C), size, roundoff)
        assert found >= (1 - 1e-12) * math.sqrt(roundoff) * size


def test_two_hermitian_matrices_travel_as_one():
    M = gaussian((2, 5, 5), 0, torch.complex128)
    D, P = M + M.mH, M @ M.mH
    (packed,) = message = message_of(GramSums((D, P), ()))
    assert packed.shape == (2, 6, 5)
    got = sums_of(message).hermitian
    assert all(torch.equal(a, b) for a, b in zip(got, (D, P), strict=True))


@examples(150)
@given(scene=scenes(), ranks=st.integers(1, 5))
def test_rows_apart_never_leave_the_ball(scene, ranks):
    n, p = sorted(scene["shape"], reverse=True)
    dtype, eps = scene["dtype"], scene["options"]["eps"]
    X = nn.Parameter(ol.random_orthogonal(n, p, seed=scene["seed"], dtype=dtype))
    if n == p or ol.distance(X) > eps:
        return
    apart = Apart(X, make_optimizer(X, scene), ranks)
    spectral = scene["options"]["safe_step"] == "spectral"
    generator = torch.Generator().manual_seed(scene["seed"])
    exact = torch.complex128 if dtype.is_complex else torch.float64
    rounding = 8 * torch.finfo(dtype).eps * (math.sqrt(n) + math.sqrt(p))
    for k in range(5):
        current = apart.whole().to(torch.complex64 if dtype.is_complex else torch.float32)
        G = scene["scale"] * gradient_like(scene["kind"], current, generator, k)
        apart.step(G.to(dtype))
        assert distance(apart.whole().to(exact), spectral=spectral) <= eps + rounding


@pytest.mark.parametrize("share", [1e-3, 1e-6, 1e-7, 3e-8, 1e-8, 3e-9, 1e-9, 1e-12])
@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
@pytest.mark.parametrize("shape", [(6, 1), (9, 2), (40, 3)], ids=str)
def test_gradients_that_are_almost_normal_stay_in_the_ball_apart(shape, attraction, share):
    """The tangent part is a difference of Gram matrices, of which rounding leaves few digits."""
    X = ol.random_orthogonal(*shape, seed=0, dtype=torch.float64)
    optimizer = ol.LandingMuon(
        [nn.Parameter(X)],
        lr=1.0,
        lam=0.0,
        eps=0.125,
        attraction=attraction,
        safe_step="frobenius",
        omega=0.0,
        momentum=0.0,
    )
    apart = Apart(X, optimizer, ranks=2)
    for k in range(6):
        current = apart.whole()
        apart.step(current + share * gaussian(shape, k, torch.float64))
        assert distance(apart.whole()) <= 0.125 + 1e-12


# In one place: a landing step against the methods that an optimizer has for its parts.


def overriding(make):
    """The optimizer with a ``move`` of its own: no engine steps around ``matrix_step``."""

    class Measured(make):
        def move(self, X, B, group):
            return super().move(X, B, group)

    return Measured


SHAPES = {"tall": (23, 6), "column": (9, 1), "nearly square": (12, 11), "wide": (6, 23)}


@each_attraction
@each_method
@pytest.mark.parametrize("shape", [*SHAPES.values(), (4, 2, 5, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.complex128, 1e-13), (torch.float32, 2e-5)],
    ids=str,
)
def test_a_landing_step_is_the_step_of_its_parts(
    make, options, attraction, shape, dtype, tolerance
):
    """From inside the ball, off the manifold; also as a batch."""
    view = "kernel" if len(shape) > 2 else "matrix"
    start = 1.02 * ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    runs = []
    for kind in (make, overriding(make)):
        weights = [nn.Parameter(start.clone()), nn.Parameter(start.clone())]
        optimizer = kind(weights, attraction=attraction, fused=False, view=view, **options)
        form = ol.explain(optimizer)[0].form
        assert form == ("" if kind is make else "matrix_step")
        for k in range(3):
            for i, X in enumerate(weights):
                X.grad = gaussian(shape, 10 * k + i + 1, dtype) / shape[-1] ** 0.5
            optimizer.step()
        runs.append([*weights, *(v for X in weights for v in optimizer.state[X].values())])
    for one, other in zip(*runs, strict=True):
        size = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30])
@each_attraction
@each_method
def test_gradients_of_any_size_step_as_their_parts_do(make, options, attraction, scale):
    """``B^H B`` would over- or underflow."""
    if options.get("safe_step", "") is None:
        return
    X, Y = (nn.Parameter(ol.random_orthogonal(20, 4, seed=0)) for _ in range(2))
    optimizers = [make([X], attraction=attraction, fused=False, **options)]
    optimizers.append(overriding(make)([Y], attraction=attraction, fused=False, **options))
    for k in range(3):
        for weight, optimizer in zip((X, Y), optimizers, strict=True):
            weight.grad = scale * gaussian(X.shape, k, X.dtype)
            optimizer.step()
    assert optimizers[0].skipped_steps() == 0
    # At the edge of the ball a step is the root of what room is left, and so is its rounding.
    torch.testing.assert_close(X, Y, rtol=0, atol=1e-5 if scale < 1 else 5e-3)


@pytest.mark.parametrize(("lr", "most"), [(0.1, 2e-5), (0.01, 3e-6)])
def test_what_lands_stays_near_the_manifold(lr, most):
    X = nn.Parameter(ol.random_orthogonal(384, 64, seed=0))
    optimizer = ol.LandingSGD([X], lr=lr, attraction="after", fused=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        X.grad = torch.randn(X.shape, generator=generator) / 384**0.5
        optimizer.step()
    assert ol.orthogonality_error(X) <= most
