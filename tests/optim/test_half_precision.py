"""Weights of half precision train: what they cannot hold is kept, or right in the mean."""

import copy
import io
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.geometry.rounding import COMPENSATION, HALF_TYPES, ROUNDINGS, SEED
from ortholand_lab.benchmarks.half_precision import BATCHES, METHODS, SHAPES, Teaching, train
from tests import needs
from tests.optim import test_conformance as conformance
from tests.optim.cases import CASES, Case, each_case
from tests.optim.recorder import Recorder
from tests.optim.test_conformance import mixed, parameters, run, set_gradients, snapshot

each_type = pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


# Training


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_trains_as_float32_does(method, shape, batch):
    task = Teaching.of(SHAPES[shape], seed=7)
    options = {"batch": BATCHES[batch], "seed": 7}
    full = train(task, METHODS[method], torch.float32, **options)
    half = train(task, METHODS[method], torch.bfloat16, **options)
    assert half.loss == pytest.approx(full.loss, rel=0.02)
    # What storing costs, and nothing that has added up.
    assert half.error < full.error + 2**-9 * math.sqrt(2 * SHAPES[shape][1])


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float16, None), (torch.float16, "stochastic"), (torch.bfloat16, "stochastic")],
)
def test_the_other_type_and_random_rounding_train_too(dtype, rounding):
    task = Teaching.of(SHAPES["tall"], seed=8)
    for method in ("LandingAdam, lr 1e-3", "LandingSGD, lr 0.01"):
        full = train(task, METHODS[method], torch.float32)
        half = train(task, partial(METHODS[method], rounding=rounding), dtype)
        assert half.loss == pytest.approx(full.loss, rel=0.02)


def test_rounding_to_nearest_is_what_stands_still():
    """Else the tests above would show nothing."""
    task = Teaching.of(SHAPES["tall"], seed=7)
    for method in ("LandingAdam, lr 1e-3", "LandingSGD, lr 0.01"):
        full = train(task, METHODS[method], torch.float32)
        half = train(task, partial(METHODS[method], rounding="nearest"), torch.bfloat16)
        assert half.loss > 1.1 * full.loss


@each_type
@pytest.mark.parametrize(
    "make",
    [
        partial(ol.LandingAdam, lr=1e-3, weight_decay=0.01),
        partial(ol.LandingSGD, lr=3e-3, momentum=0.9),
        partial(ol.LandingSGD, lr=3e-3),
    ],
    ids=["adam", "momentum", "sgd"],
)
def test_a_network_with_plain_groups_trains_as_in_float32(make, dtype):
    def trained(dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 2))
        groups = ol.orthogonalize_(ol.param_groups(model, ["0.weight", "2.weight"]))
        x = torch.randn(64, 10)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], dim=1) + 0.1 * torch.randn(64, 2)
        model.to(dtype)
        optimizer = make(groups)
        for _ in range(300):
            optimizer.zero_grad()
            (model(x.to(dtype)).float() - y).square().mean().backward()
            optimizer.step()
        assert optimizer.skipped_steps() == 0
        return (model.float()(x) - y).square().mean().item()

    assert trained(dtype) == pytest.approx(trained(torch.float32), rel=0.05)


# The sum of weight and rest steps as a float32 weight does


