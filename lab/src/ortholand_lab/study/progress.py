"""How a run shows its progress: bars in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ortholand.about import asked_width
from ortholand_lab.study.runner import RECORDED

WIDTH = 100  # columns of text in a file, unless $COLUMNS says otherwise
SILENCE = 10.0  # seconds of silence after which a line reports progress
PATIENCE = 50  # and for long runs, 1/50 of the time so far: a log should not grow for ever
SOON = 3.0  # seconds of work before which no time left is shown
FIRST_SHARE = 0.005  # share of the work before which the time left is anyone's guess


def make_console() -> Console:
    """A console on standard output, which writes control codes only to a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    # Explicitly: the environment may ask for colours (FORCE_COLOR), but a file is a file.
    return Console(
        force_terminal=False,
        no_color=True,
        highlight=False,
        markup=False,
        width=asked_width() or WIDTH,
    )


def has_no_width(console: Console) -> bool:
    """Whether a table may be as wide as it likes: in a file, unless $COLUMNS says otherwise."""
    return not (console.is_terminal or asked_width())


class Pace:
    """How far a run over several studies is, and how long it will take.

    Args:
        work: for each study, about how many seconds it will take. Only proportions
            matter: the time left is extrapolated from the work done so far.
        clock: returns seconds.
    """

    def __init__(self, work: Mapping[str, float], clock: Callable[[], float]) -> None:
        self._work = dict(work)
        self._clock = clock
        self._start = clock()
        self._steps: dict[str, int] = {}
        self._done: dict[str, int] = {}

    def start(self, study: str, steps: int) -> None:
        """A study begins."""
        self._steps[study], self._done[study] = steps, 0

    def advance(self, study: str, steps: int) -> None:
        """Steps of a study have been done."""
        self._done[study] += steps

    def share(self, study: str) -> float:
        """The share of a study that is done; 1 for one without steps."""
        if study not in self._steps:
            return 0.0
        return min(1.0, self._done[study] / self._steps[study]) if self._steps[study] else 1.0

    @property
    def total_share(self) -> float:
        """The share of the work of all studies that is done."""
        total = sum(self._work.values())
        return min(1.0, self._work_done() / total) if total else 1.0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds left, or None while that is anyone's guess."""
        done, total = self._work_done(), sum(self._work.values())
        if self.elapsed < SOON or done <= FIRST_SHARE * total:
            return None
        return self.elapsed * max(0.0, total / done - 1)

    def _work_done(self) -> float:
        return sum(work * self.share(study) for study, work in self._work.items())


@dataclass
class Count:
    """Units of a study: all, those done, and those that were recorded before."""

    units: int
    begun: float  # seconds after the beginning
    done: int = 0
    recorded: int = 0

    def __str__(self) -> str:
        return f"{self.done}/{self.units}"


def duration(seconds: float | None) -> str:
    """A time span as people write it: 0:00:07, 3:12:00."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Tallies:
    """What bars and lines count."""

    def __init__(self, work: Mapping[str, float], clock: Callable[[], float]) -> None:
        self._pace = Pace(work, clock)
        self._counts: dict[str, Count] = {}

    def start(self, study: str, units: int, steps: int) -> None:
        """A study begins."""
        self._pace.start(study, steps)
        self._counts[study] = Count(units, self._pace.elapsed)


class Lines(Tallies, AbstractContextManager["Lines"]):
    """One line per unit of work, and one now and then during a long unit."""

    def __init__(
        self,
        console: Console,
        work: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(work, clock)
        self._console = console
        self._told = 0.0  # seconds after the beginning

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, study: str, steps: int) -> None:
        """Steps are done: print a line after a long silence."""
        self._pace.advance(study, steps)
        elapsed = self._pace.elapsed
        if elapsed - self._told > max(SILENCE, elapsed / PATIENCE):
            left = f", {duration(self._pace.left)} left in all" if self._pace.left else ""
            self._tell(study, f"{self._pace.share(study):.0%} done{left}")

    def unit_done(self, study: str, unit: str, outcome: str) -> None:
        """A unit is done: say so at once, for anyone watching the file."""
        self._counts[study].done += 1
        self._tell(study, f"{unit}: {outcome}")

    def _tell(self, study: str, news: str) -> None:
        self._told = self._pace.elapsed
        self._console.print(Text(f"{study} {self._counts[study]}  {news}"), soft_wrap=True)
        self._console.file.flush()


class TimesColumn(ProgressColumn):
    """Time so far and time left, updated even while nothing else moves."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        """The times, for the bars that show them."""
        times = f"{duration(self._pace.elapsed)}, {duration(self._pace.left)} left"
        return Text(times if task.fields["times"] else "")


class Bars(Tallies):
    """A bar for the current study and one for all; above them, a line for each finished study.

    There are too many units for a line each, except where an old record had to be redone.
    """

    def __init__(self, console: Console, work: Mapping[str, float]) -> None:
        super().__init__(work, time.monotonic)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}"),
            TimesColumn(self._pace),
            console=console,
            # Rarely: drawing takes time from what is being timed.
            refresh_per_second=2,
        )
        several = len(work) > 1
        self._present = self._progress.add_task("", total=1, note="", times=not several)
        self._all: TaskID | None = None
        if several:
            self._all = self._progress.add_task("all", total=1, note="", times=True)

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, study: str, units: int, steps: int) -> None:
        """A study begins."""
        super().start(study, units, steps)
        self._draw(study)

    def advance(self, study: str, steps: int) -> None:
        """Move the bars."""
        self._pace.advance(study, steps)
        self._draw(study)

    def unit_done(self, study: str, unit: str, outcome: str) -> None:
        """A unit is done; with the last one, the study."""
        count = self._counts[study]
        count.done += 1
        count.recorded += outcome == RECORDED
        if "redone" in outcome:
            self._print(f"{study} {count}  {unit}: {outcome}")
        if count.done == count.units:
            self._print(self._summary(study))
        self._draw(study)

    def _summary(self, study: str) -> str:
        count = self._counts[study]
        taken = duration(self._pace.elapsed - count.begun)
        runs = f"{count.units} run" if count.units == 1 else f"{count.units} runs"
        before = f", {count.recorded} of them {RECORDED}" if count.recorded else ""
        return f"{study}: {runs}{before}, {taken}"

    def _draw(self, study: str) -> None:
        self._progress.update(
            self._present,
            description=study,
            completed=self._pace.share(study),
            note=str(self._counts[study]),
        )
        if self._all is not None:
            self._progress.update(self._all, completed=self._pace.total_share)

    def _print(self, line: str) -> None:
        self._progress.console.print(Text(line), soft_wrap=True)


def make_progress(console: Console, work: Mapping[str, float]) -> Bars | Lines:
    """Bars or lines, as suits the console; ``work`` is the seconds each study may take."""
    return Bars(console, work) if console.is_terminal else Lines(console, work)
