"""The benchmark measures what it says, and judges its claims on the records alone."""

import pickle
from dataclasses import asdict, replace

import pytest
import torch

import ortholand as ol
from ortholand_lab.benchmarks import orthogonality
from ortholand_lab.benchmarks.orthogonality import (
    DRIFT,
    DRIFTERS,
    NOISE,
    OPTIMIZERS,
    ORTHOGONALITY,
    OrthogonalitySettings,
    OrthogonalityTask,
    make_table,
    plan,
    run,
    title,
    unit_name,
)
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

CONTEXT = Context(seed=0, device=torch.device("cpu"), tick=lambda _: None)
SETTINGS = OrthogonalitySettings(
    noise=((1, 4, 4, 5), (3, 4, 4, 5)), drift=((1, 4, 4, 100, 1_000, 2_000),), seeds=3
)


@pytest.fixture(autouse=True)
def with_pogo(monkeypatch):
    monkeypatch.setattr(orthogonality, "find_spec", lambda name: object())


def noise(method, column=(3, 4, 4, 5), seeds=3):
    return OrthogonalityTask(NOISE, column, method, replace(SETTINGS, seeds=seeds))


@pytest.mark.parametrize("preset", BENCHMARK_PRESETS)
def test_every_optimizer_has_a_unit_in_every_column(preset):
    settings, units = ORTHOGONALITY.settings[preset], ORTHOGONALITY.units(preset)
    assert len({unit.name for unit in units}) == len(units)
    assert not any(unit.timed for unit in units)
    for column in settings.noise:
        methods = {u.task.method for u in units if u.task.column == column}
        assert methods >= {m for m in OPTIMIZERS if not m.endswith(("polar", "exponential"))}
        assert (methods == set(OPTIMIZERS)) == (column[1] <= 500)
    drift = [u.task.method for u in units if u.task.kind == DRIFT]
    assert drift == DRIFTERS
    assert len(DRIFTERS) == 7


def test_without_pogo_its_rows_are_left_out(monkeypatch):
    monkeypatch.setattr(orthogonality, "find_spec", lambda name: None)
    methods = {unit.task.method for unit in plan(SETTINGS)}
    assert methods == {m for m in OPTIMIZERS if "POGO" not in m}


def test_names_and_titles():
    assert title((1, 40, 40, 10_000), 10_000) == "40x40, 10,000 steps"
    column = (1920, 4, 4, 1_000)
    assert title(column, 1_000) == "1920 of 4x4, 1,000 steps"
    assert unit_name(NOISE, column, "POGO + SGD") == "noise-1920-of-4x4-1000-steps-pogo-sgd"


@pytest.mark.parametrize(
    ("method", "lr"), [("LandingSGD, coupled", 0.1), ("LandingAdam, after", 0.01)]
)
def test_the_error_after_noise_is_that_of_a_plain_loop(method, lr):
    errors = []
    kind, attraction = method.split(", ")
    for seed in range(3):
        X = torch.nn.Parameter(ol.random_orthogonal(3, 4, 4, seed=seed))
        optimizer = getattr(ol, kind)([X], lr=lr, view="kernel", attraction=attraction)
        generator = torch.Generator().manual_seed(1000 + seed)
        for _ in range(5):
            X.grad = torch.randn(3, 4, 4, generator=generator) / 2
            optimizer.step()
        D = X.detach().double()
        errors.append(torch.linalg.matrix_norm(D.mT @ D - torch.eye(4)).max().item())
    (error,) = run(noise(method), CONTEXT).values.values()
    assert error == pytest.approx(sorted(errors)[1])


def test_another_seed_is_other_noise():
    task = noise("LandingSGD, coupled")
    first, again = (run(task, CONTEXT).values for _ in range(2))
    assert first == again
    assert run(task, replace(CONTEXT, seed=1)).values != first


def test_errors_along_the_drift():
    column = (1, 4, 4, 10, 200)
    task = OrthogonalityTask(DRIFT, column, "LandingSGD, after", replace(SETTINGS, seeds=1))
    values = run(task, CONTEXT).values
    assert list(values) == ["4x4, 10 steps", "4x4, 200 steps"]
    assert max(values.values()) < 1e-5
    shorter = replace(task, column=(1, 4, 4, 10))
    assert run(shorter, CONTEXT).values["4x4, 10 steps"] == values["4x4, 10 steps"]


def test_ticks_add_up_to_the_steps():
    settings = OrthogonalitySettings(noise=((2, 4, 4, 3),), drift=((1, 4, 4, 2, 4),), seeds=2)
    for unit in plan(settings):
        if "POGO" not in unit.task.method:
            ticks = []
            run(unit.task, replace(CONTEXT, tick=ticks.append))
            assert sum(ticks) == unit.steps


