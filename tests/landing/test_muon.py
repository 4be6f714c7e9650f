"""Steepest descent in the spectral norm: the theorem, its closed form, and what a step does."""

import math

import pytest
import torch

import ortholand as ol
from ortholand.geometry import distance, skew
from ortholand.geometry.derivatives import relative_gradient_times_x
from ortholand.landing.moments import generator
from ortholand.landing.muon import MuonMoments, polar_gram, shifted_cholesky
from ortholand.landing.point import Point

EXACT = torch.float64
STEPS = 5  # one more than the default, for what is near the closed form


def gaussian(*shape, seed=0, dtype=EXACT):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def direction(X, G, steps=STEPS):
    """``R = A X`` as the library has it, from a generator that it makes."""
    B = MuonMoments(steps=steps).direction(Point(X), generator(X, G), G).of_length_one(X).B
    return B @ X if X.shape[-2] == X.shape[-1] else relative_gradient_times_x(X, B)


def exact_direction(X, G):
    """``msign(psi) X`` by singular values, and ``||psi||_*``."""
    X, G = (M.to(torch.complex128 if M.is_complex() else EXACT) for M in (X, G))
    U, s, V = torch.linalg.svd(skew(G @ X.mH))
    kept = s > 1e-9 * s[..., :1]
    return (U * kept[..., None, :]) @ V @ X, s.sum(-1)


def norm_of_turn(X, R):
    """The least ``||A||_2`` of a skew A with ``A X = R``: that of ``R S^(-1/2)``."""
    L = torch.linalg.cholesky(X.mH @ X)
    return torch.linalg.matrix_norm(torch.linalg.solve_triangular(L, R.mH, upper=False), ord=2)


def near_manifold(n, p, far, seed=0):
    """A matrix at spectral distance ``far``."""
    V = ol.random_orthogonal(p, p, seed=seed + 1, dtype=EXACT)
    e = 2 * torch.rand(p, generator=torch.Generator().manual_seed(seed), dtype=EXACT) - 1
    e = far * e / e.abs().max()
    X = ol.random_orthogonal(n, p, seed=seed, dtype=EXACT)
    return X @ (V * (1 + e).sqrt()) @ V.mT


def spectrum(kind, p, cond, generator):
    if kind == "geometric":
        return torch.logspace(0, -math.log10(cond), p, dtype=EXACT)
    if kind == "one large":
        return torch.tensor([1.0] + [1 / cond] * (p - 1), dtype=EXACT)
    if kind == "even":
        return torch.linspace(1, 1 / cond, p, dtype=EXACT)
    if kind == "random":
        return cond ** -torch.rand(p, generator=generator, dtype=EXACT)
    return (torch.arange(p) <= p // 3).to(EXACT)  # of low rank


def random_case(seed):
    """X and G in float32: shapes to 300 x 100, condition numbers to 1e6, distances to 0.3."""
    draw = torch.Generator().manual_seed(seed)
    uniform = lambda low, high: low + (high - low) * float(torch.rand((), generator=draw))  # noqa: E731
    p = round(10 ** uniform(0, 2))
    n = p if uniform(0, 1) < 0.25 else min(300, p + round(10 ** uniform(0, 2.3)))
    X = near_manifold(n, p, uniform(0, 0.3) if uniform(0, 1) < 0.75 else 0.0, seed)
    kinds = ("geometric", "one large", "even", "random", "low rank")
    s = spectrum(kinds[int(uniform(0, 5))], p, 10 ** uniform(0, 6), draw)
    U, V = (ol.random_orthogonal(k, p, seed=seed + k, dtype=EXACT) for k in (n, p))
    G = (U * s) @ V.mT
    if uniform(0, 1) < 0.3:  # a large normal part, as near a critical point
        H = torch.randn(p, p, generator=draw, dtype=EXACT)
        G = G + uniform(0, 5) * X @ (H + H.mT)
    return X.float(), (G * 10 ** uniform(-8, 8)).float()


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_cases_against_singular_values(hundred):
    tried = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        X, G = random_case(seed)
        R = direction(X, G).double()
        X, G = X.double(), G.double()
        _, optimum = exact_direction(X, G)
        if optimum <= 1e-5 * torch.linalg.matrix_norm(G):  # what is tangent of G is rounding
            continue
        tried += 1
        assert (G * R).sum() >= 0.98 * optimum, seed
        assert norm_of_turn(X, R) <= 1.001, seed
        normal = torch.linalg.matrix_norm(X.mT @ R + R.mT @ X)
        assert normal <= 1e-6 * max(1.0, float(torch.linalg.matrix_norm(R))), seed
    assert tried >= 90


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (6, 6), (7, 6), (9, 5), (40, 10), (3, 12, 4)])
@pytest.mark.parametrize("scale", [1.0, 1.05])
def test_in_double_precision_it_is_the_closed_form(shape, dtype, scale):
    X = scale * ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    G = gaussian(*shape, seed=1, dtype=dtype)
    expected, _ = exact_direction(X, G)
    assert (direction(X, G) - expected).abs().max() < 3e-6


