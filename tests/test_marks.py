"""``ol.orthogonal``: marks on weights, who finds them, and what they survive."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.marks import marks_of, unmark


class Net(nn.Module):
    """A model that says itself which of its weights are orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ol.orthogonal(nn.Conv2d(2, 5, 3), view="kernel")
        self.mix = ol.orthogonal(nn.Linear(5, 5), options={"lr": 0.02})
        self.wide = ol.orthogonal(nn.Linear(5, 3), scale="fan")
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(torch.tanh(self.mix(self.stem(x).mean((-2, -1))))))


MARKED = ["stem.weight", "mix.weight", "wide.weight"]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(k: int = 0) -> torch.Tensor:
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(k))


def orthogonal_names(model: nn.Module, *selectors, **options) -> list[str]:
    groups = ol.param_groups(model, *selectors, **options)
    return [name for group in groups if group["orthogonal"] for name, _ in group["params"]]


def train(model: nn.Module, steps: int = 3, first: int = 0) -> torch.optim.Optimizer:
    optimizer = ol.LandingAdam(ol.param_groups(model), lr=0.01)
    for k in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(k)).square().sum().backward()
        optimizer.step()
    return optimizer


def test_a_model_says_itself_which_of_its_weights_are_orthogonal():
    model = net()
    assert ol.orthogonality_error(model) < 1e-5
    groups = ol.param_groups(model, options={"lr": 0.5, "momentum": 0.9}, other_options={"lr": 0.1})
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    common = {"orthogonal": True, "momentum": 0.9}
    assert options == [
        {**common, "view": "kernel", "blocks": None, "scale": 1.0, "lr": 0.5},
        {**common, "view": "matrix", "blocks": None, "scale": 1.0, "lr": 0.02},
        {**common, "view": "matrix", "blocks": None, "scale": "fan", "lr": 0.5},
        {"orthogonal": False, "lr": 0.1},
    ]
    assert orthogonal_names(model) == MARKED
    every = [name for group in groups for name, _ in group["params"]]
    assert sorted(every) == sorted(name for name, _ in model.named_parameters())


def test_weights_that_agree_share_a_group():
    model = nn.Sequential(*[ol.orthogonal(nn.Linear(3, 3)) for _ in range(3)])
    model.append(ol.orthogonal(nn.Linear(3, 3), options={"lr": 0.1}))
    sizes = [len(group["params"]) for group in ol.param_groups(model)]
    assert sizes == [3, 1, 4]
    together = ol.param_groups(model, options={"lr": 0.1})
    assert [len(group["params"]) for group in together] == [4, 4]


def test_training_keeps_marked_weights_on_the_manifold_and_moves_them():
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = train(model)
    assert ol.orthogonality_error(model) < 1e-4
    assert ol.orthogonality_error(model) == ol.orthogonality_error(optimizer)
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_marks_leave_parameters_and_state_dict_as_they_are():
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    weight = plain.weight
    assert ol.orthogonal(plain) is plain
    assert plain.weight is weight
    assert type(plain.weight) is nn.Parameter
    assert type(plain) is nn.Linear
    assert list(plain.state_dict()) == ["weight", "bias"]
    assert not plain._forward_pre_hooks
    assert not plain._state_dict_hooks


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: nn.Module) -> nn.Module:
    memory = io.BytesIO()
    torch.save(model, memory)
    return torch.load(io.BytesIO(memory.getvalue()), weights_only=False)


def loaded(model: nn.Module) -> nn.Module:
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    other = Net()
    other.load_state_dict(torch.load(io.BytesIO(memory.getvalue()), weights_only=True))
    return other


