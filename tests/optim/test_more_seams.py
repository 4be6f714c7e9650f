"""Seams between one run and the next, one kind of weight and another, ours and torch's."""

import copy
import functools
import pickle
import warnings
from fractions import Fraction

import pytest
import torch
from torch import nn

import ortholand as ol


def weight(*shape):
    return nn.Parameter(ol.random_orthogonal(*shape, seed=0))


def noise(shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(50, 3), (16, 3), (5, 4), (6, 6), (3, 50)])
@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
def test_a_weight_recovers_from_one_huge_gradient(shape, attraction):
    """Its momentum decays even while no step is safe."""
    X = weight(*shape)
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, attraction=attraction)
    for k in range(500):
        X.grad = noise(shape, k, 1e6 if k == 50 else 1.0) / 7
        optimizer.step()
        if k == 400:
            before = X.detach().clone()
    assert not torch.equal(X, before)
    assert optimizer.skipped_steps() == 0
    assert ol.orthogonality_error(X, spectral=True) <= 0.5 + 1e-5


@pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon, ol.RiemannianSGD])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_a_weight_with_state_stays_of_its_kind(make, orthogonal):
    options = {} if make is ol.LandingAdam else {"momentum": 0.9}
    X, other = weight(6, 6), weight(4, 4)
    groups = [{"params": [other]}, {"params": [("X", X)], "orthogonal": orthogonal}]
    groups[0]["params"] = [("other", other)]
    optimizer = make(groups, lr=0.1, **options)
    for p in (X, other):
        p.grad = noise(p.shape, 0, 0.01)
    optimizer.step()
    before = other.detach().clone()
    optimizer.param_groups[1]["orthogonal"] = not orthogonal
    with pytest.raises(ValueError, match=r"'orthogonal' of a weight with state .*'X' was"):
        optimizer.step()
    assert torch.equal(other, before)


def test_a_bias_that_is_called_orthogonal_later_is_refused_before_anything_moves():
    X, bias = weight(4, 4), nn.Parameter(torch.zeros(3))
    groups = [{"params": [X]}, {"params": [bias], "orthogonal": False}]
    optimizer = ol.LandingSGD(groups, lr=0.1)
    X.grad, bias.grad = torch.ones(4, 4), torch.ones(3)
    optimizer.step()
    before = X.detach().clone()
    optimizer.param_groups[1]["orthogonal"] = True
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        optimizer.step()
    assert torch.equal(X, before)


def test_each_matrix_of_a_loaded_buffer_is_skew():
    X = weight(3, 5, 5)
    optimizer = ol.LandingSGD([X], lr=1.0, momentum=0.9, view="kernel")
    state, B = optimizer.state_dict(), noise((3, 5, 5), 0)
    B[0] = (B[0] - B[0].mT) * 1e4
    state["state"] = {0: {"momentum_buffer": B}}
    optimizer.load_state_dict(state)
    loaded = optimizer.state[X]["momentum_buffer"]
    assert torch.equal(loaded[0], B[0])
    assert torch.allclose(loaded, -loaded.mT)


def test_a_state_of_torchs_sgd_loads_beside_a_plain_group():
    X, bias = weight(4, 4), nn.Parameter(torch.zeros(3))
    torchs = torch.optim.SGD([{"params": [X]}, {"params": [bias]}], lr=0.1, momentum=0.9)
    X.grad, bias.grad = noise((4, 4), 0), torch.ones(3)
    torchs.step()
    ol.orthogonalize_(X)
    groups = [{"params": [X]}, {"params": [bias], "orthogonal": False}]
    optimizer = ol.LandingSGD(groups, lr=0.1, momentum=0.9)
    optimizer.load_state_dict(torchs.state_dict())
    assert [group["orthogonal"] for group in optimizer.param_groups] == [True, False]
    assert torch.equal(optimizer.state[bias]["momentum_buffer"], torch.ones(3))
    optimizer.step()
    assert optimizer.skipped_steps() == 0


