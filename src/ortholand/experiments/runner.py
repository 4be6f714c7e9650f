"""Runs experiments unit by unit. What is recorded already is not run again."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from time import perf_counter
from typing import Any, Protocol

import torch

from ortholand.experiments.environment import machine, torch_threads, versions
from ortholand.experiments.records import Options, Record, Records, Request, Store
from ortholand.experiments.spec import AnyExperiment, Claim, Context, Finding, Unit


class Watcher(Protocol):
    """Is told how a run goes on."""

    def start(self, experiment: str, units: int, steps: int) -> None:
        """An experiment begins."""

    def advance(self, steps: int) -> None:
        """Steps have been done, or need not be."""

    def unit_done(self, unit: str, outcome: str) -> None:
        """A unit is done."""


@dataclass(frozen=True)
class Run:
    """An experiment with options, and what is recorded of it."""

    experiment: AnyExperiment
    options: Options
    records: Records
    missing: Mapping[str, str]  # unit -> why there is no record

    @property
    def label(self) -> str:
        """Which run this is, in a few words."""
        return f"{self.experiment.name}, preset {self.options.preset}, seed {self.options.seed}"

    def findings(self) -> list[tuple[Claim, Finding]]:
        """Every claim with what the records say of it."""
        return [(claim, claim.judge(self.records)) for claim in self.experiment.claims]


def request_of(experiment: AnyExperiment, unit: Unit[Any], options: Options) -> Request:
    """The identity of a unit's record."""
    return Request(
        experiment.name, experiment.revision, unit.name, options, asdict(unit.task), versions()
    )


def run_experiment(
    experiment: AnyExperiment, options: Options, store: Store, watcher: Watcher
) -> Run:
    """Run what is not recorded yet, and collect the records."""
    units = experiment.units(options.preset)
    watcher.start(experiment.name, len(units), sum(unit.steps for unit in units))
    with torch_threads(options.threads):
        for unit in units:
            _run_unit(experiment, unit, options, store, watcher)
    return collect(experiment, options, store)


def collect(
    experiment: AnyExperiment, options: Options, store: Store, *, any_versions: bool = False
) -> Run:
    """What is recorded of an experiment with these options. Runs nothing."""
    found = {
        unit.name: store.find(request_of(experiment, unit, options), any_versions=any_versions)
        for unit in experiment.units(options.preset)
    }
    records = {name: f.record for name, f in found.items() if f.record is not None}
    missing = {name: f.reason for name, f in found.items() if f.record is None}
    return Run(experiment, options, Records(records), missing)


def _run_unit(
    experiment: AnyExperiment, unit: Unit[Any], options: Options, store: Store, watcher: Watcher
) -> None:
    request = request_of(experiment, unit, options)
    found = store.find(request)
    if found.record is not None:
        watcher.advance(unit.steps)
        watcher.unit_done(unit.name, "recorded already")
        return
    device = torch.device(options.device)
    start = perf_counter()
    result = experiment.run(unit.task, Context(options.seed, device, watcher.advance))
    seconds = perf_counter() - start
    finished = datetime.now(timezone.utc).isoformat()
    store.save(Record(request, result, machine(device), seconds, finished))
    redone = "" if found.reason == "not run yet" else f", redone ({found.reason})"
    watcher.unit_done(unit.name, f"{seconds:.1f} s{redone}")
