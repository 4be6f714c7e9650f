import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal as torch_orthogonal

import ortholand as ol
from ortholand.trivializations import rebase_, trivialize_, untrivialize_

MAPS = ["exp", "cayley"]
SHAPES = [(5, 5), (7, 5), (5, 7), (9, 3), (3, 9)]  # square, n x n and thin forms, tall and wide
TYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


def linear(n: int, p: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Linear:
    module = nn.Linear(p, n, bias=False, dtype=dtype)
    module.weight.data = ol.random_orthogonal(n, p, seed=seed, dtype=dtype)
    return module


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 6))
    return ol.orthogonalize_(model, orthogonal="*")


def coordinates(module: nn.Module) -> nn.Parameter:
    return module.parametrizations.weight.original


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Reach a target for the weight of a single layer, or of the output of a network."""
    generator = torch.Generator().manual_seed(1)

    def closure():
        optimizer.zero_grad()
        out = model.weight if hasattr(model, "weight") else model(torch.ones(1, 2, 4, 4))
        generator.manual_seed(1)
        target = torch.randn(out.shape, dtype=out.dtype, generator=generator)
        loss = (out - target).abs().square().sum()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)]


@pytest.mark.parametrize("dtype", [*TYPES, torch.bfloat16])
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_weights_are_kept_to_the_last_bit(shape, map, dtype):
    module = linear(*shape, dtype=dtype)
    weight, parameter, state = module.weight.detach().clone(), module.weight, torch.get_rng_state()
    parameter.grad = torch.ones_like(parameter)
    assert trivialize_(module, "weight", map=map) is module
    assert torch.equal(module.weight, weight)
    assert module.weight.is_contiguous()
    assert coordinates(module) is parameter
    assert parameter.grad is None  # it was the weight's
    assert torch.equal(torch.get_rng_state(), state)
    assert untrivialize_(module) is module
    assert torch.equal(module.weight, weight)


def against_torch(ours: nn.Module, make_optimizer, view: str, map: str) -> None:
    theirs = copy.deepcopy(ours)
    trivialize_(ours, "weight", view=view, map=map)
    torch_orthogonal(theirs, orthogonal_map={"exp": "matrix_exp", "cayley": "cayley"}[map])
    start = ours.weight.detach()
    for module in (ours, theirs):
        train(module, make_optimizer(module.parameters()), steps=10)
    assert torch.dist(ours.weight, start) > 0.5
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sgd_goes_where_it_goes_with_torchs_parametrization(shape, map, dtype):
    against_torch(linear(*shape, dtype=dtype), OPTIMIZERS["momentum"], "matrix", map)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("kind", ["linear", "kernel"])
def test_square_matrices_have_torchs_own_coordinates(kind, map):
    module = linear(5, 5)
    if kind == "kernel":
        module = nn.Conv2d(2, 4, 3, bias=False, dtype=torch.float64)
        module.weight.data = ol.random_orthogonal(4, 2, 3, 3, seed=0, dtype=torch.float64)
    against_torch(module, OPTIMIZERS["adam"], "kernel", map)


def test_a_convolution_is_one_matrix_by_default():
    convolution, flat = nn.Conv2d(2, 4, 3, bias=False, dtype=torch.float64), linear(4, 18)
    convolution.weight.data = flat.weight.detach().reshape(4, 2, 3, 3).clone()
    trivialize_(flat, "weight")
    trivialize_(convolution, nn.Conv2d)
    G = torch.randn(4, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for module in (flat, convolution):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        (module.weight.flatten(1) * G).sum().backward()
        optimizer.step()
    torch.testing.assert_close(convolution.weight.flatten(1), flat.weight)


@pytest.mark.parametrize("view", ["matrix", "kernel"])
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_stay_orthogonal_with_any_optimizer(name, map, view):
    model = ol.orthogonalize_(network(), orthogonal="*", view=view)
    trivialize_(model, "*", map=map, view=view)
    losses = train(model, OPTIMIZERS[name](model.parameters()), steps=50)
    assert losses[-1] < 0.1 * losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert ol.orthogonality_error(untrivialize_(model), orthogonal="*", view=view) < 5e-6


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_stay_orthogonal_far_from_the_base(shape, map):
    module = trivialize_(linear(*shape), "weight", map=map)
    with torch.no_grad():
        coordinates(module).normal_(generator=torch.Generator().manual_seed(0)).mul_(10)
    assert ol.distance(module.weight) < 1e-12


@pytest.mark.parametrize("map", MAPS)
def test_half_precision_and_autocast(map):
    half = trivialize_(linear(32, 8, dtype=torch.bfloat16), "weight", map=map)
    train(half, OPTIMIZERS["adam"](half.parameters()), steps=20)
    assert half.weight.dtype == torch.bfloat16
    assert ol.distance(half.weight) < 0.02  # 2^-9 sqrt(p), twice over
    single = trivialize_(linear(32, 8, dtype=torch.float32), "weight", map=map)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(single, OPTIMIZERS["adam"](single.parameters()), steps=20)
        weights = [single.weight, rebase_(single).weight]
    assert max(ol.distance(weight) for weight in weights) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_rebasing_keeps_weights_and_parameters(shape):
    module = trivialize_(linear(*shape), "weight")
    A = coordinates(module)
    optimizer = OPTIMIZERS["momentum"]([A])
    train(module, optimizer, steps=5)
    weight = module.weight.detach()
    assert A.abs().max() > 0.01
    assert rebase_(module) is module
    assert coordinates(module) is A
    assert not A.any()
    assert A.grad is None
    torch.testing.assert_close(module.weight, weight, rtol=0, atol=1e-13)
    before, *_, after = train(module, optimizer, steps=20)
    assert after < before


def test_rebasing_removes_rounding_errors():
    module = linear(20, 20)
    with torch.no_grad():
        module.weight *= 1 + 4e-15
    trivialize_(module, "weight")
    assert ol.distance(module.weight) > 3e-14
    assert ol.distance(rebase_(module).weight) < 1e-14


def test_rebasing_refuses_what_is_not_finite():
    model = trivialize_(nn.Sequential(linear(3, 3), linear(3, 3)), nn.Linear)
    with torch.no_grad():
        coordinates(model[0]).fill_(0.1)
        coordinates(model[1]).fill_(torch.nan)
    with pytest.raises(ValueError, match="Only finite weights"):
        rebase_(model)
    assert coordinates(model[0]).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_rebased_at_every_step_sgd_is_riemannian(shape):
    """``A = L - L^H`` moves by twice ``psi = Skew(G X^H)``: half the step size."""
    ours, reference = trivialize_(linear(*shape), "weight"), linear(*shape)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    riemannian = ol.RiemannianSGD(reference.parameters(), lr=0.1, retraction="exponential")
    for _ in range(10):
        train(ours, optimizer, steps=1)
        rebase_(ours)
        train(reference, riemannian, steps=1)
    torch.testing.assert_close(ours.weight, reference.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("dtype", TYPES)
def test_base_identity_is_the_papers_form(dtype, map):
    module = nn.Conv2d(2, 3, 4, bias=False, dtype=dtype)
    module.weight.data = ol.random_orthogonal(3, 2, 4, 4, seed=0, special=True, dtype=dtype)
    weight = module.weight.detach().clone()
    trivialize_(module, "weight", view="kernel", map=map, base="identity")
    torch.testing.assert_close(module.weight, weight, rtol=0, atol=2000 * torch.finfo(dtype).eps)
    A = coordinates(module).detach().tril()
    A = A - A.mH
    image = torch.linalg.matrix_exp(A)
    if map == "cayley":
        identity = torch.eye(4, dtype=dtype)
        image = torch.linalg.solve(identity - A / 2, identity + A / 2)
    torch.testing.assert_close(module.weight, image)
    train(module, OPTIMIZERS["adam"](module.parameters()), steps=5)
    moved = module.weight.detach()
    torch.testing.assert_close(rebase_(module).weight, moved)


def test_back_to_the_plain_model():
    model = network()
    model[0].weight.requires_grad_(False)  # frozen weights are left out
    plain = copy.deepcopy(model)
    trivialize_(trivialize_(model, model[2]), "3.*", map="cayley")  # one after the other
    train(model, OPTIMIZERS["adam"](model.parameters()), steps=2)
    trained = [model[i].weight.detach() for i in (0, 2, 3)]
    untrivialize_(model)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert all(torch.equal(model[i].weight, w) for i, w in zip((0, 2, 3), trained, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    assert [type(module) for module in model] == [type(module) for module in plain]
    assert model[2].weight.grad is None
    landing = ol.LandingSGD(ol.param_groups(model, orthogonal=nn.Linear), lr=0.01)
    before, *_, after = train(model, landing, steps=5)
    assert after < before


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM])
def test_recurrent_modules(make):
    module = ol.orthogonalize_(make(3, 4, 2), orthogonal=make)
    x, names = torch.randn(5, 1, 3), list(module.state_dict())
    before = module(x)[0]
    trivialize_(module, "weight_hh*")
    after = module(x)[0]
    torch.testing.assert_close(after, before)
    after.sum().backward()
    assert module.parametrizations.weight_hh_l1.original.grad.any()
    assert list(untrivialize_(module).state_dict()) == names
    torch.testing.assert_close(module(x)[0], before)


def test_other_parametrizations_stay():
    model = nn.ModuleList([nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), linear(3, 3)])
    untrivialize_(trivialize_(model, "1.weight"))
    assert parametrize.is_parametrized(model[0], "weight")
    assert not parametrize.is_parametrized(model[1])


def test_a_resumed_run_continues_bit_for_bit():
    model = trivialize_(network(), "*")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(rebase_(model), optimizer, steps=3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, steps=3)

    resumed = trivialize_(network(seed=1), "*")
    resumed_optimizer = OPTIMIZERS["adam"](resumed.parameters())
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(state)
    train(resumed, resumed_optimizer, steps=3)
    for i in (0, 2, 3):
        assert torch.equal(resumed[i].weight, model[i].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"map": "cayley"}, "cayley_base"), ({"view": "kernel"}, "size mismatch")],
)
def test_checkpoints_of_another_map_or_view_are_refused(options, message):
    convolution, other = nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 3)
    for module, chosen in ((convolution, {}), (other, options)):
        ol.orthogonalize_(module, orthogonal="weight", view=chosen.get("view"))
        trivialize_(module, "weight", **chosen)
    with pytest.raises(RuntimeError, match=message):
        convolution.load_state_dict(other.state_dict())


def test_copies_are_independent_and_pickle_says_why_not():
    model = trivialize_(network(), "*")
    twin = copy.deepcopy(model)
    weight = model[2].weight.detach()
    train(twin, OPTIMIZERS["adam"](twin.parameters()), steps=2)
    rebase_(twin)
    assert torch.equal(model[2].weight, weight)
    assert torch.dist(twin[2].weight, weight) > 0.01
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(model)  # torch's rule for every parametrized module
    pickle.dumps(untrivialize_(twin))


def test_assigning_a_weight_moves_the_base():
    module = trivialize_(linear(5, 3), "weight")
    W = ol.random_orthogonal(5, 3, seed=7, dtype=torch.float64)
    module.weight = W
    assert torch.equal(module.weight, W)
    with pytest.raises(ValueError, match="orthogonalize_"):
        module.weight = 2 * W
    assert torch.equal(module.weight, W)


def test_a_module_used_twice_is_fine_but_a_shared_parameter_is_not():
    layer = linear(4, 4)
    assert trivialize_(nn.Sequential(layer, layer), nn.Linear)[1].weight is not None
    model = nn.Sequential(linear(4, 4), linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight is shared by 2"):
        trivialize_(model, nn.Linear)


@pytest.mark.parametrize(
    ("selector", "options", "message"),
    [
        ("*", {"map": "polar"}, "map must be one of"),
        ("*", {"base": "zero"}, "base must be one of"),
        ("*", {"view": "row"}, "view must be one of"),
        ("nothing", {}, "selects no trainable parameter"),
        ([], {}, "names no parameter"),
        ("2.*", {"base": "identity"}, "needs square matrices, but 2.weight"),
        (["2.*", "3.*"], {}, r"3\.weight has 5\.\de\+00.*orthogonalize_"),
        ("4.*", {}, r"4\.weight has nan"),
        ("5.*", {"base": "identity"}, r"5\.weight has 1 others of 1.*base='weight'"),
    ],
)
def test_error_inputs_change_nothing(selector, options, message):
    model = network().append(linear(2, 2, dtype=torch.float32)).append(linear(2, 2))
    model[3].weight.data.mul_(1.75)
    model[4].weight.data.fill_(torch.nan)
    model[5].weight.data = torch.diag(torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match=message):
        trivialize_(model, selector, **options)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


@pytest.mark.parametrize("selector", ["weight", nn.Linear, "*", "parametrizations.*"])
def test_trivializing_twice_is_refused(selector):
    module = trivialize_(linear(4, 4), "weight")
    weight = module.weight.detach()
    with pytest.raises(ValueError, match="untrivialize_"):
        trivialize_(module, selector)
    assert torch.equal(module.weight, weight)


@pytest.mark.parametrize("function", [untrivialize_, rebase_])
def test_a_plain_model_is_refused(function):
    with pytest.raises(ValueError, match="trivialized weights, but this Linear has none"):
        function(linear(3, 3))
