"""Attractions and rules from outside step on every engine; subclasses are never bypassed."""

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.landing import ATTRACTIONS, After, Attraction, Coupled, Decoupled, register
from ortholand.safe_step import RULES, Frobenius, SafeStepRule, Spectral
from tests.distributed.toys import register_toys

WEIGHTS = {
    "small square": ((3, 3), torch.float32),
    "square": ((40, 40), torch.float32),
    "large square": ((150, 150), torch.float32),
    "tall": ((50, 20), torch.float32),
    "very tall": ((200, 4), torch.float32),
    "wide": ((20, 50), torch.float32),
    "stack": ((5, 3, 3), torch.float64),
    "stack of tall": ((5, 30, 3), torch.float64),
    "complex": ((6, 6), torch.complex128),
    "complex tall": ((40, 4), torch.complex64),
    "half": ((30, 3), torch.bfloat16),
}
each_weight = pytest.mark.parametrize("weight", WEIGHTS)


@pytest.fixture(autouse=True)
def toys():
    attractions, rules = dict(ATTRACTIONS), dict(RULES)
    register_toys()
    yield
    for registry, before in ((ATTRACTIONS, attractions), (RULES, rules)):
        registry.clear()
        registry.update(before)


def stepped(weight, seed=1, scale=1.0, **options):
    """The weight before and after one step, and the gradient, in full precision."""
    shape, dtype = WEIGHTS[weight]
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0, dtype=dtype))
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    X.grad = scale * torch.randn(shape, generator=generator, dtype=kind).to(dtype)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    before, G = X.detach().to(exact, copy=True), X.grad.to(exact)
    optimizer = ol.LandingSGD([X], view="kernel" if len(shape) > 2 else "matrix", **options)
    optimizer.step()
    assert optimizer.skipped_steps() == 0
    return before, X.detach().to(exact), G, 300 * torch.finfo(dtype).eps


@each_weight
def test_an_attraction_with_nothing_but_a_move_steps_everywhere(weight):
    X, moved, G, tolerance = stepped(weight, attraction="lazy", lr=1e-3)
    expected = X - 1e-3 * ol.landing_field(X, G) / 2
    torch.testing.assert_close(moved, expected, rtol=tolerance, atol=tolerance)


@each_weight
def test_an_attraction_with_a_gram_form_steps_everywhere(weight):
    X, moved, G, tolerance = stepped(weight, attraction="tangent only", lr=1e-2)
    R = ol.landing_field(X, G, lam=0.0)
    expected = X - 1e-2 * R / torch.linalg.vector_norm(R, dim=(-2, -1), keepdim=True)
    torch.testing.assert_close(moved, expected, rtol=tolerance, atol=tolerance)


@each_weight
def test_a_rule_steps_by_its_own_bound_everywhere(weight):
    X, moved, G, tolerance = stepped(weight, safe_step="cautious", lr=1e3, lam=0.0)
    L = ol.landing_field(X, G, lam=0.0)
    size = torch.linalg.vector_norm(L, dim=(-2, -1), keepdim=True)
    expected = X - 0.5**0.5 / (3 * size) * L
    torch.testing.assert_close(moved, expected, rtol=10 * tolerance, atol=10 * tolerance)


def test_functions_may_stand_for_objects():
    ATTRACTIONS["stay"] = lambda X, B, options: (X, torch.ones(X.shape[:-2], dtype=torch.bool))
    RULES["huge"] = lambda L: torch.full(L.shape[:-2], 1e30, dtype=torch.float64)
    for weight in WEIGHTS:
        X, moved, _, _ = stepped(weight, attraction="stay", lr=0.1)
        assert torch.equal(X, moved)
        X, moved, _, tolerance = stepped(weight, safe_step="huge", lr=0.1)
        torch.testing.assert_close(X, moved, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parent", [Coupled, After])
def test_a_subclass_that_redefines_a_form_has_no_inherited_ones(parent):
    class Stays(parent):
        name = "stays"

        def move(self, X, B, options):
            return X.clone(), torch.ones(X.shape[:-2], dtype=torch.bool)

    register(Stays())
    for weight in WEIGHTS:
        X, moved, _, _ = stepped(weight, attraction="stays", lr=0.1)
        assert torch.equal(X, moved)

    class Renamed(parent):
        name = "renamed"

    register(Renamed())
    X, moved, _, _ = stepped("square", attraction="renamed", lr=0.1)
    twin = stepped("square", attraction=parent.name, lr=0.1)[1]
    torch.testing.assert_close(moved, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parent", [Frobenius, Spectral])
def test_so_has_a_rule(parent):
    class Careful(parent):
        name = "careful"

        def bound(self, L):
            return 1e30 * super().bound(L)

    RULES["careful"] = Careful()
    for weight in WEIGHTS:
        X, moved, _, tolerance = stepped(weight, safe_step="careful", lr=0.1)
        torch.testing.assert_close(X, moved, rtol=tolerance, atol=tolerance)


def test_an_attraction_without_a_move_is_refused():
    class Nothing(Attraction):
        name = "nothing"

    with pytest.raises(TypeError, match="Nothing must define move"):
        register(Nothing())
    with pytest.raises(TypeError, match="must be an Attraction, got"):
        register("coupled")
    with pytest.raises(ValueError, match=r"attraction must be one of .*'coupled'.*, got 'nothing'"):
        ol.LandingSGD([nn.Parameter(torch.eye(3))], attraction="nothing")


def test_explain_tells_which_form_is_missing():
    X = nn.Parameter(ol.random_orthogonal(60, 4, seed=0))
    (row,) = ol.explain(ol.LandingSGD([X], attraction="lazy"))
    assert row.engine == "reference"
    assert row.reason == "attraction 'lazy' has no compiled form"
    (row,) = ol.explain(ol.LandingSGD([X], safe_step="cautious"))
    assert row.reason == "safe_step 'cautious' has no compiled form"
    assert isinstance(RULES["cautious"], SafeStepRule)


@pytest.mark.parametrize("parent", [Coupled, Decoupled, After])
def test_a_subclass_may_call_its_parent(parent):
    class Twice(parent):
        name = "twice"

        def move(self, X, B, options):
            moved, taken = super().move(X, B, options)
            return 2 * moved - X, taken

    register(Twice())
    for weight in WEIGHTS:
        X, moved, _, tolerance = stepped(weight, attraction=parent.name, lr=1e-3)
        twice = stepped(weight, attraction="twice", lr=1e-3)[1]
        torch.testing.assert_close(twice, 2 * moved - X, rtol=2 * tolerance, atol=2 * tolerance)


def test_what_is_mixed_in_is_what_steps():
    class Stays:
        def move(self, X, B, options):
            return X.clone(), torch.ones(X.shape[:-2], dtype=torch.bool)

    class Mixed(Stays, Coupled):
        name = "mixed"

    class Small:
        def bound(self, L):
            return torch.full(L.shape[:-2], 1e30, dtype=torch.float64)

    class MixedRule(Small, Frobenius):
        name = "mixed"

    register(Mixed())
    RULES["mixed"] = MixedRule()
    for options in ({"attraction": "mixed"}, {"safe_step": "mixed"}):
        for weight in WEIGHTS:
            X, moved, _, tolerance = stepped(weight, lr=0.1, **options)
            torch.testing.assert_close(X, moved, rtol=tolerance, atol=tolerance)
