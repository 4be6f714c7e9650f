import math

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import relative_gradient, sym
from tests.optim.recorder import Recorder
from tests.optim.reference import reference_steps


def gaussian(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


OPTIONS = [
    {},
    {"lam": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.9},
    {"momentum": 0.7, "nesterov": True, "eps": 0.2},
    {"lr": 100.0, "momentum": 0.9, "lam": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rule", ["frobenius", "spectral"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 4), (7, 3), (3, 7), (1, 1), (5, 1)])
def test_steps_equal_the_reference(shape, dtype, rule, options):
    options = {"lr": 0.1, **options}
    start = ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    gradients = [gaussian(*shape, seed=k, dtype=dtype) for k in range(6)]
    X = nn.Parameter(start.clone())
    optimizer = ol.LandingSGD([X], safe_step=rule, **options)
    for G in gradients:
        X.grad = G.clone()
        optimizer.step()
    wide = shape[0] < shape[1]
    tall = reference_steps(
        start.mT if wide else start,
        [G.mT if wide else G for G in gradients],
        rule=rule,
        **options,
    )
    torch.testing.assert_close(X.detach(), tall.mT if wide else tall, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("view", ["matrix", "kernel"])
def test_convolutions_step_as_the_matrices_they_are_seen_as(view):
    shape = (4, 2, 3, 5)
    weight = nn.Parameter(gaussian(*shape, seed=0))
    ol.orthogonalize_(weight, view=view)
    start, G = weight.detach().clone(), gaussian(*shape, seed=1)
    optimizer = ol.LandingSGD([weight], lr=0.1, momentum=0.5, view=view)
    for _ in range(3):
        weight.grad = G.clone()
        optimizer.step()
    if view == "matrix":
        expected = reference_steps(
            start.reshape(4, -1).mT, [G.reshape(4, -1).mT] * 3, lr=0.1, momentum=0.5
        ).mT.reshape(shape)
    else:
        expected = torch.stack(
            [
                torch.stack(
                    [
                        reference_steps(start[i, j].mT, [G[i, j].mT] * 3, lr=0.1, momentum=0.5).mT
                        for j in range(2)
                    ]
                )
                for i in range(4)
            ]
        )
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-8, atol=1e-10)


# The eps ball (tests/optim/test_ball.py looks for a way out of it).


def test_the_ball_is_needed_and_used():
    """Without the safe step the same run leaves the ball; with it, it comes close to its edge."""
    reached = {}
    for rule in (None, "frobenius", "spectral"):
        X = nn.Parameter(torch.eye(10))
        optimizer = ol.LandingSGD([X], lr=0.3, momentum=0.9, safe_step=rule, eps=0.3)
        worst = 0.0
        for k in range(19):  # one more, and a warning would tell that X is frozen at infinity
            X.grad = gaussian(10, 10, seed=k, dtype=torch.float32)
            optimizer.step()
            worst = max(worst, ol.orthogonality_error(X))
            if rule == "spectral":
                assert ol.distance(X.detach(), spectral=True) <= 0.3 + 1e-5
        reached[rule] = worst
    assert reached["frobenius"] <= 0.3 + 1e-5
    assert reached["spectral"] > reached["frobenius"] > 0.1
    assert not reached[None] <= 0.3


def test_the_first_steps_with_momentum_stay_in_the_ball():
    """With a buffer that starts as the raw gradient, as in the paper's code, they do not."""
    X = nn.Parameter(ol.random_orthogonal(10, 10, seed=0))
    optimizer = ol.LandingSGD([X], lr=1.0, momentum=0.9, eps=0.1)
    for k in range(50):
        X.grad = gaussian(10, 10, seed=k, dtype=torch.float32)
        optimizer.step()
        assert ol.orthogonality_error(X, spectral=True) <= 0.1 + 1e-6


@pytest.mark.parametrize("shape", [(6, 6), (20, 4), (4, 20)])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_extreme_gradients_in_float32(shape, scale):
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9)
    for k in range(20):
        X.grad = scale * gaussian(*shape, seed=k, dtype=torch.float32)
        optimizer.step()
    assert torch.isfinite(X).all()
    assert ol.orthogonality_error(X, spectral=True) <= 0.5 + 1e-5
    assert optimizer.skipped_steps() == 0
    moved = torch.dist(X.detach(), ol.random_orthogonal(*shape, seed=0))
    assert moved > 0.1 if scale > 1 else moved < 1e-5


def test_overflowing_steps_are_skipped_not_taken():
    X = nn.Parameter(torch.eye(3))
    optimizer = ol.LandingSGD([X], lr=0.1)
    X.grad = torch.full((3, 3), 3e38).triu()
    X.grad[0, 1] = -3e38
    optimizer.step()
    assert torch.isfinite(X).all()
    assert ol.orthogonality_error(X, spectral=True) <= 0.5


def test_without_safe_step_a_start_anywhere_is_accepted():
    X = nn.Parameter(2 * torch.eye(3))
    optimizer = ol.LandingSGD([X], lr=0.05, safe_step=None)
    for _ in range(300):
        X.grad = torch.zeros(3, 3)
        optimizer.step()
    assert ol.orthogonality_error(X) < 1e-5


@pytest.mark.parametrize("rule", ["spectral", "frobenius"])
@pytest.mark.parametrize("eps", [0.1, 0.5])
def test_a_start_may_be_outside_the_ball_by_rounding_but_no_farther(rule, eps):
    X = nn.Parameter(torch.eye(6, 3, dtype=torch.float64))
    for outside in (1 + 5e-5, 1 + 1e-3):
        X.data[0, 0] = (1 + outside * eps) ** 0.5  # D has one entry, so all its norms are equal
        if outside < 1 + 1e-4:
            ol.LandingSGD([X], eps=eps, safe_step=rule)
        else:
            with pytest.raises(ValueError, match=f"within {eps} of the manifold"):
                ol.LandingSGD([X], eps=eps, safe_step=rule)


def test_the_determinant_keeps_its_sign():
    """The best rotation has determinant -1; from SO(n), landing finds the best one in SO(n)."""
    from ortholand_lab.problems import Procrustes

    problem = Procrustes.gaussian(5, seed=0)
    other = -int(torch.linalg.det(problem.solution()).sign())
    start = ol.random_orthogonal(5, 5, seed=0, special=True, dtype=torch.float64)
    if other < 0:
        start[0] *= -1
    X = nn.Parameter(start)
    optimizer = ol.LandingSGD([X], lr=1000.0)
    for k in range(3000):
        optimizer.param_groups[0]["lr"] = 1000.0 if k < 100 else 0.1
        X.grad = problem.grad(X.detach())
        optimizer.step()
        assert torch.linalg.det(X.detach()).sign() == other
    torch.testing.assert_close(X.detach(), problem.solution(determinant=other))


# Momentum.


def test_square_momentum_is_skew_and_the_papers():
    """A_{k+1} = (1 - gamma) A_k + gamma psi with momentum = dampening = 1 - gamma."""
    X = nn.Parameter(ol.random_orthogonal(5, 5, seed=0, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.05, momentum=0.8, dampening=0.8)
    A = None
    for k in range(10):
        X.grad = gaussian(5, 5, seed=k)
        psi = relative_gradient(X.detach(), X.grad)
        A = psi if A is None else 0.8 * A + 0.2 * psi
        optimizer.step()
        buffer = optimizer.state[X]["momentum_buffer"]
        torch.testing.assert_close(buffer, A)
        assert torch.equal(buffer, -buffer.mT)


def test_tall_momentum_has_the_weights_shape_and_no_normal_part():
    X = nn.Parameter(ol.random_orthogonal(9, 3, seed=0, dtype=torch.float64))
    optimizer = ol.LandingSGD([X], lr=0.01, momentum=0.9)
    for k in range(10):
        before = X.detach().clone()
        X.grad = 100 * before @ sym(gaussian(3, 3, seed=k)) + gaussian(9, 3, seed=k)
        optimizer.step()
    buffer = optimizer.state[X]["momentum_buffer"]
    assert buffer.shape == X.shape
    normal = torch.linalg.matrix_norm(sym(before.mT @ buffer))
    assert normal < 0.02 * torch.linalg.matrix_norm(sym(before.mT @ X.grad))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(20, 20), (30, 10), (10, 30)])
def test_momentum_accelerates_an_ill_conditioned_problem(shape, nesterov):
    """Brockett-like quadratic: the same lr gets further with momentum, to the known optimum."""
    n, p = max(shape), min(shape)
    spectrum = torch.linspace(0, 1, n, dtype=torch.float64)
    target = torch.linspace(1, 2, p, dtype=torch.float64)

    def gap(X):
        Y = X if shape[0] >= shape[1] else X.mT
        best = (spectrum[:p] * target.flip(0)).sum()
        return ((Y.mT * spectrum) @ Y * torch.diag(target)).sum() - best

    gaps = {}
    for momentum in (0.0, 0.9):
        X = nn.Parameter(ol.random_orthogonal(*shape, seed=0, dtype=torch.float64))
        optimizer = ol.LandingSGD(
            [X], lr=0.2, momentum=momentum, nesterov=nesterov and momentum > 0
        )
        for _ in range(400):
            optimizer.zero_grad()
            gap(X).backward()
            optimizer.step()
        gaps[momentum] = abs(gap(X.detach()).item())
        assert ol.orthogonality_error(X) < 1e-2
    assert gaps[0.9] < 0.2 * gaps[0.0]


# What a step may not do.


@pytest.mark.parametrize("shape", [(4, 4), (9, 3), (4, 2, 3, 3)])
@pytest.mark.parametrize("rule", ["frobenius", "spectral"])
def test_no_value_leaves_the_device_in_a_step(shape, rule):
    weight = nn.Parameter(gaussian(*shape, seed=0, dtype=torch.float32))
    bias = nn.Parameter(torch.zeros(3))
    groups = [
        {"params": [weight], "lr": torch.tensor(0.1)},
        {"params": [bias], "orthogonal": False},
    ]
    ol.orthogonalize_(groups)
    optimizer = ol.LandingSGD(groups, lr=0.1, momentum=0.9, safe_step=rule)
    for _ in range(2):
        weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
        with Recorder() as recorder:
            optimizer.step()
    syncs = ("item", "_local_scalar_dense", "nonzero", "is_nonzero")
    assert not [name for name in recorder.names if any(s in name for s in syncs)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(500, 4), (4, 500)])
