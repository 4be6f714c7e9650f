"""How many steps a polar factor needs: share of the optimum, loss, accuracy and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from matplotlib.figure import Figure

from ortholand_lab.benchmarks.muon.contenders import STEPPED
from ortholand_lab.benchmarks.muon.training import (
    WIDTHS,
    Outcome,
    StepTimes,
    TrainingTask,
    run_training,
    time_steps,
)
from ortholand_lab.study.figures import add_legend
from ortholand_lab.study.records import MissingRecordError, Record, Records, Result
from ortholand_lab.study.spec import Context, FigureSpec, Study, TableSpec, Unit

TIMES = "step-times"


@dataclass(frozen=True)
class StepsSettings:
    """How each number of steps is trained, with one learning rate for all.

    Args:
        epochs: of a training.
        seeds: one training for each.
        test_images: how many at most.
        seconds: for timing the steps.
    """

    epochs: int = 5
    seeds: tuple[int, ...] = (2000, 2001, 2002, 2003, 2004)
    test_images: int = 10_000
    seconds: float = 10.0


def plan(settings: StepsSettings) -> list[Unit[TrainingTask | StepTimes]]:
    """Trainings for every number of steps, and the times of a step."""
    tasks = {
        name: TrainingTask(
            name,
            contender.rates,
            extensions=0,
            widths=WIDTHS,
            epochs=settings.epochs,
            batch_size=1024,
            tuning_seeds=(3000,),
            seeds=settings.seeds,
            test_images=settings.test_images,
        )
        for name, contender in STEPPED.items()
    }
    times = StepTimes(tuple(STEPPED), WIDTHS, 1024, settings.seconds)
    units: list[Unit[TrainingTask | StepTimes]] = [
        Unit(name, task, task.trainings) for name, task in tasks.items()
    ]
    return [*units, Unit(TIMES, times, 1, timed=True)]


def run(task: TrainingTask | StepTimes, context: Context) -> Result:
    """Do one unit of work."""
    return time_steps(task, context) if isinstance(task, StepTimes) else run_training(task, context)


def judged(record: Record) -> list[Outcome]:
    """The trainings with the seeds that count."""
    rows = zip(*(record.series(field) for field in Outcome._fields), strict=True)
    return [o for o in (Outcome(*row) for row in rows) if o.seed in record.configuration["seeds"]]


def trained(records: Records) -> list[str]:
    """The methods of which there are records."""
    names = [name for name in STEPPED if name in records]
    if not names:
        raise MissingRecordError("no training is recorded")
    return names


def table(records: Records) -> Sequence[Sequence[str]]:
    """A row for each number of steps."""
    rows = []
    for name in trained(records):
        outcomes = judged(records[name])
        accuracy = [100 * o.accuracy for o in outcomes]
        spread = f" ± {stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
        value, loss = (fmean(getattr(o, field) for o in outcomes) for field in ("value", "loss"))
        time = f"{1e3 * records[TIMES].value(name):.1f}"
        label = STEPPED[name].label
        cells = f"{value:.4f}", f"{loss:.4f}", f"{fmean(accuracy):.2f}{spread} %", time
        rows.append([label, *cells])
    return [["method", "value", "loss", "test accuracy", "step, ms"], *rows]


def draw(records: Records) -> Figure:
    """Share of the optimum, loss and time against the number of steps."""
    figure = Figure(figsize=(8, 3.2))
    panels = figure.subplots(1, 3)
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    for name in trained(records):
        momentum, steps = STEPPED[name].label.removesuffix(" steps").split(", ")
        outcomes = judged(records[name])
        value, loss = (fmean(getattr(o, field) for o in outcomes) for field in ("value", "loss"))
        point = int(steps), value, loss, 1e3 * records[TIMES].value(name)
        curves.setdefault(momentum, []).append(point)
    for (label, points), marker in zip(curves.items(), "os", strict=False):
        steps, *columns = zip(*points, strict=True)
        for axes, column in zip(panels, columns, strict=True):
            axes.plot(steps, column, marker=marker, label=label)
    titles = ("share of the optimum", "loss, last epoch", "time of a step, ms")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, xlabel="steps of msign")
    panels[2].set_ylim(bottom=0)
    add_legend(figure, panels[0], 2)
    return figure


MUON_STEPS = Study(
    name="muon-steps",
    title="Steps of LandingMuon's polar factor",
    summary=(
        "The training of the benchmark muon, with lr 0.15 for every number of steps. The value is "
        "that of short moves, as a share of the best, summed over the weights; with momentum it is "
        "that of the mean gradient's direction."
    ),
    settings={
        "smoke": StepsSettings(epochs=1, seeds=(2000,), test_images=100, seconds=0.02),
        "quick": StepsSettings(seeds=(2000, 2001, 2002)),
        "full": StepsSettings(),
    },
    plan=plan,
    run=run,
    claims=(),
    figures=(
        FigureSpec("muon-steps", "Share of the optimum, loss and time by steps of msign", draw),
    ),
    tables=(TableSpec("muon-steps", "Trainings by steps of the polar factor", table),),
    dataset="cifar10",
    seconds={"smoke": 20, "quick": 300, "full": 600},
)
