"""What a step costs where every operation is a launch: counted on meta tensors.

Products include those in place, which torch's FlopCounterMode does not count.
"""

import math

import pytest
import torch

import ortholand as ol
from tests.optim.counting import counted, products

AFTER = {"attraction": "after"}
METHODS = {
    "coupled": (ol.LandingSGD, {}),
    "after": (ol.LandingSGD, AFTER),
    "momentum-after": (ol.LandingSGD, {**AFTER, "momentum": 0.9}),
    "Adam": (ol.LandingAdam, {}),
}
each_method = pytest.mark.parametrize("method", METHODS)
RESNET = [
    (64, 3, 7, 7),
    *[(64, 64, 3, 3)] * 4,
    (128, 64, 3, 3),
    *[(128, 128, 3, 3)] * 3,
    (128, 64, 1, 1),
    (256, 128, 3, 3),
    *[(256, 256, 3, 3)] * 3,
    (256, 128, 1, 1),
    (512, 256, 3, 3),
    *[(512, 512, 3, 3)] * 3,
    (512, 256, 1, 1),
]


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("coupled", (6, 5.7, 5.3)),
        ("after", (6, 6, 5.4)),
        ("momentum-after", (6, 7, 6.4)),
        ("Adam", (6, 8, 7.4)),
    ],
)
def test_few_products(method, most):
    make, options = METHODS[method]
    for shape, limit in zip([(768, 768), (768, 256), (2304, 256)], most, strict=True):
        assert products(make, *shape, **options) <= limit + 1e-9, shape


@pytest.mark.parametrize(
    ("shape", "most"), [((640, 640), 20), ((960, 320), 50), ((1920, 160), 23.75)]
)
def test_few_products_of_muon(shape, most):
    """Besides triangular solves of p x p matrices. torch's Muon takes 15, 11.7 and 10.4."""
    assert products(ol.LandingMuon, *shape) <= most + 1e-9


@pytest.mark.parametrize(
    ("method", "small", "large"),
    [
        ("coupled", 60, 120),
        ("after", 60, 125),
        ("momentum-after", 65, 130),
        ("Adam", 80, 165),
    ],
)
def test_equal_shapes_step_as_one_batch(method, small, large):
    make, options = METHODS[method]
    assert counted(make, [(64, 64)] * 100, **options).launches <= small
    assert counted(make, [(768, 768)] * 96, **options).launches <= large


@pytest.mark.parametrize(("method", "most"), [("coupled", 235), ("after", 350), ("Adam", 460)])
def test_launches_of_a_network(method, most):
    make, options = METHODS[method]
    assert counted(make, RESNET, **options).launches <= most


@pytest.mark.parametrize(
    ("method", "single", "batch"),
    [
        ("coupled", (5, 2.4), (7, 4.4)),
        ("after", (5, 2.6), (7, 4.6)),
        ("momentum-after", (5, 3.6), (8, 6.6)),
        ("Adam", (5, 3.6), (8, 6.6)),
    ],
)
def test_little_memory_is_needed_for_a_while(method, single, batch):
    """In units of the weights; a batch is a copy of weights, gradients and buffers."""
    make, options = METHODS[method]
    for count, most in ((1, single), (8, batch)):
        for (n, p), limit in zip([(768, 768), (2304, 256)], most, strict=True):
            needed = counted(make, [(n, p)] * count, **options).temporary
            assert needed <= (limit + 0.01) * 4 * n * p * count, (n, p, count)


def test_zeros_below_matrices_change_nothing():
    """Matrices of one width step together, tall and wide ones, in any view."""
    shapes = [(12, 4), (4, 15), (4, 2, 3, 2), (9, 4), (5, 5), (9, 4)]
    for make, options in (*METHODS.values(), (ol.LandingMuon, {})):
        together, apart = (stepped(make, shapes, foreach=f, **options) for f in (True, False))
        for a, b in zip(together, apart, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def stepped(make, shapes, **options):
    """Weights of these shapes after a few steps."""
    generator = torch.Generator().manual_seed(1)
    weights = []
    for shape in shapes:
        M = torch.randn(shape[0], math.prod(shape[1:]), generator=generator).double()
        weights.append(torch.nn.Parameter(ol.orthogonalize_(M).reshape(shape)))
    optimizer = make(weights, fused=False, **options)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).double()
        optimizer.step()
    return weights


@each_method
def test_no_host_read(method):
    make, options = METHODS[method]
    shapes = [(40, 40), (60, 20), (20, 60)]
    for lr in (0.1, torch.tensor(0.1)):
        assert not counted(make, shapes, lr=lr, **options).reads
