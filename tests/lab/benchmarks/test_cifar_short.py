"""A short training of ResNet-18: what is run, and what its end decides."""

from dataclasses import asdict

import pytest

from ortholand_lab.benchmarks import BENCHMARKS
from ortholand_lab.benchmarks.cifar_short import CIFAR_SHORT
from ortholand_lab.experiments.cifar import CIFAR_METHODS, ENOUGH, PAPER, TRAINING_CLAIMS
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.spec import BENCHMARK_PRESETS, Verdict

TEST_ERRORS = dict(zip(CIFAR_METHODS, (0.20, 0.195, 0.30), strict=True))
ERRORS = dict(zip(CIFAR_METHODS, (1e-4, 1e-3, 1e-3), strict=True))


def records_of(preset):
    """Records of trainings that end with the errors above."""
    options, kept = RunOptions(preset, 0, "cpu", 1), {}
    for unit in CIFAR_SHORT.units(preset):
        request = Request("cifar-short", 1, unit.name, options, asdict(unit.task), {})
        if unit.timed:
            places = list(range(len(unit.task.runs)))
            result = Result({"run": places, "seconds": [1.0] * len(places)}, {})
        else:
            method, end = unit.task.method, unit.task.iterations
            result = Result(
                {
                    "iteration": [0, end],
                    "train_loss": [2.3, 1.0],
                    "test_error": [0.9, TEST_ERRORS[method]],
                    "orthogonality_error": [1e-6, ERRORS[method]],
                    "largest_error": [1e-6, 0.3],
                },
                {},
            )
        kept[unit.name] = Record(request, result, {}, 0.0, "")
    return Records(kept)


def test_it_is_a_benchmark_of_cifar():
    assert BENCHMARKS["cifar-short"] is CIFAR_SHORT
    assert CIFAR_SHORT.dataset == "cifar10"


@pytest.mark.parametrize("preset", BENCHMARK_PRESETS)
def test_every_preset_trains_every_method_once_and_times_them_together(preset):
    *trainings, timing = CIFAR_SHORT.units(preset)
    assert tuple(unit.task.method for unit in trainings) == CIFAR_METHODS
    assert {unit.task.trial for unit in trainings} == {0}
    assert timing.timed
    assert tuple(run.method for run in timing.task.runs) == CIFAR_METHODS
    for unit in trainings:
        assert 0 < unit.task.lr_drop < unit.task.iterations


def test_the_whole_is_the_papers_network_and_long_enough_to_tell():
    for unit in CIFAR_SHORT.units("full")[:-1]:
        task = asdict(unit.task)
        assert all(task[name] >= least for name, least in ENOUGH.items())
        assert (task["width"], task["batch_size"]) == (PAPER.width, PAPER.batch_size)
        assert task["lr_drop"] / task["iterations"] == pytest.approx(100 / 150, abs=1e-3)


@pytest.mark.parametrize(("preset", "decided"), [("full", 4), ("quick", 1)])
def test_only_the_whole_decides_who_is_better(preset, decided):
    records = records_of(preset)
    verdicts = [claim.judge(records).verdict for claim in TRAINING_CLAIMS]
    assert sum(verdict is not Verdict.OPEN for verdict in verdicts) == decided
    if preset == "full":
        assert verdicts == [Verdict.HOLDS] * 4
