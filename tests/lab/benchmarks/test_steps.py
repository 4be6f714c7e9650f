"""The benchmark times what it says, and judges its targets on the records alone."""

import pytest
import torch
from typer.testing import CliRunner

from ortholand_lab.benchmarks.steps import (
    CASES,
    LENET,
    RIVALS,
    STEPS,
    StepsSettings,
    StepsTask,
    plan,
    run,
)
from ortholand_lab.benchmarks.steps.contenders import (
    StepsCase,
    bare_products,
    lenet_iterations,
    parameters,
    steps_of,
)
from ortholand_lab.cli import app
from ortholand_lab.study.records import (
    MissingRecordError,
    Record,
    Records,
    Request,
    Result,
    RunOptions,
    Store,
)
from ortholand_lab.study.report import markdown_table
from ortholand_lab.study.runner import collect
from ortholand_lab.study.spec import BENCHMARK_PRESETS, Context, Verdict

# Peers warn of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OURS = ("LandingAdam, after", "LandingSGD", "LandingSGD, after", "LandingSGD, momentum, after")
PEERS = ("POGO + VectorAdam", "POGO + SGD, momentum", "geoopt, RiemannianAdam")


def record(unit, values):
    request = Request("steps", 1, unit, RunOptions("quick", 0, "cpu", 1), {}, {})
    return Record(request, Result({}, values), {}, 1.0, "2026-01-01T00:00:00+00:00")


def made_up(*, ours=1.0, others=100.0, memory=1.0):
    """Records in which all our times, all others' and all peaks are the same."""
    actions = ("bare products", "bare Cayley solve", "landing by hand, unsafe", *RIVALS)
    floors = ("torch SGD, unconstrained", "torch AdamW, unconstrained")
    times = dict.fromkeys((*actions, *PEERS, *floors), others)
    times |= dict.fromkeys(OURS, ours)
    units = {f"{case}.1": times for case in (*CASES, "lenet-training")}
    units |= {f"{case}.memory": {"LandingSGD": memory} for case in CASES}
    units |= {f"size-{p}": times for p in (4, 8)} | {f"count-{n}": times for n in (1, 10)}
    return Records({unit: record(unit, dict(values)) for unit, values in units.items()})


def verdicts(records):
    return [claim.judge(records).verdict for claim in STEPS.claims]


def test_every_target_can_be_met_and_missed():
    assert set(verdicts(made_up())) == {Verdict.HOLDS}
    slow = verdicts(made_up(ours=1000.0, memory=2.5))
    assert set(slow) == {Verdict.FAILS}
    assert set(verdicts(Records({}))) == {Verdict.OPEN}


def test_a_target_against_a_peer_is_open_without_the_peer():
    records = made_up()
    for case in CASES:
        for name in [n for n in records[f"{case}.1"].result.values if "POGO" in n]:
            del records[f"{case}.1"].result.values[name]
    by_statement = {c.statement: c.judge(records).verdict for c in STEPS.claims}
    against_pogo = [v for s, v in by_statement.items() if "POGO" in s]
    assert set(against_pogo) == {Verdict.OPEN}
    assert Verdict.OPEN not in [v for s, v in by_statement.items() if "POGO" not in s]


def test_the_sum_over_lenet_is_a_sum():
    records = made_up(ours=1.0, others=2.0)
    claim = next(c for c in STEPS.claims if c.statement.startswith("LeNet's"))
    assert claim.judge(records).verdict is Verdict.HOLDS  # exactly twice as fast
    records[f"{LENET[0]}.1"].result.values["LandingSGD"] = 1.1
    assert claim.judge(records).verdict is Verdict.FAILS


def test_figures_and_tables_come_from_the_records():
    records = made_up()
    sizes, counts = (figure.draw(records).axes[0] for figure in STEPS.figures)
    assert sizes.get_xlabel().startswith("rows")
    assert counts.get_xlabel().startswith("number")
    assert len(counts.lines) == 7
    ours, peers, _ = (spec.make for spec in STEPS.tables)
    assert [row[0] for row in ours(records)[1:]] == list(CASES)
    assert ours(records)[1][1:3] == ["1e+03", "-"]
    assert peers(records)[1][1] == "1e+05 (1e+02)"
    assert markdown_table(ours(records)).count("\n") == 2 + len(CASES)