def test_nothing_of_size_n_by_n_for_a_tall_matrix(shape, momentum):
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=momentum, nesterov=momentum > 0)
    X.grad = torch.ones_like(X)
    with Recorder() as recorder:
        optimizer.step()
    assert recorder.largest <= 500 * 4


def test_orthogonal_weights_do_not_decay():
    start = ol.random_orthogonal(4, 4, seed=0)
    X = nn.Parameter(start.clone())
    optimizer = ol.LandingSGD([X], lr=0.1, weight_decay=0.5, lam=0.0)
    X.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.equal(X.detach(), start)


# Long runs.


def test_no_drift_in_100_000_float32_steps_of_noise():
    """The error stays at its floor (eta / 2 lam) ||E psi psi^T||_F and does not grow."""
    p, lr, lam = 32, 0.003, 1.0
    X = nn.Parameter(torch.eye(p))
    optimizer = ol.LandingSGD([X], lr=lr, lam=lam)
    noise = torch.randn(1000, p, p, generator=torch.Generator().manual_seed(0))
    errors = []
    for k in range(100_000):
        X.grad = noise[k % 1000]
        optimizer.step()
        if k % 1000 == 999:
            errors.append(ol.orthogonality_error(X))
    # psi has p (p - 1) entries of variance 1/2, so E psi psi^T = (p - 1) / 2 I.
    floor = lr / (2 * lam) * (p - 1) / 2 * math.sqrt(p)
    early, late = sum(errors[10:30]) / 20, sum(errors[-20:]) / 20
    assert late == pytest.approx(floor, rel=0.2)
    assert late == pytest.approx(early, rel=0.05)
    # Without gradients it lands to rounding: nothing has accumulated.
    optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(60):
        X.grad = torch.zeros(p, p)
        optimizer.step()
    assert ol.orthogonality_error(X) < 1e-5


def test_landing_trains_a_network_and_stays_orthogonal():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    inputs = torch.randn(256, 10)
    targets = inputs.square().sum(1, keepdim=True).tanh()
    groups = ol.orthogonalize_(ol.param_groups(model, orthogonal=["0.*", "2.*"]))
    optimizer = ol.LandingSGD(groups, lr=0.05, momentum=0.9)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    assert ol.orthogonality_error(optimizer) < 0.01
