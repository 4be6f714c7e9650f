"""The rule "spectral": ball and step in the spectral norm, measured only where it may bind."""

import copy
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ortholand as ol
from ortholand.geometry import distance
from ortholand.landing import LandingOptions, find_attraction
from ortholand.safe_step import RULES, Spectral, safe_step_size, spectral_bound
from tests import needs

ATTRACTIONS = ("coupled", "decoupled", "after")
SHAPES = ((6, 6), (40, 40), (150, 150), (30, 12), (200, 10), (10, 200), (5, 7, 7), (4, 30, 6))


def gaussian(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def in_ball(n, p, delta, seed):
    """A matrix whose ``X^T X - I`` has eigenvalues spread over [-delta, delta]."""
    values = torch.linspace(-delta, delta, p, dtype=torch.float64)
    X = ol.random_orthogonal(n, p, seed=seed, dtype=torch.float64)
    V = ol.random_orthogonal(p, p, seed=seed + 1, dtype=torch.float64)
    return X @ (V * (1 + values).sqrt()) @ V.mT


@given(n=st.integers(1, 40), p=st.integers(1, 40), scale=st.floats(-30, 30), seed=st.integers(0, 9))
def test_the_bound_is_one_and_within_the_eighth_root_of_p(n, p, scale, seed):
    L = 10**scale * gaussian((n, p), seed)
    true, bound = float(torch.linalg.matrix_norm(L, 2)), float(Spectral().bound(L))
    assert true * (1 - 1e-12) <= bound <= true * min(n, p) ** 0.125 * (1 + 1e-12)


@pytest.mark.parametrize("name", ["coupled", "decoupled", "after"])
@pytest.mark.parametrize("shape", [(210, 200), (200, 200), (60, 20)])
def test_bounds_left_off_early_give_the_step_of_the_best(shape, name):
    """On the CPU dearer bounds are asked for only where lr needs them; by a tensor lr always."""
    X = in_ball(*shape, 0.1, seed=3)
    B = gaussian(shape, 4)
    B = (B - B.mT) / 2 if shape[0] == shape[1] else B
    for lr in (1e-4, 1e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0):
        moves = [
            find_attraction(name).move(
                X.clone(), B, LandingOptions(rate, find_attraction(name), Spectral())
            )
            for rate in (lr, torch.tensor(lr, dtype=torch.float64))
        ]
        torch.testing.assert_close(moves[0].moved, moves[1].moved, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sharp", "power"), [(False, 1 / 4), (True, 1 / 8)])
@given(p=st.integers(1, 40), size=st.floats(-20, 0.3), seed=st.integers(0, 9))
def test_the_distance_is_a_bound_and_a_sharp_one_a_better_one(sharp, power, p, size, seed):
    D = gaussian((p, p), seed)
    D = D + D.mT
    D *= 10**size / torch.linalg.matrix_norm(D, 2)
    found = float(spectral_bound(D, sharp=sharp))
    assert 10**size * (1 - 1e-12) <= found <= 10**size * p**power * (1 + 1e-12)


@pytest.mark.parametrize("lam", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("eps", [0.05, 0.5, 0.95])
def test_a_safe_step_stays_in_the_spectral_ball_from_anywhere_in_it(lam, eps):
    for seed in range(40):
        n, p = 4 + 3 * (seed % 7), 1 + seed % 4 + (seed % 3 == 0) * (seed % 4)
        n = max(n, p)
        X = in_ball(n, p, eps * (seed + 1) / 41, seed)
        L = ol.landing_field(X, 10 ** (seed % 9 - 3) * gaussian((n, p), seed), lam)
        D = X.mT @ X - torch.eye(p, dtype=X.dtype)
        d = spectral_bound(D, sharp=True).clamp(max=eps)
        eta = safe_step_size(L, d, lam=lam, eps=eps, rule="spectral")
        assert eta > 0
        assert distance(X - eta * L, spectral=True) <= eps * (1 + 1e-12)


def test_steps_do_not_shrink_with_p():
    steps = {}
    for rule in RULES:
        lengths = []
        for p in (64, 256):
            X = ol.random_orthogonal(p, p, seed=0, dtype=torch.float64)
            G = gaussian((p, p), 1) / p**0.5  # of one spectral norm, whatever p is
            L = ol.landing_field(X, G)
            lengths.append(float(safe_step_size(L, distance(X), rule=rule, lam=0.01)))
        steps[rule] = lengths[1] / lengths[0]
    assert steps["frobenius"] == pytest.approx(1 / 2, rel=0.05)
    assert steps["spectral"] > 0.82  # 1 / 4^(1/8) at worst


def optimizer_of(shape, *, make=ol.LandingSGD, dtype=torch.float64, seed=0, **options):
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=seed, dtype=dtype))
    view = "kernel" if len(shape) > 2 else "matrix"
    return X, make([X], view=view, **{"lr": 0.3, "safe_step": "spectral", **options})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("attraction", ATTRACTIONS)
@pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon])
@pytest.mark.parametrize("rule", ["frobenius", "spectral"])
def test_every_engine_takes_the_reference_step(shape, attraction, make, rule):
    class Measured(make):
        def move(self, X, B, group):
            return super().move(X, B, group)

    runs = []
    for kind in (make, Measured):
        X, optimizer = optimizer_of(shape, make=kind, attraction=attraction, safe_step=rule)
        for k in range(3):
            X.grad = gaussian(shape, k) * 3 ** (k - 1) / shape[-1] ** 0.5
            optimizer.step()
        runs.append((X.detach(), optimizer.limited_steps()))
    (one, limited), (other, expected) = runs
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert limited == expected


