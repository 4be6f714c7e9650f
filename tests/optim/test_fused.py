"""Compiled steps are the reference steps up to rounding, and step in only where they can."""

import copy
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ortholand as ol
from ortholand.geometry import relative_gradient, remove_normal
from ortholand.geometry.matrices import is_square, tall
from ortholand.native import LARGEST_SIZE, why_no_code
from tests.grids import examples
from tests.native.agreement import assert_same

pytestmark = pytest.mark.skipif(
    why_no_code(torch.float64) is not None, reason="no C++ compiler: there are no compiled steps"
)

ADAM = {"adam": True}
DIRECTIONS = {
    "plain": {},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "adam": {**ADAM, "betas": (0.8, 0.99)},
    "adam without memory": {**ADAM, "betas": (0.0, 0.0)},
}


def start(shape, dtype, seed=0):
    """Inside the ball but not on the manifold, so that every term of the step counts."""
    generator = torch.Generator().manual_seed(seed)
    X = ol.random_orthogonal(*shape, seed=generator, dtype=torch.float64)
    scale = 1 + 0.2 * torch.rand(*shape[:-2], 1, 1, generator=generator, dtype=torch.float64)
    return nn.Parameter((X * scale ** (1 / shape[-1])).to(dtype))


class MeasuredSGD(ol.LandingSGD):
    """The reference: with its own ``move``, no engine steps around ``matrix_step``."""

    def move(self, X, B, group):
        return super().move(X, B, group)


class MeasuredAdam(ol.LandingAdam):
    def move(self, X, B, group):
        return super().move(X, B, group)


