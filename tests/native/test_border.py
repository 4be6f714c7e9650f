"""Nothing that torch.ops.ortholand is given makes it touch memory that is not the tensors' own.

What it cannot take it refuses, before anything has moved; whoever steps then, a step is right.
"""

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand import native
from ortholand.native import recipe
from ortholand.optim.engines import compiled
from tests.native.conftest import needs_compiler

pytestmark = needs_compiler

# How ops.cpp names what it refuses.
DEVICE, TYPE, SHAPE, STATE_SHAPE, LAYOUT, OTHER_LAYOUT, MEMORY, SIZE = range(-1, -9, -1)
SETTINGS = [
    0.1,
    1.0,
    1.0,
    0.5,
    0.5,
    0.6,
    0.5,
    0.9,
    0.0,
    0.9,
    0.99,
    1e-8,
    0.0,
    1.0,
    0.0,
    0.0,
    0.0,
    0.0,
    1.0,
    1.0,
]
NO_MOMENTS, MOMENTUM, ADAM = range(3)


class Wrapped(torch.Tensor):
    """A subclass may have no memory of its own."""


def settings(moments=NO_MOMENTS, kernels=False):
    values = [*SETTINGS]
    values[15], values[17] = moments, kernels
    return torch.tensor(values, dtype=torch.float64)


def call(moved, gradients, moments=NO_MOMENTS, kernels=False, only_check=True):
    """What landing_step says, once the kernels are there."""
    step = native.operations().landing_step
    for _ in range(3):
        answers = step(moved, gradients, settings(moments, kernels), only_check)
        asked = [
            (x.dtype, answer - 1)
            for x, answer in zip(moved, answers[1:], strict=False)  # no answers: all stepped
            if answer > 0 and answers[0] == 0
        ]
        if not asked:
            return answers
        for dtype, columns in asked:
            native.add_kernels(dtype, columns)
    raise AssertionError("asks for kernels again and again")


def eye(n=6, p=4):
    return torch.eye(n)[:, :p].contiguous()


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def cut(x, by=4):
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - by)
    return x


def test_what_is_plain_is_taken():
    X = eye()
    before = X.clone()
    assert call([X], [torch.ones(6, 4)]) == []
    assert torch.equal(X, before)  # that was a check
    call([X], [torch.ones(6, 4)], only_check=False)
    assert not torch.equal(X, before)


