"""The algorithm far from a minimiser: fixed and decreasing steps, noise."""

import math

import pytest
import torch

from ortholand import (
    LandingSGD,
    PowerLawLR,
    distance,
    landing_field,
    random_orthogonal,
)
from ortholand.geometry import potential, relative_gradient
from ortholand_lab.problems import Procrustes


def norm(M):
    return torch.linalg.matrix_norm(M)


def run(problem, eta, lam, horizon):
    """Iterates, and the largest ||L^T L||, over ``horizon / eta`` fixed steps from the manifold."""
    X, q = random_orthogonal(problem.p, problem.p, seed=1, dtype=torch.float64), 0.0
    path = [X]
    for _ in range(round(horizon / eta)):
        L = landing_field(X, problem.grad(X), lam)
        X, q = X - eta * L, max(q, norm(L.mT @ L).item())
        path.append(X)
    return torch.stack(path), q


def test_fixed_step_stays_within_order_eta_of_the_manifold():
    """Prop. "discrete + fixed step", sharpened: d_k <= C eta, so N(X_k) <= C^2 eta^2 / 4.

    From d' <= d - 2 eta lam d (1 - d) + eta^2 q: d_k <= eta q / (2 lam (1 - max d)). The paper has
    N(X_k) <= C eta. Halving eta divides max N by 4, up to O(eta).
    """
    problem, lam, peaks = Procrustes.gaussian(6, seed=0), 1.0, []
    for eta in (0.02, 0.01, 0.005):
        X, q = run(problem, eta, lam, horizon=2.0)
        peak = distance(X).max().item()
        assert peak <= eta * q / (2 * lam * (1 - peak))
        peaks.append(potential(X).max().item())
    ratios = [peaks[0] / peaks[1], peaks[1] / peaks[2]]
    assert ratios == pytest.approx([4, 4], rel=0.1)
    assert abs(ratios[1] - 4) < abs(ratios[0] - 4)


def test_fixed_step_reaches_a_critical_point_on_the_manifold():
    """The paper's conjecture, on one problem: psi -> 0 and N -> 0 for a small fixed step."""
    problem = Procrustes.planted(6, seed=0)
    X, _ = run(problem, 0.05, 1.0, horizon=200.0)
    psi = norm(relative_gradient(X, problem.grad(X)))
    assert psi[0] > 0.1
    assert psi[-1] < 1e-9
    assert distance(X[-1]) < 1e-9


def test_power_law_steps_land_on_a_critical_point():
    """Prop. "discrete + decreasing step", alpha = 2/3: N(X_k) -> 0 and inf ||psi||^2 -> 0."""
    problem = Procrustes.planted(4, seed=0)
    X = torch.nn.Parameter(random_orthogonal(4, 4, seed=1, dtype=torch.float64))
    optimizer = LandingSGD([X], lr=1.0)
    scheduler, N, psi = PowerLawLR(optimizer, alpha=2 / 3), [], []
    for _ in range(2000):
        X.grad = problem.grad(X.detach())
        optimizer.step()
        scheduler.step()
        N.append(potential(X.detach()))
        psi.append(norm(relative_gradient(X.detach(), X.grad)))
    N, psi, k = torch.stack(N), torch.stack(psi), torch.arange(1, 2001)
    assert N[0] > 1e-3
    # O(k^(-2 alpha)), sharper than the paper's k^-alpha: d_k follows eta_k ||psi^2|| / (2 lam).
    assert (N * k ** (4 / 3))[1000:].max() < N[0]
    assert N[-1] < 1e-6
    assert psi[1000:].min() ** 2 < 1e-4 * psi[0] ** 2


def test_power_law_steps_under_noise_follow_the_floor():
    """With gradients that never vanish, d_k -> 0 as eta_k / (2 lam) ||E psi psi^T||_F does."""
    p, lam, steps = 10, 5.0, 3000
    X = torch.nn.Parameter(torch.eye(p, dtype=torch.float64))
    optimizer = LandingSGD([X], lr=0.5, lam=lam)
    scheduler, generator, ratios = PowerLawLR(optimizer), torch.Generator().manual_seed(0), []
    for k in range(steps):
        X.grad = torch.randn(p, p, generator=generator, dtype=torch.float64) @ X.detach()
        optimizer.step()
        if k >= steps - 1000:
            ratios.append(gram(X) * 2 * lam / (0.5 * (k + 1) ** (-2 / 3)))
        scheduler.step()
    # psi = Skew(E), E standard normal: E psi psi^T = (p - 1) / 2 I.
    floor = (p - 1) / 2 * math.sqrt(p)
    mean = torch.stack(ratios).mean(0)
    # The lag of d behind eta is alpha / (2 lam eta_k k) = 1 %; the mean of 1,000 dependent
    # matrices (memory 1 / (2 lam eta) = 40 steps) is good to about 5 %.
    assert norm(mean).item() == pytest.approx(floor, rel=0.1)


def gram(X):
    X = X.detach()
    return X @ X.mT - torch.eye(X.shape[-1], dtype=X.dtype)


@pytest.mark.parametrize("isotropic", [True, False])
def test_stochastic_floor(isotropic):
    """Corrected: delta* = eta / (2 lam) ||E psi psi^T||_F; the paper has eta a^2 / (2 lam).

    psi_ij = s_i s_j g_ij (i > j), so that E psi psi^T = diag_i(s_i^2 sum_(j != i) s_j^2).
    """
    p, eta, lam = 20, 0.05, 1.0
    s = torch.ones(p, dtype=torch.float64)
    if not isotropic:
        s[:4] = 3.0
    s /= s.square().sum().sqrt()
    second_moment = s**2 * (s.square().sum() - s**2)
    generator = torch.Generator().manual_seed(0)
    X, total, steps = torch.eye(p, dtype=torch.float64), 0, 4000
    for k in range(steps):
        g = torch.randn(p, p, generator=generator, dtype=torch.float64).tril(-1)
        psi = torch.outer(s, s) * (g - g.mT)
        X = X - eta * landing_field(X, psi @ torch.linalg.inv(X).mT, lam)  # G X^T = psi
        total = total + (gram(X) if k >= 200 else 0)
    mean = norm(total / (steps - 200)).item()
    assert mean == pytest.approx(eta / (2 * lam) * second_moment.norm().item(), rel=0.05)
    a_squared = second_moment.sum().item()
    assert mean < eta * a_squared / (2 * lam) / 2
