"""A toy experiment, for what does not depend on the mathematics, and one real smoke run."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments import EXPERIMENTS
from ortholand_lab.study.records import Records, Result, RunOptions, Store
from ortholand_lab.study.runner import Run, run_study
from ortholand_lab.study.spec import (
    AnyStudy,
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)


@dataclass
class Watcher:
    """Remembers what it was told."""

    total: int = 0
    done: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)

    def start(self, study: str, units: int, steps: int) -> None:
        self.total += steps

    def advance(self, study: str, steps: int) -> None:
        self.done += steps

    def unit_done(self, study: str, unit: str, outcome: str) -> None:
        self.outcomes[unit] = outcome


@dataclass(frozen=True)
class ToySettings:
    length: int = 5


@dataclass(frozen=True)
class ToyTask:
    power: int
    length: int


class Toy:
    """Powers of the seed plus 0, 1, ...; counts its runs and can be interrupted."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.data: list[Dataset | None] = []  # that the runs were given
        self.interrupt_at: int | None = None

    def run(self, task: ToyTask, context: Context) -> Result:
        if task.power == self.interrupt_at:
            raise KeyboardInterrupt
        self.ran.append(task.power)
        self.data.append(context.data)
        context.tick(task.length)
        y = [float((context.seed + i) ** task.power) for i in range(task.length)]
        return Result({"x": list(range(task.length)), "y": y}, {"last": y[-1]})

    @staticmethod
    def plan(settings: ToySettings) -> list[Unit[ToyTask]]:
        return [Unit(f"power-{k}", ToyTask(k, settings.length), settings.length) for k in (1, 2, 3)]

    @staticmethod
    def check(records: Records) -> Finding:
        last = records["power-3"].value("last")
        return Finding(f"last is {last:g} & more", Verdict.HOLDS if last > 0 else Verdict.FAILS)

    @staticmethod
    def draw(records: Records) -> Figure:
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot(records["power-1"].series("x"), records["power-1"].series("y"))
        return figure

    def experiment(self, **changes: object) -> AnyStudy:
        experiment: AnyStudy = Study(
            name="toy",
            title="Toys <b>& more</b>",
            paper_figure="Figure 0",
            summary="Nothing <script>alert(1)</script> to see.",
            settings={
                "smoke": ToySettings(2),
                "quick": ToySettings(3),
                "paper": ToySettings(),
            },
            plan=self.plan,
            run=self.run,
            claims=(Claim("Powers < 0 do not <i>occur</i>.", "paper", self.check),),
            figures=(FigureSpec("toy-line", 'A "line" <here>.', self.draw),),
        )
        return replace(experiment, **changes)


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def options() -> RunOptions:
    return RunOptions(preset="quick", seed=7, device="cpu", threads=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Store]:
    """The Procrustes experiment at its smallest, run once for all tests."""
    store = Store(tmp_path_factory.mktemp("smoke"))
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    return run_study(EXPERIMENTS["procrustes"], options, store, Watcher()), store