def dual_value(X, G):
    """``min over symmetric S of ||G + X S||_*``, the dual: every S gives a bound."""
    S = torch.zeros(X.shape[-1], X.shape[-1], dtype=EXACT, requires_grad=True)
    optimizer = torch.optim.LBFGS([S], max_iter=100, line_search_fn="strong_wolfe")

    def value():
        return torch.linalg.svdvals(G + X @ (S + S.mT)).sum()

    def closure():
        optimizer.zero_grad()
        value().backward()
        return value()

    optimizer.step(closure)
    return float(value().detach())


@pytest.mark.parametrize("shape", [(5, 1), (6, 3), (4, 4)])
def test_no_tangent_direction_of_norm_one_descends_faster(shape):
    """Weak duality: no such direction exceeds any value of the dual."""
    X = ol.random_orthogonal(*shape, seed=0, dtype=EXACT)
    G = gaussian(*shape, seed=1)
    R, optimum = exact_direction(X, G)
    assert torch.linalg.matrix_norm(R, ord=2) <= 1 + 1e-12
    assert (X.mT @ R + R.mT @ X).abs().max() < 1e-12
    assert float((G * R).sum()) == pytest.approx(float(optimum), rel=1e-12)
    assert dual_value(X, G) == pytest.approx(float(optimum), rel=1e-6)
    for seed in range(20):  # others of norm one: none is better
        T = skew(gaussian(shape[0], shape[0], seed=seed)) @ X
        T = T / torch.linalg.matrix_norm(T, ord=2)
        assert abs((G * T).sum()) <= optimum


@pytest.mark.parametrize(("n", "p"), [(7, 3), (5, 4), (6, 1), (4, 4)])
def test_every_tangent_direction_is_completed_by_a_skew_matrix_of_its_norm(n, p):
    """The first step of the proof, as it stands in docs/muon.md."""
    basis = ol.random_orthogonal(n, n, seed=0, dtype=EXACT)
    X, Y = basis[:, :p], basis[:, p:]
    R = skew(gaussian(n, n, seed=1)) @ X
    R = R / torch.linalg.matrix_norm(R, ord=2)
    Omega, K = skew(X.mT @ R), Y.mT @ R
    values, V = torch.linalg.eigh(torch.eye(p) - Omega.mT @ Omega)
    D = (V * values.clamp(min=0).sqrt()) @ V.mT
    Gamma = K @ torch.linalg.pinv(D, rtol=1e-7)
    blocks = [[Omega, -K.mT], [K, -Gamma @ Omega @ Gamma.mT]]
    A = basis @ torch.cat([torch.cat(row, dim=1) for row in blocks]) @ basis.mT
    assert (A + A.mT).abs().max() < 1e-12
    assert (A @ X - R).abs().max() < 1e-6
    assert torch.linalg.matrix_norm(A, ord=2) <= 1 + 1e-6


