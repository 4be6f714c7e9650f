"""What every optimizer must do, whatever its algorithm."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import ortholand as ol
from tests.optim.cases import CASES, Case, each_case

SHAPES = {
    "square": (4, 4),
    "tall": (7, 3),
    "wide": (3, 7),
    "conv": (6, 2, 3, 3),
    "stack": (5, 3, 3),
}
VIEWS = {
    "square": "matrix",
    "tall": "matrix",
    "wide": "matrix",
    "conv": "kernel",
    "stack": "kernel",
}


# A seed that no weight starts from. The gradient of a weight's own seed is in its span, and their
# relative gradient of rank 2: a polar factor (LandingMuon) would show its rounding, enlarged.
UNRELATED = 100


def weights(dtype=torch.float32, names=tuple(SHAPES)) -> list[dict]:
    """Groups with one orthogonal weight of each shape, on the manifold."""
    groups = []
    for i, name in enumerate(names):
        shape = SHAPES[name]
        start = ol.random_orthogonal(*shape, seed=i, dtype=dtype)
        groups.append({"params": [nn.Parameter(start)], "view": VIEWS[name]})
    return groups


def mixed(dtype=torch.float32) -> list[dict]:
    generator = torch.Generator().manual_seed(9)
    vector = nn.Parameter(torch.randn(4, generator=generator).to(dtype))
    plain = {"params": [vector], "orthogonal": False, "weight_decay": 0.1}
    return [*weights(dtype), plain]


def parameters(optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(params, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        kind = torch.complex64 if p.is_complex() else torch.float32
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=kind).to(p.dtype)


def run(optimizer, steps: int, first_seed: int = 0) -> None:
    for k in range(steps):
        set_gradients(parameters(optimizer), first_seed + k)
        optimizer.step()


def snapshot(optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters(optimizer)]


def assert_same(first, second) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@each_case
def test_construction_moves_nothing_and_a_step_stays_near_the_manifold(case: Case):
    groups = mixed()
    before = [group["params"][0].detach().clone() for group in groups]
    optimizer = case(groups)
    assert_same(snapshot(optimizer), before)
    run(optimizer, 5)
    for now, start in zip(snapshot(optimizer), before, strict=True):
        assert not torch.equal(now, start)
    assert ol.orthogonality_error(optimizer, spectral=True) <= case.radius


@each_case
def test_state_dict_round_trip_is_bit_for_bit(case: Case):
    first, second = case(mixed()), case(mixed())
    run(first, 3)
    saved = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "weights": snapshot(first)}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    for p, value in zip(parameters(second), loaded["weights"], strict=True):
        p.data.copy_(value)
    second.load_state_dict(loaded["optimizer"])
    run(first, 3, first_seed=100)
    run(second, 3, first_seed=100)
    assert_same(snapshot(first), snapshot(second))
    assert_same_state(first, second)


def assert_same_state(first, second) -> None:
    left, right = first.state_dict()["state"], second.state_dict()["state"]
    assert left.keys() == right.keys()
    for i in left:
        assert left[i].keys() == right[i].keys()
        for name in left[i]:
            assert left[i][name].dtype == right[i][name].dtype
            assert torch.equal(left[i][name], right[i][name])


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_state_survives_the_round_trip(case: Case, dtype):
    first, second = case(mixed(dtype)), case(mixed(dtype))
    run(first, 3)
    second.load_state_dict(first.state_dict())
    assert_same_state(first, second)


@each_case
def test_a_loaded_state_shares_no_memory_with_its_source(case: Case):
    first, second = case(mixed()), case(mixed())
    run(first, 2)
    second.load_state_dict(first.state_dict())
    before = copy.deepcopy(first.state_dict()["state"])
    run(second, 2)
    after = first.state_dict()["state"]
    for i in before:
        assert all(torch.equal(before[i][name], after[i][name]) for name in before[i])


@each_case
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_pickle_and_deepcopy_continue_alike(case: Case, duplicate):
    first = case(mixed())
    run(first, 2)
    second = duplicate(first)
    run(first, 3, first_seed=50)
    run(second, 3, first_seed=50)
    assert_same(snapshot(first), snapshot(second))


@each_case
def test_closure_is_called_once_under_grad_and_its_value_returned(case: Case):
    X = nn.Parameter(ol.random_orthogonal(4, 4, seed=0))
    optimizer = case([X])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = X.square()[0].sum() + X[0, 1]
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == pytest.approx(1 + ol.random_orthogonal(4, 4, seed=0)[0, 1].item())
    assert not torch.equal(X, ol.random_orthogonal(4, 4, seed=0))


@each_case
def test_lr_zero_is_a_no_op_on_the_weights(case: Case):
    for groups in (mixed(), mixed(torch.bfloat16), mixed(torch.complex64)):
        optimizer = case(groups, lr=0.0)
        before = snapshot(optimizer)
        run(optimizer, 3)
        assert_same(snapshot(optimizer), before)


@each_case
def test_gradients_are_never_modified(case: Case):
    for maximize in (False, True):
        optimizer = case(mixed(), maximize=maximize)
        set_gradients(parameters(optimizer), 0)
        before = [p.grad.clone() for p in parameters(optimizer)]
        objects = [p.grad for p in parameters(optimizer)]
        optimizer.step()
        assert_same([p.grad for p in parameters(optimizer)], before)
        assert all(p.grad is g for p, g in zip(parameters(optimizer), objects, strict=True))


@each_case
def test_maximize_is_descent_on_the_negative(case: Case):
    up, down = case(mixed(), maximize=True), case(mixed())
    for k in range(3):
        set_gradients(parameters(up), k)
        for p, q in zip(parameters(up), parameters(down), strict=True):
            q.grad = -p.grad
        up.step()
        down.step()
    orthogonal = zip(snapshot(up)[:-1], snapshot(down)[:-1], strict=True)
    for a, b in orthogonal:
        torch.testing.assert_close(a, b)


@each_case
def test_learning_rates_follow_the_scheduler(case: Case):
    optimizer = case(mixed(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    before = snapshot(optimizer)
    for k in range(2):
        set_gradients(parameters(optimizer), k)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02] * 6)
    assert not torch.equal(snapshot(optimizer)[0], before[0])


@each_case
def test_tensor_lr_equals_float_lr_and_may_change_in_place(case: Case):
    rate = torch.tensor(0.05)
    tensor, number = case(mixed(), lr=rate), case(mixed(), lr=0.05)
    run(tensor, 2)
    run(number, 2)
    rate.mul_(0.1)
    for group in number.param_groups:
        group["lr"] = 0.005
    run(tensor, 2)
    run(number, 2)
    for a, b in zip(snapshot(tensor), snapshot(number), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # rounding of an SVD


@each_case
def test_parameters_without_gradient_stay_and_late_ones_start_afresh(case: Case):
    early, late = case(weights()), case(weights())
    stays = parameters(late)[0]
    start = stays.detach().clone()
    for k in range(3):
        set_gradients(parameters(late), k)
        stays.grad = None
        late.step()
    assert torch.equal(stays, start)
    set_gradients(parameters(early), 7)
    set_gradients(parameters(late), 7)
    early.step()
    late.step()
    assert torch.equal(parameters(early)[0], stays)


@each_case
def test_no_gradient_at_all_is_fine(case: Case):
    optimizer = case(mixed())
    before = snapshot(optimizer)
    optimizer.step()
    assert_same(snapshot(optimizer), before)


@each_case
@pytest.mark.parametrize("name", SHAPES)
def test_memory_layout_does_not_matter(case: Case, name):
    """The same numbers in transposed, sliced or channels-last memory take the same steps."""
    (plain_group,) = weights(names=(name,))
    (plain,) = plain_group["params"]
    scattered = torch.zeros(*plain.shape[:-1], 2 * plain.shape[-1])[..., ::2]
    layouts = [scattered, torch.empty(plain.mT.shape).mT]
    if plain.ndim == 4:
        layouts.append(torch.empty_like(plain, memory_format=torch.channels_last))
    for layout in layouts:
        layout.copy_(plain.detach())
        other = nn.Parameter(layout)
        assert other.stride() != plain.stride()
        twin = nn.Parameter(plain.detach().clone())
        first = case([{**plain_group, "params": [twin]}])
        second = case([{**plain_group, "params": [other]}])
        run(first, 3, UNRELATED)
        run(second, 3, UNRELATED)
        torch.testing.assert_close(other, twin, rtol=1e-5, atol=1e-6)
        assert other.stride() == layout.stride()


@each_case
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.complex128,
    ],
)
def test_types_are_kept_and_agree_with_float64(case: Case, dtype):
    """Half precision computes in float32: only the rounding of the weights separates them."""
    exact = torch.complex128 if dtype.is_complex else torch.float64
    optimizer, reference = case(mixed(dtype)), case(mixed(exact))
    for p, q in zip(parameters(optimizer), parameters(reference), strict=True):
        q.data.copy_(p.detach())
    for k in range(UNRELATED, UNRELATED + 3):
        set_gradients(parameters(optimizer), k)
        for p, q in zip(parameters(optimizer), parameters(reference), strict=True):
            q.grad = p.grad.to(exact)
        optimizer.step()
        reference.step()
    # A step that is shortened by what it measures is known up to a few units of rounding itself.
    tolerance = 40 * torch.finfo(dtype).eps
    for p, q in zip(parameters(optimizer), parameters(reference), strict=True):
        assert p.dtype == dtype
        torch.testing.assert_close(p.detach().to(exact), q, rtol=tolerance, atol=tolerance)


@each_case
def test_foreach_only_changes_how_it_is_computed(case: Case):
    def several():
        params = [nn.Parameter(ol.random_orthogonal(6, 3, seed=i)) for i in range(4)]
        params += [nn.Parameter(ol.random_orthogonal(3, 6, seed=i)) for i in range(2)]
        params += [nn.Parameter(ol.random_orthogonal(5, 5, seed=9))]
        return params

    together, apart = case(several(), foreach=True), case(several(), foreach=False)
    run(together, 4)
    run(apart, 4)
    # A batch's matrix exponential takes another number of terms than a single one's.
    for a, b in zip(snapshot(together), snapshot(apart), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@each_case
@pytest.mark.parametrize("foreach", [True, False])
def test_a_non_finite_gradient_stops_its_matrix_only(case: Case, foreach):
    for bad in (math.nan, math.inf, -math.inf):
        optimizer, twin = case(mixed(), foreach=foreach), case(mixed(), foreach=foreach)
        run(optimizer, 2)
        run(twin, 2)
        before = copy.deepcopy(snapshot(optimizer))
        state = copy.deepcopy(optimizer.state_dict()["state"])
        for o in (optimizer, twin):
            set_gradients(parameters(o), 77)
        square, _, _, conv, _, vector = parameters(optimizer)
        square.grad[1, 2] = bad
        conv.grad[3, 1, 0, 0] = bad
        vector.grad[0] = bad
        optimizer.step()
        twin.step()
        now, expected = snapshot(optimizer), snapshot(twin)
        assert torch.equal(now[0], before[0])
        assert torch.equal(now[5], before[5])
        assert torch.equal(now[3][3, 1], before[3][3, 1])
        untouched = torch.ones(6, 2, dtype=torch.bool)
        untouched[3, 1] = False
        assert torch.equal(now[3][untouched], expected[3][untouched])
        assert_same([now[i] for i in (1, 2, 4)], [expected[i] for i in (1, 2, 4)])
        assert optimizer.skipped_steps() == 3
        assert twin.skipped_steps() == 0
        for i in (0, 5):
            for name, value in optimizer.state_dict()["state"][i].items():
                assert name == "skipped" or torch.equal(value, state[i][name])


@each_case
def test_a_non_finite_first_gradient_leaves_a_fresh_start(case: Case):
    optimizer, twin = case(weights()), case(weights())
    set_gradients(parameters(optimizer), 0)
    for p in parameters(optimizer):
        p.grad.fill_(math.nan)
    optimizer.step()
    run(optimizer, 2)
    run(twin, 2)
    assert_same(snapshot(optimizer), snapshot(twin))


@each_case
def test_gradient_scaler(case: Case):
    optimizer, twin = case(mixed()), case(mixed())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for k in range(3):
        for o, scale in ((optimizer, scaler.get_scale()), (twin, 1.0)):
            set_gradients(parameters(o), k, scale)
        scaler.scale(torch.zeros(()))  # the scaler wants to have been used
        scaler.step(optimizer)
        scaler.update()
        twin.step()
    for a, b in zip(snapshot(optimizer), snapshot(twin), strict=True):
        torch.testing.assert_close(a, b)


@each_case
def test_groups_can_be_added_and_bad_ones_leave_no_trace(case: Case):
    optimizer = case(weights())
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="view must be one of"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.eye(3))], "view": "row"})
    assert len(optimizer.param_groups) == 5
    added = nn.Parameter(torch.eye(3))
    optimizer.add_param_group({"params": [added], "lr": 0.01})
    run(optimizer, 1)
    assert not torch.equal(added, torch.eye(3))


@each_case
def test_every_way_to_hand_over_parameters(case: Case):
    def start():
        return nn.Parameter(ol.random_orthogonal(4, 4, seed=0))

    ways = [
        lambda X: [X],
        lambda X: iter([X]),
        lambda X: (p for p in [X]),
        lambda X: [("weight", X)],
        lambda X: [{"params": X}],
        lambda X: [{"params": [("weight", X)], "maximize": False}],
        lambda X: nn.ParameterList([X]).parameters(),
        lambda X: nn.ParameterList([X]).named_parameters(),
    ]
    results = []
    for way in ways:
        X = start()
        optimizer = case(way(X))
        run(optimizer, 2)
        results.append(X.detach())
    assert all(torch.equal(results[0], other) for other in results)


@each_case
def test_zero_grad(case: Case):
    optimizer = case(mixed())
    set_gradients(parameters(optimizer), 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters(optimizer))


@each_case
def test_plain_groups_take_torchs_own_step(case: Case):
    groups = mixed()
    optimizer = case(groups)
    group = optimizer.param_groups[-1]
    twin = nn.Parameter(group["params"][0].detach().clone())
    torchs_own = case.torch_twin([twin], group)
    for k in range(4):
        set_gradients(parameters(optimizer), k)
        twin.grad = group["params"][0].grad.clone()
        optimizer.step()
        torchs_own.step()
        assert torch.equal(twin, group["params"][0])


@each_case
def test_a_start_outside_the_ball_is_refused_with_name_distance_and_cure(case: Case):
    if case.radius == math.inf:
        pytest.skip("starts anywhere")
    far = nn.Parameter(2 * torch.eye(3))
    before = far.detach().clone()
    lands = "landing" in case.name.lower()
    spectral = lands and case.options.get("safe_step", "spectral") == "spectral"
    distance = "distance 3" if spectral else "5.196"  # ||3 I||_2, ||3 I||_F
    with pytest.raises(ValueError, match=rf"'w' of shape \(3, 3\).*{distance}.*orthogonalize_"):
        case([("w", far)])
    assert torch.equal(far, before)
    with pytest.raises(ValueError, match=r"distance (nan|inf)"):
        case([nn.Parameter(torch.full((2, 2), math.nan))])
    optimizer = case(ol.orthogonalize_([far]))
    assert ol.orthogonality_error(optimizer) < 1e-6


@each_case
def test_sparse_gradients_are_refused_before_anything_moves(case: Case):
    optimizer = case(weights())
    set_gradients(parameters(optimizer), 0)
    last = parameters(optimizer)[-1]
    last.grad = last.grad.to_sparse()
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=r"dense, got layout torch.sparse_coo.*sparse=False"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


ERRORS = [(case, *bad) for case in CASES for bad in case.bad_options]


@pytest.mark.parametrize(
    ("case", "options", "error", "message"), ERRORS, ids=[f"{e[0].name}-{e[1]}" for e in ERRORS]
)
def test_bad_options_are_refused_as_default_and_in_a_group(case, options, error, message):
    with pytest.raises(error, match=message):
        case([nn.Parameter(torch.eye(3))], **options)
    with pytest.raises(error, match=message):
        case([{"params": [nn.Parameter(torch.eye(3))], **options}])


@each_case
@pytest.mark.parametrize("shape", [(), (3,), (3, 0)])
def test_weights_that_are_no_matrices_are_refused(case: Case, shape):
    with pytest.raises(ValueError, match="orthogonal parameter needs"):
        case([nn.Parameter(torch.zeros(shape))])


@each_case
def test_meta_parameters_construct(case: Case):
    case([nn.Parameter(torch.empty(4, 4, device="meta"))])


@each_case
def test_meta_parameters_are_checked_when_they_have_values(case: Case, monkeypatch):
    # As it is for DTensors: parameters get values rather than being replaced.
    monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", True)
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    optimizer = case(model.named_parameters())
    model.to_empty(device="cpu")
    nn.init.constant_(model.weight, 3.0)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    model.weight.grad = torch.ones(4, 4)
    if case.radius < math.inf:
        with pytest.raises(ValueError, match=r"'weight' of shape \(4, 4\).* Project it first"):
            optimizer.step()
        assert (model.weight == 3).all()
        ol.orthogonalize_(model.weight)
    optimizer.step()
    assert not (model.weight == 3).all()
    assert optimizer.skipped_steps() == 0


@each_case
def test_a_state_dict_of_torchs_own_optimizer_loads(case: Case):
    """Options that it does not know take their defaults."""
    optimizer = case(weights(names=("square",)))
    foreign = torch.optim.SGD([nn.Parameter(torch.eye(4))], lr=0.03)
    optimizer.load_state_dict(foreign.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.03
    run(optimizer, 2)
    assert ol.orthogonality_error(optimizer, spectral=True) <= case.radius
