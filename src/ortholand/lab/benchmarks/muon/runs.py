"""What is run: searches for directions, their costs, training runs, and step times."""

from dataclasses import dataclass

from ortholand.lab.benchmarks.muon.contenders import CONTENDERS
from ortholand.lab.benchmarks.muon.searches import (
    DECAYING,
    GAUSSIAN,
    NETWORK,
    Case,
    CostTask,
    SearchTask,
    cost,
    search,
)
from ortholand.lab.benchmarks.muon.training import (
    WIDTHS,
    StepTimes,
    TrainingTask,
    run_training,
    time_steps,
)
from ortholand.lab.study.records import Result
from ortholand.lab.study.spec import Context, Unit

STEP_TIMES = "step-times"
# Chosen before any training with them: earlier ones, by which rates were compared, decide nothing.
TUNING_SEEDS = (3000, 3001, 3002)
SEEDS = (2000, 2001, 2002, 2003, 2004)
SHAPES = ((128, 128), (64, 64), (3072, 128), (128, 64), (512, 128), (300, 100), (1024, 256))
MuonTask = SearchTask | CostTask | TrainingTask | StepTimes


@dataclass(frozen=True)
class MuonSettings:
    """What is searched, timed and trained.

    Args:
        shapes: of the points with random gradients.
        layers: shapes of the network's weights; their gradients at its start are cases as well.
        cap: the most inner steps of a dual ascent.
        rates: of the dual ascent, in addition to the published one.
        seconds: for each timing.
        methods: that are trained, by their names; those that are not installed are left out.
        widths: of the network that is trained.
        epochs: of a training.
        batch_size: of a training.
        grid: how many learning rates are tried, the middle ones of a method's grid.
        extensions: how many more, beyond an edge of the grid that is best.
        tuning_seeds: with which each of them is tried.
        seeds: with which the best one is judged.
        test_images: how many at most.
    """

    shapes: tuple[tuple[int, int], ...] = SHAPES
    layers: tuple[tuple[int, int], ...] = ((3072, 128), (128, 64), (64, 10))
    cap: int = 5000
    rates: tuple[float, ...] = (0.003, 0.03, 0.1, 0.3)
    seconds: float = 3.0
    methods: tuple[str, ...] = tuple(CONTENDERS)
    widths: tuple[int, ...] = WIDTHS
    epochs: int = 5
    batch_size: int = 1024
    grid: int = 5
    extensions: int = 3
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    seeds: tuple[int, ...] = SEEDS
    test_images: int = 10_000


def cases(settings: MuonSettings) -> list[Case]:
    """Every shape with both kinds of random gradients, and the network's layers."""
    kinds = [(kind, *shape) for shape in settings.shapes for kind in (GAUSSIAN, DECAYING)]
    kinds += [(NETWORK, *layer) for layer in settings.layers]
    return [Case(*kind) for kind in kinds]


def plan(settings: MuonSettings) -> list[Unit[MuonTask]]:
    """A search and a cost for every case, training for every method, and step times."""
    there = tuple(m for m in settings.methods if CONTENDERS[m].installed)
    units: list[Unit[MuonTask]] = []
    for case in cases(settings):
        task = SearchTask(case, settings.cap, settings.rates)
        units.append(Unit(f"search-{case.name}", task, 1 + len(task.rates)))
        units.append(Unit(f"cost-{case.name}", CostTask(case, settings.seconds), 1, timed=True))
    for method in there:
        training = training_task(method, settings)
        units.append(Unit(f"training-{method}", training, training.trainings))
    times = StepTimes(there, settings.widths, settings.batch_size, settings.seconds)
    return [*units, Unit(STEP_TIMES, times, 1, timed=True)]


def training_task(method: str, settings: MuonSettings) -> TrainingTask:
    """The training runs of a method."""
    rates = CONTENDERS[method].rates
    left_out = max(0, len(rates) - settings.grid) // 2
    return TrainingTask(
        method,
        rates[left_out : left_out + settings.grid],
        settings.extensions,
        settings.widths,
        settings.epochs,
        settings.batch_size,
        settings.tuning_seeds,
        settings.seeds,
        settings.test_images,
    )


def run(task: MuonTask, context: Context) -> Result:
    """Do one unit of work."""
    if isinstance(task, SearchTask):
        return search(task, context)
    if isinstance(task, CostTask):
        return cost(task, context)
    if isinstance(task, TrainingTask):
        return run_training(task, context)
    return time_steps(task, context)