def assigned(model: nn.Module) -> nn.Module:
    other = Net()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def with_new_data(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data = p.data.clone()
    return model


def with_new_parameters(model: nn.Module) -> nn.Module:
    model.mix.weight = nn.Parameter(model.mix.weight.detach().clone())
    return model


CHANGES = [
    copy.deepcopy,
    copy.copy,
    pickled,
    saved_whole,
    loaded,
    assigned,
    with_new_data,
    with_new_parameters,
    lambda model: model.double().float(),
    lambda model: model.to("cpu", memory_format=torch.channels_last),
    lambda model: torch.compile(model, backend="eager"),
    lambda model: nn.Sequential(model),
    lambda model: nn.DataParallel(model),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_marks_survive(change):
    model, original = change(net()), net()
    assert [name.split(".", name.count(".") - 1)[-1] for name in orthogonal_names(model)] == MARKED
    train(original)
    train(model)
    for p, q in zip(original.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    assert ol.orthogonality_error(model) < 1e-4


def test_a_shallow_copy_is_marked_on_its_own():
    layer = nn.Linear(3, 3)
    other = copy.copy(layer)
    ol.orthogonal(other)
    assert marks_of(layer) == {}
    ol.orthogonal(layer, options={"lr": 0.5})
    assert marks_of(other) == {"weight": {"view": "matrix", "blocks": None, "scale": 1.0}}
    unmark(layer)
    assert "weight" in marks_of(other)


def test_torch_compile_makes_one_graph_for_layers_with_and_without_a_mark():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plain, marked = nn.Linear(3, 3), ol.orthogonal(nn.Linear(3, 3))
    for layer in (plain, marked, ol.orthogonal(plain)):
        torch.compile(layer, backend=backend, fullgraph=True)(torch.ones(2, 3))
    assert len(graphs) == 1
    torch.compile(nn.Linear(3, 3, bias=False), backend=backend)(torch.ones(2, 3))
    assert len(graphs) == 2  # it does notice what matters


def test_export_and_functional_calls_do_not_notice():
    model = ol.orthogonal(nn.Linear(3, 3))
    x = torch.ones(2, 3)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))
    parameters = {name: 2 * p for name, p in model.named_parameters()}
    assert torch.allclose(torch.func.functional_call(model, parameters, x), 2 * model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
@pytest.mark.parametrize("init", ["project", "random"])
def test_weights_start_on_the_manifold(dtype, shape, init):
    layer = nn.Linear(*shape, dtype=dtype)
    ol.orthogonal(layer, init=init, seed=3 if init == "random" else None, scale=2.0)
    assert layer.weight.requires_grad
    assert layer.weight.dtype == dtype
    # The Gram matrix has the scale 2 squared.
    assert ol.orthogonality_error(layer.weight, scale=2.0) < (0.05 if dtype.itemsize == 2 else 1e-5)


def test_ways_to_start():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    nearest = ol.orthogonalize_(layer.weight.detach().clone(), view="kernel")
    assert torch.equal(ol.orthogonal(layer, view="kernel").weight, nearest)
    first = ol.orthogonal(layer, init="random", seed=0, view="kernel").weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    ol.orthogonal(layer, init="random", seed=generator, view="kernel")
    assert torch.equal(layer.weight, first)
    assert not torch.equal(layer.weight, nearest)
    values = torch.randn(4, 3, 3, 3)
    layer.weight.data.copy_(values)
    assert torch.equal(ol.orthogonal(layer, init="keep", view="kernel").weight, values)
    with pytest.raises(ValueError, match="must start within"):
        ol.LandingSGD(ol.param_groups(layer), lr=0.1)
    ol.orthogonalize_(layer)
    assert torch.allclose(layer.weight, ol.orthogonalize_(values, view="kernel"))


def test_meta_device_marks_now_and_projects_later():
    with torch.device("meta"):
        model = Net()
    assert orthogonal_names(model) == MARKED
    with pytest.raises(ValueError, match=r"stem.weight is on the meta device.*to_empty"):
        ol.orthogonalize_(model)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for part in model.children():
        part.reset_parameters()
    with pytest.raises(ValueError, match="must start within"):
        ol.LandingSGD(ol.param_groups(model), lr=0.1)
    train(ol.orthogonalize_(model))
    assert ol.orthogonality_error(model) < 1e-4
    with torch.device("meta"):
        layer = ol.orthogonal(nn.Linear(3, 3), init="random", seed=0)
    assert "weight" in marks_of(layer)


def test_a_second_mark_replaces_the_first_and_unmarked_weights_are_free():
    layer = ol.orthogonal(nn.Linear(3, 3), options={"lr": 0.1})
    ol.orthogonal(layer, scale=2.0)
    assert marks_of(layer) == {"weight": {"view": "matrix", "blocks": None, "scale": 2.0}}
    assert ol.orthogonality_error(layer) < 1e-5
    unmark(layer)
    with pytest.raises(ValueError, match="say which parameters are orthogonal"):
        ol.param_groups(layer)
    with pytest.raises(ValueError, match=r"'weight' of this Linear is not. Marked are: none"):
        unmark(layer)


def test_selectors_add_to_marks():
    model = net()
    assert orthogonal_names(model, "head.*") == ["head.weight", *MARKED]
    groups = ol.param_groups(model, "head.*", scale=3.0, options={"lr": 0.7})
    assert [group.get("scale") for group in groups] == [3.0, 1.0, 1.0, "fan", None]
    assert [group.get("lr") for group in groups] == [0.7, 0.7, 0.02, 0.7, None]
    # A mark is kept where a selector takes the weight as well.
    groups = ol.param_groups(model, nn.Linear)
    assert [group.get("scale") for group in groups] == [None, 1.0, 1.0, "fan", None]
    assert orthogonal_names(model, []) == MARKED
    errors = ol.orthogonality_error(model, orthogonal="head", reduce=None)
    assert list(errors) == ["head.weight", *MARKED]


@pytest.mark.parametrize("options", [{"view": "kernel"}, {"scale": 2.0}])
def test_selectors_may_not_contradict_marks(options):
    model = net()
    with pytest.raises(ValueError, match=r"A weight has one .*mix.weight is marked.*mark it again"):
        ol.param_groups(model, "mix", **options)
    for function in (ol.param_groups, ol.orthogonalize_, ol.orthogonality_error):
        with pytest.raises(
            ValueError, match=r"without a selection. Marked weights state their own"
        ):
            function(model, **options)
    assert orthogonal_names(model, "mix", view="matrix", scale=1) == MARKED


def test_tied_weights_are_one():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    ol.orthogonal(model[1])
    assert orthogonal_names(model) == ["0.weight"]
    ol.orthogonal(model[0])
    assert orthogonal_names(model) == ["0.weight"]
    ol.orthogonal(model[0], options={"lr": 0.1})
    with pytest.raises(ValueError, match=r"0.weight and 1.weight are one parameter, marked with"):
        ol.param_groups(model)
    shared = nn.Sequential(layer := ol.orthogonal(nn.Linear(4, 4)), layer)
    assert orthogonal_names(shared) == ["0.weight"]


def test_frozen_weights_are_left_out():
    model = net()
    model.mix.requires_grad_(False)
    assert orthogonal_names(model) == ["stem.weight", "wide.weight"]
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert orthogonal_names(model) == []
    assert ol.orthogonality_error(model) == 0


def test_several_weights_of_a_module():
    rnn = nn.RNN(4, 5, num_layers=2)
    for name in ("weight_hh_l0", "weight_hh_l1"):
        ol.orthogonal(rnn, name)
    assert orthogonal_names(rnn) == ["weight_hh_l0", "weight_hh_l1"]
    attention = ol.orthogonal(nn.MultiheadAttention(4, 2), "in_proj_weight")
    assert orthogonal_names(attention) == ["in_proj_weight"]


def test_marks_and_trivializations():
    model = net()
    ol.trivialize_(model, "mix.weight")
    assert list(dict(model.mix.named_parameters())) == ["bias", "parametrizations.weight.original"]
    assert isinstance(model.wide.weight, nn.Parameter)
    with pytest.raises(ValueError, match=r"'mix.weight' .*parametrization.*untrivialize_"):
        ol.param_groups(model)
    assert orthogonal_names(ol.untrivialize_(model)) == MARKED


def frozen_integers() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    return layer


def with_nan() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data[0, 0] = torch.nan
    return layer


@pytest.mark.parametrize(
    ("module", "arguments", "error", "message"),
    [
        (lambda: nn.Linear(3, 3).weight, {}, TypeError, r"holds the weight, got Parameter.*layer"),
        (
            lambda: nn.Linear(3, 3),
            {"name": "w"},
            ValueError,
            r"'w' is not a parameter of this Linear, which has: weight, bias",
        ),
        (lambda: nn.Linear(3, 3), {"name": "bias"}, ValueError, r"2 dimensions.*'bias' of"),
        (
            lambda: nn.Linear(3, 3, bias=False),
            {"name": "bias"},
            ValueError,
            "'bias' is not a parameter of this Linear, which has: weight",
        ),
        (lambda: nn.ReLU(), {}, ValueError, "which has: none"),
        (net, {"name": "mix.weight"}, ValueError, r"get_submodule\('mix'\), 'weight'"),
        (net, {}, ValueError, r"get_submodule\('stem'\), 'weight'"),
        (lambda: nn.BatchNorm2d(3), {}, ValueError, "at least 2 dimensions"),
        (lambda: nn.LazyLinear(3), {}, ValueError, "no shape yet"),
        (lambda: nn.Conv2d(2, 2, 1), {"view": "kernel"}, ValueError, 'Use view="matrix"'),
        (frozen_integers, {}, TypeError, r"'weight' of this Linear is torch.int8.*Convert it"),
        (with_nan, {}, ValueError, r"'weight' of this Linear has NaN.*Initialise it again"),
        (lambda: nn.Linear(3, 3), {"view": "row"}, ValueError, "view must be one of"),
        (lambda: nn.Linear(3, 9), {"blocks": "qkv"}, ValueError, "'qkv' for 'weight' of a Linear"),
        (lambda: nn.Linear(3, 9), {"blocks": (2, 1)}, ValueError, "9 is not a multiple of 2"),
        (
            lambda: nn.Linear(3, 9),
            {"blocks": (3, 1), "view": "kernel"},
            ValueError,
            "Leave one of them out",
        ),
        (lambda: nn.Linear(3, 9), {"blocks": (9, 3)}, ValueError, "1 x 1 orthogonal matrix"),
        (lambda: nn.Linear(3, 9), {"options": {"blocks": (3, 1)}}, ValueError, "'blocks' is not"),
        (
            lambda: nn.LSTM(3, 4),
            {"name": "bias_hh_l0", "blocks": "gates"},
            ValueError,
            "'gates' for 'bias_hh_l0' of a LSTM",
        ),
        (lambda: nn.Linear(3, 3), {"scale": -1.0}, ValueError, "scale must be a positive"),
        (lambda: nn.Linear(3, 3), {"scale": 1e39}, ValueError, "Use another scale"),
        (lambda: nn.Linear(3, 3), {"init": "zero"}, ValueError, "init must be one of"),
        (lambda: nn.Linear(3, 3), {"init": "random"}, ValueError, "needs a seed"),
        (lambda: nn.Linear(3, 3), {"seed": 1}, ValueError, "init='project' and seed=1"),
        (lambda: nn.Linear(3, 3), {"options": {"params": []}}, ValueError, "'params' is not one"),
        (
            lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
            {},
            ValueError,
            r"parametrization. Remove that first: .*remove_parametrizations",
        ),
    ],
)
def test_what_cannot_be_marked_is_refused_and_left_alone(module, arguments, error, message):
    built = module()
    parts = list(built.modules()) if isinstance(built, nn.Module) else []
    before = [marks_of(part) for part in parts]
    values = [copy.deepcopy(part._parameters) for part in parts]
    with pytest.raises(error, match=message):
        ol.orthogonal(built, **arguments)
    assert [marks_of(part) for part in parts] == before
    for part, kept in zip(parts, values, strict=True):
        for name, p in kept.items():
            if p is not None and not isinstance(p, nn.UninitializedParameter):
                assert torch.equal(part._parameters[name].nan_to_num(), p.nan_to_num())


def test_a_mark_whose_weight_is_gone_or_unfit_is_named():
    model = nn.Sequential(ol.orthogonal(nn.Linear(3, 3)))
    model[0].weight = None
    with pytest.raises(
        ValueError, match=r"'0.weight' is not a parameter of this Linear.*unmark\(module"
    ):
        ol.param_groups(model)
    model[0].weight = nn.Parameter(torch.ones(9))
    with pytest.raises(ValueError, match=r"at least 2 dimensions, but 0.weight has shape \(9,\)"):
        ol.param_groups(model)


# Optimizers that are given parameters only.


def train_bare(model: nn.Module, params, steps: int = 3, **options) -> torch.optim.Optimizer:
    optimizer = ol.LandingAdam(params, lr=0.01, **options)
    for k in range(steps):
        optimizer.zero_grad()
        model(batch(k)).square().sum().backward()
        optimizer.step()
    return optimizer


def emptied(model: nn.Module) -> nn.Module:
    with torch.device("meta"):
        other = Net()
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("change", [*CHANGES, emptied])
@pytest.mark.parametrize("way", ["parameters", "named_parameters", "groups"])
def test_marks_travel_with_plain_parameters(change, way):
    """The result is bit for bit that of :func:`ortholand.param_groups`."""
    models = change(net()), change(net())
    train(models[0])
    params = getattr(models[1], "parameters" if way == "groups" else way)()
    if way == "groups":  # as trainers make them
        every = list(params)
        params = [{"params": [p for p in every if p.ndim > 1]}]
        params += [{"params": (p for p in every if p.ndim == 1), "weight_decay": 0.0}]
    optimizer = train_bare(models[1], params)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    sizes = {tuple(p.shape) for g in optimizer.param_groups if g["orthogonal"] for p in g["params"]}
    assert sizes == {(5, 2, 3, 3), (5, 5), (3, 5)}


def test_the_groups_are_those_of_param_groups_and_states_are_exchanged():
    model, other = net(), net()
    bare = train_bare(model, model.named_parameters())
    grouped = ol.LandingAdam(ol.param_groups(other), lr=0.01)
    other.load_state_dict(model.state_dict())
    grouped.load_state_dict(copy.deepcopy(bare.state_dict()))
    for mine, own in zip(bare.param_groups, grouped.param_groups, strict=True):
        for key in mine.keys() - {"params"}:
            assert mine[key] == own[key]
    resumed = ol.LandingAdam(other.named_parameters(), lr=0.01)
    resumed.load_state_dict(bare.state_dict())
    assert ol.orthogonality_error(resumed) == ol.orthogonality_error(bare) < 1e-4
    scheduler = torch.optim.lr_scheduler.StepLR(bare, 1)
    assert len(scheduler.get_last_lr()) == 4  # a group for each set of options


def test_a_group_of_marked_and_free_weights_is_split_with_its_options():
    model = net()
    rest = [p for name, p in model.named_parameters() if name not in MARKED]
    groups = [{"params": [model.mix.weight, *rest], "lr": 0.5}, {"params": [model.stem.weight]}]
    optimizer = ol.LandingSGD(groups, lr=0.1, momentum=0.9)
    seen = [(g["orthogonal"], g["view"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    assert seen == [
        (True, "matrix", 0.02, 1),  # the mark's own lr
        (False, "matrix", 0.5, len(rest)),
        (True, "kernel", 0.1, 1),
    ]
    optimizer.add_param_group({"params": model.wide.weight, "lr": 0.3})
    assert optimizer.param_groups[-1]["scale"] == "fan"
    free = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [free]})
    assert not optimizer.param_groups[-1]["orthogonal"]
    before = len(optimizer.param_groups)
    other = ol.orthogonal(nn.Linear(3, 3))
    other.weight.data.mul_(7)
    with pytest.raises(ValueError, match="must start within"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == before


@pytest.mark.parametrize("with_names", ["pairs", "beside"])
def test_names_of_a_group_go_where_their_parameters_go(with_names):
    model = net()
    names, parameters = zip(*model.named_parameters(), strict=True)
    group = {"params": list(model.named_parameters())}
    if with_names == "beside":  # as torchtitan writes it
        group = {"params": list(parameters), "param_names": list(names)}
    optimizer = ol.LandingSGD([group], lr=0.1)
    seen = [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["param_names"], group["params"], strict=True)
    ]
    assert len(optimizer.param_groups) == 4
    assert sorted(name for name, _ in seen) == sorted(names)
    assert all(p is model.get_parameter(name) for name, p in seen)


class Adapter(nn.Module):
    """A layer and a low-rank correction of it, as LoRA adds."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_wrapped_layers_keep_their_marks_and_what_is_added_is_free():
    models = net(), net()
    for model in models:
        model.mix = Adapter(model.mix)
    train(models[0])
    optimizer = train_bare(models[1], models[1].parameters())
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    free = {p for g in optimizer.param_groups if not g["orthogonal"] for p in g["params"]}
    assert {models[1].mix.up, models[1].mix.down} <= free
    assert models[1].mix.up.abs().max() > 0
    assert ol.orthogonality_error(models[1]) < 1e-4


def test_weight_decay_of_marked_weights_is_ignored_with_one_warning():
    models = net(), net()
    with pytest.warns(UserWarning, match=r"weight_decay=0.3 is ignored for 3 marked") as caught:
        optimizer = train_bare(models[1], models[1].parameters(), weight_decay=0.3)
    assert [str(each.filename) for each in caught] == [__file__]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.0, 0.0, 0.3]
    train_bare(models[0], ol.param_groups(models[0], other_options={"weight_decay": 0.3}))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_without_a_mark_nothing_changes():
    layer = ol.orthogonal(nn.Linear(3, 3))
    unmark(layer)
    with pytest.raises(ValueError, match="at least 2 dimensions, but parameter 1"):
        ol.LandingSGD(layer.parameters(), lr=0.1)
    ol.orthogonal(layer)
    groups = [{"params": [layer.weight], "orthogonal": False, "weight_decay": 0.1}]
    assert not ol.LandingSGD(groups, lr=0.1).param_groups[0]["orthogonal"]
    free = ol.LandingSGD(layer.parameters(), lr=0.1, orthogonal=False)
    assert len(free.param_groups) == 1
    unmark(layer)
    assert ol.LandingSGD([layer.weight], lr=0.1).param_groups[0]["orthogonal"]
    for params, error in (([], ValueError), (layer.weight, TypeError), ([3], TypeError)):
        with pytest.raises(error):
            ol.LandingSGD(params, lr=0.1)


def test_marks_that_an_optimizer_cannot_keep_are_refused():
    first, second = ol.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4)
    second.weight = first.weight
    ol.orthogonal(second, scale=2.0)
    with pytest.raises(ValueError, match=r"one mark, but 'weight' of shape \(4, 4\) is shared"):
        ol.LandingSGD(first.parameters(), lr=0.1)
    layers = [ol.orthogonal(nn.Linear(4, 4)) for _ in range(2)]
    nn.utils.parametrizations.weight_norm(layers[0])
    with pytest.raises(ValueError, match=r"'weight', which is marked, is computed.*unmark"):
        ol.LandingSGD([p for layer in layers for p in layer.parameters()], lr=0.1)


def test_a_mark_keeps_no_module_alive():
    layer = ol.orthogonal(nn.Linear(4, 4))
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("module", "name", "blocks", "grid"),
    [
        (lambda: nn.LSTM(5, 6), "weight_hh_l0", "gates", (4, 1)),
        (lambda: nn.LSTM(5, 6, proj_size=3), "weight_hh_l0", "gates", (4, 1)),
        (lambda: nn.LSTMCell(5, 6), "weight_ih", "gates", (4, 1)),
        (lambda: nn.GRU(5, 6, bidirectional=True), "weight_ih_l0_reverse", "gates", (3, 1)),
        (lambda: nn.GRUCell(5, 6), "weight_hh", "gates", (3, 1)),
        (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", "qkv", (3, 1)),
        (lambda: nn.MultiheadAttention(8, 2).out_proj, "weight", (1, 2), (1, 2)),
        (lambda: nn.Linear(6, 8), "weight", [2, 1], (2, 1)),
    ],
)
@pytest.mark.parametrize("init", ["project", "random"])
def test_blocks_of_a_module_are_marked_in_one_call(module, name, blocks, grid, init):
    built = module()
    seed = {"seed": 0} if init == "random" else {}
    assert ol.orthogonal(built, name, blocks=blocks, init=init, **seed) is built
    assert marks_of(built)[name]["blocks"] == grid
    W = getattr(built, name)
    for rows in W.detach().chunk(grid[0]):
        for block in rows.chunk(grid[1], dim=1):
            assert ol.orthogonality_error(block) < 1e-5
    assert ol.orthogonality_error(built) < 1e-5
    copied = pickle.loads(pickle.dumps(built))
    optimizer = ol.LandingAdam(copied.parameters(), lr=0.01)
    twin = ol.LandingAdam(ol.param_groups(built), lr=0.01)
    (group,) = [g for g in optimizer.param_groups if g["orthogonal"]]
    assert group["blocks"] == twin.param_groups[0]["blocks"] == grid
    for model, own in ((copied, optimizer), (built, twin)):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        own.step()
    assert all(map(torch.equal, copied.parameters(), built.parameters()))
    assert ol.orthogonality_error(copied) < 1e-5


def test_shared_weights_have_one_grid():
    one, other = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
    other.weight = one.weight
    ol.orthogonal(one, blocks=(2, 1))
    ol.orthogonal(other, blocks=(4, 1))
    before = one.weight.detach().clone()
    for use in (ol.param_groups, ol.orthogonalize_, lambda m: ol.LandingSGD(m.parameters(), lr=1)):
        with pytest.raises(ValueError, match=r"one mark, but .*\(2, 1\).*\(4, 1\)"):
            use(nn.Sequential(one, other))
    assert torch.equal(one.weight, before)
    ol.orthogonal(other, blocks=(2, 1))
    assert ol.param_groups(nn.Sequential(one, other))[0]["blocks"] == (2, 1)


def test_grids_that_contradict_a_mark_or_do_not_fit_are_refused():
    model = nn.Sequential(ol.orthogonal(nn.Linear(6, 8), blocks=(2, 1)), nn.Linear(8, 5))
    with pytest.raises(ValueError, match=r"one blocks, but .* is marked with blocks=.2, 1. and"):
        ol.param_groups(model, nn.Linear, blocks=(1, 1))
    with pytest.raises(ValueError, match=r"'1.weight' of shape .5, 8. has 5 rows"):
        ol.param_groups(model, "1.weight", blocks=(2, 1))
    with pytest.raises(ValueError, match=r"blocks belongs to weights that orthogonal=... selects"):
        ol.orthogonalize_(model, blocks=(2, 1))
    groups = ol.param_groups(model, "1.weight", blocks=(1, 2))
    assert [group["blocks"] for group in groups[:2]] == [(1, 2), (2, 1)]


def test_quantised_weights_have_no_blocks():
    built = nn.LSTM(4, 4)
    built.weight_hh_l0 = nn.Parameter(torch.zeros(16, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"'weight_hh_l0' of this LSTM is torch.int8.*Convert it"):
        ol.orthogonal(built, "weight_hh_l0", blocks="gates")
    nn.utils.parametrizations.weight_norm(parametrized := nn.LSTM(4, 4), "weight_hh_l0")
    with pytest.raises(ValueError, match="must be a parameter of its module"):
        ol.orthogonal(parametrized, "weight_hh_l0", blocks="gates")
