"""The paper's statements that need a correction, each measured on the spot.

Every function here takes no argument, measures one statement with a fixed seed and reports what the
paper says, what is right and what was observed. docs/results/errata.md gives the derivations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ortholand.fields import landing_field, plam_field
from ortholand.flow import landing_flow
from ortholand.geometry import (
    distance,
    gram_residual,
    potential,
    random_orthogonal,
    relative_gradient,
    relative_gradient_times_x,
    relative_hessian,
    riemannian_gradient,
    riemannian_hessian,
    skew,
    skew_exponential,
    sym,
)
from ortholand.optim import LandingSGD
from ortholand.retractions import retract
from ortholand.safe_step import safe_step_size
from ortholand_lab.problems import Procrustes
from ortholand_lab.rules import paper_step_size  # which also registers "tight"


@dataclass(frozen=True)
class Erratum:
    """One statement of the paper, its correction and a measurement.

    ``agrees``: the measurement agrees with the correction and, where it can distinguish the two,
    contradicts the paper.
    """

    name: str
    paper: str
    corrected: str
    measured: str
    agrees: bool


ERRATA: dict[str, Callable[[], Erratum]] = {}


def _erratum(
    name: str, *, paper: str, corrected: str
) -> Callable[[Callable[[], tuple[str, bool]]], Callable[[], Erratum]]:
    """Register a measurement, a function that returns ``(measured, agrees)``, under a name."""

    def register(measure: Callable[[], tuple[str, bool]]) -> Callable[[], Erratum]:
        def erratum() -> Erratum:
            measured, agrees = measure()
            return Erratum(name, paper, corrected, measured, agrees)

        erratum.__name__, erratum.__doc__ = measure.__name__, measure.__doc__
        ERRATA[name] = erratum
        return erratum

    return register


# The flow.


@_erratum(
    "flow",
    paper="N(t) <= e^(-lam t) N0 / (sqrt(N0) - 1)^2",
    corrected="d(t) <= e^(-2 lam t) d0 / (1 - d0) for d0 < 1, so N decays as e^(-4 lam t)",
)
def flow_decay() -> tuple[str, bool]:
    """Exponent of N along a flow from d0 = 0.999, and both bounds at every time."""
    lam, times = 0.7, torch.linspace(0, 14, 141, dtype=torch.float64)
    problem = Procrustes.gaussian(3, seed=0)
    X0 = torch.diag(torch.tensor([1.0, 1.0, math.sqrt(0.001)], dtype=torch.float64))
    d = distance(landing_flow(problem.grad, X0, times, lam=lam, rtol=1e-12).X)
    N = d.square() / 4
    exponent = torch.log(N[-1] / N[100]).item() / (lam * 4)
    corrected = torch.exp(-2 * lam * times) * d[0] / (1 - d[0])
    paper = torch.exp(-lam * times) * N[0] / (N[0].sqrt() - 1) ** 2
    ours, theirs = (d / corrected).max().item(), (N / paper).max().item()
    measured = (
        f"N ~ e^({exponent:.3f} lam t); from d0 = 0.999, d is at most {ours:.3f} of its bound, "
        f"N up to {theirs:.2f} times the paper's"
    )
    return measured, abs(exponent + 4) < 0.01 and ours < 1 + 1e-6 and theirs > 1


@_erratum(
    "singular",
    paper="the flow lands regardless of initialization",
    corrected="it lands from every X0 of full rank; a singular X stays singular",
)
def singular_start() -> tuple[str, bool]:
    """The flow from diag(1, 0), and the bound of the paper."""
    times = torch.tensor([0.0, 20.0])
    X0 = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    G = _randn(2, 2, seed=0)
    path = landing_flow(lambda _: G, X0, times).X
    N0, N = potential(path[0]).item(), potential(path[-1]).item()
    bound = math.exp(-20) * N0 / (math.sqrt(N0) - 1) ** 2
    smallest = torch.linalg.svdvals(path[-1])[-1].item()
    measured = (
        f"diag(1, 0), t = 20: N = {N:.4f}, sigma_min = {smallest:.0e}; paper N <= {bound:.0e}"
    )
    return measured, abs(N - 0.25) < 1e-8 and smallest < 1e-8 and bound < 0.25


@_erratum(
    "singular-potential",
    paper="a singular X has N >= 1, so N <= eps = 1/2 keeps X invertible",
    corrected="a singular X has d >= 1, so N >= 1/4, attained: the ball must be d <= eps < 1",
)
def singular_potential() -> tuple[str, bool]:
    """Smallest N over singular matrices."""
    attained = potential(torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))).item()
    X = random_orthogonal(10_000, 3, 3, seed=0, dtype=torch.float64)
    values = torch.linspace(0.7, 1.3, 10_000, dtype=torch.float64)
    singular = X * torch.stack([values, values.flip(0), torch.zeros_like(values)], -1)[:, None]
    smallest = potential(singular).min().item()
    measured = f"N(diag(1, 1, 0)) = {attained}; least of 10,000 singular X: {smallest:.5f}"
    return measured, attained == 0.25 and 0.25 <= smallest < 0.5


@_erratum(
    "global",
    paper="inf ||psi||^2 <= (f0 - f* + 2 K sqrt(N0) / (sqrt(N0) - 1)) / T",
    corrected="inf ||psi||^2 <= (f0 - f* + K d0 / (2 (1 - d0))) / T, K >= ||Sym(G X^T)||",
)
def global_convergence() -> tuple[str, bool]:
    """Mean of ||psi||^2 along a flow that starts off the manifold near a minimiser of f."""
    problem = Procrustes.planted(5, seed=0)
    rotation = skew_exponential(0.03 * _randn(5, 5, seed=1))
    X0 = 1.05 * rotation @ problem.solution()
    times = torch.linspace(0, 2, 2001, dtype=torch.float64)
    X = landing_flow(problem.grad, X0, times).X
    M = problem.grad(X) @ X.mT
    mean = torch.trapezoid(_norm(skew(M)).square(), times) / 2
    K, d0, drop = _norm(sym(M)).max(), distance(X0), problem.fun(X0)  # f* = 0
    right = (drop + K * d0 / (2 * (1 - d0))) / 2
    paper = (drop + 2 * K * (d0 / 2) / (d0 / 2 - 1)) / 2
    measured = f"mean ||psi||^2 {mean:.4f} <= {right:.4f}; the paper's bound: {paper:.4f}"
    return measured, bool(mean <= right) and bool(mean > paper)


# Local convergence.


@_erratum(
    "jacobian",
    paper="Sp(J) = Sp(H) and lam; J block diagonal",
    corrected="Sp(J) = Sp(H) and 2 lam (p (p + 1) / 2 times); J block triangular",
)
def jacobian_spectrum() -> tuple[str, bool]:
    """Autograd Jacobian of the field at a minimiser, in the basis (skew, symmetric)."""
    p, lam = 4, 0.7
    problem = Procrustes.gaussian(p, seed=0)
    J, n_skew = _jacobian_in_blocks(problem, lam)
    eigenvalues = torch.linalg.eigvals(J)
    attraction = torch.full((p * (p + 1) // 2,), 2 * lam, dtype=torch.float64)
    expected = torch.cat([_relative_spectrum(problem), attraction])
    gap = (eigenvalues.real.sort().values - expected.sort().values).abs().max().item()
    count = int(((eigenvalues - 2 * lam).abs() < 1e-6).sum())
    at_lam = int(((eigenvalues - lam).abs() < 1e-6).sum())
    lower, upper = _norm(J[n_skew:, :n_skew]).item(), _norm(J[:n_skew, n_skew:]).item()
    measured = (
        f"p = 4: 2 lam {count} times, lam {at_lam} times, gap to the spectrum {gap:.0e}; "
        f"blocks off the diagonal {lower:.0e} and {upper:.2f}"
    )
    return measured, gap < 1e-6 and at_lam == 0 and lower < 1e-12 and upper > 0.1


@_erratum(
    "best-lam",
    paper="local rate min(mu_min, lam), best at lam = mu_min",
    corrected="local rate min(mu_min, 2 lam): with the step 1 / L lam = mu_min / 2 is best, with "
    "the best step every lam from mu_min / 2 to mu_max / 2 is, the paper's among them",
)
def best_lam() -> tuple[str, bool]:
    """Rates along the flow; the best lam for steps of 1 / (Lipschitz constant), and for any."""
    problem = Procrustes.gaussian(4, seed=0)
    mu, high = _relative_spectrum(problem)[[0, -1]].tolist()
    rates = {c: _flow_rate(problem, c * mu) / mu for c in (0.125, 0.25, 1.0)}
    ratios = [2.0**k for k in range(-4, 5)]
    progress = [_rate_per_step(problem, c * mu) for c in ratios]
    best = ratios[progress.index(max(progress))]
    seen = ", ".join(f"{rate:.3f}" for rate in rates.values())
    plateau = [_best_radius(problem, lam) for lam in (mu / 2, mu, high / 2)]
    outside = [_best_radius(problem, lam) for lam in (mu / 4, high)]
    factors = ", ".join(f"{factor:.3f}" for factor in (*plateau, *outside))
    measured = (
        f"rate / mu_min at lam / mu_min = 1/8, 1/4, 1: {seen}; with 1 / L lam = {best} mu_min is "
        "fastest; with the best step the error per step at lam = mu_min / 2, mu_min, mu_max / 2, "
        f"and outside at mu_min / 4, mu_max: {factors}"
    )
    right = all(abs(rate - min(1, 2 * c)) < 0.02 for c, rate in rates.items())
    flat = max(plateau) - min(plateau) < 1e-6 and min(outside) > max(plateau) + 0.01
    return measured, right and best == 0.5 and flat


def _best_radius(problem: Procrustes, lam: float) -> float:
    """Spectral radius of ``I - eta J`` with the eta that makes it least."""
    J, _ = _jacobian_in_blocks(problem, lam)
    spectrum = torch.linalg.eigvals(J).real
    eta = 2 / (spectrum.min() + spectrum.max())
    identity = torch.eye(len(J), dtype=J.dtype)
    return torch.linalg.eigvals(identity - eta * J).abs().max().item()


def _rate_per_step(problem: Procrustes, lam: float) -> float:
    """``1 - rho(I - J / L)`` with L the spectral norm of J: the gain of one step of 1 / L."""
    J, _ = _jacobian_in_blocks(problem, lam)
    iteration = torch.eye(len(J), dtype=J.dtype) - J / torch.linalg.matrix_norm(J, 2)
    return 1 - torch.linalg.eigvals(iteration).abs().max().item()


def _flow_rate(problem: Procrustes, lam: float) -> float:
    """Exponential rate at which the flow approaches a minimiser, measured late in the flow."""
    target = problem.solution()
    scale = min(_relative_spectrum(problem)[0].item(), 2 * lam)
    times = torch.tensor([0.0, 12.0, 16.0], dtype=torch.float64) / scale
    start = target + 1e-2 * _randn(*target.shape, seed=3)
    path = landing_flow(problem.grad, start, times, lam=lam, rtol=1e-10, atol=1e-14)
    error = _norm(path.X - target)
    return (torch.log(error[1] / error[2]) / (times[2] - times[1])).item()


# The algorithm.


@_erratum(
    "safe-step",
    paper="eta <= eta*(a, d) keeps N <= eps (d = N in the statement, d = ||D|| in the proof)",
    corrected="d <= eps < 1 for eta <= min((b + sqrt(b^2 + q (eps - d))) / q, 1 / (2 lam))",
)
def safe_step() -> tuple[str, bool]:
    """Share of random cases in which each rule breaks its own promise."""
    broken: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        for name, violated in _safe_step_case(generator, batch=100).items():
            broken.setdefault(name, []).append(violated)
    share = {name: torch.cat(cases).double().mean().item() for name, cases in broken.items()}
    measured = "20,000 cases, broken: " + ", ".join(f"{k} {v:.1%}" for k, v in share.items())
    paper, ours = ("paper (d = N)", "paper (d = ||D||)"), ("frobenius", "tight")
    return measured, all(share[k] > 0.1 for k in paper) and all(share[k] == 0 for k in ours)


def _safe_step_case(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    """Which of a batch of random steps, as long as each rule allows, leave the ball."""
    uniform = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    p, lam, eps = 1 + int(30 * uniform[0]), 10 ** (4 * uniform[1] - 2), 0.05 + 0.9 * uniform[2]
    X = _at_distance(eps * _rand(batch, generator), p, seed=generator)
    rank = 1 if uniform[3] < 0.5 else p
    G = _randn(batch, p, rank, seed=generator) @ _randn(batch, rank, p, seed=generator)
    G = G * 10 ** (10 * _rand(batch, generator) - 4)[:, None, None]
    L, d, N, a = landing_field(X, G, lam), distance(X), potential(X), _norm(relative_gradient(X, G))
    a = a.clamp(min=1e-30)  # p = 1 has no tangent directions
    by_potential, by_distance = (paper_step_size(a, x, lam=lam, eps=eps) for x in (N, d))
    capped = by_distance.clamp(max=1 / (2 * lam))
    frobenius, tight = (
        safe_step_size(L, d, lam=lam, eps=eps, rule=rule) for rule in ("frobenius", "tight")
    )
    rounding = 1e-9
    return {
        "paper (d = N)": ~(potential(_move(X, L, by_potential)) <= eps + rounding),
        "paper (d = ||D||)": ~(distance(_move(X, L, by_distance)) <= eps + rounding),
        "the same capped at 1 / (2 lam)": ~(distance(_move(X, L, capped)) <= eps + rounding),
        "frobenius": ~(distance(_move(X, L, frobenius)) <= eps + rounding),
        "tight": ~(distance(_move(X, L, tight)) <= eps + rounding),
    }


@_erratum(
    "one-step",
    paper="one step at eta = 0.3, lam = 1 cuts the error about 10 times",
    corrected="1 / (1 - 2 eta lam) = 2.5 times; a Newton-Schulz step after the move: quadratically",
)
def one_step_reduction() -> tuple[str, bool]:
    """The paper's orthogonalisation experiment with a tiny gradient: p = 100, sigma = 1e-4."""
    p, eta, A = 100, 0.3, 1e-6 * skew(_randn(100, 100, seed=1))
    X = torch.eye(p, dtype=torch.float64) + 1e-4 * _randn(p, p, seed=0)
    landed = X - eta * (A + gram_residual(X.mT)) @ X
    moved = X - eta * A @ X
    polished = moved - moved @ gram_residual(moved) / 2
    before, after, newton = (distance(Y).item() for Y in (X, landed, polished))
    measured = (
        f"{before:.4f} -> {after:.5f}, {before / after:.2f} times; Newton-Schulz {newton:.1e}"
    )
    return measured, abs(before / after - 2.5) < 0.05 and newton < before**2


