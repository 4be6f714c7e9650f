"""How a run shows itself: bars in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ortholand.experiments.runner import RECORDED

SILENCE = 10.0  # seconds without a line after which one says how far it is
PATIENCE = 50  # and for long runs, the part of the time so far: a log should not grow for ever
SOON = 3.0  # seconds of work before which no time left is told


def make_console() -> Console:
    """A console on standard output, which writes control codes to a terminal and nowhere else."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    # Explicitly: the environment may ask for colours (FORCE_COLOR), but a file is a file.
    return Console(force_terminal=False, no_color=True, highlight=False, markup=False, width=100)


class Pace:
    """How far a run over several experiments is, and how long it will take.

    Args:
        work: of each experiment, about how many seconds it will take. Only their proportions
            count: the time left is as long as the work done so far suggests.
        clock: seconds.
    """

    def __init__(self, work: Mapping[str, float], clock: Callable[[], float]) -> None:
        self._work = dict(work)
        self._clock = clock
        self._start = clock()
        self._before = 0.0  # work of the experiments before the present one
        self._present, self._steps, self._done = "", 0, 0

    def start(self, experiment: str, steps: int) -> None:
        """An experiment begins, and the one before is done."""
        self._before += self._work.get(self._present, 0.0)
        self._present, self._steps, self._done = experiment, steps, 0

    def advance(self, steps: int) -> None:
        """Steps of the present experiment have been done."""
        self._done += steps

    @property
    def share(self) -> float:
        """What part of the present experiment is done; all of one without steps."""
        return min(1.0, self._done / self._steps) if self._steps else 1.0

    @property
    def total_share(self) -> float:
        """What part of the work of all experiments is done."""
        total = sum(self._work.values())
        return min(1.0, self._work_done() / total) if total else 1.0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds that the rest will take, or None while that is anyone's guess."""
        done = self._work_done()
        if self.elapsed < SOON or not done:
            return None
        return self.elapsed * max(0.0, sum(self._work.values()) / done - 1)

    def _work_done(self) -> float:
        return self._before + self._work.get(self._present, 0.0) * self.share


def duration(seconds: float | None) -> str:
    """A time span as people write it: 0:00:07, 3:12:00."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Lines:
    """One line per unit of work, and one now and then while a unit takes long."""

    def __init__(
        self,
        console: Console,
        work: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._pace = Pace(work, clock)
        self._experiment, self._units, self._done = "", 0, 0
        self._told = 0.0  # seconds after the beginning

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, experiment: str, units: int, steps: int) -> None:
        """An experiment begins."""
        self._pace.start(experiment, steps)
        self._experiment, self._units, self._done = experiment, units, 0

    def advance(self, steps: int) -> None:
        """Steps are done: worth a line after a long silence."""
        self._pace.advance(steps)
        elapsed = self._pace.elapsed
        if elapsed - self._told > max(SILENCE, elapsed / PATIENCE):
            left = f", {duration(self._pace.left)} left in all" if self._pace.left else ""
            self._tell(f"{self._done}/{self._units}  {self._pace.share:.0%} done{left}")

    def unit_done(self, unit: str, outcome: str) -> None:
        """A unit is done: say so at once, for whoever watches the file."""
        self._done += 1
        self._tell(f"{self._done}/{self._units}  {unit}: {outcome}")

    def _tell(self, line: str) -> None:
        self._told = self._pace.elapsed
        self._console.print(Text(f"{self._experiment} {line}"), soft_wrap=True)
        self._console.file.flush()


class TimesColumn(ProgressColumn):
    """Time so far and time left, which go on while nothing else moves."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        """The times, beside the bars that have a place for them."""
        times = f"{duration(self._pace.elapsed)}, {duration(self._pace.left)} left"
        return Text(times if task.fields["times"] else "")


class Bars:
    """A bar for the present experiment and one for all; above them, a line for each that is done.

    Units are too many for a line each, except where an old record had to be redone.
    """

    def __init__(self, console: Console, work: Mapping[str, float]) -> None:
        self._pace = Pace(work, time.monotonic)
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
        self._experiment, self._units, self._begun = "", 0, 0.0
        self._done, self._recorded = 0, 0

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._draw()
        self._progress.stop()

    def start(self, experiment: str, units: int, steps: int) -> None:
        """An experiment begins."""
        self._pace.start(experiment, steps)
        self._experiment, self._units, self._begun = experiment, units, self._pace.elapsed
        self._done, self._recorded = 0, 0
        self._draw()

    def advance(self, steps: int) -> None:
        """Move the bars."""
        self._pace.advance(steps)
        self._draw()

    def unit_done(self, unit: str, outcome: str) -> None:
        """A unit is done; with the last one, the experiment."""
        self._done += 1
        self._recorded += outcome == RECORDED
        if "redone" in outcome:
            self._print(f"{self._experiment} {self._done}/{self._units}  {unit}: {outcome}")
        if self._done == self._units:
            self._print(self._summary())
        self._draw()

    def _summary(self) -> str:
        taken = duration(self._pace.elapsed - self._begun)
        runs = f"{self._units} run" if self._units == 1 else f"{self._units} runs"
        before = f", {self._recorded} of them {RECORDED}" if self._recorded else ""
        return f"{self._experiment}: {runs}{before}, {taken}"

    def _draw(self) -> None:
        self._progress.update(
            self._present,
            description=self._experiment,
            completed=self._pace.share,
            note=f"{self._done}/{self._units}",
        )
        if self._all is not None:
            self._progress.update(self._all, completed=self._pace.total_share)

    def _print(self, line: str) -> None:
        self._progress.console.print(Text(line), soft_wrap=True)


def make_progress(console: Console, work: Mapping[str, float]) -> Bars | Lines:
    """What suits the console, for experiments that will take about so many seconds each."""
    return Bars(console, work) if console.is_terminal else Lines(console, work)
