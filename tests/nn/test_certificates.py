import math

import pytest
import torch
from torch import Tensor, nn

import ortholand as ol
from ortholand.nn import (
    MaxMin,
    OrthogonalConv2d,
    OrthogonalLinear,
    UnitRowLinear,
    certified_accuracy,
    certified_radii,
    lipschitz_bound,
)


def network(last: type[nn.Module] = UnitRowLinear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(OrthogonalConv2d(1, 8, 3), MaxMin()),
        OrthogonalConv2d(8, 6, 4, stride=2, padding_mode="zeros"),
        nn.PixelUnshuffle(2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        OrthogonalLinear(24, 30),
        nn.ReLU(),
        last(30, 4),
    )


def jacobian_norm(model: nn.Module, x: Tensor) -> float:
    J = torch.func.jacrev(lambda image: model(image[None])[0])(x).detach().flatten(1)
    return float(torch.linalg.matrix_norm(J.double(), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [UnitRowLinear, OrthogonalLinear, nn.Linear])
def test_no_gradient_is_larger_than_the_bound(last, dtype):
    model = network(last).to(dtype)
    bound, narrow = lipschitz_bound(model), lipschitz_bound(model, margins=True)
    assert narrow <= bound
    assert bound <= 1.6
    for _ in range(3):
        assert jacobian_norm(model, torch.randn(1, 8, 8, dtype=dtype)) <= bound
    assert lipschitz_bound(model.double()) == pytest.approx(bound, abs=2e-5)
    assert lipschitz_bound(model.float()) == pytest.approx(bound, abs=2e-5)


def test_the_bound_grows_with_an_error_of_the_factors():
    model = network(OrthogonalLinear)
    before = lipschitz_bound(model)
    with torch.no_grad():
        model[0][0].mix *= 1.25
        model[5].weight *= 2
    assert lipschitz_bound(model) == pytest.approx(before * 2.5, rel=1e-4)


def test_a_layer_counts_as_often_as_it_is_used():
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(3 * torch.eye(4))
    assert lipschitz_bound(nn.Sequential(layer, nn.ReLU(), layer)) == pytest.approx(9)
    assert lipschitz_bound(nn.Sequential()) == pytest.approx(1)


def test_margins_use_the_distances_of_the_last_rows_only():
    head = UnitRowLinear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]))
    assert lipschitz_bound(head, margins=True) == pytest.approx(math.sqrt(2))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]))
    assert lipschitz_bound(head, margins=True) == 0
    assert lipschitz_bound(nn.Sequential(head, nn.ReLU()), margins=True) == pytest.approx(2**0.5)


KNOWN = [
    *((nn.Dropout(0.5).eval(), 1), (nn.Dropout(0.0), 1), (nn.Tanh(), 1), (nn.LeakyReLU(2.0), 2)),
    *((nn.ELU(3.0), 3), (nn.MaxPool2d(2), 1), (nn.AvgPool2d(2), 0.5), (nn.AvgPool2d((1, 4)), 0.5)),
    *((nn.AvgPool2d(2, ceil_mode=True), 1), (nn.Unflatten(1, (2, 2)), 1), (MaxMin(dim=-1), 1)),
]


@pytest.mark.parametrize(("layer", "bound"), KNOWN, ids=str)
def test_known_layers(layer, bound):
    assert lipschitz_bound(layer) == pytest.approx(bound)


def subclass(kind: type[nn.Module], *arguments: int) -> nn.Module:
    return type("Own", (kind,), {"forward": lambda self, x: 5 * x})(*arguments)


def own(bound: float) -> nn.Module:
    return type("Own", (nn.Module,), {"lipschitz_bound": lambda self: bound})()


patched, hooked = nn.ReLU(), nn.ReLU()
patched.forward = lambda x: 5 * x
hooked.register_forward_hook(lambda module, inputs, output: 5 * output)

