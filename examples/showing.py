"""What the example networks display: a bar per contestant, a table, a figure of two panels."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ortholand_lab.study.figures import house_style

Tell = Callable[[str], object]  # a step is done, and a few words on it
LOOKS = (  # of the contestants' curves, in their order
    {"color": "#0072B2", "linestyle": "-"},
    {"color": "#D55E00", "linestyle": "--"},
    {"color": "#7F7F7F", "linestyle": "-."},
    {"color": "#009E73", "linestyle": ":"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
)


@contextmanager
def bars(console: Console) -> Generator[Callable[[str, int], Tell], None, None]:
    """What starts a bar, of a name and so many steps; what that returns moves the bar by one."""
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:

        def start(name: str, steps: int) -> Tell:
            bar = progress.add_task(name, total=steps, words="")
            return lambda words: progress.update(bar, advance=1, words=words)

        yield start


def make_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = ""
) -> Table:
    """Names, and numbers to their right."""
    table = Table(title=title, caption=caption)
    for i, heading in enumerate(headings):
        table.add_column(heading, no_wrap=i == 0, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def cell(number: float | None, form: str) -> str:
    """A number, or a dash where there is none; parts of 1 in percent, as in "95.2 %"."""
    return "-" if number is None else f"{number:{form}}".replace("%", " %")


@contextmanager
def two_panels(path: Path, title: str = "") -> Generator[tuple[Axes, Axes], None, None]:
    """Axes to draw in; then they get their legends and are saved."""
    with house_style():
        figure = Figure(figsize=(9.5, 4))
        left, right = figure.subplots(1, 2)
        yield left, right
        for axes in (left, right):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
        figure.suptitle(title)
        figure.savefig(path, dpi=150)
