"""One step, exactly, and the safe interval (the paper's Prop. "Safe step-size interval")."""

import math
from typing import NamedTuple

import pytest
import torch

import ortholand_lab.rules  # noqa: F401  (registers "tight")
from ortholand import (
    LandingSGD,
    distance,
    landing_field,
    random_orthogonal,
    safe_step_size,
)
from ortholand.fields import landing_along, tangency_bound
from ortholand.geometry import gram_residual, skew
from ortholand.geometry.matrices import tall
from ortholand.safe_step import RULES

DTYPES = [torch.float64, torch.complex128]
ROUNDING = 1e-9  # eta ||L|| is at most about 1 in a safe step, so u p^2 is far below


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 5), (9, 4), (4, 9), (6, 1)])
def test_one_step_identity(shape, dtype, randn):
    """D' = D - 2 eta lam (D + D^2) + eta^2 L^H L, with no approximation, at any X and any eta."""
    X, G = randn(2, 50, *shape, seed=0, dtype=dtype)
    eta, lam = 0.37, 0.8
    assert_one_step(tall(X), tall(landing_field(X, G, lam)), eta, lam)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_step_identity_with_momentum(dtype, randn):
    """Any skew A in place of psi, such as a momentum buffer; any B in Skew(B X^H) for tall X."""
    eta, lam = 0.37, 0.8
    X, B = randn(2, 50, 5, 5, seed=0, dtype=dtype)
    assert_one_step(X, landing_along(X, skew(B), lam), eta, lam)
    X, B = randn(2, 50, 9, 4, seed=1, dtype=dtype)
    assert_one_step(X, landing_along(X, B, lam), eta, lam)