def made_up(ours=1.0, landing_growth=1.0, retraction_growth=10.0, settings=SETTINGS):
    """Records in which landing's errors are ``ours``, all others 1, and they grow as asked."""
    records = {}
    for unit in plan(settings):
        task = unit.task
        growth = retraction_growth if "Riemannian" in task.method else landing_growth
        error = ours if task.method.startswith("Landing") else 1.0
        marks = task.column[3:]
        values = {title(task.column, k): error * (growth if k > 1_000 else 1.0) for k in marks}
        options = RunOptions("quick", 0, "cpu", 1)
        request = Request("orthogonality", 1, unit.name, options, asdict(task), {})
        records[unit.name] = Record(request, Result({}, values), {}, 1.0, "")
    return Records(records)


def verdicts(records):
    return [claim.judge(records).verdict for claim in ORTHOGONALITY.claims]


def test_claims_can_hold_and_fail():
    assert verdicts(made_up()) == [Verdict.HOLDS] * 3
    assert verdicts(made_up(ours=1.1)) == [Verdict.FAILS] * 2 + [Verdict.HOLDS]
    assert verdicts(made_up(landing_growth=2.1))[2] is Verdict.FAILS
    assert verdicts(made_up(retraction_growth=1.9))[2] is Verdict.FAILS


def test_one_column_above_pogo_is_enough_to_fail():
    records = made_up()
    unit = unit_name(NOISE, SETTINGS.noise[1], "LandingAdam, after")
    records[unit].result.values["3 of 4x4, 5 steps"] = 1.01
    assert verdicts(records) == [Verdict.HOLDS, Verdict.FAILS, Verdict.HOLDS]
    measured = ORTHOGONALITY.claims[1].judge(records).measured
    assert "4x4, 5 steps: 1.00; 3 of 4x4, 5 steps: 1.01" in measured


def test_without_records_claims_are_not_decided():
    assert verdicts(Records({})) == [Verdict.OPEN] * 3
    without = Records({name: r for name, r in made_up().items() if "pogo" not in name})
    assert verdicts(without) == [Verdict.OPEN, Verdict.OPEN, Verdict.HOLDS]
    cayley = unit_name(DRIFT, SETTINGS.drift[0], "RiemannianSGD, cayley")
    without = Records({name: r for name, r in made_up().items() if name != cayley})
    assert verdicts(without)[2] is Verdict.OPEN
    short = made_up(settings=replace(SETTINGS, drift=((1, 4, 4, 100, 1_000),)))
    assert verdicts(short)[2] is Verdict.OPEN


def test_tables_show_what_is_recorded():
    records = made_up(ours=0.5)
    missing = unit_name(NOISE, SETTINGS.noise[1], "POGO + SGD")
    records = Records({name: r for name, r in records.items() if name != missing})
    head, *rows = make_table(NOISE, records)
    assert head == ["", "4x4, 5 steps", "3 of 4x4, 5 steps"]
    assert [row[0] for row in rows] == list(OPTIMIZERS)
    assert rows[0] == ["LandingSGD, coupled", "5.0e-01", "5.0e-01"]
    assert rows[-2] == ["POGO + SGD", "1.0e+00", "-"]
    head, *rows = make_table(DRIFT, records)
    assert head == ["", "4x4, 100 steps", "4x4, 1,000 steps", "4x4, 2,000 steps"]
    assert [row[0] for row in rows] == DRIFTERS
    assert rows[-1] == ["RiemannianSGD, qr", "1.0e+00", "1.0e+00", "1.0e+01"]
    with pytest.raises(MissingRecordError):
        make_table(NOISE, Records({}))


def test_a_small_run_from_end_to_end(monkeypatch, store, watcher):
    monkeypatch.setattr(orthogonality, "find_spec", lambda name: None)
    settings = OrthogonalitySettings(noise=((2, 4, 4, 3),), drift=((1, 4, 4, 2, 4),), seeds=1)
    tiny = replace(ORTHOGONALITY, settings={"smoke": settings})
    done = run_study(tiny, RunOptions("smoke", 0, "cpu", 1), store, watcher)
    assert not done.missing
    assert watcher.done == watcher.total
    assert done.verdicts() == [Verdict.OPEN] * 3
    assert [len(rows) for _, rows in done.tables()] == [1 + 10, 1 + 7]


def test_units_can_be_sent_to_other_processes():
    for unit in plan(SETTINGS):
        function, task = pickle.loads(pickle.dumps((ORTHOGONALITY.run, unit.task)))
        assert (function, task) == (run, unit.task)
