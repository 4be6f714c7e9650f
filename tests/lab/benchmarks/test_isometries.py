"""The study of a step of an orthogonal convolution: what is run, and what is said of it."""

from dataclasses import asdict, replace

import pytest

from ortholand_lab.benchmarks.certified.contenders import AOC, CONTENDERS, LANDING
from ortholand_lab.benchmarks.isometries import (
    ISOMETRIES,
    LAYERS,
    METHODS,
    IsometrySettings,
    make_table,
    plan,
)
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import Verdict


def made_up(*, step: float = 0.7, peak: float = 0.9, methods=METHODS) -> Records:
    """Records in which landing takes these shares of what all others take."""
    records = {}
    for unit in plan(IsometrySettings()):
        values = {f"{m}-{q}": 1.0 for m in methods for q in ("step", "passes", "bytes")}
        values |= {f"{LANDING}-step": step, f"{LANDING}-bytes": peak}
        request = Request(
            "isometries", 1, unit.name, RunOptions("full", 0, "cpu", 1), asdict(unit.task), {}
        )
        records[unit.name] = Record(request, Result({}, values), {}, 1.0, "")
    return Records(records)


@pytest.mark.parametrize(
    ("records", "verdicts"),
    [
        (made_up(), [Verdict.HOLDS, Verdict.HOLDS]),
        (made_up(step=0.81), [Verdict.FAILS, Verdict.HOLDS]),
        (made_up(peak=1.01), [Verdict.HOLDS, Verdict.FAILS]),
        (made_up(methods=(LANDING,)), [Verdict.OPEN, Verdict.OPEN]),
        (Records({}), [Verdict.OPEN, Verdict.OPEN]),
    ],
)
def test_claims_can_hold_and_fail(records, verdicts):
    assert [claim.judge(records).verdict for claim in ISOMETRIES.claims] == verdicts


def test_the_table_has_a_row_for_each_layer_and_method():
    _, *rows = make_table(made_up())
    assert [row[:2] for row in rows[:2]] == [
        ["64-64-k3", CONTENDERS[m].label] for m in (LANDING, AOC)
    ]
    assert rows[1][4] == "1.43"
    assert len(rows) == len(LAYERS) * len(METHODS)


def test_a_small_run_from_end_to_end(store, watcher):
    small = IsometrySettings(batch_size=1, pixels=8, repetitions=1)
    tiny = replace(ISOMETRIES, settings={"smoke": small}, plan=lambda s: plan(s)[:1])
    run = run_study(tiny, RunOptions("smoke", 0, "cpu", 1), store, watcher)
    assert not run.missing
    [record] = run.records.values()
    assert all(record.value(f"{LANDING}-{q}") > 0 for q in ("step", "passes", "bytes"))
