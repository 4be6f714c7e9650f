"""Units of work that worker processes can import: they walk, fail, die, or go on for ever.

Each leaves a file with the process that did it, and when. As a program, ``python -m
tests.lab.study.chores FOLDER KIND``, it runs two units of a kind side by side.
"""

import fcntl
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ortholand_lab.datasets import Dataset
from ortholand_lab.study.records import Result, RunOptions, Store
from ortholand_lab.study.runner import Job, run_studies
from ortholand_lab.study.spec import AnyStudy, Context, Study, Unit

STEPS = 6
PAUSE = 0.02  # seconds of a step: several steps for one message
OPTIONS = RunOptions(preset="smoke", seed=3, device="cpu", threads=1)


class ChoreError(Exception):
    """Can be pickled."""


class StubbornError(Exception):
    """Cannot: it is made from two arguments and remembers one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what)


@dataclass(frozen=True)
class Chore:
    name: str
    kind: str
    folder: str


def run(chore: Chore, context: Context) -> Result:
    begun = time.monotonic()
    result = KINDS[chore.kind](chore, context)
    place = Path(chore.folder) / f"{chore.name}.done"
    place.write_text(f"{os.getpid()} {begun} {time.monotonic()} {torch.get_num_threads()}")
    return result


def walk(chore: Chore, context: Context) -> Result:
    """A random walk; with data, through its labels."""
    random = torch.Generator().manual_seed(context.seed + len(chore.name))
    path = torch.randn(STEPS, generator=random).double().cumsum(0)
    if context.data is not None:
        path = path * context.data.train_labels
    for _ in range(STEPS):
        time.sleep(PAUSE)
        context.tick(1)
    return Result({"path": path.tolist()}, {"end": float(path[-1])})


def fail(chore: Chore, context: Context) -> Result:
    raise ChoreError(f"{chore.name} failed")


def fail_stubbornly(chore: Chore, context: Context) -> Result:
    raise StubbornError(f"{chore.name} failed", "for no reason")


def die(chore: Chore, context: Context) -> Result:
    os._exit(3)


def tick_for_ever(chore: Chore, context: Context) -> Result:
    mark_as_running(chore)
    while True:
        time.sleep(PAUSE)
        context.tick(1)


def sleep_for_ever(chore: Chore, context: Context) -> Result:
    mark_as_running(chore)
    while True:
        time.sleep(PAUSE)


KINDS = {
    "walk": walk,
    "fail": fail,
    "fail stubbornly": fail_stubbornly,
    "die": die,
    "tick for ever": tick_for_ever,
    "sleep for ever": sleep_for_ever,
}


def mark_as_running(chore: Chore) -> None:
    """Lock a file for as long as this process lives, however it ends."""
    path = Path(chore.folder) / f"{chore.name}.running"
    file = os.open(path.with_suffix(".new"), os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    path.with_suffix(".new").rename(path)


def is_running(path: Path) -> bool:
    """Whether the process that has marked this file is alive."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def load_labels(folder: str) -> Dataset:
    """A data set of 1, 2, ...; leaves a line each time that it is read."""
    with (Path(folder) / "readers").open("a") as file:
        file.write(f"{os.getpid()}\n")
    labels, empty = torch.arange(1, STEPS + 1), torch.zeros(0)
    return Dataset("MNIST", empty, labels, empty, empty)


def chores(
    folder: Path, kinds: dict[str, str], timed: tuple[str, ...] = (), **changes: object
) -> AnyStudy:
    """A study with a unit of each name, of the kind that stands beside it."""
    units = [
        Unit(name, Chore(name, kind, str(folder)), STEPS, timed=name in timed)
        for name, kind in kinds.items()
    ]
    fields = {"name": "chores", "title": "", "summary": "", "claims": (), "run": run, **changes}
    return Study(settings={"smoke": None}, plan=lambda _: units, **fields)


class NoWatcher:
    def start(self, study: str, units: int, steps: int) -> None:
        pass

    def advance(self, study: str, steps: int) -> None:
        pass

    def unit_done(self, study: str, unit: str, outcome: str) -> None:
        pass


def main(folder: Path, kind: str) -> None:
    # A shell that starts its children in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    study = chores(folder, {"one": kind, "two": kind})
    try:
        (folder / "begun").touch()
        run_studies([Job(study, OPTIONS)], Store(folder), NoWatcher(), processes=2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
