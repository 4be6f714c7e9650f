"""Published directions are what they were published as; claims are judged on the records alone."""

import math
import pickle
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ortholand as ol
from ortholand_lab.benchmarks import BENCHMARKS, muon
from ortholand_lab.benchmarks.muon import (
    MUON,
    MuonSettings,
    cases,
    contenders,
    needed,
    plan,
    run,
    time_of,
    training,
)
from ortholand_lab.benchmarks.muon.contenders import (
    CONTENDERS,
    DUAL,
    OURS,
    MatrixwiseMuon,
    RetractedDescent,
)
from ortholand_lab.benchmarks.muon.directions import (
    PUBLISHED_RATE,
    best_value,
    closed_form,
    compressed,
    dual_ascent,
    exact_sign,
    fewest_steps,
    quality,
    spel,
)
from ortholand_lab.benchmarks.muon.searches import (
    Case,
    CostTask,
    SearchTask,
    Tried,
    good_enough,
    make_case,
)
from ortholand_lab.benchmarks.muon.training import (
    Outcome,
    StepTimes,
    Training,
    TrainingTask,
    batches,
    prepare_images,
    rate_beyond,
    run_training,
    short_move,
    start,
)
from ortholand_lab.datasets import Dataset
from ortholand_lab.study.records import (
    MissingRecordError,
    Record,
    Records,
    Request,
    Result,
    RunOptions,
)
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import BENCHMARK_PRESETS, Context, Verdict

# Peers warn of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHAPES = [(5, 1), (6, 6), (7, 7), (9, 6), (12, 6), (40, 6)]
NARROW = (3 * 32 * 32, 16, 12, 10)  # widths of a network for tests
INSTALLED = [m for m, contender in CONTENDERS.items() if contender.installed]
CONSTRAINED = [m for m in INSTALLED if CONTENDERS[m].constrained]


def one_training(method, rates, epochs, batch_size):
    return TrainingTask(method, rates, 0, NARROW, epochs, batch_size, (3000,), (2000,), 20)


def random_images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(10, (count,), generator=generator)


@pytest.fixture(scope="module")
def data():
    return Dataset("CIFAR-10", *random_images(50, 0), *random_images(20, 1))


@pytest.fixture
def context(data):
    return Context(seed=0, device=torch.device("cpu"), tick=lambda _: None, data=data)


