"""Runs experiments unit by unit. What is recorded already is not run again."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from time import perf_counter
from typing import Any, Protocol

import torch

from ortholand.datasets import Dataset, Source, data_notice
from ortholand.experiments.environment import machine, torch_threads, versions
from ortholand.experiments.records import Options, Record, Records, Request, Store
from ortholand.experiments.spec import AnyExperiment, Claim, Context, Finding, Unit, Verdict

RECORDED = "recorded already"  # the outcome of a unit that need not be run


class Watcher(Protocol):
    """Is told how a run goes on."""

    def start(self, experiment: str, units: int, steps: int) -> None:
        """An experiment begins: all its units, and the steps of those still to be run."""

    def advance(self, steps: int) -> None:
        """Steps have been done."""

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

    @property
    def notice(self) -> str:
        """What must be told of the data that this run was made with; mostly nothing."""
        dataset = self.experiment.dataset
        return data_notice(dataset, self.options.data) if dataset else ""

    @property
    def seconds(self) -> float:
        """Duration of all its recorded units."""
        return sum(record.seconds for record in self.records.values())

    def verdicts(self) -> list[Verdict]:
        """The verdict on every claim."""
        return [finding.verdict for _, finding in self.findings()]

    def findings(self) -> list[tuple[Claim, Finding]]:
        """Every claim with what the records say of it."""
        return [(claim, claim.judge(self.records)) for claim in self.experiment.claims]


def request_of(experiment: AnyExperiment, unit: Unit[Any], options: Options) -> Request:
    """The identity of a unit's record."""
    return Request(
        experiment.name, experiment.revision, unit.name, options, asdict(unit.task), versions()
    )


def run_experiment(
    experiment: AnyExperiment,
    options: Options,
    store: Store,
    watcher: Watcher,
    source: Source | None = None,
) -> Run:
    """Run what is not recorded yet, and collect the records.

    Args:
        experiment: what to run.
        options: how; ``data`` must be the source's identity.
        store: where records are.
        watcher: is told how it goes.
        source: of the experiment's data, if it needs any. Read once, and only if a unit is run.
    """
    _check_source(experiment, options, source)
    units = experiment.units(options.preset)
    watcher.start(experiment.name, len(units), steps_to_do(experiment, options, store))
    load = cache(source.load) if source else lambda: None
    with torch_threads(options.threads):
        for unit in units:
            _run_unit(experiment, unit, options, store, watcher, load)
    return collect(experiment, options, store)


def steps_to_do(experiment: AnyExperiment, options: Options, store: Store) -> int:
    """Steps of the units that are not recorded yet."""
    missing = collect(experiment, options, store).missing
    return sum(unit.steps for unit in experiment.units(options.preset) if unit.name in missing)


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


def _check_source(experiment: AnyExperiment, options: Options, source: Source | None) -> None:
    if experiment.dataset and source is None:
        raise ValueError(f"{experiment.name} needs a source of its data ({experiment.dataset}).")
    identity = source.identity if source else ""
    if options.data != identity:
        raise ValueError(f"The options' data must be {identity!r}, got {options.data!r}.")


def _run_unit(
    experiment: AnyExperiment,
    unit: Unit[Any],
    options: Options,
    store: Store,
    watcher: Watcher,
    load: Callable[[], Dataset | None],
) -> None:
    request = request_of(experiment, unit, options)
    found = store.find(request)
    if found.record is not None:
        watcher.unit_done(unit.name, RECORDED)
        return
    device = torch.device(options.device)
    context = Context(options.seed, device, watcher.advance, load())
    start = perf_counter()
    result = experiment.run(unit.task, context)
    seconds = perf_counter() - start
    finished = datetime.now(timezone.utc).isoformat()
    store.save(Record(request, result, machine(device), seconds, finished))
    redone = "" if found.reason == "not run yet" else f", redone ({found.reason})"
    watcher.unit_done(unit.name, f"{seconds:.1f} s{redone}")
