"""LandingMuon: what is its own. What every optimizer must do is in the conformance suites."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ortholand as ol
from ortholand.geometry import distance
from tests import needs


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def stepped(X, G, **options):
    weight = nn.Parameter(X.clone())
    optimizer = ol.LandingMuon([weight], **{"momentum": 0.0, **options})
    weight.grad = G
    optimizer.step()
    return weight.detach(), optimizer


@pytest.mark.parametrize("shape", [(8, 8), (20, 6), (6, 20), (5, 1)])
def test_it_finds_the_polar_factor(shape):
    """``min <A, X>`` is at minus the polar factor of A."""
    A = gaussian(*shape, seed=3)
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = ol.LandingMuon([X], lr=0.1)
    for k in range(300):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - k / 300)
        optimizer.zero_grad()
        loss = (X * A).sum()
        loss.backward()
        optimizer.step()
    least = -float(torch.linalg.svdvals(A).sum())
    if shape == (8, 8):  # in the component of O(n) where it started
        least += 2 * float(torch.linalg.svdvals(A)[-1]) * bool(torch.det(X @ A.mT) < 0)
    assert float(loss.detach()) == pytest.approx(least, rel=1e-3)
    assert ol.orthogonality_error(optimizer) < 1e-5


@needs.torchs_muon
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_that_of_torchs_muon(nesterov):
    """The same mean of gradients; the buffer of a tall weight loses its normal part only."""
    X = nn.Parameter(ol.random_orthogonal(9, 4, seed=0, dtype=torch.float64))
    twin = nn.Parameter(X.detach().clone())
    ours = ol.LandingMuon([X], lr=1e-9, nesterov=nesterov)
    theirs = torch.optim.Muon([twin], lr=0.0, nesterov=nesterov, weight_decay=0.0)
    for k in range(3):
        X.grad = gaussian(9, 4, seed=10 + k, dtype=torch.float64)
        twin.grad = X.grad.clone()
        ours.step()
        theirs.step()
    buffer = theirs.state[twin]["momentum_buffer"].double()
    P = twin.detach()
    tangent = buffer - P @ (P.mT @ buffer + buffer.mT @ P) / 2
    assert (ours.state[X]["momentum_buffer"] - tangent).abs().max() < 1e-6


def test_nesterov_needs_no_momentum():
    X, G = ol.random_orthogonal(6, 3, seed=0), gaussian(6, 3, seed=1)
    first, optimizer = stepped(X, G, lr=0.1, nesterov=True)
    second, _ = stepped(X, G, lr=0.1, nesterov=False)
    assert torch.equal(first, second)
    assert "momentum_buffer" not in optimizer.state[optimizer.param_groups[0]["params"][0]]


@pytest.mark.parametrize("attraction", ["after", "coupled", "decoupled"])
@pytest.mark.parametrize("shape", [(12, 12), (30, 10)])
def test_every_plane_turns_by_lr_whatever_the_gradient(attraction, shape):
    X = ol.random_orthogonal(*shape, seed=0)
    lengths = []
    for scale in (1e-20, 1.0, 1e20):
        moved, _ = stepped(X, scale * gaussian(*shape, seed=1), lr=0.02, attraction=attraction)
        lengths.append(float(torch.linalg.matrix_norm((moved - X).double(), ord=2)))
    assert lengths == pytest.approx([0.02] * 3, rel=2e-3)


@pytest.mark.parametrize("shape", [(200, 200), (260, 200)])
def test_the_norm_that_is_known_by_construction_limits_no_step(shape):
    """Bounds by products are too large by p^(1/8) = 1.9 for singular values that are all 1."""
    X = ol.random_orthogonal(*shape, seed=0)
    for attraction in ("after", "coupled"):
        lr = 0.8 if attraction == "after" else 0.45
        options = {"attraction": attraction, "steps": 5}
        moved, optimizer = stepped(X, gaussian(*shape, seed=1), lr=lr, **options)
        assert optimizer.limited_steps() == 0
        assert distance(moved.double(), spectral=True) <= 0.5
    _, optimizer = stepped(X, gaussian(*shape, seed=1), lr=0.9)
    assert optimizer.limited_steps() == 1


@pytest.mark.parametrize("shape", [(30, 30), (60, 20)])
def test_a_move_that_makes_directions_longer_stays_in_the_ball(shape):
    class Longer(ol.LandingMuon):
        def move(self, X, B, group):
            return super().move(X, 5 * B, group)

    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = Longer([X], lr=0.8)
    for k in range(5):
        X.grad = gaussian(*shape, seed=k + 1)
        optimizer.step()
        assert distance(X.detach().double(), spectral=True) <= 0.5
    assert optimizer.limited_steps() == 5


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9)])
def test_without_a_gradient_nothing_turns(shape):
    X = ol.random_orthogonal(*shape, seed=0)
    moved, optimizer = stepped(X, torch.zeros(shape), lr=0.5)
    assert (moved - X).abs().max() < 1e-6
    assert optimizer.skipped_steps() == 0
    tall = X if shape[0] >= shape[1] else X.mT
    H = gaussian(tall.shape[1], tall.shape[1], seed=2)
    normal = tall @ (H + H.mT)
    moved, optimizer = stepped(X, normal if tall is X else normal.mT, lr=0.5)
    assert (moved - X).abs().max() < 1e-5
    assert optimizer.skipped_steps() == 0


def test_one_optimizer_for_a_transformer():
    """Attention orthogonal, the rest AdamW's, each with an lr of its own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    groups = ol.param_groups(layer, ["self_attn.*weight", "linear*.weight"])
    ol.orthogonalize_(groups)
    twin = copy.deepcopy(layer)
    optimizer = ol.LandingMuon(
        [{**groups[0], "lr": 0.03}, {**groups[1], "lr": 1e-3, "betas": (0.9, 0.95)}],
        weight_decay=0.1,
    )
    names = [name for name, _ in groups[1]["params"]]
    plain = [p for name, p in twin.named_parameters() if name in names]
    theirs = torch.optim.AdamW(plain, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    x, y = gaussian(4, 5, 16), gaussian(4, 5, 16, seed=1)
    losses = []
    for k in range(30):
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        if k == 0:
            for (_, p), q in zip(groups[1]["params"], plain, strict=True):
                q.grad = p.grad.clone()
        optimizer.step()
        if k == 0:
            theirs.step()
            for (_, p), q in zip(groups[1]["params"], plain, strict=True):
                assert torch.equal(p, q)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert ol.orthogonality_error(optimizer) < 1e-5


@pytest.mark.parametrize("view", ["matrix", "kernel"])
def test_convolutions_in_both_views_step_as_the_matrices_they_are(view):
    W = ol.random_orthogonal(6, 4, 3, 3, seed=0)
    if view == "matrix":
        W = ol.orthogonalize_(gaussian(6, 4, 3, 3))
    G = gaussian(6, 4, 3, 3, seed=1)
    moved, _ = stepped(W, G, lr=0.1, view=view)
    if view == "matrix":
        alone, _ = stepped(W.reshape(6, 36), G.reshape(6, 36), lr=0.1)
        torch.testing.assert_close(moved, alone.view_as(W), rtol=0, atol=1e-6)
    else:
        alone, _ = stepped(W[2, 1].clone(), G[2, 1].clone(), lr=0.1)
        torch.testing.assert_close(moved[2, 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_kernel_is_skipped_and_counted(bad):
    W, G = ol.random_orthogonal(2, 3, 3, 3, seed=0), gaussian(2, 3, 3, 3, seed=1)
    spoilt = G.clone()
    spoilt[1, 2, 0, 0] = bad
    moved, optimizer = stepped(W, spoilt, lr=0.1, view="kernel", momentum=0.9)
    assert optimizer.skipped_steps() == 1
    assert torch.equal(moved[1, 2], W[1, 2])
    assert not torch.equal(moved[1, 1], W[1, 1])
    assert (
        optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].isfinite().all()
    )


def test_explain_tells_why_nothing_is_compiled():
    (row,) = ol.explain(ol.LandingMuon([nn.Parameter(ol.random_orthogonal(6, 3, seed=0))]))
    assert row.engine == "reference"
    assert "no compiled form" in row.reason


def test_off_the_manifold_without_a_safe_step():
    """Outside of every ball: no promise, but finite numbers."""
    X, G = 1.6 * ol.random_orthogonal(8, 4, seed=0), gaussian(8, 4, seed=1)
    moved, optimizer = stepped(X, G, lr=0.01, safe_step=None)
    assert moved.isfinite().all()
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8),
        lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.05, 2),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_schedules_cycle_betas_and_momentum_follows_where_it_is_told_to(schedule, follows):
    """torch writes betas wherever there are any; the line for momentum is that of docs/muon.md."""

    def new():
        X, b = nn.Parameter(ol.random_orthogonal(6, 3, seed=0)), nn.Parameter(torch.ones(3))
        return ol.LandingMuon([{"params": [X]}, {"params": [b], "orthogonal": False}], momentum=0.9)

    optimizer, by_hand = new(), new()
    scheduler, seen = schedule(optimizer), set()
    for k in range(6):
        if follows:
            for group in optimizer.param_groups:
                group["momentum"] = group["betas"][0]
        for mine, other in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
            mine["lr"], mine["betas"] = other["lr"], other["betas"]
            mine["momentum"] = other["betas"][0] if follows else 0.9
            for p, q in zip(mine["params"], other["params"], strict=True):
                p.grad = q.grad = gaussian(*p.shape, seed=k)
        seen.add(optimizer.param_groups[1]["betas"][0])
        optimizer.step()
        by_hand.step()
        scheduler.step()
    assert len(seen) >= 3
    for mine, other in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
        assert torch.equal(mine["params"][0], other["params"][0])