@_erratum(
    "one-step-retractions",
    paper="for large gradients the exponential and Cayley retractions increase the error",
    corrected="they multiply by an orthogonal matrix: the error is unchanged, up to rounding",
)
def one_step_retractions() -> tuple[str, bool]:
    """A step of the two retractions from near the manifold, for small and large gradients."""
    X = random_orthogonal(20, 20, seed=0, dtype=torch.float64)
    X = X + 1e-4 * _randn(20, 20, seed=1)
    A = 0.3 * skew(_randn(20, 20, seed=2))
    growth = {
        method: [float(distance(retract(X, scale * A, method)) / distance(X)) for scale in scales]
        for method, scales in {"exponential": (1e-3, 1e3), "cayley": (1e-3, 1e3)}.items()
    }
    worst = max(abs(ratio - 1) for ratios in growth.values() for ratio in ratios)
    return f"error after / before: 1 up to {worst:.0e} for gradients from 1e-3 to 1e3", worst < 1e-6


@_erratum(
    "floor",
    paper="stochastic floor eta a^2 / (2 lam)",
    corrected="eta / (2 lam) ||E psi psi^T||_F, that is eta a^2 / (2 lam sqrt(p)) if isotropic",
)
def stochastic_floor() -> tuple[str, bool]:
    """Mean distance of the iterates under isotropic noise of norm a, and no signal."""
    p, eta, lam, a = 50, 0.05, 1.0, 1.0
    generator = torch.Generator().manual_seed(0)
    X, seen = torch.eye(p, dtype=torch.float64), []
    for k in range(600):
        noise = skew(_randn(p, p, seed=generator))
        psi = a * math.sqrt(2 / (p * (p - 1))) * noise
        X = X - eta * (psi + lam * gram_residual(X.mT)) @ X
        seen += [distance(X)] if k >= 200 else []  # (1 - 2 eta lam)^200 = 7e-10
    floor, right, paper = (
        torch.stack(seen).mean().item(),
        eta * a**2 / (2 * lam * math.sqrt(p)),
        eta * a**2 / (2 * lam),
    )
    measured = f"p = {p}: {floor:.5f}; corrected {right:.5f}, paper {paper:.5f}"
    return measured, abs(floor / right - 1) < 0.1 and floor < paper / 2


