"""Whoever overrides a part of a step has it called: no faster way goes around it."""

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import polar_projection

SHAPES = {
    "stack": ((5, 3, 3), "kernel"),
    "40": ((40, 40), "matrix"),
    "150": ((150, 150), "matrix"),
    "tall": ((50, 20), "matrix"),
    "wide": ((20, 50), "matrix"),
}
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_fused = pytest.mark.parametrize("fused", [None, True], ids=["default", "fused"])
each_method = pytest.mark.parametrize(
    "make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon], ids=["sgd", "adam", "muon"]
)
N_STEPS = 4


def options_of(make, **options) -> dict:
    defaults = {"lr": 0.01} if issubclass(make, ol.LandingAdam) else {"lr": 0.1, "momentum": 0.9}
    return {**defaults, **options}


def start(shape, seed=0) -> nn.Parameter:
    size, _ = SHAPES[shape]
    return nn.Parameter(ol.random_orthogonal(*size, seed=seed))


def build(make, shape, weights=1, **options) -> torch.optim.Optimizer:
    params = [start(shape, seed) for seed in range(weights)]
    return make(params, view=SHAPES[shape][1], **options_of(make, **options))


def parameters(optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def run(optimizer, steps=N_STEPS) -> list[torch.Tensor]:
    """The weights after some steps."""
    generator = torch.Generator().manual_seed(100)
    for _ in range(steps):
        for p in parameters(optimizer):
            p.grad = torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5
        optimizer.step()
    return [p.detach().clone() for p in parameters(optimizer)]


def assert_close(one, other) -> None:
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def assert_tall(X, shape) -> None:
    """Overrides are handed matrices (..., n, p), n >= p."""
    size, _ = SHAPES[shape]
    assert X.shape[-2:] == (max(size[-2:]), min(size[-2:]))


def turned_round(name):
    """An override of that name with which an optimizer does what it does under ``maximize``."""

    def matrix_step(self, X, G, state, group):
        return type(self).__mro__[1].matrix_step(self, X, -G, state, group)

    def generator(self, X, G):
        return -type(self).__mro__[1].generator(self, X, G)

    def move(self, X, B, group):
        return type(self).__mro__[1].move(self, X, -B, group)

    return {"matrix_step": matrix_step, "generator": generator, "move": move}[name]


def counted(function, calls, name):
    def counting(self, X, *rest, **options):
        calls.append(name)
        return function(self, X, *rest, **options)

    return counting


@pytest.mark.parametrize("name", ["matrix_step", "generator", "move"])
@each_method
@each_fused
@each_shape
def test_a_subclass_that_turns_a_part_round_ascends(make, name, shape, fused):
    calls = []
    override = counted(turned_round(name), calls, name)
    changed = type("Changed", (make,), {name: override})
    result = run(build(changed, shape, fused=fused))
    assert calls == [name] * N_STEPS
    assert_close(result, run(build(make, shape, maximize=True)))


@each_fused
@each_shape
def test_a_subclass_that_forgets_in_transport_has_no_momentum(shape, fused):
    calls = []

    class Forgetful(ol.LandingSGD):
        def transport(self, X, buffer):
            calls.append(tuple(X.shape))
            assert_tall(X, shape)
            assert buffer.shape == X.shape
            return torch.zeros_like(super().transport(X, buffer))

    optimizer = build(Forgetful, shape, fused=fused)
    result = run(optimizer)
    assert len(calls) == N_STEPS
    assert not optimizer.state[parameters(optimizer)[0]]["momentum_buffer"].any()
    assert_close(result, run(build(ol.LandingSGD, shape, momentum=0.0)))


@each_method
@each_fused
@each_shape
def test_a_move_that_refuses_moves_nothing_and_is_counted(make, shape, fused):
    class Stubborn(make):
        def move(self, X, B, group):
            assert_tall(X, shape)
            moved, taken = super().move(X, B, group)
            assert moved.shape == X.shape == B.shape
            assert taken.shape == X.shape[:-2]
            return moved, torch.zeros_like(taken)

    optimizer = build(Stubborn, shape, fused=fused)
    before = [p.detach().clone() for p in parameters(optimizer)]
    after = run(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    assert optimizer.skipped_steps() == N_STEPS * (5 if shape == "stack" else 1)


@each_method
@each_fused
@each_shape
def test_a_matrix_step_may_change_the_result(make, shape, fused):
    class Watched(make):
        seen = 0

        def matrix_step(self, X, G, state, group):
            assert_tall(X, shape)
            self.seen += 1
            result = super().matrix_step(X, G, state, group)
            landed = polar_projection(result.moved)
            return result._replace(moved=landed)

    optimizer = build(Watched, shape, fused=fused)
    run(optimizer)
    assert optimizer.seen == N_STEPS
    assert ol.orthogonality_error(optimizer) < 1e-4
    assert ol.orthogonality_error(build_and_run(make, shape, attraction="coupled")) > 1e-4


def build_and_run(make, shape, **options) -> torch.optim.Optimizer:
    optimizer = build(make, shape, **options)
    run(optimizer)
    return optimizer


@each_method
@each_fused
@each_shape
def test_a_matrix_step_may_keep_state_of_its_own(make, shape, fused):
    class Counting(make):
        def state_kinds(self, group):
            return {**super().state_kinds(group), "seen": "number"}

        def matrix_step(self, X, G, state, group):
            own = {"seen": state["seen"] + 1}
            inherited = {name: value for name, value in state.items() if name != "seen"}
            result = super().matrix_step(X, G, inherited, group)
            return result._replace(state={**result.state, **own})

    optimizer = build(Counting, shape, fused=fused)
    result = run(optimizer)
    (p,) = parameters(optimizer)
    assert (optimizer.state[p]["seen"] == N_STEPS).all()
    assert_close(result, run(build(make, shape)))


@pytest.mark.parametrize("name", ["matrix_step", "generator", "move"])
@each_method
@each_fused
def test_an_override_on_one_optimizer_is_its_own(make, name, fused):
    for shape in SHAPES:
        changed, other = (build(make, shape, fused=fused) for _ in range(2))
        calls = []
        inherited = getattr(changed, name)

        def override(X, second, *rest, calls=calls, inherited=inherited, **options):
            calls.append(1)
            return inherited(X, -second, *rest, **options)

        setattr(changed, name, override)
        result = run(changed)
        assert len(calls) == N_STEPS
        assert_close(result, run(build(make, shape, maximize=True)))
        assert_close(run(other), run(build(make, shape)))
        delattr(changed, name)
        run(changed)
        assert len(calls) == N_STEPS


@each_fused
def test_an_override_set_in_mid_run_counts_from_the_next_step_on(fused):
    for shape in SHAPES:
        optimizer = build(ol.LandingSGD, shape, fused=fused)
        run(optimizer)
        before = [p.detach().clone() for p in parameters(optimizer)]
        optimizer.move = lambda X, B, group: (X, torch.ones(X.shape[:-2], dtype=torch.bool))
        after = run(optimizer)
        assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
        del optimizer.move
        after = run(optimizer)
        assert all(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


@each_method
@each_fused
def test_overrides_see_all_weights_of_a_group(make, fused):
    """Several weights may come as one batch; every one of their matrices must come."""
    for shape in SHAPES:
        seen = []

        class Watched(make):
            def move(self, X, B, group, seen=seen):
                seen.append(X.shape[:-2].numel())
                return super().move(X, B, group)

        result = run(build(Watched, shape, weights=3, fused=fused))
        assert sum(seen) == 3 * N_STEPS * (5 if shape == "stack" else 1)
        assert_close(result, run(build(make, shape, weights=3)))


@each_method
@each_fused
def test_a_subclass_that_overrides_nothing_steps_as_its_parent_bit_for_bit(make, fused):
    class Same(make):
        """Only a name."""

    for shape in SHAPES:
        result, expected = (run(build(kind, shape, fused=fused)) for kind in (Same, make))
        assert all(torch.equal(p, q) for p, q in zip(result, expected, strict=True))


@pytest.mark.parametrize("make", [ol.RiemannianSGD, ol.PLAM, ol.PenaltySGD])
@pytest.mark.parametrize("name", ["matrix_step", "generator", "move"])
def test_the_other_optimizers_call_overrides_too(make, name):
    for shape in SHAPES:
        calls = []
        changed = type("Changed", (make,), {name: counted(turned_round(name), calls, name)})
        result = run(build(changed, shape, lr=0.01))
        assert calls == [name] * N_STEPS
        assert_close(result, run(build(make, shape, lr=0.01, maximize=True)))
