import math

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry import polar_projection


def lenet_like() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 3)
    )


def names(groups) -> dict[bool, list[str]]:
    return {group["orthogonal"]: [name for name, _ in group["params"]] for group in groups}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("3.weight", ["3.weight"]),
        ("[03].weight", ["0.weight", "3.weight"]),
        ("*", ["0.weight", "3.weight", "5.weight"]),
        ("5", ["5.weight"]),
        (nn.Linear, ["3.weight", "5.weight"]),
        (nn.Conv2d, ["0.weight"]),
        (lambda name, p: p.ndim == 4, ["0.weight"]),
        ([nn.Conv2d, "5.*"], ["0.weight", "5.weight"]),
        ((name for name in ("3.*", "5.*")), ["3.weight", "5.weight"]),
    ],
)
def test_selection(selector, expected):
    groups = ol.param_groups(lenet_like(), orthogonal=selector)
    assert names(groups)[True] == expected
    every = sorted(names(groups)[True] + names(groups)[False])
    assert every == sorted(name for name, _ in lenet_like().named_parameters())


def test_a_module_selects_its_own_weights():
    model = lenet_like()
    assert names(ol.param_groups(model, orthogonal=model[3]))[True] == ["3.weight"]


def test_options_reach_their_groups_and_empty_groups_vanish():
    groups = ol.param_groups(
        lenet_like(),
        orthogonal=nn.Conv2d,
        view="kernel",
        options={"lr": 0.5},
        other_options={"weight_decay": 0.1},
    )
    assert groups[0]["view"] == "kernel"
    assert groups[0]["lr"] == 0.5
    assert groups[1]["weight_decay"] == 0.1
    only = ol.param_groups(nn.Linear(3, 3, bias=False), orthogonal="weight")
    assert len(only) == 1


def test_frozen_and_tied_parameters():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight = model[0].weight
    assert names(ol.param_groups(model, orthogonal=nn.Linear))[True] == ["0.weight"]
    model.append(nn.Linear(4, 4))
    model[2].requires_grad_(False)
    assert "2.weight" not in str(names(ol.param_groups(model, orthogonal=nn.Linear)))


@pytest.mark.parametrize("module", [nn.RNN(4, 5), nn.LSTM(4, 5), nn.MultiheadAttention(4, 2)])
def test_recurrent_and_attention_modules(module):
    groups = ol.orthogonalize_(ol.param_groups(module, orthogonal=type(module)))
    optimizer = ol.LandingSGD(groups, lr=0.1)
    assert ol.orthogonality_error(optimizer) < 1e-5


@pytest.mark.parametrize(
    ("selector", "error", "message"),
    [
        ("nowhere.*", ValueError, "selects no trainable parameter.*0.weight, 3.weight, 5.weight"),
        ("3.bias", ValueError, "'3.bias' has shape"),
        (nn.GRU, ValueError, "selects no trainable parameter"),
        (lambda name, p: True, ValueError, "at least 2 dimensions"),
        (3, TypeError, "name pattern.*got 3"),
        ([3], TypeError, "name pattern, a module type, a module, a predicate"),
    ],
)
def test_selections_that_make_no_sense(selector, error, message):
    with pytest.raises(error, match=message):
        ol.param_groups(lenet_like(), orthogonal=selector)


def test_orthogonalize_takes_whatever_there_is():
    W = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    P = polar_projection(W)
    assert torch.equal(ol.orthogonalize_(W), P)
    tensors = [torch.randn(4, 2), torch.randn(2, 4)]
    assert ol.orthogonalize_(tensors) is tensors
    model = lenet_like()
    assert ol.orthogonalize_(model, orthogonal=nn.Linear) is model
    assert ol.orthogonality_error(model, orthogonal=nn.Linear) < 1e-5
    before = model[0].weight.detach().clone()
    ol.orthogonalize_(model, orthogonal=nn.Conv2d, view="kernel")
    assert not torch.equal(before, model[0].weight)
    assert ol.orthogonality_error(model[0].weight, view="kernel") < 1e-5
    optimizer = ol.LandingSGD(ol.param_groups(model, orthogonal=nn.Linear), lr=0.1)
    with torch.no_grad():
        model[3].weight.mul_(1.1)
    assert ol.orthogonality_error(optimizer) > 0.1
    assert ol.orthogonalize_(optimizer) is optimizer
    assert ol.orthogonality_error(optimizer) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_orthogonalize_keeps_type_layout_and_identity(dtype):
    exact = torch.complex64 if dtype.is_complex else torch.float32
    weight = nn.Parameter(torch.randn(6, 4, dtype=exact).to(dtype).mT)
    stride = weight.stride()
    ol.orthogonalize_(weight)
    assert weight.dtype == dtype
    assert weight.stride() == stride
    assert weight.requires_grad
    assert ol.orthogonality_error(weight) < 0.05


@pytest.mark.parametrize("function", [ol.orthogonalize_, ol.orthogonality_error])
def test_weights_without_values_are_refused(function):
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"weight is on the meta device.*to_empty"):
        function(model, orthogonal=nn.Linear)


def test_orthogonalize_changes_nothing_if_it_must_refuse():
    good, bad = torch.randn(3, 3), torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    before = good.clone()
    with pytest.raises(ValueError, match=r"1 has NaN or infinite entries"):
        ol.orthogonalize_([good, bad])
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        ol.orthogonalize_([good, torch.zeros(3)])
    assert torch.equal(good, before)


