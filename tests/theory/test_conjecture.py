"""A merit function for the landing algorithm, and what follows: docs/results/theory.md.

``m = f - <Sym(X^T G), D> / 2 + gamma N`` decreases along the field, so that with a fixed step psi
and N go to 0: the paper's conjecture. Ablin, Vary, Gao and Absil (JMLR 2024) have rates like these.
"""

import math

import pytest
import torch

from ortholand import distance, landing_field, random_orthogonal
from ortholand.geometry import gram_residual, relative_gradient, sym
from ortholand_lab.problems import Procrustes

EPS = 0.5


def norm(M):
    return torch.linalg.matrix_norm(M)


def constants(G, X, hessian_norm):
    """K >= ||Sym(X^T G)||_2 and C with ||d Sym(X^T G)[E]|| <= C ||E||, at one point."""
    K = torch.linalg.matrix_norm(sym(X.mT @ G), 2).item()
    X2 = torch.linalg.matrix_norm(X, 2).item()
    return K, torch.linalg.matrix_norm(G, 2).item() + X2 * hessian_norm


def smallest_gamma(K, C, lam):
    """The gamma of the theorem: see the proof."""
    a = C * math.sqrt(1 + EPS) / 2
    return (lam * K + lam * C * math.sqrt(1 + EPS) / 2 + a**2 / 2 + lam * (1 - EPS) / 2) / (
        lam * (1 - EPS)
    )


def merit(problem, X, gamma):
    G, D = problem.grad(X), gram_residual(X)
    return problem.fun(X) - (sym(X.mT @ G) * D).sum() / 2 + gamma * D.square().sum() / 4


def problems(shape, seed):
    """A quadratic f, and its Hessian's norm: Procrustes for square X, Brockett's for tall."""
    n, p = shape
    if n == p:
        problem = Procrustes.gaussian(p, seed=seed)
        return problem, 2 * torch.linalg.matrix_norm(problem.A @ problem.A.mT, 2).item() / p
    generator = torch.Generator().manual_seed(seed)
    M = torch.randn(n, n, generator=generator, dtype=torch.float64)
    weights = torch.arange(p, 0, -1, dtype=torch.float64)

    class Weighted:
        def fun(self, X):
            return (X * (sym(M) @ X) * weights).sum() / 2

        def grad(self, X):
            return sym(M) @ X * weights

    return Weighted(), torch.linalg.matrix_norm(sym(M), 2).item() * p


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 2), (6, 6), (9, 4), (5, 1)])
@pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
def test_the_merit_function_decreases_along_the_field(shape, lam, at_distance):
    """<grad m, L> >= ||psi||^2 / 2 + lam (1 - eps) d^2 / 2 wherever d <= eps."""
    for seed in range(50):
        problem, hessian = problems(shape, seed)
        X = at_distance(EPS * (seed + 1) / 50, *shape, seed=seed).requires_grad_()
        G = problem.grad(X)
        with torch.no_grad():
            gamma = smallest_gamma(*constants(G, X, hessian), lam)
            L = landing_field(X, G, lam)
        (slope,) = torch.autograd.grad(merit(problem, X, gamma), X)
        psi = relative_gradient(X.detach(), G.detach())
        d = distance(X.detach())
        bound = psi.square().sum() / 2 + lam * (1 - EPS) * d**2 / 2
        assert (slope * L).sum() >= bound * (1 - 1e-9)


def landing(problem, p, steps, eta, lam=1.0):
    """Squares of ||psi|| and d along the iterates, from a random start on the manifold."""
    X = random_orthogonal(p, p, seed=1, dtype=torch.float64)
    psi, d = [], []
    for k in range(steps):
        G = problem.grad(X)
        psi.append(norm(relative_gradient(X, G)).item() ** 2)
        d.append(distance(X).item() ** 2)
        X = X - eta(k) * landing_field(X, G, lam)
    return torch.tensor(psi), torch.tensor(d)


