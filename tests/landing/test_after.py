"""Move, then land, once or more often."""

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import distance
from ortholand.landing import LandingOptions, Momentum, find_attraction
from ortholand.landing.description import LandingStep
from ortholand.landing.step import Rows


def options_with(landings, lr=0.1):
    return LandingOptions(lr, find_attraction("after"), rule=None, landings=landings)


def problem(n, p, dtype=torch.float64):
    X = ol.random_orthogonal(n, p, seed=0, dtype=dtype)
    return X, torch.randn(n, p, dtype=dtype, generator=torch.Generator().manual_seed(1))


def test_another_landing_squares_what_is_left():
    X, G = problem(12, 4)
    options = [options_with(landings) for landings in (1, 2)]
    once, twice = (o.attraction.move(X, G, o).moved for o in options)
    D = once.mT @ once - torch.eye(4).double()
    expected = -0.75 * D @ D + 0.25 * D @ D @ D
    torch.testing.assert_close(
        twice.mT @ twice - torch.eye(4).double(), expected, rtol=0, atol=1e-14
    )
    assert distance(once) > 1e-4


@pytest.mark.parametrize("landings", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gram_form_lands_as_often(landings, dtype):
    X, G = problem(12, 4, dtype)
    options = options_with(landings)
    gram_step = LandingStep(Momentum(), options).gram_step
    assert gram_step is not None
    pending = gram_step(X[None], G[None], {}, Rows(12, 12))
    moved = pending.finish(pending.sums).moved[0]
    torch.testing.assert_close(moved, options.attraction.move(X, G, options).moved)


@pytest.mark.parametrize("shape", [(10, 64), (64, 10), (6, 6)])
@pytest.mark.parametrize("lr", [0.1, 0.2])
def test_muon_stays_at_rounding_with_gradients_of_low_rank(shape, lr):
    """A softmax's: the entries of each column add up to zero."""
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = ol.LandingMuon([X], lr=lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        G = torch.randn(shape, generator=generator)
        X.grad = G - G.mean(0)
        optimizer.step()
        assert ol.orthogonality_error(optimizer) < 5e-6
