"""With processes: a run that is killed resumes, and a file gets no control codes.

Run as a script, this file is the ortholand command with experiments that take a second or two.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from ortholand_lab import cli
from ortholand_lab.datasets import find_dataset
from ortholand_lab.experiments.procrustes import PROCRUSTES, ProcrustesSettings
from ortholand_lab.study.records import Record, Result, RunOptions, Store
from ortholand_lab.study.runner import Run, run_study
from ortholand_lab.study.spec import AnyStudy, Context, Study, Unit


@dataclass(frozen=True)
class Task:
    index: int
    steps: int = 10


def run(task: Task, context: Context) -> Result:
    """A random walk, slow enough to be killed on its way; with data, through its pixels."""
    random = torch.Generator().manual_seed(1000 * context.seed + task.index)
    y = []
    for _ in range(task.steps):
        draw = torch.randn(3, generator=random).double()
        if context.data is not None:
            draw = draw * context.data.train_images[task.index].double().mean()
        y.append(float(draw.sum()))
        time.sleep(0.005)
        context.tick(1)
    return Result({"y": y}, {"last": y[-1]})


def plan(_: object) -> list[Unit[Task]]:
    return [Unit(f"walk-{i}", Task(i), 10) for i in range(6)]


WALKS: AnyStudy = Study(
    name="walks",
    title="Walks",
    paper_figure="Figure 0",
    summary="",
    settings=dict.fromkeys(("smoke", "paper"), Task(0)),
    plan=plan,
    run=run,
    claims=(),
    figures=(),
)
SMALL = ProcrustesSettings(p=4, iterations=60, extra_iterations=30, warm_up=2, repetitions=3)
PROCRUSTES_SMALL = replace(
    PROCRUSTES, settings={"smoke": SMALL, "paper": SMALL}, claims=(), figures=()
)
WALKS_ON_DATA = replace(WALKS, name="walks-on-data", dataset="mnist")
EXPERIMENTS = {e.name: e for e in (WALKS, PROCRUSTES_SMALL, WALKS_ON_DATA)}


def start(out: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, __file__, "reproduce", "--preset", "smoke", "--offline"]
    # Some environments ask for colours everywhere; a file must not get them even then.
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    with log.open("w") as file:
        return subprocess.Popen(
            [*command, "--threads", "1", "--out", str(out)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def signal_after(process: subprocess.Popen, log: Path, ready: Callable[[str], bool], kind: int):
    """Send a signal as soon as the log says so; what came out is left in the log."""
    limit = time.monotonic() + 180
    while not ready(log.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(kind)
    process.wait(60)


def records_in(out: Path) -> dict[str, bytes]:
    paths = out.glob("records/*/*/*.json")
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def run_all(out: Path, watcher) -> dict[str, Run]:
    """What the command does, in this process; MNIST where it is found, or what stands in."""
    data = find_dataset("mnist", offline=True)
    options = RunOptions("smoke", 0, "cpu", 1)
    return {
        name: run_study(
            experiment,
            replace(options, data=data.identity) if experiment.dataset else options,
            Store(out),
            watcher,
            data if experiment.dataset else None,
        )
        for name, experiment in EXPERIMENTS.items()
    }


def numbers(record: Record):
    series = {name: y for name, y in record.result.series.items() if name != "seconds"}
    return series, record.result.values


def test_a_run_killed_again_and_again_ends_with_the_same_numbers(tmp_path, watcher):
    whole = run_all(tmp_path / "whole", watcher)  # in one go
    total = sum(len(run.records) for run in whole.values())

    out, random, saved = tmp_path / "killed", Random(0), {}
    out.mkdir()
    # In the middle of the first experiment, and of one of the others.
    for units in (random.randint(1, 5), random.randint(8, total - 2)):
        log = tmp_path / f"log-{units}"

        def ready(text: str, units: int = units) -> bool:
            return len(re.findall(r": (?:\d+\.\d s|recorded already)\n", text)) >= units

        signal_after(start(out, log), log, ready, signal.SIGKILL)
        assert saved.items() <= records_in(out).items()  # what was recorded was kept
        saved = records_in(out)
        assert units <= len(saved) < total

    watcher.outcomes.clear()
    resumed = run_all(out, watcher)
    assert saved.items() <= records_in(out).items()
    assert records_in(out).keys() == records_in(tmp_path / "whole").keys()
    assert not list(out.glob("**/*.tmp"))
    for name, run in resumed.items():
        assert not run.missing
        for unit, record in run.records.items():
            assert numbers(record) == numbers(whole[name].records[unit])

    text = log.read_text()
    assert re.search(r"^walks 1/6  walk-\d: recorded already$", text, re.MULTILINE)
    assert re.search(r"^procrustes \d+/24  [a-z0-9-]+: \d+\.\d s$", text, re.MULTILINE)
    assert not [c for c in text if c != "\n" and ord(c) < 32]


def test_ctrl_c_ends_a_run_with_a_message(tmp_path):
    log = tmp_path / "log"
    process = start(tmp_path, log)
    signal_after(process, log, lambda text: "walk-1:" in text, signal.SIGINT)
    assert process.returncode == 130
    text = log.read_text()
    assert text.endswith("Interrupted. Finished work is recorded: the same command resumes.\n")
    assert "Traceback" not in text


if __name__ == "__main__":
    # A shell that starts its children in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.EXPERIMENTS = EXPERIMENTS
    cli.main()