# A user's msign


def jordans(M, steps=5):
    """Keller Jordan's: singular values end between 0.7 and 1.2."""
    M = M / torch.linalg.matrix_norm(M)[..., None, None].clamp(min=1e-7)
    for _ in range(steps):
        E = M.mT @ M
        M = 3.4445 * M + M @ (-4.7750 * E + 2.0315 * E @ E)
    return M


def spoilt(M):
    """Like ol.msign, but without a number for the first matrix of a batch."""
    N = ol.msign(M)
    return torch.cat([N[:1] * math.nan, N[1:]]) if M.ndim > 2 else N


SHAPES = [(8, 8), (20, 6), (96, 6), (6, 20), (3, 8, 8), (3, 12, 4), (3, 4, 40)]


@pytest.mark.parametrize("shape", SHAPES)
def test_another_msign_takes_the_place_of_ours(shape):
    X, G = ol.random_orthogonal(*shape, seed=0), gaussian(*shape, seed=1)
    ours, _ = stepped(X, G, lr=0.1, view="kernel", steps=7)
    theirs, _ = stepped(X, G, lr=0.1, view="kernel", msign=ol.msign, steps=1)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_coarse_msign_still_lands(shape):
    weight = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    optimizer = ol.LandingMuon([weight], lr=0.1, view="kernel", msign=jordans)
    for k in range(10):
        weight.grad = gaussian(*shape, seed=k)
        optimizer.step()
    assert ol.orthogonality_error(optimizer) < 1e-5
    assert optimizer.skipped_steps() == 0


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 12, 4), (3, 40, 4)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_another_msign_spoils_is_skipped_and_counted(shape, momentum):
    X = ol.random_orthogonal(*shape, seed=0)
    options = {"view": "kernel", "msign": spoilt, "momentum": momentum}
    moved, optimizer = stepped(X, gaussian(*shape), lr=0.1, **options)
    assert optimizer.skipped_steps() == 1
    assert torch.equal(moved[0], X[0])
    assert not torch.equal(moved[1], X[1])
    assert moved.isfinite().all()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda M: M[..., :1], ValueError, r"for \(1, 8, 8\), .* it returned \(1, 8, 1\)"),
        (lambda M: M.bfloat16(), ValueError, "it returned .* torch.bfloat16 on cpu"),
        (lambda M: [M], ValueError, "it returned list"),
        ("msign", TypeError, "a function of skew matrices or None, got 'msign'"),
    ],
)
def test_a_wrong_msign_is_refused_before_anything_moves(function, error, message):
    first, second = (nn.Parameter(ol.random_orthogonal(*s, seed=0)) for s in [(4, 4), (9, 4)])
    with pytest.raises(error, match=message):
        ol.LandingMuon([{"params": [first]}, {"params": [second], "msign": function}])
    optimizer = ol.LandingMuon([{"params": [first]}, {"params": [second]}], lr=0.1)
    optimizer.param_groups[1]["msign"] = function
    first.grad, second.grad = gaussian(4, 4), gaussian(9, 4)
    before = first.detach().clone()
    with pytest.raises(error, match=message):
        optimizer.step()
    assert torch.equal(first, before)


def test_state_dicts_leave_a_function_out_and_loading_keeps_it(tmp_path):
    def own(M):
        return ol.msign(M)

    def new(**options):
        weight = nn.Parameter(ol.random_orthogonal(9, 4, seed=0))
        weight.grad = gaussian(9, 4)
        return weight, ol.LandingMuon([weight], lr=0.1, **options)

    weight, optimizer = new(msign=own)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    twin, second = new(msign=own)
    second.load_state_dict(state)
    assert second.param_groups[0]["msign"] is own
    twin.data.copy_(weight)
    optimizer.step()
    second.step()
    assert torch.equal(twin, weight)
    _, third = new()
    third.load_state_dict(state)
    assert third.param_groups[0]["msign"] is None
    assert copy.deepcopy(optimizer).param_groups[0]["msign"] is own
