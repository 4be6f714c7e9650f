import io
from dataclasses import replace

import pytest
import torch

import ortholand
from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments.batch_size import (
    BATCH_SIZE,
    BATCH_SIZES,
    PAPER_METHODS,
    TIMED_METHODS,
    BatchSizeSettings,
    plan,
    start_any,
    times_per_batch,
    unit_name,
)
from ortholand_lab.experiments.classification import TrainingRun
from ortholand_lab.methods import careful
from ortholand_lab.study.records import Records
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import Timing
from tests.lab.experiments import made


def images(n=256):
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (n, 1, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.arange(n) % 10
    return Dataset("random", pictures, labels, pictures, labels)


CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None, data=images())
RUN = TrainingRun(method="landing", lr=0.01, batch_size=4, iterations=3, points=0, test_images=0)


# The plan and the training.


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_times_all_methods_at_every_batch_size(preset):
    units = BATCH_SIZE.units(preset)
    *units, small, large = units
    for unit, batch_size in ((small, 2), (large, 256)):
        assert unit.name == unit_name(batch_size, PAPER_METHODS)
        assert {(t.method, t.batch_size) for t in unit.task.runs} == {
            (method, batch_size) for method in PAPER_METHODS
        }
    assert [unit.name for unit in units] == [unit_name(n) for n in BATCH_SIZES]
    assert BATCH_SIZES == (2, 4, 8, 16, 32, 64, 128, 256)
    assert all(unit.timed for unit in (*units, small, large))
    for unit, batch_size in zip(units, BATCH_SIZES, strict=True):
        assert [(t.method, t.batch_size) for t in unit.task.runs] == [
            (method, batch_size) for method in TIMED_METHODS
        ]


@pytest.mark.parametrize("method", dict.fromkeys((*TIMED_METHODS, *PAPER_METHODS)))
def test_every_method_does_what_its_name_says(method):
    training = start_any(replace(RUN, method=method), CONTEXT)
    model = training.trainee.model
    before = model.conv2.weight.detach().clone()
    training.advance_to(2)
    after = model.conv2.weight.detach()
    assert not torch.equal(before, after)
    error = ortholand.orthogonality_error(after, view="kernel")
    assert (error < (0.5 if method == "landing" else 1e-5)) == (method != "unconstrained")


@pytest.mark.parametrize("method", ["polar", "qr"])
def test_the_retractions_that_the_paper_leaves_out_step_as_the_others(method):
    """All retractions agree to first order."""
    moved = []
    for name in (method, "exponential"):
        training = start_any(replace(RUN, method=name, lr=1e-3), CONTEXT)
        before = training.trainee.model.conv1.weight.detach().clone()
        training.advance_to(1)
        moved.append(training.trainee.model.conv1.weight.detach() - before)
    step, expected = moved
    assert expected.norm() > 1e-4
    torch.testing.assert_close(step, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    assert not torch.equal(step, expected)


def test_a_unit_times_all_methods_in_turn():
    unit = plan(BatchSizeSettings(warm_up=1, repetitions=2))[0]
    ticks = []
    result = BATCH_SIZE.run(unit.task, replace(CONTEXT, tick=ticks.append))
    assert sorted(result.series["run"]) == sorted([*range(len(TIMED_METHODS))] * 2)
    assert min(result.series["seconds"]) > 0
    assert sum(ticks) == unit.steps


# Claims, on records made by hand.

GAIN, BOTTLENECK, DOMINANT, FASTEST = range(4)
EXTRA = {  # milliseconds that the constraint costs, whatever the batch size
    "landing": 1.0,
    "exponential": 5.0,
    "cayley": 4.0,
    "polar": 6.0,
    "qr": 6.0,
    "trivialization-sgd": 20.0,
    "unconstrained": 0.0,
}


def made_records(extra=EXTRA, per_image=0.1, start=1.0, repetitions=7):
    units = {}
    for unit in plan(BatchSizeSettings(warm_up=0, repetitions=repetitions)):
        assert isinstance(unit.task, Timing)
        times = [
            start + per_image * t.batch_size + extra[careful(t.method)] for t in unit.task.runs
        ]
        series = made.turns([1e-3 * time for time in times], repetitions)
        units[unit.name] = made.record("batch-size", unit.task, series, "quick")
    return Records(units)


def verdicts(records):
    return [claim.judge(records).verdict for claim in BATCH_SIZE.claims]


def test_all_claims_hold_where_the_constraint_costs_the_same_at_every_size():
    records = made_records()
    assert times_per_batch(records, 8)["cayley"] == pytest.approx(1e-3 * (1 + 0.8 + 4))
    assert verdicts(records) == [Verdict.HOLDS] * 4


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        (dict(per_image=0.0), {GAIN, DOMINANT}),
        (dict(start=6.0), {BOTTLENECK}),
        (dict(per_image=0.01, start=0.5), {DOMINANT}),
        (dict(extra={**EXTRA, "landing": 4.5}), {GAIN, FASTEST}),
        (dict(extra={**EXTRA, "qr": 0.8}), {FASTEST}),
        (dict(extra={**EXTRA, "trivialization-sgd": 0.8}), {FASTEST}),
        (dict(extra={**EXTRA, "qr": 0.95}), set()),
    ],
)
def test_claims_fail_where_they_should(changes, fails):
    found = verdicts(made_records(**changes))
    assert {i for i, verdict in enumerate(found) if verdict is Verdict.FAILS} == fails
    assert Verdict.OPEN not in found


def test_a_share_near_a_half_is_not_told_from_it():
    """With batches of 2 and Cayley, 4 / (4 + 4) of the time."""
    found = verdicts(made_records(start=3.8))
    assert [i for i, verdict in enumerate(found) if verdict is not Verdict.HOLDS] == [BOTTLENECK]
    assert found[BOTTLENECK] is Verdict.OPEN


def test_few_repetitions_decide_nothing():
    assert verdicts(made_records(repetitions=2)) == [Verdict.OPEN] * 4


def test_a_missing_batch_size_leaves_open_what_needs_it():
    records = made_records()
    some = Records({name: records[name] for name in records if "256" not in name})
    found = verdicts(some)
    assert [i for i, v in enumerate(found) if v is Verdict.OPEN] == [GAIN, DOMINANT, FASTEST]


def test_the_figure_has_a_curve_for_every_method():
    figure = BATCH_SIZE.figures[0].draw(made_records())
    (axes,) = figure.axes
    assert len(axes.lines) == len(TIMED_METHODS)
    for line, method in zip(axes.lines, TIMED_METHODS, strict=True):
        assert list(line.get_xdata()) == list(BATCH_SIZES)
        assert line.get_ydata()[0] == pytest.approx(1 + 0.2 + EXTRA[method])
    figure.savefig(io.BytesIO(), format="svg")