@_erratum(
    "momentum",
    paper="A_0 = 0, A_(k+1) = (1 - g) A_k + g psi(X_k), X_(k+1) = X_k - eta (A_k X_k + ...)",
    corrected="A_(k+1) in the X update: printed, step 1 ignores f and eta mu < 1 is needed, not "
    "eta mu < 2 (2 - g) / g",
)
def momentum_display() -> tuple[str, bool]:
    """First step from the manifold, and 400 steps near a minimiser with eta mu_max = 5, g = 0.1.

    Steps are capped at ``||X' - X|| = 1/2``, so that the diverging one does not overflow.
    """
    problem, gamma = Procrustes.gaussian(5, seed=0), 0.1
    mu = _relative_spectrum(problem)[-1].item()
    target = problem.solution()
    X0 = skew_exponential(1e-3 * _randn(5, 5, seed=1)) @ target
    final, first = {}, {}
    for printed in (True, False):
        X, A = X0, torch.zeros_like(X0)
        for _ in range(400):
            new = (1 - gamma) * A + gamma * relative_gradient(X, problem.grad(X))
            L = ((A if printed else new) + mu / 50 * gram_residual(X.mT)) @ X
            A, X = new, X - min(5 / mu, 0.5 / _norm(L).item()) * L
            first.setdefault(printed, _norm(X - X0).item())
        final[printed] = _norm(X - target).item()
    measured = (
        f"printed, corrected: first step {first[True]:.0e}, {first[False]:.0e}; "
        f"error {_norm(X0 - target):.0e} -> {final[True]:.1f}, {final[False]:.0e}"
    )
    return measured, first[True] < 1e-12 < first[False] and final[False] < 1e-6 < final[True]


