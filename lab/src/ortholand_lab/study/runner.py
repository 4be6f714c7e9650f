"""Runs studies unit by unit. Recorded units are not run again.

Units that measure no time run in parallel in a few processes; those that do, alone. Numbers do
not depend on the number of processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any, NamedTuple, Protocol

from ortholand_lab.datasets import Dataset, Source, data_notice
from ortholand_lab.study.environment import versions
from ortholand_lab.study.records import (
    NOT_RUN,
    MissingRecordError,
    Record,
    Records,
    Request,
    RunOptions,
    Store,
)
from ortholand_lab.study.spec import AnyStudy, Claim, Finding, TableSpec, Unit, Verdict
from ortholand_lab.study.workers import Done, Work, do_side_by_side

RECORDED = "recorded already"  # the outcome of a unit that need not be run


class Watcher(Protocol):
    """Shows how runs progress. Several studies may run at once."""

    def start(self, study: str, units: int, steps: int) -> None:
        """A study begins: all its units, and the steps of those still to be run."""

    def advance(self, study: str, steps: int) -> None:
        """Steps have been done."""

    def unit_done(self, study: str, unit: str, outcome: str) -> None:
        """A unit is done."""


@dataclass(frozen=True)
class Run:
    """A study with options, and its records."""

    study: AnyStudy
    options: RunOptions
    records: Records
    missing: Mapping[str, str]  # unit -> why there is no record

    @property
    def label(self) -> str:
        """Which run this is, in a few words."""
        return f"{self.study.name}, preset {self.options.preset}, seed {self.options.seed}"

    @property
    def notice(self) -> str:
        """What a reader must know about this run's data; usually nothing."""
        dataset = self.study.dataset
        return data_notice(dataset, self.options.data) if dataset else ""

    @property
    def seconds(self) -> float:
        """Duration of all its recorded units."""
        return sum(record.seconds for record in self.records.values())

    def verdicts(self) -> list[Verdict]:
        """The verdict on every claim."""
        return [finding.verdict for _, finding in self.findings()]

    def tables(self) -> list[tuple[TableSpec, Sequence[Sequence[str]]]]:
        """Every table for which there are enough records."""
        made = []
        for spec in self.study.tables:
            try:
                made.append((spec, spec.make(self.records)))
            except MissingRecordError:
                continue
        return made

    def findings(self) -> list[tuple[Claim, Finding]]:
        """Every claim with what the records say about it."""
        return [(claim, claim.judge(self.records)) for claim in self.study.claims]


def request_of(study: AnyStudy, unit: Unit[Any], options: RunOptions) -> Request:
    """The identity of a unit's record."""
    return Request(study.name, study.revision, unit.name, options, asdict(unit.task), versions())


class Job(NamedTuple):
    """What to run, with which options and data."""

    study: AnyStudy
    options: RunOptions
    source: Source | None = None  # of the study's data, if it needs any; read when a unit is run


def run_study(
    study: AnyStudy,
    options: RunOptions,
    store: Store,
    watcher: Watcher,
    source: Source | None = None,
) -> Run:
    """Run the units of one study not yet recorded, in this process; return all its records."""
    (run,) = run_studies([Job(study, options, source)], store, watcher)
    return run


def run_studies(
    jobs: Sequence[Job], store: Store, watcher: Watcher, processes: int = 1
) -> list[Run]:
    """Run the units not yet recorded, and collect the records.

    Args:
        jobs: what to run.
        store: where records are.
        watcher: shows the progress.
        processes: how many units that measure no time may run at once.
    """
    for job in jobs:
        _check_source(job)
    to_do = [_Piece(job, unit) for job in jobs for unit in _begin(job, store, watcher)]
    alone = [piece for piece in to_do if piece.unit.timed or processes == 1]
    together = [piece for piece in to_do if not (piece.unit.timed or processes == 1)]
    if together:
        do_side_by_side(
            [piece.work() for piece in together],
            processes,
            lambda i, steps: watcher.advance(together[i].job.study.name, steps),
            lambda i, done: together[i].save(done, store, watcher),
        )
    loaders: dict[int, Callable[[], Dataset]] = {}
    for piece in alone:
        piece.do(store, watcher, loaders)
    return [collect(job.study, job.options, store) for job in jobs]


def _begin(job: Job, store: Store, watcher: Watcher) -> list[Unit[Any]]:
    """The units not yet recorded; the watcher shows the others as done."""
    study, options = job.study, job.options
    units = study.units(options.preset)
    missing = collect(study, options, store).missing
    watcher.start(study.name, len(units), sum(u.steps for u in units if u.name in missing))
    for unit in units:
        if unit.name not in missing:
            watcher.unit_done(study.name, unit.name, RECORDED)
    return [unit for unit in units if unit.name in missing]


class _Piece(NamedTuple):
    """A unit of a job."""

    job: Job
    unit: Unit[Any]

    def work(self) -> Work:
        study, options, source = self.job
        task = self.unit.task
        return Work(study.run, task, options.seed, options.device, options.threads, source)

    def do(self, store: Store, watcher: Watcher, loaders: dict[int, Callable[[], Dataset]]) -> None:
        """Run it in this process."""
        study, _, source = self.job
        data = None
        if source is not None:
            data = loaders.setdefault(id(source), cache(source.load))()
        done = self.work().do(lambda steps: watcher.advance(study.name, steps), data)
        self.save(done, store, watcher)

    def save(self, done: Done, store: Store, watcher: Watcher) -> None:
        """Record the result."""
        study, options, _ = self.job
        request = request_of(study, self.unit, options)
        reason = store.find(request).reason
        finished = datetime.now(timezone.utc).isoformat()
        store.save(Record(request, done.result, done.machine, done.seconds, finished))
        redone = "" if reason == NOT_RUN else f", redone ({reason})"
        watcher.unit_done(study.name, self.unit.name, f"{done.seconds:.1f} s{redone}")


def steps_to_do(study: AnyStudy, options: RunOptions, store: Store) -> int:
    """Steps of the units not yet recorded."""
    missing = collect(study, options, store).missing
    return sum(unit.steps for unit in study.units(options.preset) if unit.name in missing)


def collect(
    study: AnyStudy, options: RunOptions, store: Store, *, any_versions: bool = False
) -> Run:
    """The records of a study with these options. Runs nothing."""
    found = {
        unit.name: store.find(request_of(study, unit, options), any_versions=any_versions)
        for unit in study.units(options.preset)
    }
    records = {name: f.record for name, f in found.items() if f.record is not None}
    missing = {name: f.reason for name, f in found.items() if f.record is None}
    return Run(study, options, Records(records), missing)


def _check_source(job: Job) -> None:
    study, options, source = job
    if study.dataset and source is None:
        raise ValueError(f"{study.name} needs a source of its data ({study.dataset}).")
    identity = source.identity if source else ""
    if options.data != identity:
        raise ValueError(f"The options' data must be {identity!r}, got {options.data!r}.")
