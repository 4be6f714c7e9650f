"""The benchmark times what it says, and judges its targets on the records alone."""

import json

import pytest
import torch
from ortholand.lab.benchmarks.steps.timing import interleaved_medians, peak_bytes
from typer.testing import CliRunner

from ortholand.lab.benchmarks.steps import BENCH, CASES, bench_json, markdown_table
from ortholand.lab.benchmarks.steps.actions import Case, actions_for, bare_products, parameters
from ortholand.lab.benchmarks.steps.study import LENET, PEERS, draw_counts, draw_sizes
from ortholand.lab.cli import app
from ortholand.lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand.lab.study.spec import Verdict

# Of peers, about torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OURS = ("LandingSGD", "LandingSGD, after")


def record(unit, values):
    request = Request("bench", 1, unit, RunOptions("quick", 0, "cpu", 1), {}, {})
    return Record(request, Result({}, values), {}, 1.0, "2026-01-01T00:00:00+00:00")


def made_up(*, ours=1.0, others=100.0, memory=1.0):
    """Records in which all our times, all others' and all peaks are the same."""
    actions = ("bare products", "bare Cayley solve", "landing by hand, unsafe", *PEERS)
    times = dict.fromkeys((*actions, "torch SGD, unconstrained"), others)
    times |= dict.fromkeys(OURS, ours)
    units = {f"{case}.1": times for case in (*CASES, "lenet-training")}
    units |= {f"{case}.memory": {"LandingSGD": memory} for case in CASES}
    units |= {f"size-{p}": times for p in (4, 8)} | {f"count-{n}": times for n in (1, 10)}
    return Records({unit: record(unit, dict(values)) for unit, values in units.items()})


def verdicts(records):
    return [claim.judge(records).verdict for claim in BENCH.claims]


def test_every_target_can_be_met_and_missed():
    assert set(verdicts(made_up())) == {Verdict.HOLDS}
    slow = verdicts(made_up(ours=1000.0, memory=2.5))
    assert set(slow) == {Verdict.FAILS}
    assert set(verdicts(Records({}))) == {Verdict.OPEN}


def test_a_target_against_a_peer_is_open_without_the_peer():
    records = made_up()
    for case in CASES:
        del records[f"{case}.1"].result.values["POGO + SGD"]
    by_statement = {c.statement: c.judge(records).verdict for c in BENCH.claims}
    against_pogo = [v for s, v in by_statement.items() if "POGO" in s]
    assert set(against_pogo) == {Verdict.OPEN}
    assert Verdict.OPEN not in [v for s, v in by_statement.items() if "POGO" not in s]


def test_the_sum_over_lenet_is_a_sum():
    records = made_up(ours=1.0, others=2.0)
    claim = next(c for c in BENCH.claims if c.statement.startswith("LeNet's"))
    assert claim.judge(records).verdict is Verdict.HOLDS  # exactly twice as fast
    records[f"{LENET[0]}.1"].result.values["LandingSGD"] = 1.1
    assert claim.judge(records).verdict is Verdict.FAILS


def test_figures_and_tables_come_from_the_records():
    records = made_up()
    assert draw_sizes(records).axes[0].get_xlabel().startswith("rows")
    assert len(draw_counts(records).axes[0].lines) == 7
    table = markdown_table(records)
    assert table.count("\n") == 2 + 9
    assert "1e+03 (1)" in table
    assert json.loads(bench_json(records))["40x40.1"]["LandingSGD"] == 1.0


@pytest.mark.parametrize(
    "case", [Case(2, (6, 6)), Case(1, (9, 4)), Case(1, (2, 2, 3, 3), "kernel")], ids=str
)
def test_all_actions_step(case):
    for name, action in actions_for(case).items():
        action()
        assert callable(action), name


def test_the_bare_products_are_three_or_four():
    for case, count in ((Case(1, (6, 6)), 3), (Case(1, (9, 4)), 4)):
        action = bare_products(case)
        with torch.profiler.profile() as profile:
            action()
        assert sum(event.name == "aten::mm" for event in profile.events()) == count


def test_parameters_are_the_case():
    case = Case(2, (3, 2, 4, 4), "kernel")
    assert case.matrices == 12
    assert [tuple(p.shape) for p in parameters(case)] == [(3, 2, 4, 4)] * 2
    assert [tuple(p.shape) for p in parameters(case, flat=True)] == [(6, 4, 4)] * 2
    assert [tuple(p.shape) for p in parameters(Case(1, (4, 4)), stacked=True)] == [(1, 4, 4)]


def test_medians_and_peaks():
    calls = []
    times = interleaved_medians(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0, least=5
    )
    assert times.keys() == {"a", "b"}
    assert calls.count("a") == calls.count("b") == 2 + 5
    x = torch.zeros(1000)

    def two_at_once():
        y = x + 1
        return float((y + 1).sum())

    assert 8000 <= peak_bytes(two_at_once) < 9000


def test_the_command_writes_times_figures_and_report(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--preset", "smoke", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    times = json.loads((tmp_path / "bench.json").read_text())
    assert times["40x40.1"]["LandingSGD"] > 0
    assert "| LandingSGD |" in (tmp_path / "bench.md").read_text()
    assert "| LandingSGD |" in result.output
    assert (tmp_path / "report.html").exists()
