"""What an experiment is: settings, units of work, claims and figures. Nothing runs here."""

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from ortholand.datasets import Dataset
from ortholand.datasets import Name as DatasetName
from ortholand.experiments.records import MissingRecordError, Records, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# smoke: seconds, to see that all works; quick: minutes; paper: the paper's settings.
PRESETS = ("smoke", "quick", "paper")

SettingsT = TypeVar("SettingsT")  # settings of an experiment at a preset, a frozen dataclass
TaskT = TypeVar("TaskT")  # configuration of one unit of work, a frozen dataclass


class Verdict(enum.Enum):
    """What the records say of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not decided"

    @classmethod
    def of(cls, holds: bool) -> "Verdict":
        """The verdict on what can be told."""
        return cls.HOLDS if holds else cls.FAILS

    @classmethod
    def worst(cls, verdicts: Iterable["Verdict"]) -> "Verdict":
        """What follows for all, if each of several must hold."""
        return min(verdicts, key=(cls.FAILS, cls.OPEN, cls.HOLDS).index)


@dataclass(frozen=True)
class Finding:
    """What was measured for a claim, in words, and what follows."""

    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """A statement that is checked on the records.

    ``source``: the paper as printed; a correction of it (docs/errata.md); or beyond the paper.
    """

    statement: str
    source: Literal["paper", "correction", "beyond the paper"]
    check: Callable[[Records], Finding]

    def judge(self, records: Records) -> Finding:
        """What the records say; not decided where one is missing."""
        try:
            return self.check(records)
        except MissingRecordError as missing:
            return Finding(str(missing), Verdict.OPEN)


@dataclass(frozen=True)
class FigureSpec:
    """A figure that is drawn from the records."""

    name: str
    caption: str
    draw: Callable[[Records], "Figure"]


@dataclass(frozen=True)
class Unit(Generic[TaskT]):
    """A piece of work that is recorded as a whole."""

    name: str
    task: TaskT
    steps: int  # for the progress bar

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name):
            raise ValueError(
                f"A unit's name becomes a file name: a-z, 0-9, '.' and '-', got {self.name!r}."
            )


@dataclass(frozen=True)
class Context:
    """What a unit of work gets besides its task."""

    seed: int
    device: torch.device
    tick: Callable[[int], None]  # to be called with the number of steps done since the last call
    data: Dataset | None = None  # the experiment's data set, if it has one


@dataclass(frozen=True)
class Experiment(Generic[SettingsT, TaskT]):
    """An experiment of the paper.

    Args:
        name: what the user types.
        title: one line.
        paper_figure: which figure of the paper it reproduces.
        summary: what is done, and where and why it departs from the paper; for the report.
        settings: by preset.
        plan: units of work for given settings.
        run: does one unit of work. Its numbers must depend on task, seed, device and data only.
        claims: statements about the records.
        figures: drawings of the records.
        threads: how many suit its work best; None for torch's own choice.
        revision: to be increased when the same task comes to mean other numbers, so that old
            records are redone.
        dataset: name of the data set that it needs, if any.
        seconds: about how long a preset takes on two cores; for the estimate of the time left.
    """

    name: str
    title: str
    paper_figure: str
    summary: str
    settings: Mapping[str, SettingsT]
    plan: Callable[[SettingsT], Sequence[Unit[TaskT]]]
    run: Callable[[TaskT, Context], Result]
    claims: Sequence[Claim]
    figures: Sequence[FigureSpec]
    threads: int | None = None
    revision: int = 1
    dataset: DatasetName | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def units(self, preset: str) -> Sequence[Unit[TaskT]]:
        """Units of work at a preset."""
        return self.plan(self.settings[preset])


AnyExperiment = Experiment[Any, Any]
