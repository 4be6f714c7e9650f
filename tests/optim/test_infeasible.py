"""PLAM and the penalty method: what they are, and how they fail."""

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.fields import FIELDS
from ortholand.geometry import potential


def gaussian(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("make", "field"), [(ol.PLAM, "plam"), (ol.PenaltySGD, "penalty")])
@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
def test_a_step_follows_the_field(make, field, shape):
    start, G = gaussian(*shape, seed=0) / 2, gaussian(*shape, seed=1)
    X = nn.Parameter(start.clone())
    optimizer = make([X], lr=0.1, lam=0.7)
    X.grad = G.clone()
    optimizer.step()
    torch.testing.assert_close(X.detach(), start - 0.1 * FIELDS[field](start, G, 0.7))


@pytest.mark.parametrize("make", [ol.PLAM, ol.PenaltySGD])
def test_momentum_accumulates_euclidean_gradients(make):
    X = nn.Parameter(torch.eye(3, dtype=torch.float64))
    optimizer = make([X], lr=0.01, momentum=0.9)
    total = torch.zeros(3, 3, dtype=torch.float64)
    for k in range(4):
        X.grad = gaussian(3, 3, seed=k)
        total = 0.9 * total + X.grad
        optimizer.step()
    torch.testing.assert_close(optimizer.state[X]["momentum_buffer"], total)


def test_penalty_is_plain_sgd_on_the_penalised_cost():
    C = gaussian(4, 3, seed=0)
    X = nn.Parameter(ol.random_orthogonal(4, 3, seed=0, dtype=torch.float64))
    Y = nn.Parameter(X.detach().clone())
    penalty = ol.PenaltySGD([X], lr=0.05, momentum=0.0, lam=2.0)
    sgd = torch.optim.SGD([Y], lr=0.05)
    for _ in range(20):
        X.grad = C.clone()
        Y.grad = None
        ((C * Y).sum() + 2.0 * potential(Y)).backward()
        penalty.step()
        sgd.step()
    torch.testing.assert_close(X.detach(), Y.detach())
    assert ol.orthogonality_error(X) > 0.1  # and its limit is not orthogonal


def random_problems(count):
    """The paper's: min ||A X - B||^2 over 2 x 2 matrices from X = I, lam = 1, eta = 1e-3."""
    A, B = gaussian(2, count, 2, 2, seed=0)
    return lambda X: 2 * A.mT @ (A @ X - B)


def test_plam_explodes_on_most_random_problems_and_landing_on_none():
    gradient, start = random_problems(1000), torch.eye(2, dtype=torch.float64).repeat(1000, 1, 1)
    worst = {}
    for make in (ol.PLAM, ol.LandingSGD):
        X = nn.Parameter(start.clone())
        optimizer = make([X], lr=1e-3, lam=1.0, view="kernel")
        largest = torch.zeros(1000, dtype=torch.float64)
        for _ in range(4000):
            X.grad = gradient(X.detach())
            optimizer.step()
            largest = torch.maximum(largest, ol.distance(X.detach()))
        worst[make] = largest
    exploded = (worst[ol.PLAM] > 10).double().mean().item()
    assert 0.6 < exploded < 0.8  # 68 % after 4,000 steps; `ortholand errata plam-problems` goes on
    assert worst[ol.LandingSGD].max() < 0.02


@pytest.mark.parametrize(
    ("alpha", "explodes"), [(0.5, False), (0.6, False), (0.8, True), (0.9, True)]
)
def test_the_analytic_example(alpha, explodes):
    """f = ||alpha X - B||^2 from diag(1, 1 + delta): PLAM explodes when 2 alpha^2 > lam = 1."""
    B = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    start = torch.diag(torch.tensor([1.0, 1.05], dtype=torch.float64))
    results = {}
    for make in (ol.PLAM, ol.LandingSGD):
        X = nn.Parameter(start.clone())
        optimizer = make([X], lr=0.01, lam=1.0)
        for _ in range(3000):
            X.grad = 2 * alpha * (alpha * X.detach() - B)
            optimizer.step()
        results[make] = ol.orthogonality_error(X)
    assert (results[ol.PLAM] > 1) == explodes
    assert explodes or results[ol.PLAM] < 1e-3
    assert results[ol.LandingSGD] < 1e-6
