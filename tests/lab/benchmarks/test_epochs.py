"""LeNet-5 trained in turn: what is run, what is recorded, and the table."""

from dataclasses import asdict, replace

import pytest
import torch

from ortholand_lab.benchmarks import BENCHMARKS
from ortholand_lab.benchmarks.epochs import (
    MNIST_EPOCH,
    TRAINING,
    EpochSettings,
    plan,
    table,
    train_in_turn,
)
from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments.mnist import BEST_RATES, start_lenet
from ortholand_lab.methods import TRAINING_METHODS
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.spec import BENCHMARK_PRESETS, Context

LENET = EpochSettings(iterations=10, batch_size=4, test_images=20)


def random_context(n=24):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 1, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.arange(n) % 10
    data = Dataset("random", images, labels, images, labels)
    return Context(seed=3, device=torch.device("cpu"), tick=lambda _: None, data=data)


CONTEXT = random_context()


def test_it_is_a_benchmark_with_its_own_data():
    assert BENCHMARKS["mnist-epoch"] is MNIST_EPOCH
    assert MNIST_EPOCH.dataset == "mnist"


@pytest.mark.parametrize("preset", BENCHMARK_PRESETS)
def test_every_preset_is_one_timed_unit_with_every_method(preset):
    (unit,) = MNIST_EPOCH.units(preset)
    iterations = MNIST_EPOCH.settings[preset].iterations
    assert unit.timed
    assert unit.steps == unit.task.repetitions == iterations
    assert unit.task.warm_up == 0  # every iteration is one of the training
    assert tuple(run.method for run in unit.task.runs) == TRAINING_METHODS
    assert {run.iterations for run in unit.task.runs} == {iterations}


def test_the_whole_epoch_passes_all_images_once():
    (epoch,) = MNIST_EPOCH.units("full")
    assert {run.batch_size * run.iterations for run in epoch.task.runs} == {60_000}
    assert {run.test_images for run in epoch.task.runs} == {10_000}


def test_learning_rates_are_the_methods_own():
    (unit,) = plan(LENET)
    assert {run.method: run.lr for run in unit.task.runs} == BEST_RATES


def test_taking_turns_changes_nothing_of_a_training():
    (unit,) = plan(LENET)
    ticks = []
    result = train_in_turn(unit.task, replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == unit.steps
    for i, run in enumerate(unit.task.runs):
        alone = start_lenet(run, CONTEXT)
        alone.advance_to(LENET.iterations)
        loss = float(alone.losses[-1])  # the last tenth of so few is the last one
        point = alone.measure(LENET.test_images)
        assert result.series["train_loss"][i] == pytest.approx(loss)
        assert result.series["test_error"][i] == point.test_error
        assert result.series["orthogonality_error"][i] == point.orthogonality_error
        assert result.series["iteration"][i] == LENET.iterations


def test_times_are_sums_medians_and_multiples_of_the_first():
    (unit,) = plan(LENET)
    series = train_in_turn(unit.task, CONTEXT).series
    first = series["milliseconds"][0]
    assert series["to_first"][0] == 1
    for seconds, middle, multiple in zip(
        series["seconds"], series["milliseconds"], series["to_first"], strict=True
    ):
        # At least half of the iterations take the median or longer.
        assert seconds >= LENET.iterations / 2 * middle / 1e3 > 0
        assert multiple == pytest.approx(middle / first)


def test_the_loss_is_the_mean_of_the_last_tenth():
    settings = replace(LENET, iterations=20)
    (unit,) = plan(settings)
    run = unit.task.runs[0]
    only = replace(unit.task, runs=(run,))
    alone = start_lenet(run, CONTEXT)
    alone.advance_to(20)
    expected = sum(float(loss) for loss in alone.losses[-2:]) / 2
    assert train_in_turn(only, CONTEXT).series["train_loss"][0] == pytest.approx(expected)


def test_the_table_has_a_row_for_each_method():
    (unit,) = plan(LENET)
    count = len(TRAINING_METHODS)
    series = {
        "seconds": [1234.0, 20.0, *[30.0] * (count - 2)],
        "milliseconds": [100.0, 250.0, *[1500.0] * (count - 2)],
        "to_first": [1.0, 2.5, *[15.0] * (count - 2)],
        "train_loss": [2.0, 2.1, *[float("nan")] * (count - 2)],
        "test_error": [0.25, 0.5, *[0.9] * (count - 2)],
        "orthogonality_error": [1e-3, 2e-4, *[3e-6] * (count - 2)],
    }
    options = RunOptions("full", 0, "cpu", 1)
    request = Request("mnist-epoch", 1, TRAINING, options, asdict(unit.task), {})
    records = Records({TRAINING: Record(request, Result(series, {}), {}, 0.0, "")})
    head, *rows = table(records)
    assert len(rows) == count
    assert head[:5] == ["method", "lr", "time, s", "median, ms", "to first"]
    assert all(len(row) == len(head) for row in rows)
    assert rows[0][:2] == ["landing", "0.0625"]
    assert rows[0][2:] == ["1,234.0", "100.00", "1.00", "2.000", "25.00%", "1.0e-03"]
    assert rows[2][2:] == ["30.0", "1,500.00", "15.00", "nan", "90.00%", "3.0e-06"]
    assert [spec.make for spec in MNIST_EPOCH.tables] == [table]
