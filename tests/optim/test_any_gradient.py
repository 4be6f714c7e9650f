"""No finite gradient, however large, moves a weight out of the ball or makes anything infinite."""

import itertools
import math

import pytest
import torch
from tools import wild_gradients
from torch import nn

import ortholand as ol
from ortholand.geometry import distance
from ortholand.safe_step import RULES, safe_step_size

ATTRACTIONS = ("coupled", "decoupled", "after")
each_attraction = pytest.mark.parametrize("attraction", ATTRACTIONS)
each_engine = pytest.mark.parametrize("fused", [False, True])


@pytest.mark.parametrize("first", range(0, 400, 100))
@pytest.mark.thorough
def test_a_sample_of_all_cases(first):
    """A sample of the 100,000 cases that ``tools/wild_gradients.py`` runs."""
    report = wild_gradients.run_cases(first, 100, large=0.01)
    assert report.cases == 100
    assert report.steps > report.skipped / 10
    assert not report.violations, "\n".join(f"{seed}: {wrong}" for seed, wrong in report.violations)


def is_finite(optimizer):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in weights for v in optimizer.state[p].values()]
    return all(bool(torch.isfinite(v).all()) for v in (*weights, *state))


@pytest.mark.filterwarnings("ignore:.*is frozen")
@each_engine
@pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon])
@pytest.mark.parametrize("size", [1e37, 3e38])
def test_a_large_square_matrix_stays_in_the_ball(make, size, fused):
    X = nn.Parameter(ol.random_orthogonal(256, 256, seed=0))
    optimizer = make([X], lr=0.1, fused=fused)
    before = X.detach().clone()
    X.grad = torch.full_like(X, size)
    optimizer.step()
    assert is_finite(optimizer)
    assert ol.orthogonality_error(X, spectral=True) <= 0.5
    assert optimizer.skipped_steps() == int(torch.equal(X, before))


@each_engine
@each_attraction
@pytest.mark.parametrize(("lam", "eps", "omega"), [(10.0, 0.05, 0.5), (1.0, 0.9, 0.2)])
@pytest.mark.parametrize("shape", [(200, 20, 2), (200, 30, 12)], ids=str)
def test_what_rounding_leaves_of_a_normal_gradient_stays_in_the_ball(
    shape, lam, eps, omega, attraction, fused
):
    """A direction that consists of rounding errors is not tangent."""
    for size in (1e6, 1e8, 1e12):
        X = nn.Parameter((1 + 0.95 * eps) ** 0.5 * ol.random_orthogonal(*shape, seed=0))
        options = {"lam": lam, "eps": eps, "omega": omega, "attraction": attraction}
        optimizer = ol.LandingSGD([X], lr=1e5, view="kernel", fused=fused, **options)
        C = torch.randn(200, shape[-1], shape[-1], generator=torch.Generator().manual_seed(0))
        X.grad = size * (X.detach() @ (C + C.mT))
        optimizer.step()
        assert ol.orthogonality_error(optimizer, spectral=True) <= eps * (1 + 1e-5), size


@each_engine
def test_muon_turns_by_complex_numbers_whose_moduli_overflow(fused):
    for shape in [(5, 5), (17, 2)]:
        X = nn.Parameter(ol.random_orthogonal(*shape, seed=0, dtype=torch.complex64))
        before = X.detach().clone()
        optimizer = ol.LandingMuon([X], lr=0.1, momentum=0.0, fused=fused)
        X.grad = 3e38 * (1 + 1j) * torch.linspace(-1, 1, X.numel()).reshape(shape)
        optimizer.step()
        stands = bool((X - before).abs().max() < 1e-3)
        assert optimizer.skipped_steps() == int(stands)


@each_engine
@pytest.mark.parametrize("shape", [(6, 6), (9, 2)])
def test_muon_turns_by_gradients_whose_squares_vanish(shape, fused):
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0, dtype=torch.complex128))
    before = X.detach().clone()
    optimizer = ol.LandingMuon([X], lr=0.1, momentum=0.0, fused=fused)
    X.grad = 1e-168 * torch.linspace(-1, 1, X.numel(), dtype=X.dtype).reshape(shape)
    optimizer.step()
    assert (X - before).abs().max() > 1e-3
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e37),
        (torch.float32, 3e38),
        (torch.float64, 1e200),
        (torch.float64, 1e305),
        (torch.complex64, 2e38),
        (torch.complex128, 1e305),
    ],
)
def test_the_safe_step_of_a_field_near_overflow(rule, dtype, size):
    L, d = torch.full((64, 64), size, dtype=dtype), torch.tensor(0.0, dtype=torch.float64)
    step = safe_step_size(L, d, lam=1.0, eps=0.5, rule=rule).item()
    assert step == pytest.approx(math.sqrt(0.5) / size / 64, rel=1e-3)


