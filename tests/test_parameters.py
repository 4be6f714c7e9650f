import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

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


class Tied(nn.Module):
    """A weight with two names, and a module with two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.second = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("embed.weight", "embed.weight"),
        ("head.weight", "embed.weight"),
        ("head", "embed.weight"),
        ("he*", "embed.weight"),
        (nn.Embedding, "embed.weight"),
        (lambda name, p: name.startswith("head"), "embed.weight"),
        ("first.weight", "first.weight"),
        ("second.*", "first.weight"),
        (lambda name, p: name == "second.weight", "first.weight"),
    ],
)
def test_a_tied_weight_is_found_by_each_of_its_names(selector, expected):
    model = Tied()
    groups = ol.param_groups(model, orthogonal=selector)
    assert names(groups)[True] == [expected]
    every = [id(p) for group in groups for _, p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())
    ol.orthogonalize_(model, orthogonal=selector)
    assert ol.orthogonality_error(model.get_parameter(expected)) < 1e-5
    assert list(ol.orthogonality_error(model, orthogonal=selector, reduce=None)) == [expected]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return 2 * X

    def right_inverse(self, X: torch.Tensor) -> torch.Tensor:
        return X / 2


def old(norm):
    """One of torch's older functions, without the warning that it is old."""

    def apply(layer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return norm(layer)

    return apply


COMPUTED = {
    "weight_norm": (parametrizations.weight_norm, "remove_parametrizations"),
    "spectral_norm": (parametrizations.spectral_norm, "remove_parametrizations"),
    "orthogonal": (parametrizations.orthogonal, "remove_parametrizations"),
    "custom": (
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        "remove_parametrizations",
    ),
    "trivialization": (
        lambda layer: ol.trivialize_(ol.orthogonalize_(layer, orthogonal="weight"), "weight"),
        "untrivialize_",
    ),
    "old weight_norm": (old(nn.utils.weight_norm), "remove_weight_norm"),
    "old spectral_norm": (old(nn.utils.spectral_norm), "remove_spectral_norm"),
    "pruning": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), r"prune\.remove"),
}
each_computed = pytest.mark.parametrize("way", COMPUTED)


def with_computed_weight(way) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    norm, advice = COMPUTED[way]
    norm(model[0])
    return model, advice


def ingredients(layer) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name != "bias"]


SELECTORS = {
    "glob": lambda model: "0.*",
    "everything": lambda model: "*",
    "weights": lambda model: "*.weight",
    "module's name": lambda model: "0",
    "weight's name": lambda model: "0.weight",
    "its own names": lambda model: [
        name for name, p in model.named_parameters() if any(p is q for q in ingredients(model[0]))
    ],
    "module": lambda model: model[0],
    "model": lambda model: model,
    "type": lambda model: nn.Linear,
    "every type": lambda model: nn.Module,
    "predicate on shapes": lambda model: lambda name, p: p.ndim > 1,
    "predicate on names": lambda model: lambda name, p: name == "0.weight",
    "predicate on objects": lambda model: lambda name, p: p is ingredients(model[0])[-1],
    "several": lambda model: ["1.weight", model[0]],
}


@each_computed
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("function", [ol.param_groups, ol.orthogonalize_, ol.orthogonality_error])
def test_a_weight_that_is_computed_cannot_be_selected(way, selector, function):
    """Its ingredients may well be orthogonal while it is not."""
    model, advice = with_computed_weight(way)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"'0\.weight' of .* is computed.*{advice}.*'0'"):
        function(model, orthogonal=SELECTORS[selector](model))
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)


@each_computed
@pytest.mark.parametrize("selector", ["1.weight", "1", lambda name, p: name == "1.weight"])
def test_weights_beside_a_computed_one_can_be_selected(way, selector):
    model, _ = with_computed_weight(way)
    assert names(ol.param_groups(model, orthogonal=selector))[True] == ["1.weight"]
    assert names(ol.param_groups(model, orthogonal=model[1]))[True] == ["1.weight"]


@each_computed
def test_neither_a_computed_weight_nor_its_ingredients_can_be_marked(way):
    model, advice = with_computed_weight(way)
    with pytest.raises(ValueError, match=f"'weight' of .* is computed.*{advice}"):
        ol.orthogonal(model[0])
    for module in model[0].modules():
        for name, p in module.named_parameters(recurse=False):
            if any(p is q for q in ingredients(model[0])):
                with pytest.raises(ValueError, match=f"{name!r} .*comput"):
                    ol.orthogonal(module, name, init="keep")


@each_computed
def test_a_marked_weight_that_is_computed_later_is_named(way):
    model = nn.Sequential(ol.orthogonal(nn.Linear(4, 4)))
    norm, advice = COMPUTED[way]
    norm(model[0])
    with pytest.raises(ValueError, match=rf"'0\.weight' of .* is computed.*{advice}"):
        ol.param_groups(model)


def test_the_weight_that_is_left_when_a_norm_is_removed_can_be_selected():
    for way, remove in (
        ("weight_norm", lambda m: parametrize.remove_parametrizations(m, "weight")),
        ("old weight_norm", nn.utils.remove_weight_norm),
        ("old spectral_norm", nn.utils.remove_spectral_norm),
        ("pruning", lambda m: prune.remove(m, "weight")),
        ("trivialization", ol.untrivialize_),
    ):
        model, _ = with_computed_weight(way)
        remove(model[0])
        assert names(ol.param_groups(model, orthogonal="0"))[True] == ["0.weight"]


def test_names_that_only_look_computed_can_be_selected():
    layer = nn.Module()
    layer.weight_v, layer.weight_g = (nn.Parameter(torch.eye(3)) for _ in range(2))
    assert names(ol.param_groups(layer, orthogonal="weight*"))[True] == ["weight_v", "weight_g"]
    layer.weight_orig = copy.deepcopy(layer.weight_v)
    layer.register_buffer("weight", torch.eye(3))
    assert names(ol.param_groups(layer, orthogonal="weight_orig"))[True] == ["weight_orig"]


def test_a_parametrization_s_own_parameters_can_be_selected():
    """They are parameters like others: the factors of a low-rank update may be orthogonal."""
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    parametrize.register_parametrization(layer, "weight", nn.Linear(4, 4, bias=False))
    groups = ol.param_groups(layer, orthogonal="parametrizations.weight.0.weight")
    assert names(groups)[True] == ["parametrizations.weight.0.weight"]


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