@pytest.mark.thorough
def test_the_conjecture_on_a_thousand_problems():
    """psi -> 0 and N -> 0 with a small fixed step: a theorem now, and no problem contradicts it."""
    count, p, eta = 1000, 3, 0.05
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(count, p, p, generator=generator, dtype=torch.float64) for _ in range(2))
    # Bounded f: with ||A|| <= 1 one eta is small enough for all of them.
    A = A / torch.linalg.matrix_norm(A, 2)[:, None, None]
    B = B / torch.linalg.matrix_norm(B, 2)[:, None, None]
    X = random_orthogonal(count, p, p, seed=1, dtype=torch.float64)
    seen = []
    for k in range(4001):
        G = 2 * (X @ A - B) @ A.mT
        if k in (0, 1000, 4000):
            seen.append((norm(relative_gradient(X, G)), distance(X)))
        X = X - eta * landing_field(X, G, 1.0)
    (psi0, _), (psi1, d1), (psi2, d2) = seen
    assert psi0.median() > 0.1
    # Where two singular values of B A^T nearly cancel, convergence is slow but does not stop.
    stuck = (psi2 > 1e-6) & (psi2 > 0.9 * psi1)
    assert not stuck.any()
    assert (psi2 < 1e-6).double().mean() > 0.9
    assert d2.max() < 1e-3
    assert (d2 <= d1.clamp(min=1e-12)).all()


@pytest.mark.thorough
@pytest.mark.parametrize("eta", [0.2, 0.1, 0.05])
def test_with_a_fixed_step_no_floor_of_order_eta_is_left(eta):
    """The paper bounds inf ||psi||^2 by C sqrt(eta); there is no floor: it goes to rounding."""
    psi, d = landing(Procrustes.planted(6, seed=0), 6, round(300 / eta), lambda _: eta)
    assert psi[0] > 0.1
    assert psi[-1] < 1e-20
    assert d[-1] < 1e-20


@pytest.mark.thorough
@pytest.mark.parametrize("alpha", [1 / 3, 1 / 2, 2 / 3])
def test_decreasing_steps_without_noise_are_as_good_as_the_sum_of_the_steps(alpha):
    """min ||psi||^2 = O(1 / S) with S = sum eta_k ~ K^(1 - alpha), for every alpha below 1.

    The paper has k^-min(alpha / 2, 1 - alpha). On O(2) and a flat minimum, f = (1 - tr X / 2)^4,
    the flow leaves the angle t ~ S^(-1/6), so ||psi||^2 ~ t^14 ~ S^(-7/3), and so does landing.
    """
    angle = torch.tensor(1.0, dtype=torch.float64)
    c, s = angle.cos(), angle.sin()
    X, S, seen = torch.stack([torch.stack([c, -s]), torch.stack([s, c])]), 0.0, {}
    for k in range(1, 20_001):
        G = -2 * (1 - X.trace() / 2) ** 3 * torch.eye(2, dtype=torch.float64)
        if k in (2_000, 20_000):
            seen[S] = norm(relative_gradient(X, G)).item() ** 2
        S += k**-alpha
        X = X - k**-alpha * landing_field(X, G, 1 / 4)
    (S0, first), (S1, last) = seen.items()
    assert -math.log(last / first) / math.log(S1 / S0) == pytest.approx(7 / 3, abs=0.05)
    assert last * S1 < first * S0
    assert distance(X) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("alpha", [1 / 3, 1 / 2, 2 / 3])
def test_decreasing_steps_under_noise_follow_k_to_the_minus_alpha(alpha):
    """E ||psi||^2 ~ eta_k near a nondegenerate minimum.

    The bound of the theory page, min(alpha, 1 - alpha), is attained for alpha <= 1/2; at 2/3 this
    problem is faster than its bound 1/3, at its own alpha.
    """
    runs, p, K = 400, 3, 6000
    problem = Procrustes.planted(p, seed=0)
    target = problem.solution()
    X = target.expand(runs, p, p).clone()
    generator = torch.Generator().manual_seed(0)
    marks, seen = [K // 20, K // 10, K // 4, K // 2, K], []
    for k in range(1, K + 1):
        G = problem.grad(X)
        if k in marks:
            seen.append(norm(relative_gradient(X, G)).square().mean().item())
        noise = torch.randn(runs, p, p, generator=generator, dtype=torch.float64)
        X = X - 0.5 * k**-alpha * landing_field(X, G + 0.3 * noise, 1.0)
    x = torch.tensor(marks, dtype=torch.float64).log()
    y = torch.tensor(seen, dtype=torch.float64).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert -slope.item() == pytest.approx(alpha, abs=0.05)
