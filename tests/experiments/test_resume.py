"""With processes: a run that is killed resumes, and a file gets no control codes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from ortholand.experiments.records import Store
from ortholand.experiments.runner import run_experiment


def start(out: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "ortholand.cli", "reproduce", "procrustes"]
    # Some environments ask for colours everywhere; a file must not get them even then.
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    with log.open("w") as file:
        return subprocess.Popen(
            [*command, "--preset", "smoke", "--out", str(out)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def records_in(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("records/*/*/*.json")}


def kill_after_first_line(process: subprocess.Popen, log: Path) -> None:
    """The line is written after the record: at the kill the second unit is under way."""
    limit = time.monotonic() + 60
    while "\n" not in log.read_text():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def numbers(record):
    series = {name: y for name, y in record.result.series.items() if name != "seconds"}
    return series, record.result.values


def test_a_killed_run_resumes_and_ends_with_the_same_numbers(smoke, tmp_path, watcher):
    whole, _ = smoke  # made in one go
    out, log = tmp_path / "killed", tmp_path / "log"
    kill_after_first_line(start(out, log), log)
    saved = records_in(out)
    assert 1 <= len(saved) < len(whole.records)

    resumed = run_experiment(whole.experiment, whole.options, Store(out), watcher)
    assert saved.items() <= records_in(out).items()  # what was recorded was kept
    assert list(watcher.outcomes.values()).count("recorded already") == len(saved)
    assert len(resumed.records) == len(whole.records)
    for name, record in resumed.records.items():
        assert numbers(record) == numbers(whole.records[name])
    assert not list(out.glob("**/*.tmp"))

    text = log.read_text()
    assert re.match(r"procrustes 1/15  landing-float32: \d+\.\d s\n", text)
    assert not [c for c in text if c != "\n" and ord(c) < 32]
