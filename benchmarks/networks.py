"""What mnist_epoch.py and cifar_steps.py share: networks trained in turn, and a table of them."""

import statistics
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from ortholand.lab.experiments.classification import Training
from ortholand.lab.study.figures import METHOD_STYLES


class Course:
    """A training with the time of each of its iterations and its losses."""

    def __init__(self, training: Training, lr: float) -> None:
        self.training = training
        self.lr = lr
        self.seconds: list[float] = []

    def step(self) -> None:
        """Do and time one iteration."""
        before = self.training.stopwatch.seconds
        self.training.advance_to(self.training.iteration + 1)
        self.seconds.append(self.training.stopwatch.seconds - before)

    def recent_loss(self, iterations: int) -> float:
        """Mean training loss of the last so many iterations."""
        return statistics.fmean(float(loss) for loss in self.training.losses[-iterations:])


def train_in_turn(courses: Mapping[str, Course], iterations: int, *, report_every: int) -> None:
    """One iteration of each after the other, so that what disturbs one disturbs them all."""
    console = Console()
    for k in range(1, iterations + 1):
        for course in courses.values():
            course.step()
        if k % report_every == 0:
            losses = ", ".join(
                f"{method} {course.recent_loss(report_every):.3g}"
                for method, course in courses.items()
            )
            console.print(f"{k} of {iterations}, training loss: {losses}", highlight=False)


def print_table(courses: Mapping[str, Course], title: str, *, test_images: int) -> None:
    """Times, and where the networks have got to."""
    table = Table(title=title)
    names = ("method", "lr", "time, s", "median, ms", "to first", "loss", "test error", "||X'X-I||")
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right")
    first = statistics.median(next(iter(courses.values())).seconds)
    for method, course in courses.items():
        middle = statistics.median(course.seconds)
        loss = course.recent_loss(len(course.seconds) // 10 or 1)
        point = course.training.measure(test_images)
        table.add_row(
            METHOD_STYLES[method].label,
            f"{course.lr:.3g}",
            f"{sum(course.seconds):.1f}",
            f"{1e3 * middle:.2f}",
            f"{middle / first:.2f}",
            f"{loss:.3f}",
            f"{point.test_error:.2%}",
            f"{point.orthogonality_error:.1e}",
        )
    Console(width=110).print(table)
