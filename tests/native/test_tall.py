"""Compiled steps of tall and wide matrices are the reference steps up to rounding."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ortholand as ol
from ortholand import native
from ortholand.geometry import remove_normal
from tests.grids import examples
from tests.native import agreement

pytestmark = pytest.mark.skipif(
    native.why_no_code(torch.float64) is not None, reason="no C++ compiler"
)

DIRECTIONS = {
    "plain": {},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "adam": {"betas": (0.8, 0.99)},
    "adam without memory": {"betas": (0.0, 0.0)},
}
ATTRACTIONS = ["coupled", "decoupled", "after"]
RULES = ["frobenius", "spectral", None]
SHAPES = [
    (5, 1),
    (1, 5),
    (9, 8),
    (33, 7),
    (7, 33),
    (6, 8, 3),
    (20, 3, 8),
    (2, 3, 5, 4),
    (1000, 2),
    (300, 16),
    (16, 300),
    (17, 18),
    (200, 100),
    (131, 128),
]


def start(shape, dtype, seed=0):
    """Inside the ball but not on the manifold, so that every term of the step counts."""
    generator = torch.Generator().manual_seed(seed)
    X = ol.random_orthogonal(*shape, seed=generator, dtype=torch.float64)
    scale = 1 + 0.2 * torch.rand(*shape[:-2], 1, 1, generator=generator, dtype=torch.float64)
    return (X * scale ** (1 / min(shape[-2:]))).to(dtype)


def noise(shape, dtype, seed, scale=1.0):
    generator = torch.Generator().manual_seed(3 * 2**30 + seed)  # of no weight: else almost normal
    G = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (scale * G / max(shape[-2:]) ** 0.5).to(dtype)


def contiguous(X):
    return X.contiguous()


def column_major(X):
    return X.mT.contiguous().mT


def channels_last(X):
    """The stack's dimensions innermost in memory."""
    k = X.ndim - 2
    order = [k, k + 1, *range(k)]
    return X.permute(order).contiguous().permute(*range(2, k + 2), 0, 1)


def make(X, fused=True, **options):
    method = ol.LandingAdam if "betas" in options else ol.LandingSGD
    return method([X], **{"view": "kernel", "fused": fused, "eps": 0.9, **options})


def run(shape, dtype, fused, gradients, layout=contiguous, seed=0, **options):
    """Weight and state after steps with these gradients."""
    X = nn.Parameter(layout(start(shape, dtype, seed)))
    optimizer = make(X, fused, **options)
    if fused:
        (row,) = ol.explain(optimizer)
        assert row.engine == "compiled", row.reason
    for G in gradients:
        X.grad = G
        optimizer.step()
    return X.detach(), optimizer.state[X]