@_erratum(
    "procrustes-scale",
    paper="f = ||X A - B||^2, p = 40, eta = 0.1: lands",
    corrected="f = ||X A - B||^2 / p; without 1 / p it rides the safe boundary and never lands",
)
def procrustes_scale() -> tuple[str, bool]:
    """The paper's Procrustes run in float32, with and without 1 / p."""
    problem = Procrustes.gaussian(40, seed=0, dtype=torch.float32)
    paths = {scale: _landing_distances(problem, scale, steps=2000) for scale in (1, problem.p)}
    scaled, printed = paths[1], paths[problem.p]
    late = printed[-500:]
    measured = (
        f"f / p: peak {scaled.max():.2f}, end {scaled[-1]:.0e}; "
        f"f: {late.min():.4f} to {late.max():.4f} over the last 500 of 2,000 steps"
    )
    return measured, bool(scaled[-1] < 1e-5) and bool(late.min() > 0.1)


def _landing_distances(problem: Procrustes, scale: float, steps: int) -> Tensor:
    X = torch.nn.Parameter(torch.eye(problem.p, dtype=problem.A.dtype))
    optimizer, path = LandingSGD([X], lr=0.1, lam=1.0, eps=0.5, safe_step="frobenius"), []
    for _ in range(steps):
        X.grad = scale * problem.grad(X.detach())
        optimizer.step()
        path.append(distance(X.detach()))
    return torch.stack(path)


