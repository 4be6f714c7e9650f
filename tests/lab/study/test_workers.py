"""Units side by side: the same numbers, and nobody left behind, however a run ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from ortholand_lab.datasets import Source
from ortholand_lab.study.records import Result, Store
from ortholand_lab.study.runner import Job, collect, run_studies
from ortholand_lab.study.workers import WorkerError
from tests.lab.study.chores import (
    OPTIONS,
    STEPS,
    ChoreError,
    NoWatcher,
    chores,
    is_running,
    load_labels,
)

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0  # seconds until something that should happen counts as not happening
WALKS = {f"walk-{'i' * k}": "walk" for k in range(1, 6)}
TIMED = ("walk-ii", "walk-iiii")
READING = {f"reading-{name}": "walk" for name in WALKS}


class Counter(NoWatcher):
    """Adds up the ticks of each study."""

    def __init__(self):
        self.steps = {}

    def advance(self, study, steps):
        self.steps[study] = self.steps.get(study, 0) + steps


class Trace(NamedTuple):
    """Who did a unit, and when."""

    process: int
    begun: float
    ended: float
    threads: int


class Finished(NamedTuple):
    results: list[dict[str, Result]]
    steps: dict[str, int]
    traces: dict[str, Trace]
    readers: list[int]  # the processes that have read the data, once for each time


def finish(folder, processes) -> Finished:
    """A study with timed units and one with data, in so many processes."""
    source = Source("MNIST", "", partial(load_labels, str(folder)))
    jobs = [
        Job(chores(folder, WALKS, TIMED), OPTIONS),
        Job(
            chores(folder, READING, name="reading", dataset="mnist"),
            replace(OPTIONS, data="MNIST"),
            source,
        ),
    ]
    counter = Counter()
    runs = run_studies(jobs, Store(folder), counter, processes=processes)
    assert not any(run.missing for run in runs)
    results = [{name: record.result for name, record in run.records.items()} for run in runs]
    traces = {path.stem: trace(path) for path in folder.glob("*.done")}
    readers = [int(line) for line in (folder / "readers").read_text().split()]
    return Finished(results, counter.steps, traces, readers)


def trace(path) -> Trace:
    process, begun, ended, threads = path.read_text().split()
    return Trace(int(process), float(begun), float(ended), int(threads))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("alone"), processes=1)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("together"), processes=2)


def test_results_do_not_depend_on_how_many_run_at_once(alone, together):
    assert together.results == alone.results
    assert [len(results) for results in together.results] == [len(WALKS), len(READING)]


def test_units_are_shared_out_and_those_that_time_stay_in_the_main_process(alone, together):
    others = [t.process for name, t in together.traces.items() if name not in TIMED]
    assert os.getpid() not in others
    assert len(set(others)) == 2
    assert {together.traces[name].process for name in TIMED} == {os.getpid()}
    assert {t.process for t in alone.traces.values()} == {os.getpid()}
    assert {t.threads for t in together.traces.values()} == {OPTIONS.threads}


def test_nothing_runs_beside_a_unit_that_times(together):
    for name in TIMED:
        timed = together.traces[name]
        for other, t in together.traces.items():
            assert other == name or t.ended <= timed.begun or t.begun >= timed.ended


def test_every_step_is_told(alone, together):
    whole = {"chores": STEPS * len(WALKS), "reading": STEPS * len(READING)}
    assert alone.steps == together.steps == whole


def test_data_are_read_once_in_each_process(alone, together):
    assert alone.readers == [os.getpid()]
    assert len(together.readers) == len(set(together.readers)) <= 2
    assert os.getpid() not in together.readers


# Failures.


def run_two(folder, kinds, watcher=None, **changes):
    """Run units in two processes, none of which may be there afterwards."""
    before = set(multiprocessing.active_children())
    job = Job(chores(folder, kinds, **changes), OPTIONS)
    try:
        run_studies([job], Store(folder), watcher or NoWatcher(), processes=2)
    finally:
        assert set(multiprocessing.active_children()) <= before


def test_an_error_reaches_the_caller_as_it_is_and_what_was_done_is_kept(tmp_path):
    kinds = {**WALKS, "bad": "fail"}
    with pytest.raises(ChoreError, match=r"^bad failed$") as caught:
        run_two(tmp_path, kinds)
    assert "in fail" in str(caught.value.__cause__)  # what the worker was doing
    kept = collect(chores(tmp_path, kinds), OPTIONS, Store(tmp_path))
    assert "bad" in kept.missing
    assert len(kept.records) >= len(WALKS) - 1  # one may have been under way


def test_an_error_that_cannot_be_sent_is_told_in_words(tmp_path):
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*StubbornError: bad failed"):
        run_two(tmp_path, {"bad": "fail stubbornly"})


def test_a_worker_that_dies_is_an_error(tmp_path):
    with pytest.raises(WorkerError, match="A worker process has died"):
        run_two(tmp_path, {"walk": "walk", "bad": "die"})


def test_work_that_a_worker_cannot_import_is_told(tmp_path, monkeypatch):
    module = types.ModuleType("only_here")
    exec("def run(chore, context): pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(ModuleNotFoundError, match="only_here"):
        run_two(tmp_path, {"one": "walk"}, run=module.run)


def test_an_interrupted_run_leaves_no_workers(tmp_path):
    class Impatient(NoWatcher):
        def advance(self, study, steps):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_two(tmp_path, {"one": "tick for ever", "two": "sleep for ever"}, Impatient())
    assert (tmp_path / "one.running").exists()
    assert not any(map(is_running, tmp_path.glob("*.running")))


# Signals, to a program in a session of its own, as a terminal sends them.


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def program(tmp_path):
    """Starts it with two units of a kind; at the end nothing of it is left, whatever happens."""
    started = []

    def start(kind):
        command = [sys.executable, "-m", "tests.lab.study.chores", str(tmp_path), kind]
        started.append(
            subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
        )
        return started[0]

    yield start
    for process in started:
        with process, suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def both_run(folder):
    paths = list(folder.glob("*.running"))
    return len(paths) == 2 and all(map(is_running, paths))


def none_runs(folder):
    return not any(map(is_running, folder.glob("*.running")))


def test_ctrl_c_ends_workers_without_a_word_of_theirs(tmp_path, program):
    process = program("tick for ever")
    wait_until(lambda: both_run(tmp_path))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert none_runs(tmp_path)
    assert process.stderr.read() == b""


def test_so_it_does_while_they_start(tmp_path, program):
    process = program("tick for ever")
    wait_until((tmp_path / "begun").exists)
    time.sleep(0.5)  # they are importing torch
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert process.stderr.read() == b""


@pytest.mark.parametrize("kind", ["tick for ever", "sleep for ever"])
def test_workers_end_with_the_process_that_started_them(tmp_path, program, kind):
    process = program(kind)
    wait_until(lambda: both_run(tmp_path))
    process.kill()
    process.wait(PATIENCE)
    wait_until(lambda: none_runs(tmp_path))