def problem(n, p, seed=0):
    X = ol.random_orthogonal(n, p, seed=seed, dtype=torch.float64)
    G = torch.randn(n, p, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return X, G / torch.linalg.matrix_norm(G, 2)


# Directions.


@pytest.mark.parametrize("shape", SHAPES)
def test_the_closed_form_is_tangent_and_has_the_best_value(shape):
    X, G = problem(*shape)
    R = closed_form(X, G)
    assert torch.linalg.matrix_norm(R, 2) <= 1 + 1e-12
    value, tangency, rms = quality(X, G, R)
    assert value == pytest.approx(1, abs=1e-12)
    assert max(tangency, rms) < 1e-12


@pytest.mark.parametrize("shape", [(10, 6), (12, 6), (40, 6)])
def test_after_enough_inner_steps_the_dual_ascent_is_there_too(shape):
    X, G = problem(*shape)
    few, many = (quality(X, G, dual_ascent(X, G, k, rate=0.1)) for k in (1, 2000))
    assert few.tangency > 0.02
    assert many.rms < 1e-6  # by which it stops
    assert many.value == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(
        dual_ascent(X, G, 2000, rate=0.1), closed_form(X, G), rtol=0, atol=1e-4
    )


def test_where_the_best_direction_has_small_singular_values_the_dual_ascent_is_never_tangent():
    X, G = problem(9, 6)  # psi is 9 x 9 and skew: one of its singular values is zero
    R = closed_form(X, G)
    assert torch.linalg.svdvals(R)[-1] < 0.99
    assert quality(X, G, R).value == pytest.approx(1)
    assert quality(X, G, dual_ascent(X, G, 2000, rate=0.1)).tangency > 0.01


def test_three_steps_of_the_dual_ascent_written_out():
    X, G = problem(9, 6)

    def direction(L):
        U, _, Vh = torch.linalg.svd(G + 2 * X @ L, full_matrices=False)
        return U @ Vh

    L = -(X.mT @ G + G.mT @ X) / 4
    for part in (3 / 3, 2 / 3):  # of the rate: it falls to zero over the steps
        R = direction(L)
        L = L - PUBLISHED_RATE * part * (X.mT @ R + R.mT @ X)
    torch.testing.assert_close(dual_ascent(X, G, 3), direction(L))


def test_on_square_matrices_the_dual_ascent_starts_at_the_optimum_and_stops():
    X, G = problem(6, 6)
    signs = []
    dual_ascent(X, G, 50, sign=lambda M: signs.append(0) or exact_sign(M))
    assert len(signs) == 1
    assert quality(X, G, dual_ascent(X, G, 1)).value == pytest.approx(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_spel_is_where_the_dual_ascent_starts(shape):
    X, G = problem(*shape)
    torch.testing.assert_close(spel(X, G), dual_ascent(X, G, 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_compression_changes_no_quality(shape):
    X, G = problem(*shape)
    small = compressed(X, G)
    assert small[0].shape[0] == min(shape[0], 2 * shape[1]) or shape[0] <= 2 * shape[1]
    before = quality(X, G, spel(X, G))
    assert quality(*small, spel(*small)) == pytest.approx(before, abs=1e-12)


def test_the_quality_of_what_is_not_tangent():
    X = torch.eye(3, 2, dtype=torch.float64)
    G = torch.zeros(3, 2, dtype=torch.float64)
    G[0, 1], G[2, 0] = 4.0, 3.0
    # psi = Skew(G X^T) has +-2 at (0, 1) and +-1.5 at (2, 0): singular values 2.5, 2.5, 0.
    assert best_value(X, G) == pytest.approx(5.0)
    value, tangency, rms = quality(X, G, 2 * X)  # normal through and through
    assert (value, tangency) == pytest.approx((0.0, 1.0))
    assert rms == pytest.approx(4 * math.sqrt(2) / 2)  # of 4 I


def test_the_exact_sign_is_the_polar_factor_and_leaves_what_is_zero():
    M = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    torch.testing.assert_close(exact_sign(M), U @ Vh)
    M[:, 2] = M[:, 0]
    values = torch.linalg.svdvals(exact_sign(M))
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 0.0]).double(), rtol=0, atol=1e-7)
    assert not exact_sign(0 * M).any()


@given(st.integers(1, 3000), st.integers(1, 2000))
def test_the_fewest_steps_are_found_within_five_percent(threshold, cap):
    asked = []
    found = fewest_steps(lambda k: asked.append(k) or k >= threshold, cap)
    assert max(asked) <= cap
    assert len(asked) <= 30
    if threshold > cap:
        assert found is None
    else:
        assert found is not None
        assert threshold <= found <= max(threshold + 1, threshold / 0.94)


# Optimizers.


@pytest.mark.parametrize("direction", ["dual-ascent", "spel"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_retracted_descent_follows_its_direction(direction, shape):
    p = torch.nn.Parameter(ol.random_orthogonal(*shape, seed=0))
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    X, G = (M if shape[0] >= shape[1] else M.mT for M in (p.detach().clone(), p.grad.clone()))
    R = contenders.DIRECTIONS[direction](X, G)
    RetractedDescent([p], 0.1, direction=direction).step()
    U, _, Vh = torch.linalg.svd(X - 0.1 * R, full_matrices=False)
    expected = U @ Vh if p.shape == X.shape else (U @ Vh).mT
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=5e-5)
    assert ol.orthogonality_error(p) < 1e-6


def test_the_direction_of_ours_is_that_of_the_optimizer():
    X = ol.random_orthogonal(12, 5, seed=0, dtype=torch.float64)
    G = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = torch.nn.Parameter(X.clone())
    p.grad = G.clone()
    ol.LandingMuon([p], lr=1e-7, momentum=0.0).step()
    R = contenders.our_direction(X, G)
    torch.testing.assert_close((X - p.detach()) / 1e-7, R, rtol=0, atol=1e-6)


def test_pogos_base_is_muon_for_each_matrix_of_a_stack():
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    U, _, Vh = torch.linalg.svd(stack, full_matrices=False)
    torch.testing.assert_close(MatrixwiseMuon()(stack, stack, {}, {}), U @ Vh, rtol=0, atol=0.02)


@pytest.mark.parametrize("method", CONSTRAINED)
def test_a_short_move_is_a_look_ahead_and_changes_nothing(method, context):
    images = prepare_images(context.data)
    task = one_training(method, (0.1,), 1, 25)
    trainings = [Training(task, images, 0, 0.1) for _ in range(2)]
    for k in range(3):
        for t in trainings:
            t.differentiate(torch.arange(25))
        for move, p in zip(
            short_move(trainings[0].optimizer, trainings[0].weights),
            trainings[0].weights,
            strict=True,
        ):
            assert 0 < move.abs().max() < 0.01, k
            assert p.grad is not None
        for t in trainings:
            t.optimizer.step()
    for p, q in zip(trainings[0].weights, trainings[1].weights, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


# Trainings.


def test_an_epoch_has_every_image_once():
    parts = list(batches(50, 16, seed=0))
    assert [len(part) for part in parts] == [16, 16, 16, 2]
    assert sorted(torch.cat(parts).tolist()) == list(range(50))
    assert not torch.equal(parts[0], next(iter(batches(50, 16, seed=1))))


def test_the_learning_rate_falls_linearly_to_zero(context):
    task = one_training("adamw", (0.1,), 2, 20)
    training_run = Training(task, prepare_images(context.data), 0, 0.6)
    rates = []
    training_run.set_rate = rates.append  # so nothing else sets it
    training_run.run(judged=False)
    assert rates == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_weights_start_on_the_manifold_only_where_they_stay():
    for method in INSTALLED:
        model, _ = start(method, 0.1, seed=0)
        assert [tuple(p.shape) for p in model.parameters()] == [(128, 3072), (64, 128), (10, 64)]
        error = ol.orthogonality_error(list(model.parameters()))
        assert (error < 1e-3) == CONTENDERS[method].constrained


@pytest.mark.parametrize("method", INSTALLED)
def test_every_method_trains_and_is_measured(method, context):
    task = one_training(method, (0.01,), 2, 25)
    outcome = Training(task, prepare_images(context.data), 0, 0.01).run(judged=True)
    assert 0 <= outcome.accuracy <= 1
    assert math.isfinite(outcome.loss)
    constrained = CONTENDERS[method].constrained
    assert (outcome.error < 1e-3) == constrained
    assert math.isnan(outcome.value) != constrained
    if constrained:
        assert outcome.singular == pytest.approx(1, abs=1e-3)
        assert outcome.value <= 1 + 1e-2
    assert math.isnan(outcome.tangency) != (method in (OURS, DUAL, "spel"))


def test_directions_of_ours_are_best_and_tangent(context):
    images = prepare_images(context.data)
    found = {}
    for method in (OURS, DUAL, "spel"):
        task = one_training(method, (0.01,), 1, 50)
        found[method] = Training(task, images, 0, 0.01).run(judged=True)
    assert found[OURS].value > 0.98
    assert found[OURS].tangency < 1e-5
    assert min(found[DUAL].tangency, found["spel"].tangency) > 1e-3


def choose(context, monkeypatch, accuracies, extensions=0):
    """The trainings of a choice among rates 1, 2 and 4, with what they would have reached."""
    ran, ticks = [], []

    def pretend(self, *, judged):
        ran.append((self.seed, self.lr, judged))
        accuracy = 0.1 if judged else accuracies(self.lr, self.seed)
        return Outcome(self.seed, self.lr, accuracy, 1.0, 0.0, 1.0, 1.0, 0.0)

    monkeypatch.setattr(training.Training, "run", pretend)
    seeds = (30, 31), (20, 21, 22)
    task = TrainingTask("adamw", (1.0, 2.0, 4.0), extensions, NARROW, 1, 25, *seeds, 20)
    result = run_training(task, replace(context, tick=ticks.append))
    assert sum(ticks) == task.trainings == 2 * (3 + extensions) + 3
    assert [r for r in ran if r[2]] == [(s, result.values["best"], True) for s in task.seeds]
    assert {seed for seed, _, judged in ran if not judged} == set(task.tuning_seeds)
    tried = list(dict.fromkeys(lr for _, lr, judged in ran if not judged))
    return result.values["best"], tried


def test_rates_are_chosen_by_the_mean_over_seeds_that_do_not_judge(context, monkeypatch):
    seen = {1.0: (0.6, 0.1), 2.0: (0.4, 0.5), 4.0: (0.3, 0.5)}  # the first is best with one seed
    assert choose(context, monkeypatch, lambda lr, seed: seen[lr][seed - 30])[0] == 2.0


@pytest.mark.parametrize(
    ("optimum", "extensions", "best", "tried"),
    [
        (2.0, 3, 2.0, [1, 2, 4]),
        (9.0, 0, 4.0, [1, 2, 4]),
        (9.0, 1, 8.0, [1, 2, 4, 8]),
        (9.0, 3, 8.0, [1, 2, 4, 8, 16]),
        (0.2, 3, 0.25, [1, 2, 4, 0.5, 0.25, 0.12]),
        (0.01, 2, 0.25, [1, 2, 4, 0.5, 0.25]),
    ],
)
def test_a_grid_goes_on_beyond_an_edge_that_is_best(
    context, monkeypatch, optimum, extensions, best, tried
):
    accuracies = lambda lr, _: -abs(math.log(lr / optimum))  # noqa: E731
    assert choose(context, monkeypatch, accuracies, extensions) == (best, tried)


def test_one_rate_has_no_edge():
    assert rate_beyond({0.1: 0.5}) is None
    assert rate_beyond({0.2: 0.4, 0.3: 0.5}) == 0.45


def test_another_seed_of_the_study_is_another_network(context):
    task = one_training("adamw", (0.01,), 1, 25)
    first, again = (run_training(task, context).series["loss"] for _ in range(2))
    assert first == again
    assert run_training(task, replace(context, seed=1)).series["loss"] != first


# Units.


@pytest.mark.parametrize("preset", BENCHMARK_PRESETS)
def test_units_of_a_preset(preset):
    units = MUON.units(preset)
    assert len({unit.name for unit in units}) == len(units)
    assert all(unit.timed == isinstance(unit.task, CostTask | StepTimes) for unit in units)
    trained = [u.task.method for u in units if isinstance(u.task, TrainingTask)]
    assert trained == INSTALLED
    for unit in units:
        assert pickle.loads(pickle.dumps((MUON.run, unit.task))) == (run, unit.task)


def test_the_full_study_is_the_published_protocol():
    trainings = [u.task for u in MUON.units("full") if isinstance(u.task, TrainingTask)]
    assert {(t.widths, t.epochs, t.batch_size, t.test_images) for t in trainings} == {
        ((3072, 128, 64, 10), 5, 1024, 10_000)
    }
    ((tuning_seeds, seeds, extensions),) = {
        (t.tuning_seeds, t.seeds, t.extensions) for t in trainings
    }
    assert (len(tuning_seeds), len(seeds), extensions) == (3, 5, 3)
    assert not {*tuning_seeds, *seeds} & {0, 1, 2, 3, 4, 1000, 1001}  # by which it was once judged
    assert not set(tuning_seeds) & set(seeds)
    assert all(t.rates == CONTENDERS[t.method].rates for t in trainings)
    searches = [u.task for u in MUON.units("full") if isinstance(u.task, SearchTask)]
    assert {t.cap for t in searches} == {5000}


def test_what_is_not_installed_is_left_out(monkeypatch):
    missing = {**CONTENDERS, "pogo-muon": replace(CONTENDERS["pogo-muon"], installed=False)}
    monkeypatch.setattr(muon, "CONTENDERS", missing)
    names = [unit.name for unit in plan(MuonSettings())]
    assert "training-pogo-muon" not in names
    assert f"training-{OURS}" in names


@pytest.mark.parametrize("case", cases(MUON.settings["smoke"]), ids=lambda case: case.name)
def test_cases_are_on_the_manifold_and_have_their_shape(case, context):
    X, G = make_case(case, context)
    assert X.shape == G.shape == (case.rows, case.columns)
    assert X.dtype == torch.float64
    assert ol.distance(X) < 1e-5
    if case.kind != "network":
        assert torch.linalg.matrix_norm(G, 2) == pytest.approx(1)
    if case.kind == "decaying":
        expected = 1 / torch.arange(1, case.columns + 1).double()
        torch.testing.assert_close(torch.linalg.svdvals(G), expected)


def test_a_search_stops_where_the_direction_is_good_enough(context):
    task = SearchTask(Case("gaussian", 12, 4), 1000, (0.1,))
    ticks = []
    result = run(task, replace(context, tick=ticks.append))
    assert sum(ticks) == 2
    tried = [Tried(*row) for row in zip(*result.series.values(), strict=True)]
    published = {int(t.steps): t for t in tried if t.rate == PUBLISHED_RATE}
    assert {1, 2, 4, 8, 16, 32} <= set(published)  # a whole curve
    X, G = compressed(*make_case(task.case, context))
    at_eight = quality(X, G, dual_ascent(X, G, 8))
    assert published[8][2:] == pytest.approx(at_eight)
    fewest = min(k for k, t in published.items() if good_enough(t))
    assert 8 < fewest < 256
    beyond = [k for k, t in published.items() if good_enough(t) and k & (k - 1) == 0]
    assert len(beyond) == 3  # powers of two
    assert min(t.steps for t in tried if t.rate == 0.1 and good_enough(t)) < fewest
    assert result.values["our_value"] >= 0.98
    assert result.values["our_tangency"] < 1e-5


# Claims, tables and figures, on made-up records.


CASES = (Case("gaussian", 8, 8), Case("gaussian", 12, 4))


def record(unit, task, series, values, data="CIFAR-10"):
    options = RunOptions("full", 0, "cpu", 1, data)
    request = Request("muon", 1, unit, options, asdict(task), {})
    return Record(request, Result(series, values), {}, 1.0, "")


def made_up(
    *,
    value=0.99,
    tangency=1e-6,
    ours=2.0,
    accuracy=0.45,
    error=1e-6,
    seeds=5,
    tuning=3,
    data="CIFAR-10",
):
    """Records in which the dual ascent needs 40 inner steps of time 1, 20 with another rate."""
    records = {}
    for case in CASES:
        task = SearchTask(case, 100, (0.1,))
        rows = [
            Tried(PUBLISHED_RATE, 39, 1.5, 1e-3, 1e-3),  # a value that is too good to be tangent
            Tried(PUBLISHED_RATE, 38, 1.01, 1e-1, 1e-3),
            Tried(PUBLISHED_RATE, 40, 0.99, 1e-3, 1e-3),
            Tried(0.1, 20, 1.0, 1e-3, 1e-3),
        ]
        series = dict(zip(Tried._fields, zip(*rows, strict=True), strict=True))
        quality_of_ours = {"our_value": value, "our_tangency": tangency, "our_rms": 0.0}
        name = f"search-{case.name}"
        records[name] = record(name, task, series, quality_of_ours)
        times = {"ours": ours, "inner_step": 1.0, "retraction": 1.0}
        name = f"cost-{case.name}"
        records[name] = record(name, CostTask(case, 3.0), {}, times)
    for method in CONTENDERS:
        tuning_seeds = tuple(range(3000, 3000 + tuning))
        task = TrainingTask(
            method, (0.1,), 0, NARROW, 5, 1024, tuning_seeds, tuple(range(seeds)), 10_000
        )
        accurate = accuracy if method == OURS else 0.45
        far = error if method == OURS else 1e-6
        rows = [Outcome(s, 0.1, 0.9, 1.0, 9.0, 1.0, math.nan, math.nan) for s in tuning_seeds]
        rows += [
            Outcome(i, 0.1, accurate + 0.01 * (i % 2), 1.0, far, 1.0, 0.9, 1e-3)
            for i in range(seeds)
        ]
        series = dict(zip(Outcome._fields, zip(*rows, strict=True), strict=True))
        name = f"training-{method}"
        records[name] = record(name, task, series, {"best": 0.1}, data)
    times = dict.fromkeys(CONTENDERS, 12.0) | {OURS: ours}
    task = StepTimes(tuple(CONTENDERS), NARROW, 1024, 3.0)
    return Records({**records, "step-times": record("step-times", task, {}, times)})


def verdicts(records):
    return [claim.judge(records).verdict for claim in MUON.claims]


def test_every_claim_can_hold_and_fail():
    holds, fails = Verdict.HOLDS, Verdict.FAILS
    assert verdicts(made_up()) == [holds] * 6
    assert verdicts(made_up(value=0.979))[0] is fails
    assert verdicts(made_up(tangency=0.011))[0] is fails
    assert verdicts(made_up(ours=6.9))[1:3] == [holds, holds]
    assert verdicts(made_up(ours=7.1))[1:3] == [holds, fails]  # 41 and 21 in all
    assert verdicts(made_up(ours=13.7))[1:3] == [fails, fails]
    assert verdicts(made_up(accuracy=0.4481))[3] is holds
    assert verdicts(made_up(accuracy=0.4479))[3] is fails
    assert verdicts(made_up(error=1.1e-5))[4] is fails
    assert verdicts(made_up(ours=4.1))[5] is fails


def test_what_decides_nothing_is_open():
    assert set(verdicts(Records({}))) == {Verdict.OPEN}
    assert verdicts(made_up(seeds=4))[3:5] == [Verdict.OPEN] * 2
    assert verdicts(made_up(tuning=2))[3:5] == [Verdict.OPEN] * 2
    assert verdicts(made_up(data="digits of scikit-learn"))[3:5] == [Verdict.OPEN] * 2
    some = "CIFAR-10, 1 of 5 training files (data_batch_1)"
    assert verdicts(made_up(data=some))[3:5] == [Verdict.HOLDS] * 2


def test_errors_are_those_of_the_seeds_that_judge():
    measured = MUON.claims[4].judge(made_up()).measured
    assert "9.0e+00" not in measured  # the tuning seed's
    assert "1.0e-06" in measured


def test_a_dual_ascent_that_does_not_get_there_costs_as_much_as_was_tried():
    records = made_up()
    search = records["search-gaussian-12x4"]
    assert needed(search, PUBLISHED_RATE) == 40
    assert needed(search) == 20
    assert time_of(CASES[1], records, PUBLISHED_RATE) == 41
    hopeless = search.result.series["tangency"] = [1.0] * 4
    assert hopeless
    assert needed(search) == math.inf
    assert time_of(CASES[1], records) == 101


def test_tables_show_what_is_recorded():
    directions, trainings, rates = (table.make(made_up(accuracy=0.46)) for table in MUON.tables)
    assert [len(row) for row in directions] == [9] * 3
    assert directions[2][:3] == ["gaussian 12x4", "40", "20"]
    assert directions[2][-2:] == ["0.049", "0.095"]
    assert trainings[1][0] == CONTENDERS[OURS].label  # the most accurate first
    assert trainings[1][2] == "46.40 ± 0.55 %"
    assert len(trainings) == 1 + len(CONTENDERS)
    assert rates[1] == [CONTENDERS[OURS].label, "0.1: 90.00"]
    records = made_up()
    records["search-gaussian-12x4"].result.series["tangency"] = [1.0] * 4
    assert MUON.tables[0].make(records)[2][1:3] == ["not in 100", "not in 100"]
    assert MUON.tables[0].make(records)[2][-1] == "< 0.02"
    for table in MUON.tables:
        with pytest.raises(MissingRecordError):
            table.make(Records({}))


def test_the_figure_has_curves_and_our_points():
    (figure,) = MUON.figures
    value, tangency = figure.draw(made_up()).axes
    curve, point, _ = tangency.lines
    assert list(curve.get_ydata()) == [1e-3, 1e-1, 1e-3]
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (2.0, 1e-6)
    assert value.get_xlabel().startswith("inner steps")


def test_a_small_run_from_end_to_end(data, store, watcher):
    from ortholand_lab.datasets import Source

    few = {"methods": (OURS, DUAL), "widths": NARROW, "layers": (), "cap": 4}
    settings = replace(MUON.settings["smoke"], **few)
    tiny = replace(MUON, settings={"smoke": settings})
    options = RunOptions("smoke", 0, "cpu", 1, data="CIFAR-10")
    done = run_study(tiny, options, store, watcher, Source("CIFAR-10", "", lambda: data))
    assert not done.missing
    assert watcher.done == watcher.total
    assert [len(rows) for _, rows in done.tables()] == [1 + 4, 1 + 2, 1 + 2]
    assert done.verdicts()[0] is Verdict.HOLDS
    assert set(done.verdicts()[1:]) == {Verdict.OPEN}


def test_it_is_a_benchmark_with_data():
    assert BENCHMARKS["muon"] is MUON
    assert MUON.dataset == "cifar10"