@pytest.mark.parametrize("shape", [(40, 40), (150, 150), (30, 12), (5, 7, 7)], ids=str)
@pytest.mark.parametrize("attraction", ATTRACTIONS)
def test_where_lr_is_safe_nothing_better_is_asked_for(shape, attraction):
    X, optimizer = optimizer_of(shape, lr=1e-3, attraction=attraction, fused=False)
    X.grad = gaussian(shape, 0) / shape[-1] ** 0.5
    module = "after" if attraction == "after" else "attraction"
    where = f"ortholand.landing.{module}.spectral_bound"
    with mock.patch(where, side_effect=AssertionError):
        optimizer.step()
    assert optimizer.limited_steps() == 0


@pytest.mark.parametrize("fused", [None, False])
def test_limited_steps_are_counted_and_explained(fused):
    X, optimizer = optimizer_of((8, 8), lr=1e-3, fused=fused)
    Y = nn.Parameter(ol.random_orthogonal(9, 4, seed=1, dtype=torch.float64))
    optimizer.add_param_group({"params": [Y]})
    assert [row.limited for row in ol.explain(optimizer)] == [None, None]
    for k in range(4):
        X.grad = gaussian((8, 8), k) * (1e6 if k == 3 else 1e-3)
        Y.grad = gaussian((9, 4), k) * 1e6
        optimizer.step()
    assert optimizer.limited_steps() == 5
    assert [row.limited for row in ol.explain(optimizer)] == [0.25, 1.0]
    assert " 25%" in str(ol.explain(optimizer))
    resumed = copy.deepcopy(optimizer)
    assert resumed.limited_steps() == 5
    for p in (p for group in resumed.param_groups for p in group["params"]):
        p.grad = torch.zeros_like(p)
    resumed.step()
    assert [row.limited for row in ol.explain(resumed)] == [0.0, 0.0]  # since it was copied


def test_a_weight_in_the_spectral_ball_only_may_start_there():
    X = nn.Parameter(in_ball(30, 20, 0.4, seed=0))
    assert distance(X) > 0.9 > 0.5 > distance(X, spectral=True)
    with pytest.raises(ValueError, match=r"within 0.5 .*\|\|_F; eps.*is at distance"):
        ol.LandingSGD([X], safe_step="frobenius")
    optimizer = ol.LandingSGD([X], lr=0.1)
    X.grad = gaussian((30, 20), 0)
    before = X.detach().clone()
    optimizer.step()
    assert optimizer.skipped_steps() == 0
    assert not torch.equal(X, before)
    outside = nn.Parameter(in_ball(30, 20, 0.6, seed=0))
    with pytest.raises(ValueError, match=r"within 0.5 .*\|\|_2; eps.*is at distance 0.6"):
        ol.LandingSGD([outside])
    with pytest.raises(ValueError, match="at distance inf"):
        ol.LandingSGD([nn.Parameter(torch.full((4, 3), torch.nan))], safe_step="spectral")


both_engines = pytest.mark.parametrize("fused", [False, None])
shapes_of_both_kinds = pytest.mark.parametrize("shape", [(16, 16), (40, 16)], ids=str)


@both_engines
def test_the_pull_is_not_counted_twice_before_a_move(fused):
    """For one column the distance after a step by 1/2 is ``t^2 ||L||^2 - d^2``."""
    X = nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))
    X.data[0] = 1.45**0.5
    optimizer = ol.LandingSGD([X], lr=0.5, fused=fused)
    X.grad = torch.zeros(5, 1, dtype=torch.float64)
    X.grad[1] = 2 * (4 * 0.85 - 1.45 * 0.45**2) ** 0.5 / 1.45  # t^2 ||L||^2 is 0.85
    optimizer.step()
    assert optimizer.limited_steps() == 1
    assert distance(X) <= 0.5