# PLAM.


@_erratum(
    "plam-example",
    paper="field (alpha^2 - beta)(...); alpha^2 < beta explodes, alpha^2 > beta lands",
    corrected="field (2 alpha^2 - lam)(x - x^3), x = 1 + delta; explodes if 2 alpha^2 > lam",
)
def plam_example() -> tuple[str, bool]:
    """The PLAM flow from diag(1, 1.1) for alphas on both sides of (lam / 2)^(1/2), lam = 1."""
    x, fates, gaps = 1.1, {}, []
    X0, B = (torch.diag(torch.tensor(v, dtype=torch.float64)) for v in ([1.0, x], [1.0, 0.0]))
    for alpha in (0.5, 0.6, 0.8, 0.9, 1.2):
        gradient = _scaled_gradient(alpha, B)
        field = plam_field(X0, gradient(X0), 1.0)[1, 1].item()
        gaps.append(abs(field - (2 * alpha**2 - 1) * (x - x**3)))
        try:
            end = landing_flow(gradient, X0, torch.tensor([0.0, 60.0]), field=plam_field).X[-1]
            fates[alpha] = "lands" if distance(end) < 1e-6 else "neither"
        except RuntimeError:
            fates[alpha] = "explodes"
    right = {a: "explodes" if 2 * a**2 > 1 else "lands" for a in fates}
    measured = ", ".join(f"alpha {a} {fate}" for a, fate in fates.items())
    return f"{measured}; field off by {max(gaps):.0e}", fates == right and max(gaps) < 1e-14


