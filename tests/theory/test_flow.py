"""The landing flow (the paper's Props. "Convergence of the flow" and "Global convergence")."""

import pytest
import torch

from ortholand import distance, random_orthogonal
from ortholand.flow import landing_flow
from ortholand.geometry import polar_projection, relative_gradient, riemannian_gradient, skew, sym
from ortholand_lab.problems import Procrustes

TIGHT = dict(rtol=1e-11, atol=1e-13)
INTEGRATION = 1e-7  # what the integrator may be off, with a wide margin over its tolerances


def times(end, count=41):
    return torch.linspace(0, end, count, dtype=torch.float64)


def norm(M):
    return torch.linalg.matrix_norm(M)


@pytest.mark.parametrize("momentum", [False, True])
def test_gram_matrix_follows_the_logistic_equation_whatever_f_is(momentum):
    """X^T X evolves by itself, S' = -2 lam S (S - I): s(t) = 1 / (1 + (1/s0 - 1) e^(-2 lam t)).

    The tangent part drops out of (X^T X)'. So the flow lands from *every* X0 of full rank,
    N decays as e^(-4 lam t), and f has no say in it. X0 here is far away: d = 4.
    """
    lam, t = 0.7, times(6.0)
    X0 = random_orthogonal(4, 4, seed=0, dtype=torch.float64) * torch.tensor([0.05, 0.6, 1.4, 2.1])
    path = landing_flow(
        Procrustes.gaussian(4, seed=1).grad, X0, t, lam=lam, momentum=momentum, **TIGHT
    )
    s0 = torch.linalg.svdvals(X0) ** 2
    logistic = 1 / (1 + (1 / s0 - 1) * torch.exp(-2 * lam * t)[:, None])
    seen = torch.linalg.svdvals(path.X) ** 2
    torch.testing.assert_close(seen, logistic, rtol=0, atol=INTEGRATION)


def test_tall_matrices_follow_the_logistic_equation_too(randn):
    """The same on the Stiefel manifold, with N = d^2 / 4 there as well."""
    lam, t, M = 0.7, times(3.0), randn(6, 3, seed=0)
    X0 = random_orthogonal(6, 3, seed=1, dtype=torch.float64) * torch.tensor([0.3, 1.0, 1.5])
    path = landing_flow(lambda X: M + X**3, X0, t, lam=lam, **TIGHT)
    logistic = 1 / (1 + (torch.linalg.svdvals(X0) ** -2 - 1) * torch.exp(-2 * lam * t)[:, None])
    torch.testing.assert_close(
        torch.linalg.svdvals(path.X) ** 2, logistic, rtol=0, atol=INTEGRATION
    )


@pytest.mark.parametrize("d0", [0.1, 0.5, 0.9, 0.99])
def test_flow_decays_within_the_corrected_bound(d0, at_distance):
    """Corrected Prop. "Convergence of the flow": d(t) <= e^(-2 lam t) d0 / (1 - d0), d0 < 1."""
    lam, t = 1.3, times(3.0)
    X0 = at_distance(d0, 5, 5, seed=0)
    d = distance(landing_flow(Procrustes.gaussian(5, seed=1).grad, X0, t, lam=lam, **TIGHT).X)
    assert (d <= torch.exp(-2 * lam * t) * d0 / (1 - d0) + INTEGRATION).all()
    exponent = torch.log(d[-1] / d[-11]) / (lam * (t[-1] - t[-11]))
    # The logistic equation bends the exponent by c e^(-2 lam t), c <= d0 / (1 - d0) = 99.
    bend = 2 * d0 / (1 - d0) * torch.exp(-2 * lam * t[-11])
    assert abs(exponent + 2) <= bend + 1e-3


def test_singular_start_never_lands(randn):
    """Corrected: a singular X stays singular. From diag(1, 0), N stays at 1/4."""
    M, X0 = randn(2, 2, seed=0), torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    X = landing_flow(lambda _: M, X0, times(20.0)).X
    assert norm(X[-1] - X0) > 0.1  # it does move
    torch.testing.assert_close(distance(X), torch.ones_like(X[:, 0, 0]))