def test_the_safe_step_of_the_largest_field_is_zero_at_worst():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
        L = torch.full((3, 5, 4), torch.finfo(dtype).max, dtype=dtype)
        for rule in RULES:
            step = safe_step_size(L, torch.zeros(3, dtype=torch.float64), rule=rule)
            assert (step >= 0).all()
            assert (step.log() + math.log(torch.finfo(dtype).max) < 0).all()


@pytest.mark.filterwarnings("ignore:.*is frozen")
@each_engine
@each_attraction
@pytest.mark.parametrize("shape", [(8, 8), (6, 4), (40, 4), (4, 40), (130, 130), (140, 130)])
def test_without_a_safe_step_nothing_infinite_is_written(shape, attraction, fused):
    n, p = shape
    sizes = itertools.product((1e8, 1e10, 1e38), (1e-3, 1e30), (torch.float32, torch.float64))
    for lr, size, dtype in sizes:
        X = nn.Parameter(ol.random_orthogonal(n, p, seed=0, dtype=dtype))
        options = {"attraction": attraction, "safe_step": None, "fused": fused}
        optimizer = ol.LandingSGD([X], lr=lr, momentum=0.9, **options)
        for k in range(3):
            generator = torch.Generator().manual_seed(k)
            X.grad = size * torch.randn(n, p, generator=generator, dtype=dtype)
            before, skipped = X.detach().clone(), optimizer.skipped_steps()
            optimizer.step()
            assert is_finite(optimizer)
            assert torch.equal(X, before) == (optimizer.skipped_steps() > skipped)


@each_engine
@each_attraction
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (60, 4), (4, 60)])
@pytest.mark.parametrize("size", [1e150, 1e306])
def test_nesterov_in_double_precision(shape, size, attraction, fused):
    n, p = shape
    X = nn.Parameter(ol.random_orthogonal(n, p, seed=0, dtype=torch.float64))
    options = {"momentum": 0.9, "nesterov": True, "attraction": attraction, "fused": fused}
    optimizer = ol.LandingSGD([X], lr=0.1, **options)
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        X.grad = size * torch.randn(n, p, generator=generator, dtype=X.dtype)
        optimizer.step()
        assert is_finite(optimizer)
        assert distance(X.detach(), spectral=True) <= 0.5


@each_engine
@pytest.mark.parametrize("shape", [(5, 5), (9, 4), (60, 4)])
def test_after_a_skipped_step_the_state_is_the_one_before(shape, fused):
    n, p = shape
    X = nn.Parameter(ol.random_orthogonal(n, p, seed=0))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, fused=fused)
    X.grad = torch.randn(n, p, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    kept = optimizer.state[X]["momentum_buffer"].clone()
    X.grad = torch.full_like(X, torch.finfo(X.dtype).max)
    optimizer.step()
    assert optimizer.skipped_steps() == 1
    assert torch.equal(optimizer.state[X]["momentum_buffer"], kept)


@each_engine
@pytest.mark.parametrize("shape", [(4, 4), (40, 4)])
def test_one_huge_gradient_of_a_batch_stops_no_other_matrix(shape, fused):
    X = nn.Parameter(ol.random_orthogonal(5, *shape, seed=0))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, view="kernel", fused=fused)
    X.grad = torch.randn(X.shape, generator=torch.Generator().manual_seed(0))
    X.grad[2] = torch.finfo(X.dtype).max
    before = X.detach().clone()
    optimizer.step()
    assert optimizer.skipped_steps() == 1
    assert [torch.equal(a, b) for a, b in zip(X, before, strict=True)] == [i == 2 for i in range(5)]
    assert is_finite(optimizer)


@pytest.mark.parametrize("size", [1e25, 3e38])
def test_adam_in_plain_groups_keeps_its_second_moment_finite(size):
    p = nn.Parameter(torch.ones(3))
    optimizer = ol.LandingAdam([{"params": [p], "orthogonal": False}], lr=0.1)
    p.grad = torch.full_like(p, size)
    optimizer.step()
    assert optimizer.skipped_steps() == 1
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert is_finite(optimizer)
    assert (p < 0.95).all()


@each_engine
@pytest.mark.parametrize("rule", ["spectral", "frobenius"])
def test_a_gradient_of_zeros_is_a_step_of_length_zero(rule, fused):
    """Beside others that move, and where the first unit of Adam is 1 / adam_eps."""
    X = nn.Parameter(ol.random_orthogonal(4, 2, 2, seed=0))
    optimizer = ol.LandingAdam(
        [X], lr=1.0, lam=0.0, attraction="coupled", safe_step=rule, view="kernel", fused=fused
    )
    before = X.detach().clone()
    X.grad = torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(1))
    X.grad[3] = 0.0
    optimizer.step()
    assert optimizer.skipped_steps() == 0
    assert torch.equal(X[3], before[3])
    assert not torch.equal(X[:3], before[:3])