def test_errors_by_name_and_reduction():
    model = lenet_like()
    groups = ol.orthogonalize_(ol.param_groups(model, orthogonal=nn.Linear))
    with torch.no_grad():
        model[3].weight.mul_(2)
    by_name = ol.orthogonality_error(groups, reduce=None)
    assert list(by_name) == ["3.weight", "5.weight"]
    assert by_name["3.weight"] == pytest.approx(3 * math.sqrt(12), rel=1e-5)
    assert ol.orthogonality_error(groups) == by_name["3.weight"]
    mean = ol.orthogonality_error(groups, reduce="mean")
    assert mean == pytest.approx(sum(by_name.values()) / 2)
    optimizer = ol.LandingSGD(ol.orthogonalize_(groups), lr=0.1)
    assert list(ol.orthogonality_error(optimizer, reduce=None)) == ["3.weight", "5.weight"]
    assert isinstance(ol.orthogonality_error(optimizer), float)


def test_error_counts_every_kernel():
    weight = torch.stack([torch.eye(3), 2 * torch.eye(3)])[:, None]
    assert ol.orthogonality_error(weight, view="kernel") == pytest.approx(3 * math.sqrt(3))
    mean = ol.orthogonality_error(weight, view="kernel", reduce="mean")
    assert mean == pytest.approx(1.5 * math.sqrt(3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ol.orthogonality_error(nn.Linear(2, 2)), ValueError, "say which parameters"),
        (lambda: ol.orthogonality_error(torch.eye(2), orthogonal="*"), ValueError, "from a model"),
        (lambda: ol.orthogonality_error(torch.eye(2), view="row"), ValueError, "view must be"),
        (lambda: ol.orthogonality_error(torch.eye(2), reduce="sum"), ValueError, "'max', 'mean'"),
        (lambda: ol.orthogonality_error(["weight"]), TypeError, "got str"),
        (
            lambda: ol.orthogonality_error([{"params": torch.eye(2)}], view="matrix"),
            ValueError,
            "Groups state their own view",
        ),
    ],
)
def test_calls_that_make_no_sense(call, error, message):
    with pytest.raises(error, match=message):
        call()


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class TestScales:
    """What is projected and measured is X = weight / scale."""

    def test_tensors(self):
        W = noise(12, 3)
        P = ol.orthogonalize_(W.clone())
        torch.testing.assert_close(ol.orthogonalize_(W.clone(), scale=3.7), 3.7 * P)
        torch.testing.assert_close(ol.orthogonalize_(W.clone(), scale="fan"), 2 * P)
        assert ol.orthogonality_error(3.7 * P, scale=3.7) < 1e-5
        assert ol.orthogonality_error(2 * P, scale="fan", spectral=True) < 1e-5
        assert ol.orthogonality_error(2 * P) > 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
    def test_types(self, dtype):
        W = ol.orthogonalize_(noise(12, 3).to(dtype), scale=0.1)
        assert W.dtype == dtype
        assert ol.orthogonality_error(W, scale=0.1) < 0.02

    def test_models_and_views(self):
        model = nn.Sequential(nn.Conv2d(2, 3, (5, 3)), nn.Linear(4, 16))
        for view, expected in (("matrix", 1.0), ("kernel", (5 / 3) ** 0.5)):
            ol.orthogonalize_(model, orthogonal="0.*", view=view, scale="fan")
            X = model[0].weight.detach() / expected
            assert ol.orthogonality_error(X, view=view) < 1e-5
            options = {"orthogonal": "0.*", "view": view, "scale": "fan"}
            assert ol.orthogonality_error(model, **options) < 1e-5

    def test_groups_and_optimizers_state_their_own(self):
        model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))
        groups = ol.param_groups(model, nn.Linear, scale="fan")
        assert [group.get("scale") for group in groups] == ["fan", None]
        assert all("scale" not in group for group in ol.param_groups(model, nn.Linear))
        ol.orthogonalize_(groups)
        assert ol.orthogonality_error(groups) < 1e-5
        optimizer = ol.LandingAdam(groups)
        assert ol.orthogonality_error(optimizer) < 1e-5
        with torch.no_grad():
            model[0].weight.mul_(1.1)
        assert ol.orthogonality_error(optimizer) > 0.3
        ol.orthogonalize_(optimizer)
        norms = [float(layer.weight.detach().norm()) for layer in model]
        assert norms == pytest.approx([4, 2], rel=1e-5)
        for target in (groups, optimizer):
            with pytest.raises(ValueError, match="Groups state their own scale: leave scale out"):
                ol.orthogonalize_(target, scale=2.0)

    @pytest.mark.parametrize("scale", [0, -1.0, float("nan"), "fun", True, [2.0]])
    def test_bad_scales_change_nothing(self, scale):
        W = noise(4, 4)
        before, model = W.clone(), nn.Linear(4, 4)
        calls = [
            lambda: ol.orthogonalize_(W, scale=scale),
            lambda: ol.orthogonality_error(W, scale=scale),
            lambda: ol.orthogonalize_([{"params": [W], "scale": scale}]),
            lambda: ol.param_groups(model, "weight", scale=scale),
            lambda: ol.random_orthogonal(4, 4, seed=0, scale=scale),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError), match="scale must be a positive"):
                call()
        assert torch.equal(W, before)