def test_flow_from_the_manifold_is_the_riemannian_gradient_flow():
    """X0 in O_p: the flow stays there and follows -grad f, whatever lam is."""
    problem, t = Procrustes.gaussian(4, seed=0), times(2.0)
    X0 = random_orthogonal(4, 4, seed=1, dtype=torch.float64)
    landing = landing_flow(problem.grad, X0, t, lam=3.0, **TIGHT).X
    riemannian = landing_flow(
        lambda X: problem.grad(polar_projection(X)),
        X0,
        t,
        # Taken at the nearest point, lest the integrator's drift off the manifold grow.
        field=lambda X, G, _: riemannian_gradient(polar_projection(X), G),
        **TIGHT,
    ).X
    assert norm(landing[-1] - X0) > 0.1
    assert distance(landing).max() < INTEGRATION
    torch.testing.assert_close(landing, riemannian, rtol=0, atol=INTEGRATION)
    assert (problem.fun(landing).diff() < 0).all()


def test_momentum_flow_keeps_the_speed_skew_and_dissipates():
    """A(t) is skew; on the manifold (f + ||A||^2 / 2)' = -||A||^2."""
    problem, t = Procrustes.gaussian(4, seed=0), times(4.0, 401)
    X0 = random_orthogonal(4, 4, seed=1, dtype=torch.float64)
    path = landing_flow(problem.grad, X0, t, momentum=True, **TIGHT)
    assert path.A is not None
    assert norm(path.A + path.A.mT).max() < 1e-12
    assert distance(path.X).max() < INTEGRATION
    energy, speed = problem.fun(path.X) + norm(path.A) ** 2 / 2, norm(path.A) ** 2
    lost = torch.cumulative_trapezoid(speed, t)
    assert lost[-1] > 0.1
    # The trapezoidal rule with steps of 0.01 is good to t h^2 / 12 max|(||A||^2)''| = 3e-5 here.
    torch.testing.assert_close(energy[0] - energy[1:], lost, rtol=0, atol=1e-3)


def test_momentum_flow_lands_on_a_critical_point(at_distance):
    """Same orthogonalisation as without momentum, and lim psi = 0."""
    problem, X0 = Procrustes.planted(4, seed=0), at_distance(0.5, 4, 4, seed=1)
    path = landing_flow(problem.grad, X0, torch.tensor([0.0, 60.0]), momentum=True)
    X, psi0 = path.X[-1], relative_gradient(X0, problem.grad(X0))
    assert distance(X) < 1e-7
    assert norm(relative_gradient(X, problem.grad(X))) < 1e-3 * norm(psi0)


def test_global_convergence_of_the_flow(at_distance):
    """Corrected Prop. "Global convergence": int ||psi||^2 <= f0 - f* + K d0 / (2 (1 - d0)).

    K bounds ||Sym(G X^T)||; the term is K lam int d(t) dt. The paper's term,
    2 K sqrt(N0) / (sqrt(N0) - 1), is negative for N0 < 1: see the erratum "global".
    """
    problem, t = Procrustes.gaussian(4, seed=0), times(4.0, 801)
    X0 = at_distance(0.6, 4, 4, seed=1)
    X = landing_flow(problem.grad, X0, t, **TIGHT).X
    M = problem.grad(X) @ X.mT
    integral = torch.trapezoid(norm(skew(M)) ** 2, t)
    K, d0 = norm(sym(M)).max(), distance(X0)
    assert integral <= problem.fun(X0) - problem.fun(X[-1]) + K * d0 / (2 * (1 - d0))
    # Exactly: f' = -||psi||^2 - lam <D, Sym(G X^T)>.
    D = X @ X.mT - torch.eye(4)
    normal = torch.trapezoid((D * sym(M)).sum((-2, -1)), t)
    assert problem.fun(X0) - problem.fun(X[-1]) == pytest.approx(
        (integral + normal).item(), abs=1e-3
    )