def assert_one_step(X, L, eta, lam):
    D = gram_residual(X)
    predicted = D - 2 * eta * lam * (D + D @ D) + eta**2 * L.mH @ L
    torch.testing.assert_close(gram_residual(X - eta * L), predicted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("eta", [0.1, 0.3, 0.5])
def test_one_step_cuts_a_small_error_by_one_minus_two_eta_lam(eta, at_distance, randn):
    """Corrected: with a small gradient, 2.5 times at eta = 0.3, lam = 1; the paper has about 10."""
    X, A = at_distance(1e-4, 20, 20, seed=0), 1e-6 * skew(randn(20, 20, seed=1))
    after = distance(X - eta * landing_along(X, A, 1.0)).item()
    # What the first order leaves out: 2 eta ||D^2|| + eta^2 ||L^T L|| <= 2 d^2 + ||L||^2.
    assert after == pytest.approx((1 - 2 * eta) * 1e-4, abs=5e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_newton_schulz_after_the_move_lands_quadratically(dtype, at_distance, randn):
    """Y = X - eta R has E = D + eta^2 R^H R; Y - Y E / 2 has -3/4 E^2 + 1/4 E^3. Both exact."""
    X, G = at_distance(0.3, 7, 4, seed=0, dtype=dtype), randn(7, 4, seed=1, dtype=dtype)
    eta, R = 0.2, landing_field(X, G, 0.0)
    Y = X - eta * R
    E = gram_residual(Y)
    torch.testing.assert_close(E, gram_residual(X) + eta**2 * R.mH @ R)
    torch.testing.assert_close(gram_residual(Y - Y @ E / 2), -0.75 * E @ E + 0.25 * E @ E @ E)


def random_cases(at_distance, randn, *, n, p, lam, eps, dtype, rank, seed, batch=250):
    """Points of the ball, boundary included, and fields of gradients from 1e-4 to 1e6."""
    generator = torch.Generator().manual_seed(seed)
    d = eps * torch.rand(batch, generator=generator, dtype=torch.float64)
    d[:10], d[10:20] = 0, eps
    X = at_distance(d, n, p, seed=generator, dtype=dtype)
    G = randn(batch, n, rank, seed=generator, dtype=dtype) @ randn(
        batch, rank, p, seed=generator, dtype=dtype
    )
    scale = 10 ** (10 * torch.rand(batch, generator=generator, dtype=torch.float64) - 4)
    G = G * scale[:, None, None]
    if n == p:
        return X, Landing.of(X, skew(G @ X.mH), lam)
    return X, Landing.of(X, G, lam)


class Landing(NamedTuple):
    """A landing field, and what the safe step must know about it."""

    field: torch.Tensor
    distance: torch.Tensor
    tangency_error: torch.Tensor | float

    @classmethod
    def of(cls, X, B, lam):
        d, size = distance(X), torch.linalg.matrix_norm(B)
        error = 0.0 if X.shape[-2] == X.shape[-1] else tangency_bound(X.shape[-2], X.dtype, d, size)
        return cls(landing_along(X, B, lam), d, error)


def after(X, landing: Landing, eta, rule="frobenius"):
    """The distance after a step, in the norm of the rule."""
    Y = X - eta[:, None, None] * landing.field
    return distance(Y, spectral=RULES[rule].spectral)


def safe(landing: Landing, lam, eps, rule):
    L, d, error = landing
    return safe_step_size(L, d, lam=lam, eps=eps, rule=rule, tangency_error=error)


GRID = [
    dict(n=n, p=p, lam=lam, eps=eps, rank=rank, dtype=dtype)
    for n, p, ranks in [
        (1, 1, [1]),
        (3, 3, [1, 3]),
        (20, 20, [1, 20]),
        (8, 5, [1, 5]),
        (30, 2, [2]),
    ]
    for rank in ranks
    for lam in (1e-2, 1.0, 1e2)
    for eps in (0.05, 0.5, 0.95)
    for dtype in DTYPES
]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_safe_step_never_leaves_the_ball(rule, at_distance, randn):
    """Corrected Prop. "Safe step-size interval": d' <= eps for every eta in [0, eta*]."""
    for seed, case in enumerate(GRID):  # 36,000 steps, and as many half-way
        lam, eps = case["lam"], case["eps"]
        X, landing = random_cases(at_distance, randn, seed=seed, **case)
        eta = safe(landing, lam, eps, rule)
        assert (eta > 0).all()
        assert (eta <= 1 / (2 * lam)).all()
        assert after(X, landing, eta, rule).max() <= eps + ROUNDING, case
        assert after(X, landing, eta / 2, rule).max() <= eps + ROUNDING, case


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(("n", "p"), [(4, 4), (9, 4), (9, 1)])
def test_safe_step_holds_where_the_tangent_part_is_rounding_only(n, p, rule, at_distance, randn):
    """A huge normal gradient, G = X S: psi = 0, and R is noise of size u ||G||, not tangent.

    Tall X: without the allowance for it, eta u ||G|| is of the order 10 * 1e-16 * 1e14 here.
    """
    lam, eps, scale = 1e-2, 0.5, 1e14
    S = randn(500, p, p, seed=1)
    X = at_distance(torch.linspace(0, eps, 500), n, p, seed=0)
    G = scale * X @ (S + S.mT)
    landing = Landing.of(X, skew(G @ X.mT) if n == p else G, lam)
    assert after(X, landing, safe(landing, lam, eps, rule), rule).max() <= eps + ROUNDING
    careless = safe_step_size(landing.field, landing.distance, lam=lam, eps=eps, rule=rule)
    assert (after(X, landing, careless, rule).max() > eps) == (n > p)


def test_twice_the_tight_step_does_leave_the_ball(at_distance, randn):
    """The interval is not vacuous: with a small lam the tight step is nearly the largest one.

    On the manifold d' = eta^2 ||L^H L|| exactly, so twice the step gives 4 eps; off it, D and
    L^H L need not point the same way, and fewer cases leave.
    """
    case = dict(n=10, p=10, lam=1e-2, eps=0.5, rank=10, dtype=torch.float64)
    X, landing = random_cases(at_distance, randn, seed=0, batch=2000, **case)
    eta = safe(landing, 1e-2, 0.5, "tight")
    uncapped = eta < 0.5 / (2 * 1e-2)
    assert uncapped.double().mean() > 0.5
    left = after(X, landing, 2 * eta)[uncapped] > 0.5
    assert left.double().mean() > 0.9


@pytest.mark.parametrize("p", [16, 64, 256])
def test_tight_steps_are_longer_by_the_fourth_root_of_half_p(p, randn):
    """||L||_F^2 / ||L^H L||_F is about (p / 2)^(1/2) for a Gaussian psi (semicircle law)."""
    X = random_orthogonal(p, p, seed=0, dtype=torch.float64)
    L = landing_field(X, 1e3 * randn(p, p, seed=1))
    steps = {rule: safe_step_size(L, distance(X), rule=rule).item() for rule in RULES}
    # The law is exact for p -> infinity; its corrections are O(1 / p).
    assert steps["tight"] / steps["frobenius"] == pytest.approx((p / 2) ** 0.25, rel=1 / p + 0.01)


def test_any_upper_bound_of_the_second_order_term_is_safe(at_distance, randn, monkeypatch):
    """q may be any bound of ||L^H L||_F: here sqrt(p) ||L||_2^2, and ten times the tight one."""
    bounds = {
        "spectral": lambda L: L.shape[-1] ** 0.25 * torch.linalg.matrix_norm(L, 2),
        "loose": lambda L: math.sqrt(10) * RULES["tight"](L),
    }
    for name, bound in bounds.items():
        monkeypatch.setitem(RULES, name, bound)
        for seed, case in enumerate(GRID[::5]):
            lam, eps = case["lam"], case["eps"]
            X, landing = random_cases(at_distance, randn, seed=seed, **case)
            eta = safe(landing, lam, eps, name)
            assert (eta <= safe(landing, lam, eps, "tight") * (1 + 1e-12)).all()
            assert after(X, landing, eta).max() <= eps + ROUNDING, (name, case)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_zero_field_gives_the_largest_step(rule):
    """L = 0 (a critical point on the manifold): 1 / (2 lam), not 0 / 0."""
    L, d = torch.zeros(2, 4, 3, dtype=torch.float64), torch.tensor([0.0, 0.3], dtype=torch.float64)
    step = safe_step_size(L, d, lam=2.0, rule=rule)
    torch.testing.assert_close(step, torch.full_like(d, 0.25))
    assert safe_step_size(L, d, lam=0.0, rule=rule).isfinite().all()


@pytest.mark.parametrize("rule", [*sorted(RULES), None])
def test_sign_of_the_determinant_never_changes_under_safe_steps(rule, randn):
    """d <= eps < 1 keeps sigma_min > 0, even for a huge lr. Without the safe step signs do flip."""
    start = random_orthogonal(200, 3, 3, seed=0, dtype=torch.float64)
    X = torch.nn.Parameter(start.clone())
    lr = 1e6 if rule else 0.5  # larger ones overflow without the safe step
    optimizer = LandingSGD([X], lr=lr, momentum=0.5, eps=0.9, safe_step=rule, view="kernel")
    generator = torch.Generator().manual_seed(1)
    flipped = torch.zeros(200, dtype=torch.bool)
    for _ in range(100 if rule else 3):
        X.grad = randn(200, 3, 3, seed=generator)
        optimizer.step()
        flipped |= torch.linalg.det(X.detach()).sign() != torch.linalg.det(start).sign()
    assert flipped.any() == (rule is None)