def test_a_table_has_the_cases_that_are_recorded():
    _, table, _ = STEPS.tables
    some = Records({unit: record for unit, record in made_up().items() if "40x40" in unit})
    del some["40x40.1"].result.values["POGO + SGD"]
    assert [row[:2] for row in table.make(some)[1:]] == [["40x40", "-"]]
    with pytest.raises(MissingRecordError):
        table.make(Records({}))


@pytest.mark.parametrize("preset", BENCHMARK_PRESETS)
def test_times_are_measured_alone_and_memory_is_not(preset):
    units = STEPS.units(preset)
    assert len({unit.name for unit in units}) == len(units)
    assert all(unit.timed != unit.name.endswith(".memory") for unit in units)
    assert all(bool(unit.task.seconds) == unit.timed for unit in units)


def test_what_is_planned():
    settings = StepsSettings(("40x40",), sizes=(4,), counts=(10,), threads=(1, 2), seconds=3.0)
    tasks = {unit.name: unit.task for unit in plan(settings)}
    case = StepsCase(1, (40, 40))
    assert tasks == {
        "40x40.1": StepsTask(case, 1, 3.0),
        "40x40.2": StepsTask(case, 2, 3.0),
        "lenet-training.1": StepsTask(None, 1, 3.0),
        "lenet-training.2": StepsTask(None, 2, 3.0),
        "size-4": StepsTask(StepsCase(1, (4, 4)), 1, 1.5),
        "count-10": StepsTask(StepsCase(1, (10, 3, 3), "kernel"), 1, 1.5),
        "40x40.memory": StepsTask(case),
    }


def test_memory_is_in_units_of_the_parameters():
    context = Context(0, torch.device("cpu"), lambda _: None)
    peaks = run(StepsTask(StepsCase(1, (64, 64))), context).values
    assert peaks["bare products"] == 0
    assert 0 <= peaks["LandingSGD"] <= 2
    assert peaks["landing by hand, unsafe"] >= 2


@pytest.mark.parametrize(
    "case",
    [StepsCase(2, (6, 6)), StepsCase(1, (9, 4)), StepsCase(1, (2, 2, 3, 3), "kernel")],
    ids=str,
)
def test_all_steps_can_be_made(case):
    for name, step in steps_of(case).items():
        step()
        assert callable(step), name


def test_lenet_is_trained_by_each():
    steps = lenet_iterations()
    assert {"LandingSGD", "LandingSGD, after"} < set(steps)
    for step in steps.values():
        step()


def test_the_bare_products_are_three_or_four():
    for case, count in ((StepsCase(1, (6, 6)), 3), (StepsCase(1, (9, 4)), 4)):
        action = bare_products(case)
        with torch.profiler.profile() as profile:
            action()
        assert sum(event.name == "aten::mm" for event in profile.events()) == count


def test_parameters_are_the_case():
    case = StepsCase(2, (3, 2, 4, 4), "kernel")
    assert case.matrices == 12
    assert [tuple(p.shape) for p in parameters(case)] == [(3, 2, 4, 4)] * 2
    assert [tuple(p.shape) for p in parameters(case, flat=True)] == [(6, 4, 4)] * 2
    assert [tuple(p.shape) for p in parameters(StepsCase(1, (4, 4)), stacked=True)] == [(1, 4, 4)]


def test_the_command_writes_records_figures_table_and_report(tmp_path):
    command = ["bench", "steps", "--preset", "smoke", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    run = collect(STEPS, RunOptions("smoke", 0, "cpu", 1), Store(tmp_path))
    assert not run.missing
    assert run.records["40x40.1"].value("LandingSGD") > 0
    assert "| SGD, not compiled |" in (tmp_path / "tables" / "steps-smoke-seed0.md").read_text()
    assert "lenet-96-of-5x5" in result.output
    assert (tmp_path / "figures" / "bench-size-smoke-seed0.svg").exists()
    assert (tmp_path / "report.html").exists()