def test_the_polar_factor_of_a_riemannian_gradient_is_another_direction():
    """SPEL's: of norm one, but not tangent."""
    X = ol.random_orthogonal(8, 4, seed=0, dtype=EXACT)
    G = gaussian(8, 4, seed=1)
    riemannian = G - X @ (X.mT @ G + G.mT @ X) / 2
    U, _, V = torch.linalg.svd(riemannian, full_matrices=False)
    other = U @ V
    assert (X.mT @ other + other.mT @ X).abs().max() > 0.01
    assert (direction(X, G) - other).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(8, 4), (128, 64), (200, 20)])
@pytest.mark.parametrize("decays", [False, True])
def test_two_polar_factors_in_place_of_one_are_another_direction(shape, decays):
    """iMuon's, the best where ``X Omega + Y K`` has the norm ``max(|Omega|, |K|)``: tangent."""
    X, G = ol.random_orthogonal(*shape, seed=0, dtype=EXACT), gaussian(*shape, seed=1)
    if decays:
        U, s, V = torch.linalg.svd(G, full_matrices=False)
        G = U / torch.arange(1, len(s) + 1) @ V
    M = X.mT @ G
    other = X @ ol.msign(skew(M), steps=11) + ol.msign(G - X @ M, steps=11)
    assert (X.mT @ other + other.mT @ X).abs().max() < 1e-6
    norm = torch.linalg.matrix_norm(other, ord=2)
    assert float(norm) == pytest.approx(2**0.5, rel=1e-3)
    _, optimum = exact_direction(X, G)
    assert 0.8 < float((G * other).sum() / (norm * optimum)) < 0.96


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (5, 1), (5, 4)])
def test_zero_and_normal_gradients_give_no_direction(shape):
    """Rounding is not a direction."""
    X = ol.random_orthogonal(*shape, seed=0)
    assert torch.equal(direction(X, torch.zeros(shape)), torch.zeros(shape))
    H = gaussian(shape[1], shape[1], seed=1, dtype=torch.float32)
    normal = X @ (H + H.mT)
    assert direction(X, normal).abs().max() == 0
    tilted = normal + 0.01 * gaussian(*shape, seed=7, dtype=torch.float32)
    assert direction(X, tilted).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (9, 8)])
def test_a_relative_gradient_of_rank_two(shape):
    """One entry of the gradient: one plane turns, the others stay but for rounding."""
    X = ol.random_orthogonal(*shape, seed=0)
    G = torch.zeros(shape)
    G[0, 0] = 1.0
    R = direction(X, G)
    expected, _ = exact_direction(X, G)
    assert (R - expected).abs().max() < 5e-3  # u times the slope at zero, 5e3, and some
    assert torch.linalg.matrix_norm(R.double(), ord=2) < 1.001
    assert (X.mT @ R + R.mT @ X).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [(3, 6, 6), (3, 12, 4)])
