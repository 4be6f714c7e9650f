"""An option that can change in place is read in every step, whatever holds it, by every engine."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ortholand as ol

OPTIMIZERS = {
    "sgd": lambda params, **options: ol.LandingSGD(params, **{"momentum": 0.5, **options}),
    "adam": ol.LandingAdam,
    "muon": ol.LandingMuon,
    "riemannian": lambda params, **options: ol.RiemannianSGD(
        params, **{"momentum": 0.5, **options}
    ),
    "plam": lambda params, **options: ol.PLAM(params, **{"momentum": 0.5, **options}),
    "penalty": lambda params, **options: ol.PenaltySGD(params, **{"momentum": 0.5, **options}),
}
# Each number that is an option of some optimizer: its value at first, and later.
NUMBERS = {
    "lr": (0.05, 0.2),
    "momentum": (0.9, 0.2),
    "dampening": (0.1, 0.6),
    "weight_decay": (0.1, 0.7),
    "adam_eps": (1e-8, 1e-1),
    "lam": (1.0, 0.3),
    "eps": (0.5, 0.2),
    "omega": (0.5, 0.1),
}
BETAS = ((0.9, 0.999), (0.3, 0.6))
ENGINES = {
    "compiled": {"fused": True},
    "reference": {"fused": False},
    "batches": {"foreach": True},
}


class Numbers(Sequence):
    """A user's sequence, as configuration libraries have them."""

    def __init__(self, *values):
        self.values = list(values)

    def __getitem__(self, i):
        return self.values[i]

    def __len__(self):
        return len(self.values)


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


def weights(orthogonal):
    shapes = [(6, 6), (9, 4), (3, 7), (3, 4, 4)] if orthogonal else [(5,), (3, 4)]
    params = []
    for k, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(k)
        data = torch.randn(shape, dtype=torch.float64, generator=generator)
        params.append(nn.Parameter(torch.linalg.qr(data.mT)[0].mT if orthogonal else data))
    return params


def made(method, orthogonal, engine, scale, **options):
    make = OPTIMIZERS[method]
    options |= {name: value for name, value in ENGINES[engine].items() if has(method, name)}
    params = weights(orthogonal)
    if scale != 1:
        for p in params:
            p.data *= scale
    options |= {"orthogonal": orthogonal, "view": "kernel", "scale": scale}
    return make([{"params": params, **options}], lr=options.get("lr", 0.05))


TYPES = {
    "sgd": ol.LandingSGD,
    "adam": ol.LandingAdam,
    "muon": ol.LandingMuon,
    "riemannian": ol.RiemannianSGD,
    "plam": ol.PLAM,
    "penalty": ol.PenaltySGD,
}
DEFAULTS = {method: TYPES[method]([nn.Parameter(torch.eye(2))]).defaults for method in TYPES}


def step(optimizer, k):
    generator = torch.Generator().manual_seed(k)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
    optimizer.step()


def has(method, name):
    return name in DEFAULTS[method]