def assert_same(one, other, dtype, factor=1.0):
    agreement.assert_same(one, other, dtype, 2 * factor)  # a pass more


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("attraction", ATTRACTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiled_and_reference_steps_agree(direction, attraction, dtype):
    rules = itertools.cycle(RULES)
    layouts = itertools.cycle([contiguous, column_major, contiguous, channels_last, contiguous])
    for shape, (lr, scale, n) in itertools.product(
        SHAPES, [(0.1, 1.0, 3), (0.0, 1.0, 2), (3.0, 100.0, 1)]
    ):
        rule = next(rules)
        options = {"attraction": attraction, "safe_step": rule, **DIRECTIONS[direction]}
        options["lr"] = lr if rule else min(lr, 0.1) / scale
        gradients = [noise(shape, dtype, k, scale) for k in range(n)]
        layout = next(layouts)
        runs = [run(shape, dtype, f, gradients, layout, **options) for f in (True, False)]
        assert_same(*runs, dtype)


@examples(100)
@given(
    n=st.integers(2, 300),
    p=st.integers(1, 128),
    count=st.integers(1, 40),
    wide=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "lr": st.floats(1e-4, 1e2),
            "lam": st.floats(0, 10),
            "attraction": st.sampled_from(ATTRACTIONS),
            "safe_step": st.sampled_from(RULES),
        }
    ),
    direction=st.sampled_from(list(DIRECTIONS.values())),
    layout=st.sampled_from([contiguous, column_major, channels_last]),
    scale=st.floats(-12, 3),
    seed=st.integers(0, 2**31),
)
def test_one_step_agrees_at_every_shape(n, p, count, wide, options, direction, layout, scale, seed):
    n, p = max(n, p + 1), min(n - 1, p)
    shape = (max(1, min(count, 20_000 // (n * p))), *((p, n) if wide else (n, p)))
    if options["safe_step"] is None:
        options["lr"] = min(options["lr"], 0.1) * 10 ** -max(scale, 0)
    gradients = [noise(shape, torch.float64, seed % 1000, 10**scale)]
    runs = [
        run(shape, torch.float64, f, gradients, layout, seed=seed, **options, **direction)
        for f in (True, False)
    ]
    # Adam divides by the norm of what is tangent, which rounding of all of G disturbs.
    larger = excess(start(shape, torch.float64, seed), gradients[0]) if "betas" in direction else 1
    assert_same(*runs, torch.float64, factor=10 * larger)


def excess(X, G):
    """How many times longer gradients are than their parts that are tangent, at most."""
    if X.shape[-2] < X.shape[-1]:
        X, G = X.mT, G.mT
    tangent = torch.linalg.matrix_norm(remove_normal(X, G))
    return float((torch.linalg.matrix_norm(G) / tangent).max())


@pytest.mark.parametrize("shape", [(30, 4), (4, 30), (5, 8, 3), (50, 33)], ids=str)
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e37], ids=str)
@pytest.mark.parametrize("direction", ["plain", "momentum", "nesterov", "adam"])
def test_huge_and_tiny_gradients_step_as_the_reference_does(direction, scale, shape):
    for attraction in ATTRACTIONS:
        options = {"lr": 0.01, "attraction": attraction, **DIRECTIONS[direction]}
        gradients = [noise(shape, torch.float32, 0, scale)]
        runs = [run(shape, torch.float32, f, gradients, **options) for f in (True, False)]
        assert_same(*runs, torch.float32)
        assert all(int(state["skipped"]) == 0 for _, state in runs)
        assert runs[0][1]["limited"] == runs[1][1]["limited"]


@pytest.mark.parametrize("direction", ["momentum", "nesterov"])
def test_a_momentum_that_overflows_is_not_kept(direction):
    for shape, factor in itertools.product([(20, 3), (5, 20, 3)], [1.0, 1e-3]):
        G = torch.zeros(shape)
        G[..., 0, 1] = 3.3e38
        X, state = run(
            shape, torch.float32, True, [G, factor * G], lr=0.01, **DIRECTIONS[direction]
        )
        assert X.isfinite().all()
        assert state["momentum_buffer"].isfinite().all()
        skips = (direction == "nesterov") + (factor == 1.0)  # 1.9 times as large at once, or later
        assert int(state["skipped"]) == skips * (shape[0] if len(shape) == 3 else 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_zero_gradients(direction):
    for shape, attraction in itertools.product([(20, 3), (5, 20, 3)], ATTRACTIONS):
        options = {"lr": 0.1, "attraction": attraction, **DIRECTIONS[direction]}
        zero, some = torch.zeros(shape), noise(shape, torch.float32, 0)
        runs = [run(shape, torch.float32, f, [zero, some, zero], **options) for f in (True, False)]
        assert_same(*runs, torch.float32)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_step_with_lr_zero_changes_no_weight(direction):
    for shape, attraction in itertools.product([(20, 3), (5, 20, 3), (3, 40)], ATTRACTIONS):
        options = {"lr": 0.0, "attraction": attraction, **DIRECTIONS[direction]}
        X, state = run(shape, torch.float32, True, [noise(shape, torch.float32, 0)], **options)
        assert torch.equal(X, start(shape, torch.float32))
        assert int(state["skipped"]) == int(state["limited"]) == 0
        kept = {"momentum_buffer", "exp_avg"} & state.keys()
        assert all(state[name].any() for name in kept)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("direction", ["plain", "momentum", "nesterov", "adam"])
@pytest.mark.parametrize("shape", [(40, 9, 4), (3, 60, 20), (17, 4, 9)], ids=str)
def test_only_the_matrix_with_a_bad_gradient_stays(shape, direction, bad):
    for attraction, rule in itertools.product(ATTRACTIONS, RULES):
        X = nn.Parameter(start(shape, torch.float32))
        options = {"lr": 0.01, "attraction": attraction, "safe_step": rule}
        optimizer = make(X, **options, **DIRECTIONS[direction])
        X.grad = noise(shape, torch.float32, 1)
        optimizer.step()
        before, state = X.detach().clone(), copy.deepcopy(optimizer.state[X])
        X.grad = noise(shape, torch.float32, 2)
        X.grad[2, 1, 3] = bad
        optimizer.step()
        assert int(optimizer.state[X]["skipped"]) == 1
        moved = (X.detach() != before).flatten(1).any(1)
        assert moved.tolist() == [k != 2 for k in range(shape[0])]
        for name in state.keys() - {"skipped", "limited"}:
            assert torch.equal(optimizer.state[X][name][2], state[name][2])
            assert not torch.equal(optimizer.state[X][name][1], state[name][1])


@pytest.mark.parametrize("safe_step", RULES[:2])
@pytest.mark.parametrize("attraction", ATTRACTIONS)
def test_counts_and_the_ball(attraction, safe_step):
    """Steps far too long are made shorter, and counted; the ball is never left."""
    for shape, adam in itertools.product([(30, 12, 4), (60, 30), (9, 50)], [False, True]):
        X = nn.Parameter(start(shape, torch.float32))
        options = {"betas": (0.9, 0.99)} if adam else {"momentum": 0.9}
        optimizer = make(X, lr=5.0, attraction=attraction, safe_step=safe_step, **options)
        for k in range(20):
            X.grad = noise(shape, torch.float32, k, 10.0 ** (k % 5))
            optimizer.step()
            spectral = safe_step == "spectral"
            eyes = (X.mT @ X if shape[-2] > shape[-1] else X @ X.mT).detach().double()
            D = eyes - torch.eye(min(shape[-2:]), dtype=torch.float64)
            d = torch.linalg.matrix_norm(D, ord=2 if spectral else "fro")
            assert float(d.max()) <= 0.9 * (1 + 1e-5)
        count = X.shape[:-2].numel() * 20
        assert optimizer.skipped_steps() == 0
        assert 0.25 * count < optimizer.limited_steps() <= count


@pytest.mark.parametrize("shape", [(3000, 9, 4), (60, 200, 20), (5000, 64), (64, 5001)], ids=str)
@pytest.mark.parametrize("direction", ["momentum", "adam"])
def test_the_number_of_threads_changes_nothing(shape, direction):
    gradients = [noise(shape, torch.float32, k) for k in range(2)]
    options = {"lr": 0.1, "attraction": "after", **DIRECTIONS[direction]}
    try:
        runs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(run(shape, torch.float32, True, gradients, **options))
    finally:
        torch.set_num_threads(1)
    for X, state in runs[1:]:
        assert torch.equal(X, runs[0][0])
        assert all(torch.equal(state[name], runs[0][1][name]) for name in state)


class TestLayouts:
    @pytest.mark.parametrize("layout", [column_major, channels_last])
    @pytest.mark.parametrize(
        "shape",
        [(5, 40, 20), (5, 20, 40), (6, 8, 3), (6, 3, 8), (2, 9, 4, 4), (3, 20, 20)],
        ids=str,
    )
    def test_any_dense_layout_steps_the_same(self, shape, layout):
        """Bit for bit: numbers are read from elsewhere, and that is all."""
        for direction in ("momentum", "adam"):
            options = {"lr": 0.1, "attraction": "after", **DIRECTIONS[direction]}
            gradients = [noise(shape, torch.float32, k) for k in range(3)]
            X, state = run(shape, torch.float32, True, gradients, layout, **options)
            Y, other = run(shape, torch.float32, True, gradients, **options)
            assert X.stride() != Y.stride()
            assert torch.equal(X, Y)
            assert all(torch.equal(state[name], other[name]) for name in state)

    def test_weights_of_qr_are_compiled(self):
        for shape in ((50, 8), (50, 40), (40, 40), (8, 1)):
            Q, _ = torch.linalg.qr(noise(shape, torch.float32, 0))
            X, Y = nn.Parameter(Q), nn.Parameter(Q.contiguous())
            for weight in (X, Y):
                optimizer = make(weight, lr=0.1, momentum=0.9, view="matrix")
                assert ol.explain(optimizer)[0].engine == "compiled"
                weight.grad = noise(shape, torch.float32, 1)
                optimizer.step()
            assert torch.equal(X, Y)

    @pytest.mark.parametrize("shape", [(8, 6, 3, 3), (200, 2, 3, 3), (18, 2, 3, 3)], ids=str)
    def test_convolutions_in_channels_last_memory(self, shape):
        weights = []
        for memory, fused in itertools.product(
            [torch.channels_last, torch.contiguous_format], [True, False]
        ):
            W = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
            X = nn.Parameter(ol.orthogonalize_(W).to(memory_format=memory))
            optimizer = make(X, fused, lr=0.1, betas=(0.9, 0.99), view="matrix")
            for k in range(3):
                X.grad = noise(shape, torch.float64, k)
                optimizer.step()
            weights.append(X.detach())
        assert all(torch.allclose(X, weights[0], atol=1e-12) for X in weights)

    def test_gradients_and_state_in_another_layout(self):
        for shape, one, other in itertools.product(
            [(30, 7), (3, 40, 20), (5, 12, 12)],
            [contiguous, column_major],
            [contiguous, column_major],
        ):
            X, Y = (nn.Parameter(f(start(shape, torch.float32))) for f in (one, contiguous))
            optimizers = [make(W, lr=0.1, momentum=0.9) for W in (X, Y)]
            for k in range(3):
                G = noise(shape, torch.float32, k)
                X.grad, Y.grad = other(G), G
                for optimizer in optimizers:
                    optimizer.step()
                state = optimizers[0].state[X]
                state["momentum_buffer"] = other(state["momentum_buffer"])
                assert ol.explain(optimizers[0])[0].engine == "compiled"
            assert torch.equal(X, Y)

    def test_memory_with_gaps_is_left_to_torch_with_a_fix(self):
        X = nn.Parameter(torch.zeros(30, 8)[:, ::2].copy_(start((30, 4), torch.float32)))
        (row,) = ol.explain(make(X, lr=0.1))
        assert row.engine == "reference"
        assert row.reason == "memory of strides (8, 2): use weight.contiguous()"


def test_many_weights_of_several_shapes_step_together():
    shapes = [(9, 4), (4, 9), (30, 16), (9, 4), (16, 16), (2, 9, 4), (300, 5)] * 3
    weights = [
        [nn.Parameter(start(shape, torch.float32, k)) for k, shape in enumerate(shapes)]
        for _ in range(2)
    ]
    optimizers = [
        ol.LandingAdam(ws, lr=0.1, view="kernel", fused=fused, eps=0.9)
        for ws, fused in zip(weights, (True, False), strict=True)
    ]
    for step in range(3):
        for ws, optimizer in zip(weights, optimizers, strict=True):
            for k, X in enumerate(ws):
                X.grad = noise(X.shape, torch.float32, step + k) if k % 5 else None
            optimizer.step()
    for X, Y in zip(*weights, strict=True):
        torch.testing.assert_close(X, Y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("normal", [0.0, 1.0, 1e3])
def test_rounding_is_no_larger_than_the_reference_s(normal):
    """What "move, then land" leaves in single precision, also where gradients are nearly normal."""
    for shape in ((768, 16), (60, 20), (40, 200), (300, 9, 4)):
        errors = []
        for fused in (True, False):
            X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
            optimizer = make(X, fused, lr=1e-2, momentum=0.9, attraction="after")
            for k in range(20):
                X.grad = noise(shape, torch.float32, k) + normal * X.detach()
                optimizer.step()
            errors.append(ol.orthogonality_error(X, view="kernel"))
        assert errors[0] <= 2 * errors[1]