@each_case
@each_type
def test_weight_and_rest_follow_a_twin_in_float32(case: Case, dtype):
    """Every shape and view, plain groups too, by steps of which a weight holds no single one."""
    small = {"lr": 1e-6 if "Adam" in case.name else 3e-7}
    half = case(mixed(dtype), **small)
    full = case(mixed(dtype), **small)
    for p in parameters(full):
        p.data = p.data.float()
    start = snapshot(full)
    steps = 30
    for k in range(steps):
        set_gradients(parameters(half), k // 10)
        for p, q in zip(parameters(half), parameters(full), strict=True):
            q.grad = p.grad.float()
        half.step()
        full.step()
    for p, q, before in zip(parameters(half), parameters(full), start, strict=True):
        state = half.state[p]
        assert state[COMPENSATION].dtype == p.dtype == dtype
        total = p.detach().float() + state[COMPENSATION]
        assert torch.equal(total.to(dtype), p)
        # A step is rounded by half a unit of the rest, of both signs.
        unit = torch.finfo(dtype).eps
        room = 8 * unit**2 * q.detach().abs() + 2.0**-23 * (dtype == torch.float16)
        assert ((total - q).abs() <= room * math.sqrt(steps)).all()
        if dtype == torch.bfloat16 and p.ndim == 2:
            assert not torch.equal(total, before)


@each_case
@each_type
def test_state_is_float32_but_for_the_rest(case: Case, dtype):
    optimizer = case(mixed(dtype))
    run(optimizer, 2)
    for state in optimizer.state.values():
        for name, value in state.items():
            if name == COMPENSATION:
                assert value.dtype == dtype
            elif name not in ("skipped", "limited"):
                assert value.dtype == torch.float32, name


def test_plain_moments_move_where_half_precision_would_not():
    """0.999 of a bfloat16 number is that number, and the square of 1e-4 is zero in float16."""
    for dtype in HALF_TYPES:
        p, q = nn.Parameter(torch.ones(50, dtype=dtype)), nn.Parameter(torch.ones(50))
        ours = ol.LandingAdam([p], lr=1e-4, orthogonal=False)
        theirs = torch.optim.AdamW([q], lr=1e-4, weight_decay=0.0)
        for k in range(200):
            generator = torch.Generator().manual_seed(k)
            p.grad = (1e-4 * 0.97**k * torch.randn(50, generator=generator)).to(dtype)
            q.grad = p.grad.float()
            ours.step()
            theirs.step()
        torch.testing.assert_close(ours.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"])
        total = p.detach().float() + ours.state[p][COMPENSATION]
        # The rest of a bfloat16 number near 1 is rounded by 2^-18 at most, 200 times.
        torch.testing.assert_close(total, q.detach(), rtol=0, atol=2**-17 * math.sqrt(200))


# What an optimizer must do, in half precision

CHECKS = [
    conformance.test_state_dict_round_trip_is_bit_for_bit,
    conformance.test_a_loaded_state_shares_no_memory_with_its_source,
    partial(conformance.test_pickle_and_deepcopy_continue_alike, duplicate=copy.deepcopy),
    partial(
        conformance.test_pickle_and_deepcopy_continue_alike,
        duplicate=lambda o: pickle.loads(pickle.dumps(o)),
    ),
    conformance.test_gradients_are_never_modified,
    conformance.test_no_gradient_at_all_is_fine,
    conformance.test_lr_zero_is_a_no_op_on_the_weights,
]
TWIN_CHECKS = [  # of two optimizers, which draw different seeds
    partial(conformance.test_a_non_finite_gradient_stops_its_matrix_only, foreach=True),
    partial(conformance.test_a_non_finite_gradient_stops_its_matrix_only, foreach=False),
    conformance.test_a_non_finite_first_gradient_leaves_a_fresh_start,
    conformance.test_parameters_without_gradient_stay_and_late_ones_start_afresh,
]
LANDING = [
    case for case in CASES if case.name in ("LandingSGD-momentum", "LandingAdam", "LandingMuon")
]
BOTH = [
    *((case, check, None, torch.bfloat16) for case in CASES for check in (*CHECKS, *TWIN_CHECKS)),
    *((case, check, "stochastic", torch.float16) for case in LANDING for check in CHECKS),
    *((case, check, "nearest", torch.float16) for case in LANDING for check in TWIN_CHECKS),
]


def name_of_check(value) -> str:
    if isinstance(value, Case):
        return value.name
    return getattr(getattr(value, "func", value), "__name__", str(value))


@pytest.mark.parametrize(("case", "check", "rounding", "dtype"), BOTH, ids=name_of_check)
def test_half_precision_conforms(case: Case, check, rounding, dtype, monkeypatch):
    monkeypatch.setattr(conformance, "mixed", lambda kind=dtype: mixed(kind))
    whole = conformance.weights
    monkeypatch.setattr(conformance, "weights", lambda kind=dtype: whole(kind))
    check(Case(case.name, case.make, {**case.options, "rounding": rounding}, radius=case.radius))


@each_rounding
@each_type
def test_lr_zero_and_skipped_steps_leave_weight_and_rest(dtype, rounding):
    """After steps that have left a rest, and at numbers of all sizes."""
    torch.manual_seed(0)
    vector = nn.Parameter((torch.randn(2000) * 10.0 ** torch.randint(-30, 4, (2000,))).to(dtype))
    weight = nn.Parameter(ol.random_orthogonal(20, 8, seed=0, dtype=dtype))
    groups = [{"params": [weight]}, {"params": [vector], "orthogonal": False}]
    optimizer = ol.LandingAdam(groups, lr=1e-4, rounding=rounding)
    run(optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict()["state"]), snapshot(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run(optimizer, 3, first_seed=10)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    for p in parameters(optimizer):
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert optimizer.skipped_steps() == 2
    for p, old in zip(parameters(optimizer), before[1], strict=True):
        assert torch.equal(p, old)
    for i, state in optimizer.state_dict()["state"].items():
        if rounding == "compensated":
            assert torch.equal(state[COMPENSATION], before[0][i][COMPENSATION])


def test_a_float16_weight_never_becomes_infinite():
    """What is finite in float32 may not be so in float16: such a step is skipped."""
    for rounding in ROUNDINGS:
        X = nn.Parameter(100 * torch.eye(4, dtype=torch.float16))
        v = nn.Parameter(torch.full((3,), 6e4, dtype=torch.float16))
        groups = [{"params": [X]}, {"params": [v], "orthogonal": False}]
        optimizer = ol.PLAM(groups, lr=0.1, rounding=rounding)
        X.grad, v.grad = torch.zeros_like(X), torch.full_like(v, -6e4)
        optimizer.step()
        assert torch.equal(X, 100 * torch.eye(4, dtype=torch.float16))
        assert (v == 6e4).all()
        assert optimizer.skipped_steps() == 2
        v.grad = torch.full_like(v, -1e3)
        optimizer.step()
        assert (v > 6e4).all()


# Where weights, types and options change in mid-run


def one_weight(dtype=torch.bfloat16, **options):
    X = nn.Parameter(ol.random_orthogonal(16, 8, seed=0, dtype=dtype))
    return X, ol.LandingSGD([X], **{"lr": 1e-3, "momentum": 0.9, **options})


def test_the_rest_follows_its_weight():
    X, optimizer = one_weight()
    for _ in range(2):  # the second time compiled code has been loaded
        X.data = X.data.bfloat16()
        run(optimizer, 5)
        X.data = X.data.float()
        run(optimizer, 2)
        assert COMPENSATION not in optimizer.state[X]
    X.data = X.data.half()
    run(optimizer, 2)
    assert optimizer.state[X][COMPENSATION].dtype == torch.float16
    X.data = X.data.bfloat16()
    run(optimizer, 2)
    assert optimizer.state[X][COMPENSATION].dtype == torch.bfloat16
    assert optimizer.state[X]["momentum_buffer"].dtype == torch.float32
    assert optimizer.skipped_steps() == 0
    plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = ol.LandingSGD([plain], orthogonal=False, lr=1e-3)
    run(optimizer, 2)
    plain.data = torch.ones(5, dtype=torch.bfloat16)
    run(optimizer, 2)
    assert optimizer.state[plain][COMPENSATION].shape == (5,)


def test_a_weight_that_is_set_anew_starts_from_there():
    X, optimizer = one_weight(momentum=0.0)
    run(optimizer, 5)
    other = ol.random_orthogonal(16, 8, seed=5, dtype=torch.bfloat16)
    other[0, 0] = 0.0
    with torch.no_grad():
        X.copy_(other)
    X.grad = torch.zeros_like(X)
    for group in optimizer.param_groups:
        group["lam"] = 0.0
    optimizer.step()
    assert torch.equal(X, other)
    assert optimizer.state[X][COMPENSATION][0, 0] == 0


def test_the_option_can_change_and_differ_by_group():
    X, optimizer = one_weight()
    Y = nn.Parameter(ol.random_orthogonal(8, 8, seed=1, dtype=torch.float16))
    optimizer.add_param_group({"params": [Y], "rounding": "nearest"})
    run(optimizer, 2)
    assert COMPENSATION in optimizer.state[X]
    assert COMPENSATION not in optimizer.state[Y]
    optimizer.param_groups[0]["rounding"] = "stochastic"
    optimizer.param_groups[1]["rounding"] = None
    run(optimizer, 2)
    assert optimizer.state[X].keys() == {"momentum_buffer", "skipped", "limited", SEED}
    assert COMPENSATION in optimizer.state[Y]
    optimizer.param_groups[0]["rounding"] = "down"
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"rounding must be one of .*, got 'down'"):
        run(optimizer, 1)
    conformance.assert_same(snapshot(optimizer), before)


def test_another_view_or_kind_needs_no_new_state_without_moments():
    X = nn.Parameter(ol.random_orthogonal(2, 4, 4, seed=0, dtype=torch.bfloat16))
    optimizer = ol.LandingSGD([X], lr=1e-3, view="kernel")
    run(optimizer, 2)
    optimizer.param_groups[0]["orthogonal"] = False
    run(optimizer, 2)


@each_rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_other_types_take_the_option_and_do_nothing_with_it(dtype, rounding):
    optimizers = [ol.LandingAdam(mixed(dtype), rounding=way) for way in (None, rounding)]
    for optimizer in optimizers:
        run(optimizer, 3)
        for state in optimizer.state.values():
            assert state.keys().isdisjoint({COMPENSATION, SEED})
    conformance.assert_same(*map(snapshot, optimizers))


def test_a_checkpoint_of_before_the_option_loads():
    _, optimizer = one_weight()
    run(optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["rounding"]
    for state in saved["state"].values():
        del state[COMPENSATION]
    Y, other = one_weight()
    other.load_state_dict(saved)
    run(other, 2)
    assert COMPENSATION in other.state[Y]
    foreign = torch.optim.Adam([nn.Parameter(torch.ones(4, dtype=torch.bfloat16))])
    run(foreign, 2)
    plain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    adam = ol.LandingAdam([plain], orthogonal=False)
    saved = foreign.state_dict()
    del saved["param_groups"][0]["eps"]  # which is the ball's here
    adam.load_state_dict(saved)
    run(adam, 2)
    assert adam.state[plain]["exp_avg_sq"].dtype == torch.float32


# Random rounding


def test_random_rounding_follows_manual_seed_and_leaves_torchs_numbers_alone():
    def trained(seed):
        torch.manual_seed(seed)
        optimizer = ol.LandingSGD(mixed(torch.bfloat16), lr=1e-3, rounding="stochastic")
        run(optimizer, 1)
        state = torch.get_rng_state()
        run(optimizer, 3, first_seed=1)
        assert torch.equal(torch.get_rng_state(), state)
        return snapshot(optimizer)

    first, again, other = trained(1), trained(1), trained(2)
    conformance.assert_same(first, again)
    assert all(not torch.equal(a, b) for a, b in zip(first[:-1], other[:-1], strict=True))


@each_type
def test_random_rounding_travels_as_far_as_it_should(dtype):
    """Each step is a tenth of what the weights can hold."""
    step = torch.finfo(dtype).eps / 10
    p = nn.Parameter(torch.full((40, 50), 1.3, dtype=dtype))
    start = p.detach().float().mean()
    optimizer = ol.LandingSGD([p], lr=step, orthogonal=False, rounding="stochastic")
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    travelled = (start - p.detach().float().mean()) / step
    assert float(travelled) == pytest.approx(100, rel=0.03)
    values = p.detach().float().unique()
    assert len(values) > 5


def test_matrices_of_one_shape_draw_their_own():
    weights = [nn.Parameter(ol.random_orthogonal(12, 6, seed=0).bfloat16()) for _ in range(2)]
    optimizer = ol.LandingSGD(weights, lr=1e-3, rounding="stochastic", foreach=True)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(*weights)


# Around a step


@each_rounding
@pytest.mark.parametrize(
    "make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon], ids=lambda make: make.__name__
)
def test_no_value_leaves_the_device(make, rounding):
    # (Adam's count of steps of plain groups is on the host, as in torch.)
    groups = mixed if make is ol.LandingSGD else conformance.weights
    # (The default rule of the safe step branches on the CPU.)
    optimizer = make(groups(torch.bfloat16), lr=0.01, rounding=rounding, safe_step="frobenius")
    for k in range(2):
        set_gradients(parameters(optimizer), k)
        with Recorder() as recorder:
            optimizer.step()
    syncs = ("item", "_local_scalar_dense", "nonzero", "is_nonzero")
    assert not [name for name in recorder.names if any(s in name for s in syncs)]


@needs.compiled_steps
@each_rounding
@pytest.mark.parametrize(
    "make", [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon], ids=lambda make: make.__name__
)
def test_a_compiled_step_is_the_step(make, rounding):
    """By bits, because Inductor would take a cast there and back for nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = make(mixed(torch.bfloat16), lr=torch.tensor(1e-3), rounding=rounding)
    twin = copy.deepcopy(ours)
    torch.manual_seed(1)
    compiled = torch.compile(lambda: ours.step(), fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about code of torch's own
        for k in range(3):
            set_gradients(parameters(ours), k)
            compiled()
    torch.manual_seed(1)
    run(twin, 3)
    for p, q in zip(parameters(ours), parameters(twin), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=2**-8)


def test_it_is_saved_with_weights_only_and_explained():
    X, optimizer = one_weight(rounding="stochastic")
    run(optimizer, 2)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    Y, other = one_weight()
    Y.data.copy_(X.data)
    other.load_state_dict(loaded)
    assert other.param_groups[0]["rounding"] == "stochastic"
    run(optimizer, 2)
    run(other, 2)
    assert torch.equal(X, Y)
    (row,) = ol.explain(optimizer)
    assert row.dtype == "bfloat16"
    assert row.engine == "reference"


@pytest.mark.parametrize("duplicates", [1, 3])
def test_memory_is_what_the_page_says(duplicates):
    """2 bytes for the weight, 2 for the rest, 4 for a momentum."""
    weights = [one_weight()[0] for _ in range(duplicates)]
    optimizer = ol.LandingSGD(weights, lr=1e-3, momentum=0.9)
    run(optimizer, 1)
    for X in weights:
        tensors = [value for value in optimizer.state[X].values() if value.shape == X.shape]
        assert sum(t.element_size() for t in tensors) == 2 + 4
