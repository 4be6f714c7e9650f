import io
import math

import pymanopt.manifolds
import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import relative_gradient, sym
from ortholand.retractions import RETRACTIONS
from ortholand_lab.problems import Procrustes
from tests.optim.peers import METHODS, each_method, gaussian, geoopt
from tests.optim.recorder import Recorder


def parameter(*shape, seed=0, dtype=torch.float64):
    return nn.Parameter(ol.random_orthogonal(*shape, seed=seed, dtype=dtype))


@pytest.fixture
def registry():
    """The registry, put back afterwards."""
    before = dict(RETRACTIONS)
    yield RETRACTIONS
    RETRACTIONS.clear()
    RETRACTIONS.update(before)


# What a step is.


@each_method
@pytest.mark.parametrize("shape", [(4, 4), (9, 3), (3, 9), (5, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_step_retracts_minus_lr_times_the_relative_gradient(method, shape, dtype):
    X = parameter(*shape, dtype=dtype)
    Y, G = X.detach().clone(), gaussian(*shape, seed=1, dtype=dtype)
    wide = shape[0] < shape[1]
    psi = relative_gradient(Y.mT if wide else Y, G.mT if wide else G)
    X.grad = G.clone()
    ol.RiemannianSGD([X], lr=0.3, retraction=method).step()
    torch.testing.assert_close(X.detach(), ol.retract(Y, -0.3 * psi, method))


@pytest.mark.parametrize("nesterov", [False, True])
def test_square_momentum_keeps_the_skew_matrices_as_they_are(nesterov):
    X = parameter(5, 5)
    optimizer = ol.RiemannianSGD([X], lr=0.1, momentum=0.8, nesterov=nesterov)
    Y, buffer = X.detach().clone(), torch.zeros(5, 5, dtype=torch.float64)
    for k in range(5):
        X.grad = gaussian(5, 5, seed=k)
        psi = relative_gradient(Y, X.grad)
        buffer = 0.8 * buffer + psi
        Y = ol.retract(Y, -0.1 * (psi + 0.8 * buffer if nesterov else buffer))
        optimizer.step()
    torch.testing.assert_close(X.detach(), Y)


# What it is for.


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_method
def test_procrustes_is_solved_in_the_component_where_it_starts(method, momentum):
    problem = Procrustes.gaussian(5, seed=0)
    start = ol.random_orthogonal(5, 5, seed=0, special=True, dtype=torch.float64)
    X = nn.Parameter(start)
    lr = 0.02 if momentum else 0.1
    optimizer = ol.RiemannianSGD([X], lr=lr, momentum=momentum, retraction=method)
    for _ in range(600):
        X.grad = problem.grad(X.detach())
        optimizer.step()
    torch.testing.assert_close(X.detach(), problem.solution(determinant=1), rtol=0, atol=1e-9)
    assert ol.orthogonality_error(X) < 1e-12


@each_method
@pytest.mark.parametrize("shape", [(20, 20), (30, 10), (10, 30)])
def test_momentum_accelerates(method, shape):
    """Brockett's cost, ill conditioned: the same lr gets further, to the known optimum."""
    n, p = max(shape), min(shape)
    spectrum = torch.linspace(0, 1, n, dtype=torch.float64)
    weights = torch.linspace(1, 2, p, dtype=torch.float64)
    best = (spectrum[:p] * weights.flip(0)).sum()

    def gap(momentum):
        X = parameter(*shape)
        optimizer = ol.RiemannianSGD([X], lr=0.2, momentum=momentum, retraction=method)
        for _ in range(100):
            Y = X.detach() if shape[0] >= shape[1] else X.detach().mT
            G = 2 * spectrum[:, None] * Y * weights
            X.grad = G if shape[0] >= shape[1] else G.mT
            optimizer.step()
        Y = X.detach() if shape[0] >= shape[1] else X.detach().mT
        return ((Y.mT * spectrum) @ Y).diagonal().mul(weights).sum() - best

    assert -1e-9 < gap(0.9) < 0.2 * gap(0.0)


@each_method
def test_float32_stays_on_the_manifold(method):
    square, thin = parameter(12, 12, dtype=torch.float32), parameter(30, 4, dtype=torch.float32)
    optimizer = ol.RiemannianSGD([square, thin], lr=0.01, momentum=0.9, retraction=method)
    for k in range(200):
        square.grad = gaussian(12, 12, seed=k % 20, dtype=torch.float32)
        thin.grad = gaussian(30, 4, seed=k % 20, dtype=torch.float32)
        optimizer.step()
    assert ol.orthogonality_error(optimizer) < 5e-5


# What may go wrong.


@each_method
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(4, 4), (9, 3), (3, 9), (70, 70)])
def test_non_finite_gradients_are_skipped_not_raised(method, bad, shape):
    """LAPACK raises on NaN, so nothing of the kind may reach it."""
    X = nn.Parameter(ol.random_orthogonal(3, *shape, seed=0))
    before = X.detach().clone()
    optimizer = ol.RiemannianSGD([X], lr=0.1, momentum=0.9, retraction=method, view="kernel")
    X.grad = gaussian(3, *shape, seed=1, dtype=torch.float32)
    X.grad[1, 0, 1] = bad
    optimizer.step()
    assert torch.equal(X[1], before[1])
    assert not torch.equal(X[0], before[0])
    assert not torch.equal(X[2], before[2])
    assert optimizer.skipped_steps() == 1
    assert torch.isfinite(optimizer.state[X]["momentum_buffer"]).all()
    assert ol.orthogonality_error(X, view="kernel") < 1e-4


@each_method
@pytest.mark.parametrize("shape", [(6, 6), (20, 4), (4, 20)])
@pytest.mark.parametrize("scale", [1e-30, 1e10, 1e25, 3e38])
def test_extreme_gradients_move_along_the_manifold_or_not_at_all(method, shape, scale):
    X = parameter(*shape, dtype=torch.float32)
    optimizer = ol.RiemannianSGD([X], lr=1.0, retraction=method)
    for k in range(3):
        G = gaussian(*shape, seed=k, dtype=torch.float32)
        X.grad = scale * (G / G.abs().max())
        optimizer.step()
    assert torch.isfinite(X).all()
    if method != "exponential" or scale < 1:
        assert ol.orthogonality_error(X) < 1e-3


def test_a_start_off_the_manifold_is_refused():
    with pytest.raises(ValueError, match=r"start within 0\.1 of the manifold.*orthogonalize_"):
        ol.RiemannianSGD([nn.Parameter(1.05 * torch.eye(5))])
    ol.RiemannianSGD([nn.Parameter(1.02 * torch.eye(5))])
    ol.RiemannianSGD([nn.Parameter(3 * torch.eye(5))], orthogonal=False)


# Groups and names.


def run(optimizer, steps=4):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for k in range(steps):
        for p in params:
            p.grad = gaussian(*p.shape, seed=k)
        optimizer.step()
    return params


def test_groups_may_differ_in_their_retraction():
    groups = [{"params": [parameter(9, 3)], "retraction": method} for method in METHODS]
    together = run(ol.RiemannianSGD(groups, lr=0.5, momentum=0.5))
    for X, method in zip(together, METHODS, strict=True):
        (alone,) = run(ol.RiemannianSGD([parameter(9, 3)], 0.5, 0.5, retraction=method))
        torch.testing.assert_close(X, alone)
    for i in range(4):
        for j in range(i):
            assert torch.dist(together[i], together[j]) > 1e-3


def my_retraction(X, A):
    return RETRACTIONS["qr"](X, A)


def test_a_function_is_stored_by_its_name(registry):
    optimizer = ol.RiemannianSGD([parameter(9, 3)], lr=0.1, retraction=my_retraction)
    assert optimizer.param_groups[0]["retraction"] == "my_retraction"
    assert registry["my_retraction"] is my_retraction
    assert optimizer.defaults["retraction"] == "my_retraction"
    (X,) = run(optimizer)
    (Y,) = run(ol.RiemannianSGD([parameter(9, 3)], lr=0.1, retraction="qr"))
    assert torch.equal(X, Y)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = ol.RiemannianSGD([X], lr=0.5)
    again.load_state_dict(state)
    assert again.param_groups[0]["retraction"] == "my_retraction"
    run(again)


def test_a_function_in_a_group_and_an_object_that_can_be_called(registry):
    class Retraction:
        def __call__(self, X, A):
            return my_retraction(X, A)

    groups = [
        {"params": [parameter(4, 4)], "retraction": my_retraction},
        {"params": [parameter(4, 4)], "retraction": Retraction()},
        {"params": [parameter(4, 4)]},
    ]
    optimizer = ol.RiemannianSGD(groups, lr=0.1, retraction="qr")
    names = [group["retraction"] for group in optimizer.param_groups]
    assert names == ["my_retraction", "Retraction", "qr"]
    first, second, third = run(optimizer)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_two_functions_of_one_name_are_an_error(registry):
    ol.RiemannianSGD([parameter(3, 3)], retraction=my_retraction)
    ol.RiemannianSGD([parameter(3, 3)], retraction=my_retraction)  # the same one may come again

    def other(X, A):
        return X

    other.__name__ = "my_retraction"
    with pytest.raises(ValueError, match=r"'my_retraction' exists already.*another __name__"):
        ol.RiemannianSGD([parameter(3, 3)], retraction=other)
    other.__name__ = "qr"
    with pytest.raises(ValueError, match="named 'qr' exists already"):
        ol.RiemannianSGD([{"params": [parameter(3, 3)], "retraction": other}])
    assert registry["my_retraction"] is my_retraction


@pytest.mark.parametrize("unknown", ["euler", 3, None])
def test_what_is_no_retraction_is_refused(unknown):
    with pytest.raises(ValueError, match=r"one of \('exponential', .*or a function"):
        ol.RiemannianSGD([parameter(3, 3)], retraction=unknown)
    with pytest.raises(ValueError, match=r"one of \('exponential', .*or a function"):
        ol.RiemannianSGD([{"params": [parameter(3, 3)], "retraction": unknown}])


# Cost.


@each_method
@pytest.mark.parametrize("shape", [(500, 4), (4, 500)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nothing_of_size_n_by_n_for_a_tall_matrix(method, shape, momentum):
    X = parameter(*shape, dtype=torch.float32)
    optimizer = ol.RiemannianSGD([X], lr=0.1, momentum=momentum, retraction=method)
    X.grad = torch.ones_like(X)
    with Recorder() as recorder:
        optimizer.step()
    assert recorder.largest <= 2 * 500 * 4


# Independent code. Where the definitions coincide, and with which factors of lr:
#
# geoopt's gradient is G - X Sym(X^T G) on EuclideanStiefel: psi X for square X. On tall X it is
# twice psi X where X^T G is symmetric (every cost of X X^T), and something else elsewhere.
# On CanonicalStiefel it is twice psi X, and the retraction moves a square X twice as far as it is
# asked to (tests/test_retractions.py), a tall one as far as asked where X^T G is symmetric.
#
# geoopt's momentum starts as the raw Euclidean gradient; a buffer of zeros given beforehand cures
# that. Its transports are others than ours, except where the test below says so.


def geoopt_steps(start, manifold, gradient, steps, lr, momentum=0.0):
    X = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
    optimizer = geoopt.optim.RiemannianSGD([X], lr=lr, momentum=momentum)
    if momentum:
        optimizer.state[X]["momentum_buffer"] = torch.zeros_like(start)
    for k in range(steps):
        X.grad = gradient(X.detach().as_subclass(torch.Tensor), k).clone()
        optimizer.step()
    return X.detach().as_subclass(torch.Tensor)


def our_steps(start, gradient, steps, **options):
    X = nn.Parameter(start.clone())
    optimizer = ol.RiemannianSGD([X], **options)
    for k in range(steps):
        X.grad = gradient(X.detach(), k)
        optimizer.step()
    return X.detach()


def any_gradient(X, k):
    return gaussian(*X.shape, seed=k)


def symmetric_gradient(X, k):
    """Gradients of Rayleigh quotients, each with another matrix: X^T G is symmetric."""
    M = sym(gaussian(X.shape[0], X.shape[0], seed=k))
    return M @ X


SQUARE = [
    (geoopt.EuclideanStiefel, "qr", 1),
    (geoopt.EuclideanStiefelExact, "exponential", 1),
    (geoopt.CanonicalStiefel, "cayley", 4),
]
TALL = [
    (geoopt.EuclideanStiefel, "qr", 2),
    (geoopt.EuclideanStiefelExact, "exponential", 2),
    (geoopt.CanonicalStiefel, "cayley", 2),
]


@pytest.mark.parametrize(("manifold", "method", "factor"), SQUARE)
def test_geoopts_steps_on_square_matrices(manifold, method, factor):
    start = ol.random_orthogonal(6, 6, seed=0, dtype=torch.float64)
    theirs = geoopt_steps(start, manifold(), any_gradient, 20, lr=0.05)
    ours = our_steps(start, any_gradient, 20, lr=0.05 * factor, retraction=method)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("manifold", "method", "factor"), TALL)
def test_geoopts_steps_on_tall_matrices(manifold, method, factor):
    start = ol.random_orthogonal(12, 4, seed=0, dtype=torch.float64)
    theirs = geoopt_steps(start, manifold(), symmetric_gradient, 20, lr=0.02)
    ours = our_steps(start, symmetric_gradient, 20, lr=0.02 * factor, retraction=method)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    elsewhere = geoopt_steps(start, manifold(), any_gradient, 1, lr=0.02)
    ours = our_steps(start, any_gradient, 1, lr=0.02 * factor, retraction=method)
    assert torch.dist(ours, elsewhere) > 1e-3


def test_geoopts_momentum_on_square_matrices_by_cayley():
    """Its transport conjugates the buffer with Cayley's transform of the buffer: no change."""
    start = ol.random_orthogonal(6, 6, seed=0, dtype=torch.float64)
    manifold = geoopt.CanonicalStiefel()
    theirs = geoopt_steps(start, manifold, any_gradient, 20, lr=0.02, momentum=0.8)
    ours = our_steps(start, any_gradient, 20, lr=0.08, momentum=0.8, retraction="cayley")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["qr", "polar"])
def test_geoopts_momentum_on_a_single_column(method):
    """Projection after projection on the sphere; with more columns the two directions differ."""
    start = ol.random_orthogonal(7, 1, seed=0, dtype=torch.float64)
    manifold = geoopt.EuclideanStiefel()
    theirs = geoopt_steps(start, manifold, any_gradient, 20, lr=0.05, momentum=0.8)
    ours = our_steps(start, any_gradient, 20, lr=0.1, momentum=0.8, retraction=method)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["qr", "polar"])
@pytest.mark.parametrize("shape", [(6, 6), (12, 4)])
def test_pymanopts_gradient_descent(method, shape):
    """The metric is the Euclidean one: factors as for geoopt's EuclideanStiefel."""
    manifold = pymanopt.manifolds.Stiefel(*shape, retraction=method)
    gradient = any_gradient if shape == (6, 6) else symmetric_gradient
    start = ol.random_orthogonal(*shape, seed=0, dtype=torch.float64)
    point = start.numpy()
    for k in range(20):
        euclidean = gradient(torch.from_numpy(point), k).numpy()
        tangent = manifold.euclidean_to_riemannian_gradient(point, euclidean)
        point = manifold.retraction(point, -0.02 * tangent)
    lr = 0.02 if shape == (6, 6) else 0.04
    ours = our_steps(start, gradient, 20, lr=lr, retraction=method)
    torch.testing.assert_close(ours, torch.from_numpy(point), rtol=0, atol=1e-13)
