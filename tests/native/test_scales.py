"""Compiled steps of scaled weights are the reference's up to rounding, relative to the scale."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import ortholand as ol
from ortholand import native
from tests.grids import examples
from tests.native.agreement import assert_same
from tests.native.test_tall import (
    ATTRACTIONS,
    DIRECTIONS,
    RULES,
    channels_last,
    column_major,
    contiguous,
    make,
    noise,
    start,
)

pytestmark = pytest.mark.skipif(
    native.why_no_code(torch.float64) is not None, reason="no C++ compiler"
)

# Lanes and panels, square and tall and wide; whole, and by passes.
SHAPES = [(3, 3), (21, 3, 3), (20, 20), (33, 7), (7, 33), (20, 8, 3), (2, 3, 5, 4), (300, 16)]
SCALES = [0.1, 1, 3.7, "fan"]


def run(shape, dtype, fused, gradients, scale, layout=contiguous, seed=0, **options):
    """Weight by its scale, and state, after steps with these gradients."""
    s = max(1.0, shape[-2] / shape[-1]) ** 0.5 if scale == "fan" else scale
    X = nn.Parameter(layout((s * start(shape, torch.float64, seed)).to(dtype)))
    optimizer = make(X, fused, scale=scale, **options)
    (row,) = ol.explain(optimizer)
    assert (row.engine == "compiled") == fused, row.reason
    for G in gradients:
        X.grad = G
        optimizer.step()
    return X.detach() / s, optimizer.state[X]


def assert_agree(shape, dtype, gradients, scale, layout=contiguous, factor=1.0, **options):
    runs = [run(shape, dtype, f, gradients, scale, layout, **options) for f in (True, False)]
    assert_same(*runs, dtype, 3 * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("attraction", ATTRACTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiled_and_reference_steps_agree(direction, attraction, dtype):
    rules = itertools.cycle(RULES)
    layouts = itertools.cycle([contiguous, column_major, contiguous, channels_last, contiguous])
    cases = itertools.product(SHAPES, SCALES, [(0.1, 1.0, 3), (0.0, 1.0, 2), (3.0, 100.0, 1)])
    for shape, scale, (lr, size, n) in cases:
        rule = next(rules)
        options = {"attraction": attraction, "safe_step": rule, **DIRECTIONS[direction]}
        options["lr"] = lr if rule else min(lr, 0.01) / size
        gradients = [noise(shape, dtype, k, size) for k in range(n)]
        assert_agree(shape, dtype, gradients, scale, next(layouts), **options)


# A step that moves nothing, of a weight whose one matrix is a view with other strides.
@example(
    n=1,
    p=2,
    count=1,
    wide=False,
    options={"lr": 1.0, "lam": 0.0, "attraction": "coupled", "safe_step": "frobenius"},
    direction={},
    layout=column_major,
    size=0.0,
    scale="fan",
    seed=0,
)
@examples(100)
@given(
    n=st.integers(1, 300),
    p=st.integers(1, 128),
    count=st.integers(1, 40),
    wide=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "lr": st.floats(1e-4, 1e2),
            "lam": st.floats(0, 10),
            "attraction": st.sampled_from(ATTRACTIONS),
            "safe_step": st.sampled_from(RULES[:3]),
        }
    ),
    direction=st.sampled_from(list(DIRECTIONS.values())),
    layout=st.sampled_from([contiguous, column_major, channels_last]),
    size=st.floats(-6, 3),
    scale=st.floats(-6, 6).map(lambda exponent: 10.0**exponent) | st.just("fan"),
    seed=st.integers(0, 2**31),
)
def test_one_step_agrees_at_every_scale(
    n, p, count, wide, options, direction, layout, size, scale, seed
):
    n = max(n, p)
    shape = (max(1, min(count, 20_000 // (n * p))), *((p, n) if wide else (n, p)))
    gradients = [noise(shape, torch.float64, seed % 1000, 10**size)]
    if options["safe_step"] is None:  # a step that explodes magnifies rounding
        options["lr"] = min(options["lr"], 0.1) * 10 ** -max(size, 0)
    assert_agree(
        shape,
        torch.float64,
        gradients,
        scale,
        layout,
        factor=10,
        seed=seed,
        **{**options, "lr": options["lr"] * (1 if scale == "fan" else scale)},
        **direction,
    )


@pytest.mark.parametrize("shape", [(3000, 9, 4), (60, 200, 20), (5000, 64), (64, 5001)], ids=str)
@pytest.mark.thorough
def test_the_number_of_threads_changes_nothing(shape):
    gradients = [noise(shape, torch.float32, k) for k in range(2)]
    options = {"lr": 0.1, "attraction": "after", "momentum": 0.9}
    try:
        runs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(run(shape, torch.float32, True, gradients, 3.7, **options))
    finally:
        torch.set_num_threads(1)
    for X, _ in runs[1:]:
        assert torch.equal(X, runs[0][0])


@pytest.mark.parametrize("direction", ["plain", "momentum", "nesterov", "adam"])
def test_only_the_matrix_with_a_bad_gradient_stays(direction):
    for shape, attraction in itertools.product([(40, 9, 4), (3, 60, 20), (17, 5, 5)], ATTRACTIONS):
        X = nn.Parameter(3.7 * start(shape, torch.float32))
        optimizer = make(X, lr=0.01, attraction=attraction, scale=3.7, **DIRECTIONS[direction])
        before = X.detach().clone()
        X.grad = noise(shape, torch.float32, 2)
        X.grad[2, 1, 3] = float("nan")
        optimizer.step()
        assert int(optimizer.state[X]["skipped"]) == 1
        moved = (X.detach() != before).flatten(1).any(1)
        assert moved.tolist() == [k != 2 for k in range(shape[0])]
