"""What is constant on the manifold moves no iterate: f and ``f + tr(X^H X C) / 2`` step alike."""

import pytest
import torch
from torch import nn

import ortholand as ol
from tests.landing.test_gram import Apart
from tests.optim.multipliers import ATTRACTIONS, METHODS, NORM, Cost, start

TOLERANCE = 1e-9
SHAPES = [(6, 6), (9, 4), (40, 4), (40, 4), (4, 9), (30, 12), (5, 60), (5, 2, 9, 4), (3, 4, 4)]
each_method = pytest.mark.parametrize("method", METHODS)
each_attraction = pytest.mark.parametrize("attraction", ATTRACTIONS)
both_engines = pytest.mark.parametrize("fused", [False, True])


def iterates(method, shape, norm, *, distance, dtype=torch.float64, size=1.0, steps=8, **options):
    make, own = METHODS[method]
    W = nn.Parameter(start(shape, distance, dtype))
    optimizer = make([W], **{**own, **options, "view": "kernel"})
    cost, points = Cost(shape, norm, dtype, size), []
    for _ in range(steps):
        W.grad = cost.gradient(W)
        optimizer.step()
        points.append(W.detach().clone())
    assert optimizer.skipped_steps() == 0
    return torch.stack(points), optimizer


def difference(method, shape, **options):
    (without, _), (with_C, _) = (iterates(method, shape, c, **options) for c in (0.0, NORM))
    assert (without[-1] - without[0]).abs().max() > 1e-4
    return (without - with_C).abs().max()


@each_method
@each_attraction
@both_engines
def test_a_multiplier_moves_no_iterate(method, attraction, fused):
    options = {"attraction": attraction, "fused": fused}
    for i, shape in enumerate(SHAPES):
        assert difference(method, shape, distance=0.3 * (i % 2), **options) < TOLERANCE, shape


@each_method
@each_attraction
def test_complex_matrices(method, attraction):
    for shape in [(5, 5), (8, 3), (2, 3, 40)]:
        options = {"distance": 0.3, "attraction": attraction, "dtype": torch.complex128}
        assert difference(method, shape, **options) < TOLERANCE, shape


@pytest.mark.parametrize("method", ["SGD-plain", "SGD-momentum", "SGD-nesterov", "Adam"])
@each_attraction
def test_more_columns_than_compiled_tiles_have(method, attraction):
    for shape in [(134, 134), (200, 130), (130, 1050)]:
        options = {"distance": 0.3, "attraction": attraction, "steps": 2, "fused": True}
        assert difference(method, shape, **options) < TOLERANCE, shape


@pytest.mark.parametrize("method", [name for name in METHODS if "Muon" not in name])
@each_attraction
@both_engines
@pytest.mark.parametrize("rule", ["spectral", "frobenius"])
def test_steps_that_the_safe_step_limits(method, attraction, fused, rule):
    options = {"attraction": attraction, "safe_step": rule, "fused": fused, "lr": 3.0}
    for shape in [(9, 4), (40, 4), (30, 12)]:
        options |= {"distance": 0.1, "steps": 3}
        _, optimizer = iterates(method, shape, NORM, **options)
        assert optimizer.limited_steps() == 3
        assert difference(method, shape, **options) < TOLERANCE, shape


@both_engines
@each_attraction
def test_a_second_moment_of_a_gradient_that_is_nearly_normal(attraction, fused):
    for shape in [(9, 4), (40, 4), (30, 12)]:
        options = {"distance": 0.3, "size": 0.01, "attraction": attraction, "fused": fused}
        assert difference("Adam", shape, **options) < TOLERANCE, shape


@pytest.mark.parametrize(
    ("fused", "options"),
    [(False, {}), (True, {}), (True, {"nesterov": True}), (True, {"attraction": "after"})],
)
def test_momentum_lands_with_a_shifted_spectrum(fused, options):
    Q = ol.random_orthogonal(50, 50, seed=0, dtype=torch.float64)
    A = (Q * (10 + torch.linspace(0, 1, 50, dtype=torch.float64))) @ Q.mT
    X = nn.Parameter(ol.random_orthogonal(50, 5, seed=1, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, fused=fused, **options)
    for _ in range(2000):
        X.grad = -(A @ X.detach())
        optimizer.step()
    assert ol.orthogonality_error(optimizer) < 1e-13
    assert (X.mT @ Q[:, :-5]).norm() < 1e-9  # and it has found the principal components


@both_engines
def test_without_a_safe_step_a_singular_matrix_keeps_a_finite_buffer(fused):
    X = nn.Parameter(torch.eye(9, 4, dtype=torch.float64))
    options = {"lr": 0.01, "momentum": 0.9, "safe_step": None, "fused": fused}
    optimizer = ol.LandingSGD([X], **options)
    X.data[:, -1] = 0  # singular to the last bit
    X.grad = Cost((9, 4), 1.0).gradient(X)
    optimizer.step()
    assert optimizer.skipped_steps() == 0
    assert torch.isfinite(X).all()
    assert torch.isfinite(optimizer.state[X]["momentum_buffer"]).all()


# --- rows on ranks


def iterates_apart(method, shape, norm, attraction, dtype):
    make, own = METHODS[method]
    X = nn.Parameter(start(shape, 0.3, dtype))
    optimizer = make([X], attraction=attraction, **own)
    apart, cost, points = Apart(X, optimizer, ranks=3), Cost(shape, norm, dtype), []
    for _ in range(8):
        apart.step(cost.gradient(apart.whole()))
        assert apart.taken
        points.append(apart.whole())
    return torch.stack(points)


@each_method
@each_attraction
def test_rows_on_ranks(method, attraction):
    for shape, dtype in [((9, 4), torch.float64), ((40, 4), torch.complex128)]:
        without, with_C = (iterates_apart(method, shape, c, attraction, dtype) for c in (0.0, NORM))
        assert (without - with_C).abs().max() < TOLERANCE, shape
