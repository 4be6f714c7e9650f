"""The study of half precision: what is run, and what is said of the records."""

import pickle
from dataclasses import asdict, replace

import pytest

from ortholand_lab.benchmarks.half_precision import (
    FULL,
    HALF_PRECISION,
    METHODS,
    ROUNDINGS,
    TYPES,
    HalfPrecisionSettings,
    make_table,
    plan,
    run,
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
from ortholand_lab.study.spec import Verdict

SETTINGS = HalfPrecisionSettings(steps=2, seeds=1)


def made_up(**losses):
    """Records in which losses are 1, or as given by the type; another task's is 1 always."""
    records = {}
    for unit in plan(SETTINGS):
        task = unit.task
        loss = losses.get(task.type, 1.0) if task.rounding == "compensated" else 2.0
        loss = 1.0 if task.type == FULL else loss
        values = {"loss tall all-data 0": 1.0, "loss square all-data 0": loss}
        request = Request(
            "half-precision", 1, unit.name, RunOptions("quick", 0, "cpu", 1), asdict(task), {}
        )
        result = Result({}, {**values, "error": 0.5, "bytes": 4.0})
        records[unit.name] = Record(request, result, {}, 1.0, "")
    return Records(records)


def verdicts(records):
    return [claim.judge(records).verdict for claim in HALF_PRECISION.claims]


def test_claims_can_hold_and_fail():
    assert verdicts(made_up()) == [Verdict.HOLDS] * 2
    assert verdicts(made_up(bfloat16=1.051)) == [Verdict.FAILS, Verdict.HOLDS]
    assert verdicts(made_up(bfloat16=0.949)) == [Verdict.FAILS, Verdict.HOLDS]
    assert verdicts(made_up(float16=float("nan"))) == [Verdict.HOLDS, Verdict.FAILS]
    assert verdicts(Records({})) == [Verdict.OPEN] * 2


def test_the_table_shows_the_worst():
    head, *rows = make_table(made_up(bfloat16=0.7))
    assert head == ["method", "float32", "type", *ROUNDINGS]
    assert len(rows) == len(METHODS) * len(TYPES)
    assert rows[0][1:3] == ["1.000, 5.0e-01, 4", "bfloat16"]
    assert rows[0][3:] == ["2.000, 5.0e-01, 4"] * 2 + ["0.700, 5.0e-01, 4"]
    with pytest.raises(MissingRecordError):
        make_table(Records({}))


def test_a_small_run_from_end_to_end(store, watcher):
    tiny = replace(HALF_PRECISION, settings={"smoke": SETTINGS})
    done = run_study(tiny, RunOptions("smoke", 0, "cpu", 1), store, watcher)
    assert not done.missing
    assert watcher.done == watcher.total
    records = done.records
    kept, plain = (
        records[unit_name("LandingSGD, lr 0.01", "bfloat16", rounding)].value("bytes")
        for rounding in ("compensated", "nearest")
    )
    assert (kept, plain) == (4, 2)
    assert records[unit_name("LandingAdam, lr 1e-3", FULL, "")].value("bytes") == 8


def test_units_can_be_sent_to_other_processes():
    for unit in plan(SETTINGS):
        function, task = pickle.loads(pickle.dumps((HALF_PRECISION.run, unit.task)))
        assert (function, task) == (run, unit.task)
