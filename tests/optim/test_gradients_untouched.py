"""No step writes to ``p.grad``: not the library's, and not torch's in groups without constraint."""

import itertools

import pytest
import torch
from torch import nn

import ortholand as ol

OPTIMIZERS = (
    ol.LandingSGD,
    ol.LandingAdam,
    ol.LandingMuon,
    ol.RiemannianSGD,
    ol.PLAM,
    ol.PenaltySGD,
)
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
# All combinations of these are tried, for the options that an optimizer has.
CHOICES = {
    "maximize": (False, True),
    "foreach": (None, False, True),
    "nesterov": (False, True),
    "momentum": (0.0, 0.9),
    "weight_decay": (0.0, 0.1),
    "decoupled_weight_decay": (True, False),
}
KINDS = ("dense", "transposed", "expanded")
LANDING_CHOICES = {
    "maximize": (False, True),
    "nesterov": (False, True),
    "momentum": (0.0, 0.9),
    "engine": ({"fused": True}, {"fused": False}, {"foreach": True}),
    "attraction": ("coupled", "decoupled", "after"),
    "scale": (1.0, 2.0),
}


def combinations(make, choices):
    """Options of the optimizer, with one value of each choice that it has."""
    known = (*make([nn.Parameter(torch.eye(2))]).defaults, "engine")
    names = [name for name in choices if name in known]
    for values in itertools.product(*(choices[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        options |= {k: v for k, v in options.pop("engine", {}).items() if k in known}
        if options.get("momentum", 1) or not options.get("nesterov"):
            yield options


def gradient(p, kind, seed):
    G = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
    if kind == "transposed":
        return G.mT.contiguous().mT if p.ndim > 1 else G.flip(0)
    return G[..., :1].expand(p.shape) if kind == "expanded" else G


def check_untouched(optimizer, params, kind):
    for k in range(2):
        for p in params:
            p.grad = gradient(p, kind, k)
        before = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
        optimizer.step()
        for p, (same, copy, version) in zip(params, before, strict=True):
            assert p.grad is same
            assert torch.equal(p.grad, copy)
            assert p.grad._version == version  # nor written to and put back


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_plain_groups(make, dtype, tensor_lr):
    for options in combinations(make, CHOICES):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(3,), (4, 2), (4, 2)]]
        lr = torch.tensor(0.01) if tensor_lr else 0.01
        check_untouched(make(params, lr=lr, orthogonal=False, **options), params, "dense")


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_plain_group_of_huge_numbers(make):
    """Copies are put back where a step is not finite; gradients are no part of that."""
    params = [nn.Parameter(torch.full((3,), 1e38))]
    for options in combinations(make, CHOICES):
        optimizer = make(params, lr=10.0, orthogonal=False, **options)
        for value in (1e38, torch.inf, torch.nan):
            params[0].grad = torch.full((3,), value)
            copy = params[0].grad.clone()
            optimizer.step()
            torch.testing.assert_close(params[0].grad, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_orthogonal_groups(make, kind):
    for options in combinations(make, LANDING_CHOICES):
        shapes = [(4, 4), (12, 3), (3, 7), (2, 3, 3)]
        params = [random_weight(shape, torch.float32, options["scale"]) for shape in shapes]
        check_untouched(make(params, lr=0.01, view="kernel", **options), params, kind)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_orthogonal_groups_of_other_types(make, dtype):
    choices = LANDING_CHOICES | {"engine": ({}, {"foreach": True}), "nesterov": (False,)}
    for kind, options in zip(itertools.cycle(KINDS), combinations(make, choices)):
        shapes = [(4, 4), (12, 3), (2, 3, 3)]
        params = [random_weight(shape, dtype, options["scale"]) for shape in shapes]
        check_untouched(make(params, lr=0.01, view="kernel", **options), params, kind)


@pytest.mark.parametrize("make", OPTIMIZERS[:3])
def test_large_matrices(make):
    choices = LANDING_CHOICES | {"scale": (1.0,), "maximize": (True,)}
    for kind, options in zip(itertools.cycle(KINDS), combinations(make, choices)):
        params = [random_weight((130, 130), torch.float64, 1.0)]
        check_untouched(make(params, lr=0.01, **options), params, kind)


def random_weight(shape, dtype, scale):
    *batch, n, p = shape
    tall = ol.random_orthogonal(max(n, p), min(n, p), seed=0, dtype=torch.float64)
    matrix = tall if n >= p else tall.mT
    return nn.Parameter((scale * matrix.expand(*batch, n, p)).to(dtype).contiguous())
