"""How a run shows itself: a bar in a terminal, plain lines elsewhere."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


def make_console() -> Console:
    """A console on standard output, which writes control codes to a terminal and nowhere else."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    # Explicitly: the environment may ask for colours (FORCE_COLOR), but a file is a file.
    return Console(force_terminal=False, no_color=True, highlight=False, markup=False, width=100)


class Lines:
    """One line per unit of work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._experiment, self._units, self._done = "", 0, 0

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, experiment: str, units: int, steps: int) -> None:  # noqa: ARG002
        """An experiment begins."""
        self._experiment, self._units, self._done = experiment, units, 0

    def advance(self, steps: int) -> None:
        """Not worth a line."""

    def unit_done(self, unit: str, outcome: str) -> None:
        """A unit is done: say so at once, for whoever watches the file."""
        self._done += 1
        line = f"{self._experiment} {self._done}/{self._units}  {unit}: {outcome}"
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()


class Bar:
    """A bar per experiment, with a line per unit of work above it."""

    def __init__(self, console: Console) -> None:
        self._lines = Lines(console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, experiment: str, units: int, steps: int) -> None:
        """A new bar."""
        self._lines.start(experiment, units, steps)
        self._task = self._progress.add_task(experiment, total=steps)

    def advance(self, steps: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.advance(self._task, steps)

    def unit_done(self, unit: str, outcome: str) -> None:
        """A unit is done."""
        self._lines.unit_done(unit, outcome)


def make_progress(console: Console) -> Bar | Lines:
    """What suits the console."""
    return Bar(console) if console.is_terminal else Lines(console)
