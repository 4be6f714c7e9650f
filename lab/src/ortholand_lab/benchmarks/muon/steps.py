"""How many steps a polar factor needs: share of the optimum, loss and accuracy against them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ortholand_lab.benchmarks.muon.contenders import STEPPED
from ortholand_lab.benchmarks.muon.training import WIDTHS, Outcome, TrainingTask, run_training
from ortholand_lab.study.records import MissingRecordError, Records
from ortholand_lab.study.spec import Study, TableSpec, Unit


@dataclass(frozen=True)
class StepsSettings:
    """How each number of steps is trained, with one learning rate for all.

    Args:
        epochs: of a training.
        seeds: one training for each.
        test_images: how many at most.
    """

    epochs: int = 5
    seeds: tuple[int, ...] = (2000, 2001, 2002, 2003, 2004)
    test_images: int = 10_000


def plan(settings: StepsSettings) -> list[Unit[TrainingTask]]:
    """Trainings for every number of steps."""
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
    return [Unit(name, task, task.trainings) for name, task in tasks.items()]


def table(records: Records) -> Sequence[Sequence[str]]:
    """A row for each number of steps."""
    rows = []
    for name in (name for name in STEPPED if name in records):
        series = zip(*(records[name].series(field) for field in Outcome._fields), strict=True)
        outcomes = [Outcome(*row) for row in series]
        judged = [o for o in outcomes if o.seed in records[name].configuration["seeds"]]
        accuracy = [100 * o.accuracy for o in judged]
        spread = f" ± {stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
        value, loss = (fmean(getattr(o, field) for o in judged) for field in ("value", "loss"))
        label = STEPPED[name].label
        rows.append([label, f"{value:.4f}", f"{loss:.4f}", f"{fmean(accuracy):.2f}{spread} %"])
    if not rows:
        raise MissingRecordError("no training is recorded")
    return [["method", "value", "loss", "test accuracy"], *rows]


MUON_STEPS = Study(
    name="muon-steps",
    title="Steps of LandingMuon's polar factor",
    summary=(
        "The training of the benchmark muon, with lr 0.15 for every number of steps. The value is "
        "that of short moves, as a share of the best, summed over the weights; with momentum it is "
        "that of the mean gradient's direction."
    ),
    settings={
        "smoke": StepsSettings(epochs=1, seeds=(2000,), test_images=100),
        "quick": StepsSettings(seeds=(2000, 2001, 2002)),
        "full": StepsSettings(),
    },
    plan=plan,
    run=run_training,
    claims=(),
    tables=(TableSpec("muon-steps", "Trainings by steps of the polar factor", table),),
    dataset="cifar10",
    seconds={"smoke": 20, "quick": 200, "full": 500},
)