REFUSED = [
    (nn.BatchNorm2d(3), "'1.0', BatchNorm2d, has none here. Leave it out"),
    (nn.LayerNorm(3), "LayerNorm.*Leave it out"),
    (nn.MultiheadAttention(4, 2), "MultiheadAttention.*OrthogonalLinear"),
    (nn.Conv2d(3, 3, 3), r"Conv2d.*Use ortholand.nn.OrthogonalConv2d"),
    (nn.Dropout(0.5), r"Dropout.*model.eval\(\)"),
    (nn.MaxPool2d(3, stride=2), "MaxPool2d.*share no pixel"),
    (nn.GELU(), "GELU.*MaxMin"),
    (subclass(nn.ReLU), r"Own, has none here.*method lipschitz_bound\(\)"),
    (subclass(OrthogonalConv2d, 2, 2, 3), "Own, has none here"),
    (subclass(UnitRowLinear, 2, 2), "Own, has none here"),
    *((layer, "ReLU, has none here. Remove its hooks") for layer in (patched, hooked)),
    *((own(bound), f"Own, has {bound} here") for bound in (math.nan, -1.0, math.inf)),
    (nn.ModuleList([nn.ReLU()]), "ModuleList.*nn.Sequential"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=str)
def test_what_has_no_bound_is_refused_by_name(layer, message):
    with pytest.raises(ValueError, match=message):
        lipschitz_bound(nn.Sequential(nn.ReLU(), nn.Sequential(layer)))


@pytest.mark.parametrize("make", [OrthogonalConv2d, OrthogonalLinear, UnitRowLinear, nn.Linear])
def test_parameters_that_are_not_finite_have_no_bound(make):
    layer = make(4, 4, 3) if make is OrthogonalConv2d else make(4, 4)
    next(layer.parameters()).data.view(-1)[1] = math.nan
    with pytest.raises(ValueError, match=r"1\.0 must have finite parameters"):
        lipschitz_bound(nn.Sequential(nn.ReLU(), nn.Sequential(layer)))


def test_a_module_can_have_a_bound_of_its_own():
    assert lipschitz_bound(nn.Sequential(own(7.0), nn.LeakyReLU(2.0))) == pytest.approx(14)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got str"):
        lipschitz_bound("model")
    assert lipschitz_bound(ol.trivialize_(OrthogonalLinear(4, 4), "weight")) == pytest.approx(1)


def test_the_certified_radius_of_one_orthonormal_layer_is_exact():
    model = OrthogonalLinear(6, 3).double()
    x = torch.randn(20, 6, dtype=torch.float64)
    logits = model(x)
    radii = certified_radii(logits, lipschitz_bound(model, margins=True))
    best, second = logits.topk(2).indices.unbind(1)
    towards = (model.weight[second] - model.weight[best]) / math.sqrt(2)
    within, beyond = (x + (radii[:, None] * c) * towards for c in (1 - 1e-6, 1 + 1e-6))
    assert torch.equal(model(within).argmax(1), best)
    assert torch.equal(model(beyond).argmax(1), second)


def test_certified_accuracy_falls_from_accuracy_to_zero():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 0, 1])
    shares = [certified_accuracy(logits, labels, r, bound=2**-0.5) for r in (0, 0.5, 1, 1.5, 2)]
    assert shares == [0.5, 0.5, 0.25, 0.25, 0]
    assert certified_accuracy(torch.full((1, 2), torch.nan), labels[:1], 0, 1.0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3), torch.ones(3).long(), 1, 1), r"at least 2 classes.*of shape \(3,\)"),
        ((torch.ones(3, 2).half(), torch.ones(3).long(), 1, 1), "must be float32.*torch.float16"),
        ((torch.ones(3, 2), torch.ones(2).long(), 1, 1), "one integer for each of the 3 samples"),
        ((torch.ones(3, 2), torch.ones(3), 1, 1), "got torch.float32"),
        ((torch.ones(3, 2), torch.ones(3).long(), -1, 1), "radius must be finite.*got -1"),
        ((torch.ones(3, 2), torch.ones(3).long(), 1, 0), "bound must be positive.*got 0"),
        ((torch.ones(3, 2), torch.ones(3).long(), 1, math.nan), "bound must be positive"),
    ],
)
def test_bad_arguments_of_certificates(arguments, message):
    with pytest.raises(ValueError, match=message):
        certified_accuracy(*arguments)