@both_engines
@shapes_of_both_kinds
def test_no_step_is_longer_than_lr(shape, fused):
    """From where X, because of the bound of its distance, looks as if it were at the edge."""
    X, optimizer = optimizer_of(shape, lr=0.05, fused=fused)
    X.data *= 1.3**0.5
    start, G = X.detach().clone(), gaussian(shape, 0) / 100
    X.grad = G
    optimizer.step()
    torch.testing.assert_close(X.detach(), start - 0.05 * ol.landing_field(start, G))


@both_engines
@shapes_of_both_kinds
def test_no_pull_goes_beyond_the_manifold(shape, fused):
    X, optimizer = optimizer_of(shape, lr=100.0, fused=fused)
    X.data *= 1.1**0.5
    start = X.detach().clone()
    X.grad = torch.zeros_like(X)
    optimizer.step()
    torch.testing.assert_close(X.detach(), start * (1 - 0.1 / 2))


@both_engines
@shapes_of_both_kinds
def test_a_field_with_one_large_singular_value_is_not_averaged(shape, fused):
    X, optimizer = optimizer_of(shape, lr=0.5, fused=fused)
    A = torch.zeros(shape[0], shape[0], dtype=torch.float64)
    A[0, 1], A[1, 0] = 1.6, -1.6  # a step by lr would lead to 0.64
    X.data[:] = torch.eye(*shape)
    X.grad = 2 * A @ X.detach() if shape[0] > shape[1] else A @ X.detach()
    optimizer.step()
    assert optimizer.limited_steps() == 1
    assert distance(X, spectral=True) <= 0.5


DIRECTIONS = {
    "plain": {},
    "nesterov": {"momentum": 0.9, "nesterov": True, "maximize": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "adam": {"betas": (0.8, 0.99)},
}


@pytest.mark.parametrize("attraction", ATTRACTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rule", ["spectral", "frobenius"])
@shapes_of_both_kinds
def test_engines_step_alike_off_the_manifold(shape, attraction, direction, rule):
    own = DIRECTIONS[direction]
    make = ol.LandingAdam if "betas" in own else ol.LandingSGD
    for (eps, delta), lr in itertools.product([(0.5, 0.1), (0.9, 0.35)], [0.001, 3.0]):
        runs = []
        for fused in (None, False):
            X = nn.Parameter(in_ball(*shape, delta, seed=0))
            optimizer = make(
                [X], lr=lr, eps=eps, attraction=attraction, safe_step=rule, fused=fused, **own
            )
            for k in range(3):
                X.grad = gaussian(shape, k)
                optimizer.step()
            assert optimizer.limited_steps() == (3 if lr > 1 else 0)
            runs.append(X.detach())
        torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_engines_agree_to_rounding_where_distance_and_step_are_small(direction):
    """Compiled code leaves out only what is less than rounding."""
    own, runs = DIRECTIONS[direction], []
    make = ol.LandingAdam if "betas" in own else ol.LandingSGD
    for fused in (None, False):
        X = nn.Parameter(in_ball(40, 16, 1e-6, seed=0))
        optimizer = make([X], lr=1e-5, attraction="after", fused=fused, **own)
        X.grad = gaussian((40, 16), 0)
        optimizer.step()
        runs.append(X.detach())
    torch.testing.assert_close(*runs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("attraction", ATTRACTIONS)
def test_a_weight_put_outside_comes_back(attraction):
    X, optimizer = optimizer_of((30, 20), attraction=attraction, eps=0.3, lr=0.4)
    with torch.no_grad():
        X.copy_(in_ball(30, 20, 0.7, seed=1))
    for _ in range(60):
        X.grad = torch.zeros_like(X)
        optimizer.step()
    assert distance(X, spectral=True) <= 0.3


@needs.compiled_steps
@pytest.mark.parametrize("attraction", ATTRACTIONS)
@pytest.mark.parametrize("shape", [(12, 12), (30, 6)])
@pytest.mark.thorough
def test_compiled_by_torch_it_takes_the_same_steps(shape, attraction):
    runs = []
    for compiled in (False, True):
        X, optimizer = optimizer_of(shape, attraction=attraction, fused=False)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for k in range(3):
            X.grad = gaussian(shape, k)
            step()
        runs.append(X.detach())
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-10)
    torch.compiler.reset()