@_erratum(
    "plam-spurious",
    paper="grad f = S X and S D + D S = 2 lam S give a zero of the PLAM field",
    corrected="S D + D S = 2 lam D does",
)
def plam_spurious() -> tuple[str, bool]:
    """The PLAM field at points with either condition, and the landing field there."""
    lam, eye = 0.5, torch.eye(3, dtype=torch.float64)
    # D = lam I with any S has the paper's property, S = lam I with any D has the corrected one.
    X_paper, S = math.sqrt(1 + lam) * eye, sym(_randn(3, 3, seed=0))
    X_right = _at_distance(0.9, 3, seed=1)
    paper = _norm(plam_field(X_paper, S @ X_paper, lam)).item()
    right = _norm(plam_field(X_right, lam * X_right, lam)).item()
    landing = _norm(landing_field(X_right, lam * X_right, lam)).item()
    measured = (
        f"||PLAM|| {paper:.2f} under the paper's condition, {right:.0e} under the corrected one "
        f"(d = 0.9; ||landing|| there {landing:.2f})"
    )
    return measured, right < 1e-14 and paper > 0.1 and landing > 0.1


@_erratum(
    "plam-problems",
    paper="PLAM always explodes on ||A X - B||^2 (10 problems, p = 2)",
    corrected="it explodes on about three problems in four; landing on none",
)
def plam_problems() -> tuple[str, bool]:
    """1,000 random problems from X = I with eta = 1e-3, lam = 1, 10,000 steps each."""
    d, _ = _run_problems(plam_field, steps=10_000)
    landing, worst = _run_problems(landing_field, steps=10_000)
    exploded, landed = (~(d < 10)).double().mean().item(), (d < 1e-3).double().mean().item()
    measured = (
        f"PLAM: {exploded:.1%} explode, {landed:.1%} land (d < 1e-3); landing: "
        f"{(landing < 1e-3).double().mean():.1%} land, max d {worst.max():.4f}"
    )
    return measured, 0.6 < exploded < 0.85 and landed > 0.15 and bool(worst.max() < 0.05)


def _run_problems(field: Callable[[Tensor, Tensor, float], Tensor], steps: int) -> list[Tensor]:
    """Last and largest (every tenth step) distance of each problem."""
    A, B = _randn(2, 1000, 2, 2, seed=0)
    gram, target = 2 * A.mT @ A, 2 * A.mT @ B
    X = torch.eye(2, dtype=torch.float64).repeat(1000, 1, 1)
    worst = distance(X)
    for k in range(steps):
        X = X - 1e-3 * field(X, gram @ X - target, 1.0)
        if k % 10 == 9:
            worst = torch.maximum(worst, distance(X))
    return [distance(X), worst]


# Derivatives.


@_erratum(
    "stiefel",
    paper="grad f = psi X on the Stiefel manifold; N = ||X^T X - I||^2",
    corrected="psi X is half the canonical gradient; N = d^2 / 4, whose gradient is X D",
)
def stiefel_gradient() -> tuple[str, bool]:
    """``<grad, xi>_c / <G, xi>`` for psi X and the canonical gradient, and the gradient of d^2."""
    X, G = random_orthogonal(7, 3, seed=0, dtype=torch.float64), _randn(7, 3, seed=1)
    xi = riemannian_gradient(X, _randn(7, 3, seed=2))  # a tangent vector
    # The canonical metric is <u, v>_c = Tr u^T (I - X X^T / 2) v.
    dual = xi - X @ (X.mT @ xi) / 2
    psi_X, canonical = relative_gradient_times_x(X, G), riemannian_gradient(X, G, "canonical")
    half, whole = (((U * dual).sum() / (G * xi).sum()).item() for U in (psi_X, canonical))
    euclidean = ((psi_X * xi).sum() / (G * xi).sum()).item()
    Y = _randn(7, 3, seed=3).requires_grad_()
    (slope,) = torch.autograd.grad((Y.mT @ Y - torch.eye(3)).square().sum(), Y)
    factor = (_norm(slope) / _norm(Y @ gram_residual(Y))).item()
    measured = (
        f"psi X represents {half:.3f} of df (canonical metric; Euclidean {euclidean:.3f}), "
        f"G - X G^T X {whole:.3f}; grad d^2 = {factor:.3f} X D"
    )
    return measured, max(abs(half - 0.5), abs(whole - 1), abs(factor - 4)) < 1e-12