def run(shape, dtype, fused, n_steps=3, scale=1.0, seed=0, **options):
    """Weights and states after a few steps."""
    X = start(shape, dtype, seed)
    adam = options.pop("adam", False)
    if fused:
        make = ol.LandingAdam if adam else ol.LandingSGD
    else:
        make = MeasuredAdam if adam else MeasuredSGD
    optimizer = make([X], view="kernel", fused=fused, eps=0.9, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(n_steps):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        X.grad = (scale * noise / shape[-1] ** 0.5).to(dtype)
        optimizer.step()
    return X.detach(), optimizer.state[X]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiled_and_reference_steps_agree(direction, attraction, dtype):
    options = {"attraction": attraction, **DIRECTIONS[direction]}
    for shape, (lr, scale) in itertools.product(
        [(3, 3), (2, 9, 4, 4), (5, 17, 17), (64, 64)], [(0.1, 1.0), (0.0, 1.0), (3.0, 100.0)]
    ):
        runs = [run(shape, dtype, fused, lr=lr, scale=scale, **options) for fused in (True, False)]
        assert_same(*runs, dtype)


@examples(150)
@given(
    size=st.integers(1, LARGEST_SIZE),
    count=st.integers(1, 40),
    options=st.fixed_dictionaries(
        {
            "lr": st.floats(1e-4, 1e2),
            "lam": st.floats(0, 10),
            "attraction": st.sampled_from(["coupled", "decoupled", "after"]),
            "safe_step": st.sampled_from(["frobenius", "spectral", None]),
            "momentum": st.sampled_from([0.0, 0.9]),
        }
    ),
    scale=st.floats(-12, 3),
    seed=st.integers(0, 2**31),
)
def test_one_step_agrees_at_every_size(size, count, options, scale, seed):
    shape = (max(1, min(count, 20_000 // size**2)), size, size)
    if options["safe_step"] is None:
        options["lr"] = min(options["lr"], 0.1) * 10 ** -max(scale, 0)
    runs = [
        run(shape, torch.float64, fused, n_steps=1, scale=10**scale, seed=seed, **options)
        for fused in (True, False)
    ]
    assert_same(*runs, torch.float64, factor=10)


@pytest.mark.parametrize("adam", [False, True])
def test_only_the_matrix_with_a_bad_gradient_stays(adam):
    make = ol.LandingAdam if adam else lambda *a, **o: ol.LandingSGD(*a, momentum=0.9, **o)
    for size, bad in itertools.product([3, 20], [float("nan"), float("inf"), 3e38]):
        X = start((40, size, size), torch.float32)
        optimizer = make([X], lr=0.1, view="kernel", fused=True)
        before = X.detach().clone()
        X.grad = torch.randn(X.shape, generator=torch.Generator().manual_seed(1))
        X.grad[17, 0, 1] = bad
        X.grad[17, 1, 0] = -bad
        reference = copy.deepcopy(X), X.grad.clone()
        optimizer.step()
        twin, twin.grad = reference[0], reference[1]
        unfused = make([twin], lr=0.1, view="kernel", fused=False)
        unfused.step()
        torch.testing.assert_close(X.detach(), twin.detach(), rtol=1e-5, atol=1e-5)
        assert optimizer.skipped_steps() == unfused.skipped_steps() == (0 if bad == 3e38 else 1)
        assert bad == 3e38 or torch.equal(X.detach()[17], before[17])


def test_the_number_of_threads_changes_nothing():
    torch.set_num_threads(2)
    try:
        two = run((30_000, 3, 3), torch.float32, True, lr=0.1, momentum=0.9)
        torch.set_num_threads(1)
        one = run((30_000, 3, 3), torch.float32, True, lr=0.1, momentum=0.9)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1]["momentum_buffer"], two[1]["momentum_buffer"])


def left_to_torch(p, **options):
    """Whether a step of this parameter is not taken over by compiled code."""
    (row,) = ol.explain(ol.LandingSGD([p], **{"lr": 0.1, **options}))
    assert (row.engine == "compiled") == (row.reason == "")
    return row.engine != "compiled"


def test_what_compiled_code_cannot_do_is_left_to_torch():
    def square(dtype=torch.float32):
        return nn.Parameter(ol.random_orthogonal(6, 6, seed=0, dtype=dtype))

    assert not left_to_torch(square())
    assert not left_to_torch(square(torch.float64))
    assert left_to_torch(square(torch.bfloat16))
    assert left_to_torch(square(torch.complex64))
    assert left_to_torch(square(), fused=False)
    assert left_to_torch(square(), foreach=True)
    assert not left_to_torch(square(), foreach=True, fused=True)
    assert not left_to_torch(square(), safe_step="frobenius")
    assert not left_to_torch(square(), safe_step="spectral")
    assert not left_to_torch(nn.Parameter(ol.random_orthogonal(7, 6, seed=0)))
    assert not left_to_torch(nn.Parameter(ol.random_orthogonal(7, 6, seed=0)), attraction="after")
    assert not left_to_torch(nn.Parameter(square().detach().mT))
    assert not left_to_torch(nn.Parameter(ol.random_orthogonal(300, 128, seed=0)))
    assert left_to_torch(nn.Parameter(ol.random_orthogonal(300, 129, seed=0)))
    assert left_to_torch(nn.Parameter(ol.random_orthogonal(129, 129, seed=0)))
    large = nn.Parameter(ol.random_orthogonal(2, 129, 129, seed=0))
    assert left_to_torch(large, view="kernel")


def test_square_convolutions_step_in_both_views():
    for view, shape in (("matrix", (18, 2, 3, 3)), ("kernel", (4, 2, 3, 3))):
        weights = [nn.Parameter(ol.random_orthogonal(*shape, seed=0)) for _ in range(2)]
        if view == "matrix":
            for weight in weights:
                ol.orthogonalize_(weight, view=view)
        G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for weight, fused in zip(weights, (True, False), strict=True):
            weight.grad = G
            ol.LandingSGD([weight], lr=0.1, view=view, fused=fused).step()
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_any_layout_is_read_right():
    X, Y = start((12, 12), torch.float32), start((12, 12), torch.float32)
    G = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    X.grad, Y.grad = G.mT, G.mT.contiguous()
    for weight in (X, Y):
        ol.LandingSGD([weight], lr=0.1).step()
    assert torch.equal(X, Y)


def test_autograd_notices_that_the_weight_was_written_to():
    X = start((5, 5), torch.float32)
    loss = (X * X * X).sum()
    X.grad = torch.ones(5, 5)
    ol.LandingSGD([X], lr=0.1, fused=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", [(140, 140), (50, 20), (20, 50)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
def test_a_bad_gradient_leaves_a_matrix_alone(shape, bad, attraction):
    X = start(shape, torch.float32)
    momentum = 0.9 if shape[0] == shape[1] else 0.0
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=momentum, attraction=attraction)
    before = X.detach().clone()
    X.grad = torch.ones(shape)
    X.grad[3, 5] = bad
    optimizer.step()
    huge = bad == 1e30  # large, but a step as good as any
    assert optimizer.skipped_steps() == (0 if huge else 1)
    assert torch.equal(X.detach(), before) != huge
    assert ol.orthogonality_error(X, spectral=True) <= 0.5
    if shape[0] == shape[1] and not huge:
        assert not optimizer.state[X]["momentum_buffer"].any()


def random_configuration(seed):
    """A shape, a type and options of a step that compiled code takes."""
    pick = random.Random(seed)
    p = pick.choice([*range(1, 17), 24, 40, 64, 100, LARGEST_SIZE])
    n = pick.choice([p, p, p + 1, 2 * p, 5 * p + 3, 40 * p + 7])
    count = pick.choice([1, 1, 3, 16, 17, 40])
    shape = (max(1, min(count, 40_000 // (n * p))), *pick.sample([n, p], 2))
    return (
        shape,
        pick.choice([torch.float32, torch.float64]),
        {
            **pick.choice([*DIRECTIONS.values()]),
            "attraction": pick.choice(["coupled", "decoupled", "after"]),
            "safe_step": pick.choice(["spectral", "spectral", "frobenius"]),
            "lr": 10 ** pick.uniform(-4, 1),
            "lam": pick.choice([0.0, 0.3, 1.0]),
            "scale": 10 ** pick.uniform(-3, 1),
        },
    )


def normal_share(shape, dtype, seed):
    """How much longer the first gradients in :func:`run` are than their tangent parts."""
    generator = torch.Generator().manual_seed(seed + 1)
    G = tall(torch.randn(shape, generator=generator, dtype=torch.float64))
    X = tall(start(shape, dtype, seed).detach().double())
    tangent = relative_gradient(X, G) if is_square(X) else remove_normal(X, G)
    return (torch.linalg.matrix_norm(G) / torch.linalg.matrix_norm(tangent)).clamp(min=1)


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(20))
def test_one_step_of_random_configurations_agrees(block):
    """Where no step is shortened; there its length is a root of a difference, which magnifies."""
    for seed in range(100 * block, 100 * block + 100):
        shape, dtype, options = random_configuration(seed)
        (X, state), (Y, others) = (
            run(shape, dtype, fused, n_steps=1, seed=seed, **options) for fused in (True, False)
        )
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        if state["limited"] or others["limited"]:
            tolerance *= 100
        if options.get("adam"):  # it magnifies what rounding leaves of nearly normal gradients
            tolerance *= normal_share(shape, dtype, seed)[..., None, None]
        assert ((X - Y).abs() <= tolerance).all(), (seed, shape, dtype, options)
        assert state["skipped"] == others["skipped"], (seed, shape, dtype, options)
