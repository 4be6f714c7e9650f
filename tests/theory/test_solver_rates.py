"""How fast the solvers of ``minimize`` converge near a minimiser, as the theory has it."""

import math
from itertools import pairwise

import pytest
import torch

from ortholand import landing_field, minimize, random_orthogonal
from ortholand.geometry import relative_hessian, skew
from ortholand_lab.problems import Procrustes


def norm(M):
    return torch.linalg.matrix_norm(M).item()


class Brockett:
    """``Tr(X^H A X N)``, with a quartic term that makes third derivatives matter."""

    def __init__(self, n, p, seed, dtype=torch.float64):
        Q = random_orthogonal(n, n, seed=seed, dtype=dtype)
        A = (Q * torch.arange(1, n + 1, dtype=torch.float64)) @ Q.mH
        self.A, self.mu = (A + A.mH) / 2, torch.arange(p, 0, -1, dtype=torch.float64)
        self.x0 = random_orthogonal(n, p, seed=seed + 100, dtype=dtype)

    def fun(self, X):
        square = (X * X.conj()).real
        return ((X.conj() * (self.A @ X)).real * self.mu).sum() + square.square().sum()

    def jac(self, X):
        return 2 * self.A @ X * self.mu + 4 * X * X.conj() * X

    def hessp(self, X, V):
        return 2 * self.A @ V * self.mu + 8 * X * X.conj() * V + 4 * X * X * V.conj()


