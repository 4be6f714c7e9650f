"""LeNet-5 trained on MNIST for an epoch, by all methods in turn: times and results.

Learning rates are each method's best in the search of the experiment mnist.
"""

from dataclasses import dataclass, replace
from typing import Any

from ortholand_lab.experiments.classification import TrainingRun
from ortholand_lab.experiments.mnist import BEST_RATES, EPOCH, start_lenet
from ortholand_lab.study.figures import METHOD_STYLES
from ortholand_lab.study.records import Records, Result
from ortholand_lab.study.spec import Context, Study, TableSpec, Unit
from ortholand_lab.study.timing import Timing, medians, time_in_turn, timing_unit

TRAINING = "training"  # the unit in which all networks are trained in turn
COLUMNS = {  # of the table: series -> heading and form
    "seconds": ("time, s", ",.1f"),
    "milliseconds": ("median, ms", ",.2f"),
    "to_first": ("to first", ".2f"),
    "train_loss": ("loss", ".3f"),
    "test_error": ("test error", ".2%"),
    "orthogonality_error": ("‖XᵀX - I‖", ".1e"),
}


@dataclass(frozen=True)
class EpochSettings:
    """For how long the network is trained."""

    iterations: int
    batch_size: int
    test_images: int


def plan(settings: EpochSettings) -> list[Unit[Any]]:
    """One unit: all training runs, in turn."""
    sizes = (settings.batch_size, settings.iterations, 1, settings.test_images)
    runs = [TrainingRun(method, lr, *sizes) for method, lr in BEST_RATES.items()]
    return [timing_unit(Timing(tuple(runs), 0, settings.iterations), TRAINING)]


def train_in_turn(timing: Timing[TrainingRun], context: Context) -> Result:
    """Train all networks; the series have an entry for each of them."""
    trainings = {run.method: start_lenet(run, context) for run in timing.runs}
    times = time_in_turn(
        {method: training.action() for method, training in trainings.items()},
        repetitions=timing.repetitions,
        warm_up=timing.warm_up,
        device=context.device,
        tick=context.tick,
    )
    middle = medians(times)
    first, test_images = middle[timing.runs[0].method], timing.runs[0].test_images
    rows = []
    for method, training in trainings.items():
        del training.losses[: -max(1, timing.repetitions // 10)]  # of the last tenth
        row = {"milliseconds": 1e3 * middle[method], "to_first": middle[method] / first}
        rows.append(training.measure(test_images)._asdict() | row | {"seconds": sum(times[method])})
    return Result({name: [row[name] for row in rows] for name in rows[0]}, {})


def table(records: Records) -> list[list[str]]:
    """Times and results of the networks."""
    record = records[TRAINING]
    rows = [["method", "lr", *(heading for heading, _ in COLUMNS.values())]]
    for i, run in enumerate(record.configuration["runs"]):
        numbers = [f"{record.series(name)[i]:{form}}" for name, (_, form) in COLUMNS.items()]
        rows.append([METHOD_STYLES[run["method"]].label, f"{run['lr']:.3g}", *numbers])
    return rows


_WHOLE_EPOCH = EpochSettings(iterations=EPOCH, batch_size=4, test_images=10_000)

MNIST_EPOCH = Study(
    name="mnist-epoch",
    title="An epoch of LeNet-5 on MNIST by each method, in turn",
    summary=(
        "The network and the methods of the experiment mnist, batches of 4 images, one thread. All "
        "methods take turns, batch by batch. The loss is the mean over the last tenth of the "
        "batches. Below the full preset less than an epoch, and fewer test images."
    ),
    settings={
        "smoke": replace(_WHOLE_EPOCH, iterations=20, test_images=100),
        "quick": replace(_WHOLE_EPOCH, iterations=500, test_images=1_000),
        "full": _WHOLE_EPOCH,
    },
    plan=plan,
    run=train_in_turn,
    claims=(),
    tables=(TableSpec("mnist-epoch", "LeNet-5 on MNIST, all methods in turn", table),),
    dataset="mnist",
    seconds={"smoke": 3, "quick": 45, "full": 1_300},
)