def same_steps(changing, plain, change, set_plain):
    """Step both, change the options, and step both again."""
    for k in range(2):
        step(changing, k)
        step(plain, k)
    before = [p.detach().clone() for p in changing.param_groups[0]["params"]]
    change()
    set_plain()
    for k in range(2, 4):
        step(changing, k)
        step(plain, k)
    pairs = zip(changing.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True)
    for old, (p, q) in zip(before, pairs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
        assert not torch.equal(old, p)


CASES = [(method, name) for method in OPTIMIZERS for name in NUMBERS if name in DEFAULTS[method]]


WAYS = [  # orthogonal, engine, scale
    (True, "compiled", 1.0),
    (True, "compiled", 2.0),
    (True, "reference", 1.0),
    (True, "batches", 2.0),
    (False, "reference", 1.0),
    (False, "batches", 1.0),
]


@pytest.mark.parametrize(("orthogonal", "engine", "scale"), WAYS)
@pytest.mark.parametrize(("method", "name"), CASES)
def test_number(method, name, orthogonal, engine, scale):
    first, later = NUMBERS[name]
    others = {"nesterov": False} if has(method, "nesterov") else {}
    value = tensor(first)
    changing = made(method, orthogonal, engine, scale, **{name: value}, **others)
    plain = made(method, orthogonal, engine, scale, **{name: first}, **others)
    same_steps(
        changing,
        plain,
        lambda: value.fill_(later),
        lambda: plain.param_groups[0].update({name: later}),
    )


def _filled(betas, values):
    for beta, value in zip(betas, values, strict=True):
        beta.fill_(value)


def _set(betas, values):
    betas[:] = values


HOLDERS = {
    "tuple of tensors": (lambda: tuple(map(tensor, BETAS[0])), _filled),
    "list of tensors": (lambda: list(map(tensor, BETAS[0])), _filled),
    "tuple of a tensor": (
        lambda: (BETAS[0][0], tensor(BETAS[0][1])),
        lambda betas, values: betas[1].fill_(values[1]),
    ),
    "list": (lambda: list(BETAS[0]), _set),
    "sequence of a user": (
        lambda: Numbers(*BETAS[0]),
        lambda betas, values: betas.values.__setitem__(slice(None), values),
    ),
}


@pytest.mark.parametrize("set_later", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(("orthogonal", "engine", "scale"), WAYS)
@pytest.mark.parametrize("method", ["adam", "muon"])
def test_betas(method, orthogonal, engine, scale, holder, set_later):
    make, change = HOLDERS[holder]
    betas = make()
    changing = made(method, orthogonal, engine, scale, **({} if set_later else {"betas": betas}))
    if set_later:
        changing.param_groups[0]["betas"] = betas
    plain = made(method, orthogonal, engine, scale)
    kept = changing.param_groups[0]["betas"]
    if kept is not betas and isinstance(kept[0], float):  # the constructor has made numbers of it
        step(changing, 0)
        return
    later = BETAS[1] if holder != "tuple of a tensor" else (BETAS[0][0], BETAS[1][1])
    same_steps(
        changing,
        plain,
        lambda: change(betas, later),
        lambda: plain.param_groups[0].update(betas=later),
    )


@pytest.mark.parametrize("number", [np.float64, np.float32, float])
def test_plan_of_plain_numbers_is_reused(number):
    """What cannot change is not read again, since that would take as long as the step."""
    optimizer = ol.LandingSGD(weights(True), lr=number(0.1), momentum=number(0.5), view="kernel")
    step(optimizer, 0)
    plan = optimizer.plan(optimizer.param_groups[0])
    step(optimizer, 1)
    assert optimizer.plan(optimizer.param_groups[0]) is plan


class Pulled(ol.LandingSGD):
    """A user's optimizer with an option of its own, which holds lam."""

    def how_it_lands(self, group):
        return dataclasses.replace(super().how_it_lands(group), lam=float(read(group["pull"])))


def read(pull):
    while not isinstance(pull, float | torch.Tensor | np.generic):
        pull = vars(pull)["lam"] if isinstance(pull, Namespace) else pull[0]
    return pull


class Namespace(SimpleNamespace):
    pass


PULLS = {
    "number": (lambda: 1.0, None),
    "array": (lambda: np.ones(1), lambda pull: pull.fill(0.2)),
    "list in a tuple": (lambda: (([1.0],),), lambda pull: pull[0][0].__setitem__(0, 0.2)),
    "dict": (lambda: {0: 1.0}, lambda pull: pull.update({0: 0.2})),
    "object": (lambda: Namespace(lam=1.0), lambda pull: setattr(pull, "lam", 0.2)),
    "tensor in a tuple": (lambda: (tensor(1.0), 1), lambda pull: pull[0].fill_(0.2)),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("holder", PULLS)
def test_option_of_subclass(holder, fused):
    make, change = PULLS[holder]
    start = [1.1 * p.data for p in weights(orthogonal=True)]
    groups = [
        {"params": [nn.Parameter(X.clone()) for X in start], "view": "kernel", "pull": pull}
        for pull in (make(), 1.0)
    ]
    changing, plain = (Pulled([group], lr=0.1, fused=fused) for group in groups)

    def set_pull():
        plain.param_groups[0]["pull"] = 0.2

    def change_pull():
        group = changing.param_groups[0]
        change(group["pull"]) if change is not None else group.update(pull=0.2)

    same_steps(changing, plain, change_pull, set_pull)


@pytest.mark.parametrize("name", ["lr", "momentum", "lam", "scale"])
def test_number_that_torch_does_not_take(name):
    """Such as a user's class, whose value could change."""
    number = type("Number", (Fraction,), {})(1, 2)
    with pytest.raises(TypeError, match=r"use float\(\.\.\.\)"):
        ol.LandingSGD(weights(orthogonal=True), **{"lr": 0.1, "view": "kernel", name: number})


def test_view_of_weight_with_state_must_not_change():
    """This holds beside an option that can change in place, too."""
    optimizer = made("sgd", True, "compiled", 1.0, momentum=tensor(0.5))
    step(optimizer, 0)
    optimizer.param_groups[0]["view"] = "matrix"
    with pytest.raises(ValueError, match="view"):
        step(optimizer, 1)
