"""torch.compile takes a whole step as one graph, and does not compile again when lr changes."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ortholand as ol
from tests import needs

OPTIMIZERS = {
    "LandingSGD": (ol.LandingSGD, {}),
    "LandingSGD-momentum-after": (ol.LandingSGD, {"momentum": 0.9, "attraction": "after"}),
    "LandingSGD-decoupled-frobenius": (
        ol.LandingSGD,
        {"attraction": "decoupled", "safe_step": "frobenius"},
    ),
    "LandingAdam": (ol.LandingAdam, {}),
    "LandingAdam-fan": (ol.LandingAdam, {"scale": "fan"}),
    "LandingSGD-scaled": (ol.LandingSGD, {"scale": 3.7, "momentum": 0.9}),
    "LandingMuon": (ol.LandingMuon, {}),
}
OTHERS = [name for name in OPTIMIZERS if name != "LandingSGD-momentum-after"]


def make(name, dtype):
    optimizer_class, options = OPTIMIZERS[name]
    kind = {"dtype": dtype, "scale": options.get("scale", 1.0)}
    weights = [
        nn.Parameter(ol.random_orthogonal(12, 6, seed=0, **kind)),
        nn.Parameter(ol.random_orthogonal(6, 6, seed=1, **kind)),
        nn.Parameter(ol.random_orthogonal(3, 2, 3, 3, seed=2, **kind)),
        nn.Parameter(torch.zeros(4, dtype=dtype)),
    ]
    groups = [
        {"params": weights[:2]},
        {"params": weights[2:3], "view": "kernel"},
        {"params": weights[3:], "orthogonal": False},
    ]
    return weights, optimizer_class(groups, lr=torch.tensor(0.1), **options)


def train(weights, optimizer, step):
    generator = torch.Generator().manual_seed(0)
    for k in range(5):
        for p in weights:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for group in optimizer.param_groups:
            group["lr"].fill_(0.1 / (k + 1))
        step()
    return [p.detach() for p in weights]


@needs.compiled_steps
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("LandingSGD-momentum-after", torch.float32),
        *(pytest.param(name, torch.float32, marks=pytest.mark.thorough) for name in OTHERS),
        pytest.param("LandingAdam", torch.float64, marks=pytest.mark.thorough),
    ],
)
def test_a_step_is_one_graph_that_serves_every_lr(name, dtype):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    weights, optimizer = make(name, dtype)
    compiled = torch.compile(lambda: optimizer.step(), fullgraph=True, backend=counter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about code of torch's own
        ours = train(weights, optimizer, compiled)
    # One graph for the first step, which makes the state, and one for all others. (A single number
    # in float64 is one of Python's to torch, and 0 and 1 are special: one graph more.)
    assert counter.frame_count == (2 if dtype == torch.float32 else 3)
    twins, twin_optimizer = make(name, dtype)
    for one, other in zip(ours, train(twins, twin_optimizer, twin_optimizer.step), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for p, twin in zip(weights, twins, strict=True):
        for key, value in twin_optimizer.state[twin].items():
            torch.testing.assert_close(optimizer.state[p][key], value, rtol=1e-5, atol=1e-6)
