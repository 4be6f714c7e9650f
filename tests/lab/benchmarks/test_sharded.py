"""Steps of sharded weights: formulas, counts on ranks, and the page that tells of both."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ortholand_lab.benchmarks.sharded import SHARDED, TABLES, plan, run
from ortholand_lab.benchmarks.sharded.costs import (
    GPUS,
    SCENES,
    Weights,
    landing_owners,
    landing_rows,
    predict,
)
from ortholand_lab.benchmarks.sharded.counting import OWNERS, ROWS, WIDE, Case
from ortholand_lab.benchmarks.sharded.peers import LIBRARIES, OURS, outcome, train_all
from ortholand_lab.benchmarks.sharded.ranks import on_ranks
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.report import markdown_table
from ortholand_lab.study.spec import Context, Verdict

PAGE = (Path(__file__).parents[3] / "docs/results/at_scale_costs.md").read_text()
TABLE_OF = {spec.name: spec.make for spec in TABLES}
MESSAGES = {ROWS: (1, 0), "LandingAdam, rows": (1, 0), WIDE: (1, 2)}  # the others: owners


def record_of(unit, result):
    options = RunOptions("quick", 0, "cpu", 1)
    request = Request("sharded", 1, unit.name, options, asdict(unit.task), {})
    return Record(request, result, {}, 1.0, "2026-01-01T00:00:00+00:00")


def made_up(preset="full", *, more=0.0, sums=0, distance=1e-5):
    """Records in which exactly the formulas were counted, or more than they say."""
    records = {}
    for unit in plan(SHARDED.settings[preset]):
        task = unit.task
        costs = [case.cost(task.ranks) for case in task.cases]
        calls = [MESSAGES.get(case.way, (0, 2)) for case in task.cases]
        series = {
            "received": [cost.received * (1 + more) for cost in costs],
            "products": [cost.products for cost in costs],
            "seconds": [1e-3] * len(costs),
            "all-reduce": [a + sums for a, _ in calls],
            "all-to-all": [b for _, b in calls],
        }
        result = Result(series, {}) if task.cases else Result({}, {OURS: distance})
        records[unit.name] = record_of(unit, result)
    return Records(records)


def verdicts(records):
    return [claim.judge(records).verdict for claim in SHARDED.claims]


def test_every_claim_can_be_met_and_missed():
    assert set(verdicts(made_up())) == {Verdict.HOLDS}
    assert set(verdicts(made_up(more=0.01, sums=1, distance=1e-3))) == {Verdict.FAILS}
    assert set(verdicts(Records({}))) == {Verdict.OPEN}
    assert verdicts(made_up("smoke"))[:2] == [Verdict.HOLDS, Verdict.OPEN]


def test_what_differs_is_named():
    finding = SHARDED.claims[0].judge(made_up(more=0.01))
    assert f"{ROWS}, 4 of 2048 x 64: " in finding.measured


def test_a_weight_that_was_not_trained_is_not_orthogonal():
    records = made_up()
    values = records["peers"].result.values
    del values[OURS]
    values[f"{OURS}: RuntimeError: no"] = float("nan")
    finding = SHARDED.claims[-1].judge(records)
    assert (finding.measured, finding.verdict) == ("RuntimeError: no", Verdict.FAILS)


def test_a_few_numbers_more_than_the_formula_are_allowed_and_a_matrix_more_is_not():
    case = Case(OWNERS, 128, 64, 4)
    received, products, _ = case.cost(2)
    assert case.agrees(received + 18, products, 2)
    assert not case.agrees(received + 19, products, 2)
    assert not case.agrees(received, products + 1, 2)


def test_all_processes_are_started_from_units_that_run_alone():
    for preset in SHARDED.settings:
        assert all(unit.timed for unit in SHARDED.units(preset))


# --- the page


def test_the_tables_on_paper_are_what_the_formulas_say():
    rows = [
        line for size in SCENES.values() for line in markdown_table(predict(*size)).splitlines()
    ]
    assert len(rows) > 30
    for row in rows:
        assert row in PAGE
    for scene in SCENES:
        assert f"\n{scene}\n" in PAGE


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_formulas_of_the_counted_tables_are_those_of_the_page(ranks):
    (table,) = [part for part in PAGE.split("\nOn ") if part.startswith(f"{ranks} ranks:")]
    told = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:19]
    made = TABLE_OF[f"sharded-counted-{ranks}"](made_up())[1:]
    formulas = [[row[i].removeprefix("| ") for i in (0, 1, 4, 6)] for row in told]
    assert formulas == [[row[i] for i in (0, 1, 4, 6)] for row in made]


def cells(name, scene, **speeds):
    """Gigabytes and milliseconds of one way, by the number of GPUs."""
    (row,) = [row for row in predict(*SCENES[scene], **speeds) if row[0] == name]
    numbers = [float(cell.replace(",", "")) for cell in row[1:]]
    return dict(zip(GPUS, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def test_what_the_page_concludes():
    for R in GPUS:  # 1 MB where everything else moves gigabytes
        weights = Weights(*SCENES["one tall matrix of 1,000,000 x 256"], R)
        assert 4 * landing_rows(weights).received < 1.1e6
        assert 4 * landing_owners(weights).received > 2.5e9
    many = "1,000 tall matrices of 8192 x 2048"
    rows, owners = cells("landing, rows", many), cells("landing, owners", many)
    assert rows[512][1] / owners[512][1] == pytest.approx(137, rel=0.05)


def test_speeds_are_taken_as_given():
    """Each of three parts of the time counts when the two others cost nothing."""
    scene, free = "one tall matrix of 1,000,000 x 256", 1e12
    n, p, _ = SCENES[scene]
    time = {"products": free, "decompositions": free}
    (received, milliseconds) = cells("QR, owners", scene, bandwidth=0.5, **time)[8]
    assert milliseconds == pytest.approx(1e3 * received / 0.5, rel=0.05)
    time = {"bandwidth": free, "decompositions": free}
    milliseconds = cells("QR, owners", scene, products=0.5, **time)[8][1]
    assert milliseconds == pytest.approx(1e3 * 12 * n * p**2 / 0.5e12, rel=0.01)
    time = {"bandwidth": free, "products": free}
    milliseconds = cells("QR, owners", scene, decompositions=0.5, **time)[8][1]
    assert milliseconds == pytest.approx(1e3 * n * p**2 / 0.5e12, rel=0.01)


# --- on ranks


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(2, marks=pytest.mark.distributed),
        pytest.param(4, marks=pytest.mark.slow_distributed),
    ],
)
def test_formulas_and_counts_agree(ranks):
    unit, done = SHARDED.units("smoke")[0], []
    context = Context(0, torch.device("cpu"), done.append)
    record = record_of(unit, run(replace(unit.task, ranks=ranks), context))
    assert sum(done) == unit.steps
    records = Records({f"counts-{n}": record for n in (2, ranks)})
    claims = {2: SHARDED.claims[0], 4: SHARDED.claims[1]}
    for claim in (claims[ranks], SHARDED.claims[2]):
        finding = claim.judge(records)
        assert finding.verdict is Verdict.HOLDS, finding.measured
    table = TABLE_OF[f"sharded-counted-{ranks}"](records)
    assert len(table) == 18
    assert sum("all-reduce" in row[2] for row in table) == 3
    assert all(float(row[-1]) > 0 for row in table[1:])


@pytest.mark.slow_distributed
def test_peers_train_or_say_why_not():
    first, second = on_ranks(2, train_all, tick=lambda _: None)
    values = {name: value for result in first for name, value in result.items()}
    assert [list(result) for result in first] == [list(result) for result in second]
    assert values[OURS] < 1e-4
    assert values["torch's parametrization"] < 1e-4
    rows = TABLE_OF["sharded-peers"](
        Records({"peers": record_of(SHARDED.units("smoke")[-1], Result({}, values))})
    )
    assert [row[0] for row in rows[1:]] == list(LIBRARIES)
    assert all(row[1] for row in rows)


def test_outcomes_in_words():
    values = {"geoopt": 2.1, "POGO: RuntimeError: no": float("nan")}
    assert outcome("geoopt", values) == "‖XᵀX - I‖ = 2.1e+00"
    assert outcome("POGO", values) == "RuntimeError: no"
    assert outcome("geotorch", values) == "not run"


def fails_on_a_rank():
    yield {"fine": 1.0}
    raise ValueError("so it goes")


@pytest.mark.distributed
def test_a_rank_that_fails_ends_the_run_with_its_message():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="so it goes"):
        on_ranks(1, fails_on_a_rank, tick=lambda _: None)
