"""What a study is: settings, units of work, claims and figures. Nothing runs here."""

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from ortholand_lab.datasets import Dataset
from ortholand_lab.datasets import Name as DatasetName
from ortholand_lab.study.records import MissingRecordError, Records, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# smoke: seconds, to check that all works; quick: minutes; the last one: whole, as in the paper.
EXPERIMENT_PRESETS = ("smoke", "quick", "paper")
BENCHMARK_PRESETS = ("smoke", "quick", "full")

SettingsT = TypeVar("SettingsT")  # settings of a study at a preset, a frozen dataclass
TaskT = TypeVar("TaskT")  # configuration of one unit of work, a frozen dataclass


class Verdict(enum.Enum):
    """What the records say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not decided"

    @classmethod
    def of(cls, holds: bool) -> "Verdict":
        """The verdict on a claim that can be decided."""
        return cls.HOLDS if holds else cls.FAILS

    @classmethod
    def worst(cls, verdicts: Iterable["Verdict"]) -> "Verdict":
        """The verdict on a claim that needs all of several to hold."""
        return min(verdicts, key=(cls.FAILS, cls.OPEN, cls.HOLDS).index)


@dataclass(frozen=True)
class Finding:
    """What was measured for a claim, in words, and what follows."""

    measured: str
    verdict: Verdict

    @classmethod
    def of(cls, measured: str, holds: bool, doubt: str = "") -> "Finding":
        """Whether it holds; not decided if there is a doubt."""
        if doubt:
            return cls(f"{measured}; {doubt}", Verdict.OPEN)
        return cls(measured, Verdict.of(holds))


@dataclass(frozen=True)
class Claim:
    """A statement that is checked on the records.

    Args:
        statement: what is checked.
        source: the paper as printed; a correction of it (docs/results/errata.md); or beyond it.
        check: what the records say. A claim of the paper is checked on the paper's baselines:
            textbook retractions, and trivializations from the identity.
        words: what the paper says, literally.
        careful: the same check on our baselines, which are more careful than the paper's.
        erratum: the name in docs/results/errata.md, if the paper's statement needs a correction.
    """

    statement: str
    source: Literal["paper", "correction", "beyond the paper"]
    check: Callable[[Records], Finding]
    words: str = ""
    careful: Callable[[Records], Finding] | None = None
    erratum: str = ""

    @classmethod
    def of_paper(
        cls,
        statement: str,
        words: str,
        check: Callable[[Records], Finding],
        careful: Callable[[Records], Finding] | None = None,
        *,
        erratum: str = "",
    ) -> "Claim":
        """A claim that the paper makes in these words."""
        return cls(statement, "paper", check, words, careful, erratum)

    @classmethod
    def beyond(cls, statement: str, check: Callable[[Records], Finding]) -> "Claim":
        """A claim that the paper does not make."""
        return cls(statement, "beyond the paper", check)

    def judge(self, records: Records) -> Finding:
        """What the records say; not decided if one is missing."""
        return _judge(self.check, records)

    def judge_careful(self, records: Records) -> Finding | None:
        """What they say of our own baselines, if the claim is about baselines."""
        return _judge(self.careful, records) if self.careful else None


def _judge(check: Callable[[Records], Finding], records: Records) -> Finding:
    try:
        return check(records)
    except MissingRecordError as missing:
        return Finding(str(missing), Verdict.OPEN)


@dataclass(frozen=True)
class FigureSpec:
    """A figure drawn from the records."""

    name: str
    caption: str
    draw: Callable[[Records], "Figure"]


@dataclass(frozen=True)
class Unit(Generic[TaskT]):
    """A piece of work that is recorded as a whole."""

    name: str
    task: TaskT
    steps: int  # for the progress bar
    timed: bool = False  # whether it measures times: then nothing else runs at the same time

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
    data: Dataset | None = None  # the study's data set, if it has one

    @property
    def dataset(self) -> Dataset:
        """The data set, for a unit that needs one."""
        if self.data is None:
            raise ValueError("A unit that reads images needs a data set in its context, got none.")
        return self.data


@dataclass(frozen=True)
class TableSpec:
    """A table made from the records: printed, in the report, and in its own file."""

    name: str
    title: str
    make: Callable[[Records], Sequence[Sequence[str]]]  # a row of headings, then the others


@dataclass(frozen=True)
class Study(Generic[SettingsT, TaskT]):
    """An experiment of the paper, or a benchmark.

    Args:
        name: what the user types.
        title: one line.
        summary: what is done, and where and why it departs from the paper; for the report.
        settings: by preset, the smallest first and the whole study last.
        plan: units of work for given settings.
        run: does one unit of work. Its numbers must depend on task, seed, device and data only.
        claims: statements about the records.
        figures: drawings of the records.
        tables: tables of the records.
        paper_figure: which figure of the paper it reproduces; "" for none.
        threads: torch threads, for every unit.
        revision: to be increased when the same task gives other numbers, so that old
            records are redone.
        dataset: name of the data set that it needs, if any.
        seconds: about how long a preset takes on two cores; for the estimate of the time left.
    """

    name: str
    title: str
    summary: str
    settings: Mapping[str, SettingsT]
    plan: Callable[[SettingsT], Sequence[Unit[TaskT]]]
    run: Callable[[TaskT, Context], Result]
    claims: Sequence[Claim]
    figures: Sequence[FigureSpec] = ()
    tables: Sequence[TableSpec] = ()
    paper_figure: str = ""
    threads: int = 1
    revision: int = 1
    dataset: DatasetName | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> SettingsT:
        """The settings of the whole study, to compare others with."""
        return list(self.settings.values())[-1]

    def units(self, preset: str) -> Sequence[Unit[TaskT]]:
        """Units of work at a preset."""
        return self.plan(self.settings[preset])


AnyStudy = Study[Any, Any]
