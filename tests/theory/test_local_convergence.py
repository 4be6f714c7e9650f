"""The field near a minimiser (the paper's Props. "Local convergence")."""

import math

import pytest
import torch

from ortholand import landing_field, random_orthogonal
from ortholand.flow import landing_flow
from ortholand.geometry import relative_hessian
from ortholand_lab.problems import Procrustes


def norm(M):
    return torch.linalg.matrix_norm(M)


def skew_and_symmetric_basis(p):
    """Orthonormal bases of the skew and of the symmetric p x p matrices."""
    E = torch.eye(p * p, dtype=torch.float64).reshape(p, p, p, p)
    pairs = [(i, j) for i in range(p) for j in range(i)]
    skews = [(E[i, j] - E[j, i]) / math.sqrt(2) for i, j in pairs]
    syms = [(E[i, j] + E[j, i]) / math.sqrt(2) for i, j in pairs]
    return torch.stack(skews), torch.stack(syms + [E[i, i] for i in range(p)])


def relative_spectrum(problem):
    """Eigenvalues of H_X* on the skew matrices, in increasing order."""
    X, (skews, _) = problem.solution(), skew_and_symmetric_basis(problem.p)
    images = torch.stack([relative_hessian(X, A, fun=problem.fun) for A in skews])
    return torch.linalg.eigvalsh(skews.flatten(1) @ images.flatten(1).mT)


def jacobian(problem, lam):
    """Blocks of the Jacobian of E -> Lambda((I + E) X*) X*^T, ``J[to][from]``, by autograd."""
    X, p = problem.solution(), problem.p

    def field(E):
        Y = X + E @ X
        return landing_field(Y, problem.grad(Y), lam) @ X.mT

    J = torch.autograd.functional.jacobian(field, torch.zeros_like(X)).reshape(p * p, p * p)
    bases = [B.flatten(1) for B in skew_and_symmetric_basis(p)]
    return [[into @ J @ out.mT for out in bases] for into in bases]


@pytest.mark.parametrize("lam", [0.1, 1.0, 7.0])
def test_jacobian_is_block_triangular_with_two_lam(lam):
    """Corrected first-order expansion: J(A, S) = H(A) + H_sym(S) + 2 lam S.

    (I + S)(I + S)^T - I = 2 S + O(S^2): the paper has lam, and "block diagonal".
    """
    problem = Procrustes.gaussian(4, seed=0)
    (skew_skew, skew_sym), (sym_skew, sym_sym) = jacobian(problem, lam)
    assert norm(sym_skew) < 1e-12
    assert norm(skew_sym) > 0.1
    torch.testing.assert_close(sym_sym, 2 * lam * torch.eye(10, dtype=torch.float64))
    torch.testing.assert_close(
        torch.linalg.eigvalsh(skew_skew), relative_spectrum(problem), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6), (4, 1)])
def test_two_lam_has_the_multiplicity_of_the_constraints(shape, randn):
    """2 lam is an eigenvalue p (p + 1) / 2 times, p the smaller side, on Stiefel too."""
    lam, p = 0.7, min(shape)
    target = random_orthogonal(*shape, seed=0, dtype=torch.float64)
    weights = 1 + randn(*shape, seed=1).square()  # f = sum w (X - X*)^2 / 2: X* is critical
    field = lambda X: landing_field(X, weights * (X - target), lam)  # noqa: E731
    size = target.numel()
    J = torch.autograd.functional.jacobian(field, target).reshape(size, size)
    spectrum = torch.linalg.eigvals(J)
    constraint = (spectrum - 2 * lam).abs() < 1e-8
    assert int(constraint.sum()) == p * (p + 1) // 2
    assert (spectrum.real > 0).all()


@pytest.mark.parametrize("ratio", [0.125, 0.25, 1.0, 2.0])
def test_local_rate_of_the_flow(ratio, randn):
    """Corrected: rate min(mu_min, 2 lam); the paper has min(mu_min, lam)."""
    problem = Procrustes.gaussian(4, seed=0)
    mu = relative_spectrum(problem)[0].item()
    rate, target = min(mu, 2 * ratio * mu), problem.solution()
    t = torch.tensor([0.0, 12.0, 15.0], dtype=torch.float64) / rate
    X0 = target + 1e-2 * randn(4, 4, seed=3)
    X = landing_flow(problem.grad, X0, t, lam=ratio * mu, rtol=1e-10, atol=1e-14).X
    error = norm(X - target)
    seen = torch.log(error[1] / error[2]) / (t[2] - t[1])
    # The rest of the spectrum is at least twice as fast: e^-12 by then.
    assert seen.item() == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("ratio", [0.125, 0.25, 1.0, 2.0])
def test_local_rate_of_the_algorithm(ratio, randn):
    """Corrected: error times 1 - eta min(mu_min, 2 lam) per step, for eta < 1 / L."""
    problem = Procrustes.gaussian(4, seed=0)
    spectrum, target = relative_spectrum(problem), problem.solution()
    mu, lam = spectrum[0].item(), ratio * spectrum[0].item()
    eta = 1 / max(spectrum[-1].item(), 2 * lam)
    X, errors = target + 1e-4 * randn(4, 4, seed=3), []
    for _ in range(4000):
        X = X - eta * landing_field(X, problem.grad(X), lam)
        errors.append(norm(X - target).item())
        if errors[-1] < 1e-10:
            break
    seen = (errors[-1] / errors[-11]) ** 0.1
    assert 1 - seen == pytest.approx(eta * min(mu, 2 * lam), rel=0.01)


@pytest.mark.thorough
def test_at_the_best_step_lam_has_a_plateau():
    """Every lam in [mu_min / 2, mu_max / 2] gives (kappa - 1) / (kappa + 1) per step.

    The paper's best lam, mu_min, lies on the plateau: it is not the only best one.
    """
    problem = Procrustes.gaussian(4, seed=0)
    spectrum = relative_spectrum(problem)
    low, high = spectrum[0].item(), spectrum[-1].item()
    best = (high - low) / (high + low)

    def rate(lam):
        eta = 2 / (min(low, 2 * lam) + max(high, 2 * lam))
        (a, b), (c, d) = jacobian(problem, lam)
        J = torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)])
        return torch.linalg.eigvals(torch.eye(len(J), dtype=J.dtype) - eta * J).abs().max().item()

    for lam in (low / 2, low, (low * high) ** 0.5 / 2, high / 2):
        assert rate(lam) == pytest.approx(best, abs=1e-6)
    for lam in (low / 4, low / 2.2, high / 1.8, 2 * high):
        assert rate(lam) > best + 0.01


def test_best_attraction_is_half_the_smallest_curvature():
    """min(mu_min, 2 lam) / L(lam) is largest at lam = mu_min / 2; the paper has mu_min."""
    problem = Procrustes.gaussian(4, seed=0)
    mu = relative_spectrum(problem)[0].item()

    def gain(lam):
        (a, b), (c, d) = jacobian(problem, lam)
        J = torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)])
        return torch.linalg.eigvals(J).real.min() / torch.linalg.matrix_norm(J, 2)

    for other in (0.25, 0.4, 0.6, 1.0, 2.0):
        assert gain(0.5 * mu) > gain(other * mu), other