def test_what_is_not_finite_stays_in_its_matrix(shape, bad):
    X = ol.random_orthogonal(*shape, seed=0)
    G = gaussian(*shape, dtype=torch.float32)
    spoilt = G.clone()
    spoilt[1, 0, 0] = bad
    R = direction(X, spoilt)
    assert not R[1].isfinite().all()
    torch.testing.assert_close(R[[0, 2]], direction(X, G)[[0, 2]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("shape", [(6, 6), (12, 4)])
def test_the_scale_of_a_gradient_does_not_matter(shape, scale):
    X = ol.random_orthogonal(*shape, seed=0)
    G = gaussian(*shape, seed=5, dtype=torch.float32)
    torch.testing.assert_close(direction(X, scale * G), direction(X, G), rtol=0, atol=2e-5)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("shape", [(20, 20), (40, 20)])
def test_fewer_steps_are_worse_and_still_tangent_and_never_longer(shape, steps):
    X = near_manifold(*shape, 0.2).float()
    G = gaussian(*shape, dtype=torch.float32)
    few, many = (direction(X, G, k).double() for k in (steps, STEPS))
    X, G = X.double(), G.double()
    assert norm_of_turn(X, few) <= 1.001
    assert (X.mT @ few + few.mT @ X).abs().max() < 1e-6
    assert 0 < (G * few).sum() < (G * many).sum()


@pytest.mark.parametrize("shape", [(12, 4), (5, 4), (3, 9, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_the_generator_from_gram_matrices(shape, dtype):
    X = 1.04 * ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    B = gaussian(*shape, seed=1, dtype=dtype)
    D = X.mH @ X - torch.eye(shape[-1])
    polar = polar_gram(D, X.mH @ B, B.mH @ B, MuonMoments().sign, 1e-15, 1e-15)
    ours = X @ polar.of_X + B @ polar.of_B
    direction = MuonMoments().direction(Point(X), B, B)
    whole = direction.of_length_one(X).B
    assert (ours - whole).abs().max() < 1e-8
    assert (X.mH @ ours - polar.M).abs().max() < 1e-8
    assert (ours.mH @ ours - polar.T).abs().max() < 1e-8


def test_a_gradient_in_the_span_of_its_weight_from_gram_matrices():
    """What is left of it outside is a difference of equal numbers, and may come out negative."""
    X = ol.random_orthogonal(23, 6, seed=0, dtype=EXACT)
    B = X @ gaussian(6, 6)
    D = X.mT @ X - torch.eye(6)
    polar = polar_gram(D, X.mT @ B, B.mT @ B, MuonMoments().sign, 1e-15, 1e-15)
    ours = X @ polar.of_X + B @ polar.of_B
    expected, _ = exact_direction(X, B)
    assert (relative_gradient_times_x(X, ours) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(40, 40), (120, 30)])
def test_lr_is_the_angle_by_which_planes_turn(shape):
    """On the manifold: from X to the next X all principal rotations are by lr, but for eta^3."""
    X = torch.nn.Parameter(ol.random_orthogonal(*shape, seed=0, dtype=EXACT))
    before = X.detach().clone()
    optimizer = ol.LandingMuon([X], lr=0.05, momentum=0.0)
    X.grad = gaussian(*shape, seed=1)
    optimizer.step()
    moved = torch.linalg.matrix_norm(X.detach() - before, ord=2)
    assert float(2 * torch.asin(moved / 2)) == pytest.approx(0.05, rel=1e-3)
    assert distance(X.detach()) < 1e-4


@pytest.mark.parametrize(("n", "p", "rank"), [(96, 10, 9), (384, 16, 16), (200, 20, 3)])
@pytest.mark.parametrize("lr", [0.05, 0.2])
def test_the_error_is_at_rounding_after_every_step(n, p, rank, lr):
    """Where rows are many steps go by Gram matrices; gradients are those of a softmax layer."""
    X = torch.nn.Parameter(ol.random_orthogonal(n, p, seed=0))
    optimizer = ol.LandingMuon([X], lr=lr, momentum=0.0)
    worst = 0.0
    for k in range(40):
        decay = 10 ** -torch.linspace(0, 4, rank)
        X.grad = gaussian(n, rank, seed=k).float() * decay @ gaussian(rank, p, seed=k + 100).float()
        optimizer.step()
        worst = max(worst, float(distance(X.detach().double())))
    assert worst < 5e-6


def test_a_gram_matrix_that_is_not_positive_has_no_cholesky_factor():
    T = torch.stack([torch.eye(3), -torch.eye(3), torch.full((3, 3), math.nan)])
    L = shifted_cholesky(T, 0.5)
    torch.testing.assert_close(L[0], 1.5**0.5 * torch.eye(3))
    assert L[1:].isnan().all()
