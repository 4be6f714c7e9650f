"""Networks trained in turn, iteration by iteration: their times and results.

LeNet-5 on MNIST for an epoch and ResNet-18 on CIFAR-10 for some steps. Learning rates are
fixed; those on MNIST are each method's best in the search of the experiment mnist.
"""

from dataclasses import dataclass, replace
from typing import Any

from ortholand.lab.experiments.cifar import (
    CIFAR_METHODS,
    PAPER_BATCH,
    ResNetRun,
    start_resnet,
)
from ortholand.lab.experiments.classification.runs import TrainingRun
from ortholand.lab.experiments.mnist import BEST_RATES, EPOCH, start_lenet
from ortholand.lab.study.figures import METHOD_STYLES
from ortholand.lab.study.records import Records, Result
from ortholand.lab.study.spec import Context, Study, TableSpec, Unit
from ortholand.lab.study.timing import Timing, medians, time_in_turn, timing_unit

TRAINING = "training"  # the unit in which all networks are trained in turn
CIFAR_RATES = dict.fromkeys(CIFAR_METHODS, 0.5)  # of the orthogonal kernels
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
    """Which network is trained, and for how long."""

    iterations: int
    batch_size: int
    test_images: int
    width: int = 0  # of a ResNet; 0 for LeNet


def plan(settings: EpochSettings) -> list[Unit[Any]]:
    """One unit: all training runs, in turn."""
    sizes = (settings.batch_size, settings.iterations, 1, settings.test_images)
    if settings.width:
        runs = [ResNetRun(m, lr, *sizes, width=settings.width) for m, lr in CIFAR_RATES.items()]
    else:
        runs = [TrainingRun(m, lr, *sizes) for m, lr in BEST_RATES.items()]
    return [timing_unit(Timing(tuple(runs), 0, settings.iterations), TRAINING)]


def train_in_turn(timing: Timing[TrainingRun], context: Context) -> Result:
    """Train all networks; the series have an entry for each of them."""
    trainings = {
        run.method: start_resnet(run, context)
        if isinstance(run, ResNetRun)
        else start_lenet(run, context)
        for run in timing.runs
    }
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
_ONE_FILE = 10_000 // PAPER_BATCH  # iterations in which the images of one of five files pass
_SOME_STEPS = EpochSettings(_ONE_FILE, batch_size=PAPER_BATCH, test_images=10_000, width=64)

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

CIFAR_STEPS = Study(
    name="cifar-steps",
    title="The first steps of ResNet-18 on CIFAR-10 by each method, in turn",
    summary=(
        "The network and the methods of the experiment cifar, learning rate 0.5, one thread. All "
        "methods take turns, batch by batch. 78 batches of 128 images, an epoch of one of the five "
        "training files; the paper's 150 epochs of all are 750 times as long. Below the full "
        "preset fewer and smaller batches, and a network with fewer channels (the width below)."
    ),
    settings={
        "smoke": replace(_SOME_STEPS, iterations=3, batch_size=8, test_images=50, width=4),
        "quick": replace(_SOME_STEPS, iterations=30, batch_size=32, test_images=500, width=16),
        "full": _SOME_STEPS,
    },
    plan=plan,
    run=train_in_turn,
    claims=(),
    tables=(TableSpec("cifar-steps", "ResNet-18 on CIFAR-10, all methods in turn", table),),
    dataset="cifar10",
    seconds={"smoke": 3, "quick": 25, "full": 220},
)