def near(X, size, seed):
    """A point of the manifold at about this distance from X."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    U, _, Vh = torch.linalg.svd(X + size / math.sqrt(X.numel()) * noise, full_matrices=False)
    return U @ Vh


class TestNewton:
    """Tangent and normal errors both square: digits double."""

    @pytest.mark.parametrize("way", ["hessp", "autograd"])
    @pytest.mark.parametrize("shape", [(5, 5), (8, 3), (6, 1)])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
    @pytest.mark.parametrize("seed", range(2))
    def test_digits_double(self, way, shape, dtype, seed):
        """The digits gained by a step are about twice those of the step before, until rounding.

        log(g_(k+2) / g_(k+1)) / log(g_(k+1) / g_k) tends to the order of convergence. CG solves
        the first systems loosely: counted from the second step on.
        """
        problem = Brockett(*shape, seed, dtype)
        solution = minimize(problem.fun, problem.x0, method="newton", gtol=1e-12).x
        given = dict(jac=problem.jac, hessp=problem.hessp) if way == "hessp" else {}
        result = minimize(
            problem.fun, near(solution, 0.05, seed), method="newton", gtol=1e-14, **given
        )
        scale = norm(problem.jac(solution))
        digits = [-math.log10(g / scale) for g in result.history["grad_norm"]]
        gains = [b - a for a, b in pairwise(digits)]
        steps = range(2, len(gains))
        # A step that would lead to more than 14 digits is cut short by rounding.
        orders = [gains[k] / gains[k - 1] for k in steps if digits[k] + 2 * gains[k - 1] < 14]
        assert orders, digits
        assert all(order > 1.5 for order in orders), (orders, digits)
        assert math.prod(orders) ** (1 / len(orders)) > 1.8, (orders, digits)
        assert digits[-1] > 13, digits

    def test_is_as_fast_with_differences_of_gradients(self):
        """Sqrt(eps) is the accuracy of the products: superlinear, with fewer digits per step."""
        problem = Brockett(6, 3, 0)
        solution = minimize(problem.fun, problem.x0, method="newton", gtol=1e-12).x
        start = near(solution, 0.05, 0)
        exact, differences = (
            minimize(problem.fun, start, jac=problem.jac, hessp=h, method="newton", gtol=1e-10)
            for h in (problem.hessp, None)
        )
        assert exact.success
        assert differences.success
        assert differences.nit <= exact.nit + 2


def skew_basis(p):
    """An orthonormal basis of the skew matrices."""
    E = torch.eye(p * p, dtype=torch.float64).reshape(p, p, p, p)
    return torch.stack([(E[i, j] - E[j, i]) / 2**0.5 for i in range(p) for j in range(i)])


def relative_spectrum(fun, X):
    """Eigenvalues of the relative Hessian H on the skew matrices, in increasing order."""
    basis = skew_basis(len(X))
    images = torch.stack([relative_hessian(X, A, fun=fun) for A in basis])
    return torch.linalg.eigvalsh(basis.flatten(1) @ images.flatten(1).mT)


def rate(values, floor=1e-11, window=40):
    """Factor per step: the mean over the last steps before rounding, in the logarithm."""
    values = [v for v in values if v > floor]
    window = min(window, len(values) // 3)
    return (values[-1] / values[-1 - window]) ** (1 / window)


class TestLanding:
    """The error is multiplied by max |1 - eta mu|, mu in Sp(H) or 2 lam (the paper has lam)."""

    def run(self, problem, solution, *, eta, lam, momentum=0.0, size=1e-3, maxiter=4000):
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(solution.shape, generator=generator, dtype=torch.float64)
        errors = []
        result = minimize(
            problem.fun,
            solution + size * noise,  # off the manifold, too
            jac=problem.grad,
            method="landing",
            lam=lam,
            gtol=0,
            maxiter=maxiter,
            callback=lambda X: errors.append(norm(X - solution)) or errors[-1] < 1e-12,
            options=dict(step=eta, momentum=momentum),
        )
        return errors, result

    @pytest.mark.parametrize(
        ("ratio", "share"), [(0.1, 0.5), (0.25, 0.5), (2.0, 0.5), (2.0, 1.0), (0.25, 1.0)]
    )
    def test_rate_on_square_matrices(self, ratio, share):
        """lam = ratio mu_min: below 1/2, 2 lam is slowest; above, mu_min. eta = share / L."""
        problem = Procrustes.gaussian(4, seed=0)
        solution = problem.solution()
        mu = relative_spectrum(problem.fun, solution)
        lam = ratio * mu[0].item()
        eta = share / max(mu[-1].item(), 2 * lam)
        errors, _ = self.run(problem, solution, eta=eta, lam=lam)
        expected = 1 - eta * min(mu[0].item(), 2 * lam)
        assert 1 - rate(errors) == pytest.approx(1 - expected, rel=0.03)

    def test_steps_that_overshoot(self):
        """eta > 1 / L: the largest curvature decides, |1 - eta L|."""
        problem = Procrustes.gaussian(4, seed=0)
        solution = problem.solution()
        mu = relative_spectrum(problem.fun, solution)
        smallest, largest = mu[0].item(), mu[-1].item()
        eta = 2 / (largest + 0.3 * smallest)
        assert largest * eta - 1 > 1 - smallest * eta
        errors, _ = self.run(problem, solution, eta=eta, lam=0.5 * smallest)
        assert 1 - rate(errors) == pytest.approx(2 - eta * largest, rel=0.03)

    def test_distance_and_gradient_fall_at_rates_of_their_own(self):
        """Distance: 1 - 2 eta lam; gradient: 1 - eta mu_min. Each seen where the other is faster.

        A distance so small that the gradient's squares feed it falls as these do: (1 - eta mu)^2.
        """
        problem = Procrustes.gaussian(4, seed=0)
        solution = problem.solution()
        mu = relative_spectrum(problem.fun, solution)[[0, -1]].tolist()
        eta = 0.5 / mu[1]
        slow = 0.1 * mu[0]
        _, result = self.run(problem, solution, eta=eta, lam=slow)
        assert 1 - rate(result.history["distance"]) == pytest.approx(2 * eta * slow, rel=0.03)
        fast = 0.25 / eta  # each step halves the distance
        _, result = self.run(problem, solution, eta=eta, lam=fast)
        assert 1 - rate(result.history["grad_norm"]) == pytest.approx(eta * mu[0], rel=0.03)
        halved = result.history["distance"][1:5]
        assert [b / a for a, b in pairwise(halved)] == pytest.approx([0.5] * 3, rel=0.05)

    @pytest.mark.parametrize("ratio", [0.1, 2.0])
    @pytest.mark.parametrize("shape", [(6, 3), (3, 6), (5, 1)])
    def test_rate_on_tall_and_wide_matrices(self, ratio, shape):
        """The spectrum of the field's Jacobian, of which 2 lam is p (p + 1) / 2 times a member."""
        target = random_orthogonal(*shape, seed=0, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        weights = 1 + torch.rand(shape, generator=generator, dtype=torch.float64)

        class Distance:
            fun = staticmethod(lambda X: (weights * (X - target) ** 2).sum() / 2)
            grad = staticmethod(lambda X: weights * (X - target))

        def spectrum(lam):
            field = lambda X: landing_field(X, Distance.grad(X), lam)  # noqa: E731
            J = torch.autograd.functional.jacobian(field, target)
            return torch.linalg.eigvals(J.reshape(target.numel(), -1)).real

        away = spectrum(1000.0)
        slowest = away[(away - 2000).abs() > 1e-6].min().item()
        lam = ratio * slowest
        mu = spectrum(lam)
        eta = 0.7 / mu.max().item()
        errors, _ = self.run(Distance, target, eta=eta, lam=lam)
        expected = eta * min(slowest, 2 * lam)
        assert mu.min().item() == pytest.approx(min(slowest, 2 * lam))
        assert 1 - rate(errors) == pytest.approx(expected, rel=0.03)

    @pytest.mark.parametrize("momentum", [0.3, 0.6, 0.9])
    def test_rate_with_momentum(self, momentum):
        """A <- m A + (1 - m) psi: the roots of z^2 - (1 + m - eta (1 - m) mu) z + m."""
        problem = Procrustes.gaussian(4, seed=0)
        solution = problem.solution()
        mu = relative_spectrum(problem.fun, solution)
        eta = 1 / mu[-1].item()
        lam = 0.4 / eta  # the normal error is divided by five
        trace = 1 + momentum - eta * (1 - momentum) * mu
        root = (trace.to(torch.complex128) ** 2 - 4 * momentum).sqrt()
        slowest = torch.maximum((trace + root).abs() / 2, (trace - root).abs() / 2).max().item()
        errors, _ = self.run(problem, solution, eta=eta, lam=lam, momentum=momentum)
        assert slowest > 0.2
        # Complex roots oscillate: the mean over many steps is the modulus.
        assert 1 - rate(errors, window=100) == pytest.approx(1 - slowest, rel=0.05)


class TestFirstOrder:
    @pytest.mark.thorough
    def test_curvature_pays_on_an_ill_conditioned_problem(self):
        """Iterations: newton, then lbfgs, then bb.

        From three starts together, because the number from one of them depends on rounding.
        """
        n, p = 20, 3
        A = torch.diag(torch.logspace(0, 2, n, dtype=torch.float64))
        mu = torch.arange(p, 0, -1, dtype=torch.float64)
        starts = [random_orthogonal(n, p, seed=seed, dtype=torch.float64) for seed in range(3)]
        count = {}
        for method in ("newton", "lbfgs", "bb"):
            results = [
                minimize(
                    lambda X: (X * (A @ X) * mu).sum(), x0, method=method, gtol=1e-6, maxiter=600
                )
                for x0 in starts
            ]
            assert all(result.success for result in results)
            count[method] = sum(result.nit for result in results)
        assert 3 * count["newton"] < count["lbfgs"]
        assert 1.2 * count["lbfgs"] < count["bb"]

    def test_lbfgs_is_superlinear_with_enough_memory(self):
        """The last steps gain more than the first ones near the solution."""
        problem = Brockett(4, 2, 0)
        solution = minimize(problem.fun, problem.x0, method="newton", gtol=1e-12).x
        result = minimize(
            problem.fun, near(solution, 0.02, 0), jac=problem.jac, gtol=1e-9, options={"memory": 30}
        )
        g = result.history["grad_norm"]
        third = len(g) // 3
        first = (g[third] / g[0]) ** (1 / third)
        last = (g[-1] / g[-1 - third]) ** (1 / third)
        assert result.success
        assert last < 0.7 * first


def test_skew_basis_is_one():
    """A helper of these tests: orthonormal, skew, complete."""
    basis = skew_basis(4)
    gram = basis.flatten(1) @ basis.flatten(1).mT
    torch.testing.assert_close(gram, torch.eye(6, dtype=torch.float64))
    assert all(torch.equal(skew(A), A) for A in basis)