@_erratum(
    "hessian",
    paper="Hess f[A X] = Skew(H[A X] X^T - Sym(G X^T A)) X (appendix)",
    corrected="Sym(G X^T) A instead of Sym(G X^T A), which Skew would annihilate",
)
def riemannian_hessian_term() -> tuple[str, bool]:
    """Second derivative of f(exp(t A) X) at t = 0, and the quadratic form of either formula."""
    problem, X = (
        Procrustes.gaussian(5, seed=0),
        random_orthogonal(5, 5, seed=1, dtype=torch.float64),
    )
    A = skew(_randn(5, 5, seed=2))
    t = 1e-3 * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    f = problem.fun(skew_exponential(t[:, None, None] * A) @ X)
    second = ((f[0] - 2 * f[1] + f[2]) / t[2] ** 2).item()
    G, H = problem.grad(X), problem.hessp(X, A @ X)
    right = (A @ X * riemannian_hessian(X, A @ X, gradient=G, hessian_product=H)).sum().item()
    paper = (A * skew(H @ X.mT - sym(G @ X.mT @ A))).sum().item()
    measured = f"d2f/dt2 = {second:.4f}; corrected {right:.4f}, paper {paper:.4f}"
    return measured, abs(right / second - 1) < 1e-4 and abs(paper / second - 1) > 0.05


# Helpers.


def _randn(*shape: int, seed: int | torch.Generator) -> Tensor:
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _rand(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _norm(M: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(M)


def _move(X: Tensor, L: Tensor, eta: Tensor) -> Tensor:
    return X - eta[..., None, None] * L


def _scaled_gradient(alpha: float, B: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda X: 2 * alpha * (alpha * X - B)


def _at_distance(d: Tensor | float, p: int, *, seed: int | torch.Generator) -> Tensor:
    """Random square matrices with ``||X^T X - I||_F = d`` for d < 1, one per entry of d."""
    d = torch.as_tensor(d, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    Q, V = random_orthogonal(2, *d.shape, p, p, seed=generator, dtype=torch.float64)
    e = _randn(*d.shape, p, seed=generator)
    e = d[..., None] * e / torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    return (Q * (1 + e).sqrt().unsqueeze(-2)) @ V


def _basis(p: int) -> tuple[Tensor, int]:
    """Orthonormal basis of the p x p matrices, the skew ones first, and how many those are."""
    E = torch.eye(p * p, dtype=torch.float64).reshape(p, p, p, p)
    pairs = [(i, j) for i in range(p) for j in range(i)]
    skews = [(E[i, j] - E[j, i]) / math.sqrt(2) for i, j in pairs]
    syms = [(E[i, j] + E[j, i]) / math.sqrt(2) for i, j in pairs] + [E[i, i] for i in range(p)]
    return torch.stack(skews + syms), len(skews)


def _jacobian_in_blocks(problem: Procrustes, lam: float) -> tuple[Tensor, int]:
    """Jacobian of E -> Lambda((I + E) X*) X*^T in the basis (skew, symmetric)."""
    X, p = problem.solution(), problem.p
    basis, n_skew = _basis(p)

    def field(E: Tensor) -> Tensor:
        Y = X + E @ X
        return landing_field(Y, problem.grad(Y), lam) @ X.mT

    J = torch.autograd.functional.jacobian(field, torch.zeros_like(X)).reshape(p * p, p * p)
    frame = basis.reshape(p * p, p * p)
    return frame @ J @ frame.mT, n_skew


def _relative_spectrum(problem: Procrustes) -> Tensor:
    """Eigenvalues of the relative Hessian at the solution, in increasing order."""
    X = problem.solution()
    basis, n_skew = _basis(problem.p)
    skews = basis[:n_skew]
    G, products = problem.grad(X), problem.hessp(X, skews @ X)
    images = relative_hessian(X, skews, gradient=G, hessian_product=products)
    return torch.linalg.eigvalsh(skews.flatten(1) @ images.flatten(1).mT)