def test_a_buffer_of_none_is_none_yet():
    X, bias = weight(4, 4), nn.Parameter(torch.zeros(3))
    for momentum in (0.0, 0.9):
        groups = [{"params": [X]}, {"params": [bias], "orthogonal": False}]
        optimizer = ol.LandingSGD(groups, lr=0.1, momentum=momentum)
        for p in (X, bias):
            optimizer.state[p]["momentum_buffer"] = None
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.skipped_steps() == 0


def reloaded(optimizer):
    twin = ol.LandingSGD(optimizer.param_groups[0]["params"], lr=0.1)
    twin.load_state_dict(optimizer.state_dict())
    return twin


@pytest.mark.parametrize(
    "resume",
    [reloaded, copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
)
def test_skips_of_the_run_that_is_resumed_are_no_reason_to_warn(resume):
    X = weight(4, 4)
    optimizer = ol.LandingSGD([X], lr=0.1)
    for k in range(300):
        X.grad = noise((4, 4), k, 0.1) / (0.0 if k % 10 == 0 else 1.0)
        optimizer.step()
    assert optimizer.skipped_steps() == 30
    resumed = resume(optimizer)
    (Y,) = resumed.param_groups[0]["params"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(120):
            Y.grad = noise((4, 4), k, 0.1)
            resumed.step()
    assert resumed.skipped_steps() == 30


def test_a_wrapper_of_our_own_method_is_called():
    calls = []

    def logged(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            calls.append(1)
            return function(*arguments)

        return wrapper

    class Wrapped(ol.LandingSGD):
        move = logged(ol.LandingSGD.move)

    for shape in ((3, 3), (40, 40), (150, 150), (60, 4), (4, 60)):
        X = weight(*shape)
        optimizer = Wrapped([X], lr=0.1)
        X.grad = noise(shape, 0)
        optimizer.step()
    assert len(calls) == 5


@pytest.mark.parametrize("make", [ol.RiemannianSGD, ol.PLAM, ol.PenaltySGD, ol.LandingAdam])
def test_rates_of_numpy_do_for_every_optimizer(make):
    np = pytest.importorskip("numpy")
    X = weight(5, 3)
    optimizer = make([X], lr=np.float32(0.01))
    X.grad = noise((5, 3), 0)
    optimizer.step()
    assert optimizer.skipped_steps() == 0


class TestNumbersOfOtherKinds:
    """An option is a number that torch and compiled code take, or an error says so."""

    @pytest.mark.parametrize("name", ["lr", "lam", "eps", "momentum", "dampening", "omega"])
    def test_fractions(self, name):
        with pytest.raises(TypeError, match=rf"{name} must be a number that torch takes.*float"):
            ol.LandingSGD([weight(5, 5)], **{"lr": 0.1, "momentum": 0.5, name: Fraction(1, 4)})

    @pytest.mark.parametrize("name", ["lam", "eps", "momentum", "omega"])
    def test_tensors_with_dimensions(self, name):
        with pytest.raises(TypeError, match=rf"{name} must be a number, got a tensor.*\(1,\)"):
            ol.LandingSGD([weight(5, 5)], **{"lr": 0.1, name: torch.tensor([0.25])})

    @pytest.mark.parametrize("fused", [None, False])
    def test_a_tensor_that_is_filled_in_place_counts_at_once(self, fused):
        steps = []
        for momentum in (torch.tensor(0.9), 0.5):
            w = weight(5, 5)
            optimizer = ol.LandingSGD([w], lr=0.1, momentum=momentum, fused=fused)
            for k in range(2):
                w.grad = torch.full((5, 5), 0.1).triu()
                if k and isinstance(momentum, torch.Tensor):
                    momentum.fill_(0.5)
                optimizer.step()
            steps.append(w.detach().clone())
        torch.testing.assert_close(*steps)

    def test_a_list_of_betas_that_is_changed_in_place_counts_at_once(self):
        w = weight(5, 5)
        optimizer = ol.LandingAdam([w], lr=0.1)
        betas = optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        for beta in (0.9, 0.0):
            betas[0] = beta
            w.grad = torch.ones(5, 5).triu() * beta
            optimizer.step()
        assert optimizer.state[w]["exp_avg"].abs().max() == 0