BAD_WEIGHTS = {
    "type": (lambda: eye().half(), TYPE),
    "integers": (lambda: eye().long(), TYPE),
    "complex": (lambda: eye().to(torch.complex64), TYPE),
    "vector": (lambda: torch.ones(4), SIZE),
    "number": (lambda: torch.ones(()), SIZE),
    "empty": (lambda: torch.ones(0, 4), SIZE),
    "many columns": (lambda: torch.ones(140, 129), SIZE),
    "gaps": (lambda: torch.ones(6, 8)[:, ::2], LAYOUT),
    "expanded": (lambda: torch.ones(1, 4).expand(6, 4), LAYOUT),
    "overlapping": (lambda: torch.ones(12).as_strided((3, 2), (1, 1)), LAYOUT),
    "freed": (lambda: freed(eye()), MEMORY),
    "freed, with offset": (lambda: freed(torch.ones(7, 4)[1:]), MEMORY),
    "cut": (lambda: cut(eye()), MEMORY),
    "cut, with offset": (lambda: cut(torch.ones(7, 4)[1:]), MEMORY),
    "cut columns": (lambda: cut(torch.ones(4, 6).mT), MEMORY),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_weights_that_are_refused_wherever_they_stand(name, place):
    make, code = BAD_WEIGHTS[name]
    moved, gradients = [eye() for _ in range(2)], [torch.ones(6, 4) for _ in range(2)]
    bad = make()
    moved.insert(place, bad)
    gradients.insert(place, torch.ones(bad.shape, dtype=bad.dtype))
    before = [x.clone() for x in moved if x is not bad]
    expected = [0, 0, 0]
    expected[place] = code
    for only_check in (True, False):
        assert call(moved, gradients, only_check=only_check) == [0, *expected]
    after = [x for x in moved if x is not bad]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


BAD_GRADIENTS = {
    "type": (lambda: torch.ones(6, 4).double(), TYPE),
    "shape": (lambda: torch.ones(4, 6), SHAPE),
    "dimensions": (lambda: torch.ones(6, 4, 1), SHAPE),
    "too few": (lambda: torch.ones(5, 4), SHAPE),
    "layout": (lambda: torch.ones(4, 6).mT, OTHER_LAYOUT),
    "expanded": (lambda: torch.ones(1).expand(6, 4), OTHER_LAYOUT),
    "gaps": (lambda: torch.ones(6, 8)[:, ::2], OTHER_LAYOUT),
    "freed": (lambda: freed(torch.ones(6, 4)), MEMORY),
    "cut": (lambda: cut(torch.ones(6, 4)), MEMORY),
}


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_gradients_and_matrix_states_that_are_refused(name):
    make, code = BAD_GRADIENTS[name]
    assert call([eye()], [make()]) == [0, code]
    of_state = STATE_SHAPE if code == SHAPE else code
    assert call([eye(), make()], [torch.ones(6, 4)], MOMENTUM) == [0, of_state]


BAD_NUMBERS = {
    "type": (lambda: torch.ones(3).double(), TYPE),
    "too few": (lambda: torch.ones(2), STATE_SHAPE),
    "another shape": (lambda: torch.ones(3, 1), STATE_SHAPE),
    "gaps": (lambda: torch.ones(6)[::2], OTHER_LAYOUT),
    "expanded": (lambda: torch.ones(1).expand(3), OTHER_LAYOUT),
    "freed": (lambda: freed(torch.ones(3)), MEMORY),
    "cut": (lambda: cut(torch.ones(3)), MEMORY),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_numbers_that_are_refused(name, which):
    make, code = BAD_NUMBERS[name]
    X = torch.stack([eye()] * 3)
    numbers = [torch.zeros(3), torch.zeros(3)]
    gradients = [torch.ones_like(X)]
    assert call([X, torch.zeros_like(X), *numbers], gradients, ADAM, kernels=True) == []
    numbers[which] = make()
    answers = call([X, torch.zeros_like(X), *numbers], gradients, ADAM, kernels=True)
    assert answers == [0, code]


LISTS = [
    (1, 0, NO_MOMENTS),
    (0, 1, NO_MOMENTS),
    (2, 1, NO_MOMENTS),
    (1, 1, MOMENTUM),
    (3, 1, MOMENTUM),
    (2, 1, ADAM),
]


@pytest.mark.parametrize(("moved", "gradients", "moments"), LISTS)
@pytest.mark.parametrize("only_check", [True, False])
def test_lists_that_do_not_fit(moved, gradients, moments, only_check):
    with pytest.raises(RuntimeError, match="each weight must have a gradient and its state"):
        call([eye()] * moved, [torch.ones(6, 4)] * gradients, moments, only_check=only_check)


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: x[:19],
        lambda x: x.float(),
        lambda x: torch.stack([x, x], dim=1)[:, 0],
        freed,
        lambda x: cut(x, 8),
    ],
)
def test_settings_that_do_not_fit(bad):
    with pytest.raises(RuntimeError, match="settings are 20 numbers"):
        native.operations().landing_step([eye()], [torch.ones(6, 4)], bad(settings()), False)


def unreadable():
    return {
        "meta": torch.ones(6, 4, device="meta"),
        "sparse": torch.ones(6, 4).to_sparse(),
        "blocked": torch.ones(6, 4).to_mkldnn(),
    }


@pytest.mark.parametrize("name", ["meta", "sparse", "blocked"])
@pytest.mark.parametrize("place", [0, 1])
def test_torch_does_not_hand_over_what_is_elsewhere(name, place):
    tensors = [eye(), torch.ones(6, 4)]
    tensors[place] = unreadable()[name]
    with pytest.raises(RuntimeError):
        call(tensors[:1], tensors[1:], only_check=False)


def test_nor_negated_weights_but_it_resolves_gradients():
    with pytest.raises(RuntimeError, match="negation"):
        call([torch._neg_view(eye())], [torch.ones(6, 4)], only_check=False)
    X, Y, G = eye(), eye(), torch.arange(24.0).view(6, 4) / 30
    call([X], [torch._neg_view(-G)], only_check=False)
    call([Y], [G], only_check=False)
    assert torch.equal(X, Y)


def test_nor_what_vmap_shows():
    def refused(x):
        assert not native.all_below(10.0, [x])
        with pytest.raises(RuntimeError):
            call([x], [torch.ones(6, 4)], only_check=False)
        return x.sum()

    torch.vmap(refused)(torch.ones(2, 6, 4))


LAYOUTS = [
    ((9, 4), (4, 1), False),
    ((9, 4), (1, 9), False),
    ((4, 9), (9, 1), True),
    ((5, 1), (1, 1), True),
    ((7, 9, 4), (36, 4, 1), True),
    ((7, 2, 9, 4), (72, 36, 4, 1), True),
    ((7, 2, 9, 4), (72, 1, 8, 2), True),
    ((7, 2, 9, 4), (72, 1, 8, 2), False),
    ((80, 2, 9, 4), (1, 80, 640, 160), False),
    ((1, 3, 3), (77, 3, 1), True),
]


@pytest.mark.parametrize(("shape", "strides", "kernels"), LAYOUTS)
def test_any_order_of_memory_steps_the_same(shape, strides, kernels):
    """As far as strides can describe it; gradient and state lie as the weight does."""
    rows = shape[-2:] if kernels else (shape[0], torch.Size(shape[1:]).numel())
    stack = shape[:-2] if kernels else ()
    start = ol.random_orthogonal(*stack, *rows, seed=0).reshape(shape)
    G = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = [start.clone(), torch.zeros(shape)]
    call(plain, [G], MOMENTUM, kernels, only_check=False)
    strided = [torch.empty_strided(shape, strides).copy_(x) for x in (start, 0 * start, G)]
    call(strided[:2], strided[2:], MOMENTUM, kernels, only_check=False)
    assert not torch.equal(plain[0], start)
    for x, y in zip(plain, strided[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "strides", "kernels"),
    [
        ((9, 4), (8, 2), False),  # gaps
        ((9, 4), (0, 1), False),  # overlaps
        ((2, 3, 4), (3, 1, 6), False),  # the first dimension is in the midst
        ((2, 3, 2, 9, 4), (1, 2, 6, 48, 12), True),  # a stack of three levels
    ],
)
def test_orders_that_strides_cannot_tell(shape, strides, kernels):
    tensors = [torch.zeros(2000).as_strided(shape, strides) for _ in range(2)]
    assert call(tensors[:1], tensors[1:], kernels=kernels) == [0, LAYOUT]


# By an optimizer ----------------------------------------------------------------------------------


def made(X, G, **options):
    p = nn.Parameter(X)
    p.grad = G
    return p, ol.LandingSGD([p], lr=0.1, momentum=0.9, **options)


ODD = {
    "gradient subclass": lambda p, o: setattr(p, "grad", p.grad.as_subclass(Wrapped)),
    "gradient negated": lambda p, o: setattr(p, "grad", torch._neg_view(-p.grad)),
    "gradient expanded": lambda p, o: setattr(p, "grad", torch.ones(1).expand(6, 4)),
    "gradient with gaps": lambda p, o: setattr(p, "grad", torch.ones(6, 8)[:, ::2]),
    "state subclass": lambda p, o: o.state[p].update(
        momentum_buffer=o.state[p]["momentum_buffer"].as_subclass(Wrapped)
    ),
    "state negated": lambda p, o: o.state[p].update(
        momentum_buffer=torch._neg_view(-o.state[p]["momentum_buffer"])
    ),
    "state column-major": lambda p, o: o.state[p].update(
        momentum_buffer=o.state[p]["momentum_buffer"].mT.contiguous().mT
    ),
    "weight negated": lambda p, o: setattr(p, "data", torch._neg_view(-p.data)),
    "weight with gaps": lambda p, o: setattr(p, "data", torch.ones(6, 8)[:, ::2].copy_(p.data)),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("others", [0, 5])
def test_odd_tensors_step_as_by_the_reference(name, others):
    """Alone and among others, by whoever can."""
    ends = []
    for fused in (None, False):
        weights = [nn.Parameter(eye()) for _ in range(1 + others)]
        optimizer = ol.LandingSGD(weights, lr=0.1, momentum=0.9, fused=fused)
        for k in range(3):
            for i, p in enumerate(weights):
                p.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(7 * k + i))
            if k == 1:
                ODD[name](weights[0], optimizer)
            optimizer.step()
        ends.append([p.detach().clone() for p in weights])
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_reasons_are_told():
    def reason(X, G, **options):
        _, optimizer = made(X, G, **options)
        return ol.explain(optimizer)[0].reason

    assert reason(eye(), torch.ones(6, 4)) == ""
    assert "float16 is not compiled" in reason(eye().half(), torch.ones(6, 4).half())
    assert "more than 128 columns" in reason(torch.eye(130), torch.ones(130, 130))
    assert "gradient that is a Wrapped" in reason(eye(), torch.ones(6, 4).as_subclass(Wrapped))
    gaps = torch.zeros(6, 8)[:, ::2].copy_(eye())
    assert "strides (8, 2): use weight.contiguous()" in reason(gaps, torch.ones(6, 4))


def test_every_answer_has_a_reason():
    assert set(compiled.REFUSALS) | {compiled.NO_KERNELS} == {*range(-1, -10, -1), -100}
    text = (recipe.FOLDER / "ops.cpp").read_text()
    for name, number in (("OTHER_LAYOUT", OTHER_LAYOUT), ("NO_KERNELS", -9), ("SIZE", SIZE)):
        assert f"{name} = {number}" in text


def test_weights_that_keep_their_place_in_autograd():
    p, optimizer = made(eye(), torch.ones(6, 4))
    optimizer.step()
    assert p.is_leaf
    assert p.grad_fn is None
    (p**2).sum().backward()  # warns of nothing
