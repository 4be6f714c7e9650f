"""ResNet-18 on CIFAR-10 with orthogonal kernels (the paper's figure 7)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ortholand.lab.experiments.classification import (
    VIEW,
    Task,
    Timing,
    Training,
    Tried,
    best_rates,
    data_of,
    draw_learning_rates,
    draw_training,
    is_kernel,
    median_times,
    run_unit,
    stays_in_ball,
    takes_longer,
    timing_unit,
    training_unit,
    tried_rates,
)
from ortholand.lab.methods import Trainee, prepare
from ortholand.lab.models import ResNet, resnet18
from ortholand.lab.study.figures import listed
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)

LANDING, RETRACTION, TRIVIALIZATION = METHODS = (
    "landing-momentum",
    "exponential",
    "trivialization-momentum",
)
FULL_SIZE = "timing-full-size"  # the unit in which the paper's network and batch are timed
PAPER_WIDTH, PAPER_BATCH = 64, 128
EPOCH = 390  # iterations in which 50,000 images pass in batches of 128
TRAINED = 10 * EPOCH  # iterations before which a comparison of test errors means nothing
MOMENTUM = 0.9
EPS = 0.5  # radius of landing's safe ball, the optimizer's default
LARGEST_STEP = 0.5  # that is ever safe: 1 / (2 lam), with lam = 1
FASTER = 1.5  # "50 % faster"
MUCH = 2.0  # "much more expensive"
FAILED = 0.05  # a test error so far above another's is that of a method that failed
SAME_ERROR = 0.01  # test errors that differ by less count as the same


@dataclass(frozen=True)
class Settings:
    """The paper's settings are the defaults; it does not say how many epochs follow the 100."""

    width: int = PAPER_WIDTH  # channels in the first stage of the network
    batch_size: int = PAPER_BATCH
    learning_rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    seeds: int = 5
    iterations: int = 150 * EPOCH
    lr_drop: int = 100 * EPOCH  # the iteration from which all learning rates are a tenth
    trivialization_share: float = 1.0  # part of the iterations that trivializations are run for
    points: int = 150  # how often a network is tested on its way
    test_images: int = 10_000
    warm_up: int = 5  # iterations before those that are timed in turn
    repetitions: int = 50  # of the iterations that are timed in turn
    timed_width: int = PAPER_WIDTH  # of the network that is timed besides
    timed_batch: int = PAPER_BATCH
    timed_repetitions: int = 50


@dataclass(frozen=True)
class ResNetTask(Task):
    """One training of a ResNet."""

    width: int = PAPER_WIDTH
    lr_drop: int = 100 * EPOCH


def plan(settings: Settings) -> list[Unit[Task | Timing]]:
    """Every method with every learning rate and seed, and the times at this and at full size."""
    tasks = [_task(settings, method, lr) for method in METHODS for lr in settings.learning_rates]
    trials = [replace(task, trial=i) for task in tasks for i in range(settings.seeds)]
    timing = Timing(tuple(tasks), settings.warm_up, settings.repetitions, settings.seeds)
    return [
        *(training_unit(task) for task in trials),
        timing_unit(timing),
        timing_unit(_full_size(settings), FULL_SIZE),
    ]


def _task(settings: Settings, method: str, lr: float) -> ResNetTask:
    share = settings.trivialization_share if method == TRIVIALIZATION else 1.0
    return ResNetTask(
        method=method,
        lr=lr,
        batch_size=settings.batch_size,
        iterations=math.ceil(share * settings.iterations),
        points=min(settings.points, math.ceil(share * settings.iterations)),
        test_images=settings.test_images,
        width=settings.width,
        lr_drop=settings.lr_drop,
    )


def _full_size(settings: Settings) -> Timing:
    """The network that the claims on time are about, whatever is trained here."""
    sizes = dict(width=settings.timed_width, batch_size=settings.timed_batch)
    runs = tuple(replace(_task(settings, method, 1.0), **sizes) for method in METHODS)
    return Timing(runs, min(settings.warm_up, 1), settings.timed_repetitions)


def start(task: Task, context: Context) -> Training:
    """The training of a task, before its first step."""
    assert isinstance(task, ResNetTask)
    seed = context.seed + 1000 * task.trial
    model = resnet18(width=task.width, seed=seed).to(context.device)
    return Training(
        prepare_resnet(model, task.method, task.lr),
        data_of(context),
        batch_size=task.batch_size,
        seed=seed,
        augment=True,
        lr_drop=task.lr_drop,
    )


def prepare_resnet(model: ResNet, method: str, lr: float) -> Trainee:
    """A network that is ready for a method, with the paper's options for all other parameters."""
    return prepare(
        model,
        method,
        orthogonal=is_kernel,
        view=VIEW,
        lr=lr,
        momentum=MOMENTUM,
        retraction_momentum=MOMENTUM,
        plain_lr=0.1,
        plain_momentum=MOMENTUM,
        plain_weight_decay=5e-4,
    )


# Claims.


def _is_slower(method: str, factor: float, records: Records) -> Finding:
    """Time of an iteration of a method as a multiple of landing's, at the paper's size."""
    timing = records[FULL_SIZE]
    times = dict(zip(METHODS, median_times(timing), strict=True))
    finding = takes_longer(times, [method], factor, timing.configuration["repetitions"])
    if _is_full_size(timing):
        return finding
    return Finding(f"{finding.measured}; not at the paper's size", Verdict.OPEN)


def _is_full_size(timing: Record) -> bool:
    runs = timing.configuration["runs"]
    return all((run["width"], run["batch_size"]) == (PAPER_WIDTH, PAPER_BATCH) for run in runs)


def trivializations_fail(records: Records) -> Finding:
    """Test error of trivializations, beside the others."""
    best = best_rates(records)
    ends = {method: entry.end("test_error") for method, entry in best.items()}
    others = max(ends[LANDING], ends[RETRACTION])
    return _decided(best, listed(ends, ".1%"), ends[TRIVIALIZATION] >= others + FAILED)


def as_accurate(records: Records) -> Finding:
    """Test error of landing, beside that of the retraction."""
    best = best_rates(records)
    ends = {method: best[method].end("test_error") for method in (LANDING, RETRACTION)}
    return _decided(best, listed(ends, ".1%"), ends[LANDING] <= ends[RETRACTION] + SAME_ERROR)


def ends_nearer(records: Records) -> Finding:
    """Orthogonality error of landing in the end, beside that of the retraction."""
    best = best_rates(records)
    ends = {method: best[method].end("orthogonality_error") for method in (LANDING, RETRACTION)}
    return _decided(best, listed(ends, ".1e"), ends[LANDING] < ends[RETRACTION])


def rates_are_the_same(records: Records) -> Finding:
    """Training losses of landing with all rates of 1 / (2 lam) and more, before rates drop."""
    tried = [entry for entry in tried_rates(records)[LANDING] if entry.lr >= LARGEST_STEP]
    listed_rates = ", ".join(f"{entry.lr:g}" for entry in tried)
    losses = [[loss for run in entry.runs for loss in _losses_before_drop(run)] for entry in tried]
    if len(tried) < 2 or not losses[0]:
        return Finding(f"nothing to compare with: rates {listed_rates}", Verdict.OPEN)
    same = all(other == losses[0] for other in losses[1:])
    return Finding(
        f"rates {listed_rates}: the {len(losses[0])} losses recorded with each before they drop "
        f"{'are' if same else 'are not'} the same to the last bit",
        Verdict.of(same),
    )


def _losses_before_drop(run: Record) -> list[float]:
    pairs = zip(run.series("iteration"), run.series("train_loss"), strict=True)
    return [loss for k, loss in pairs if 0 < k <= run.configuration["lr_drop"]]


def _decided(best: Mapping[str, Tried], measured: str, holds: bool) -> Finding:
    """What follows from where the runs end; nothing, if that is too early or the network narrow."""
    runs = [run.configuration for entry in best.values() for run in entry.runs]
    lengths = {method: entry.runs[0].configuration["iterations"] for method, entry in best.items()}
    measured = f"{measured}; iterations: {listed(lengths, ',')}"
    if any(run["iterations"] < TRAINED or run["width"] < PAPER_WIDTH for run in runs):
        return Finding(f"{measured}; too few, or of too small a network, to tell", Verdict.OPEN)
    return Finding(measured, Verdict.of(holds))


CIFAR = Study(
    name="cifar",
    title="ResNet-18 on CIFAR-10 with orthogonal kernels",
    paper_figure="Figure 7",
    summary=(
        "A ResNet-18 with ten outputs. Every slice of every convolution's weight is orthogonal, "
        "as in the paper: 1.2 million 3 x 3 matrices and 192 of 7 x 7. In the three convolutions "
        "of 1 x 1 such a slice is +1 or -1 and never changes. SGD with momentum 0.9 for all: by "
        "landing, by the exponential retraction and by trivializations. Other parameters have "
        "learning rate 0.1, momentum 0.9 and weight decay 5e-4; all rates are divided by 10 after "
        "100 epochs. The curves are those of the learning rate with the smallest training loss "
        "in the end, and medians of five seeds. The paper does not tell how many epochs there "
        "are in all (here 150), nor whether images are shifted and mirrored at random (here they "
        "are, as is usual, and scaled to mean 0 and deviation 1). Below the paper preset a "
        "network with a fraction of the channels (the width below, of 64) is trained with one "
        "seed for less than an epoch, and trivializations for a part of that (their share "
        "below): enough to see them begin to learn, not to compare how well. The claims on time do "
        "not suffer: quick times single iterations of the whole network with batches of 128, the "
        "methods in turn."
    ),
    settings={
        "smoke": Settings(
            width=4,
            batch_size=16,
            learning_rates=(1.0,),
            seeds=1,
            iterations=6,
            trivialization_share=0.5,
            points=2,
            test_images=50,
            warm_up=1,
            repetitions=2,
            timed_width=4,
            timed_batch=16,
            timed_repetitions=2,
        ),
        "quick": Settings(
            width=8,
            seeds=1,
            iterations=100,
            trivialization_share=0.5,
            points=5,
            test_images=500,
            warm_up=1,
            repetitions=5,
            timed_repetitions=5,
        ),
        "paper": Settings(),
    },
    plan=plan,
    run=partial(run_unit, start),
    claims=(
        Claim(
            "Landing is 50 % faster than the retraction: an iteration with the exponential "
            f"retraction takes {FASTER} times as long or longer (batches of {PAPER_BATCH}).",
            "paper",
            partial(_is_slower, RETRACTION, FASTER),
        ),
        Claim(
            "Trivializations are much more expensive than landing: an iteration takes "
            f"{MUCH:.0f} times as long or longer.",
            "paper",
            partial(_is_slower, TRIVIALIZATION, MUCH),
        ),
        Claim(
            "Trivializations fail to reach a high accuracy: their test error ends "
            f"{FAILED:.0%} or more above that of landing and of the retraction.",
            "paper",
            trivializations_fail,
        ),
        Claim(
            "The corrected safe step keeps every kernel within eps of the manifold.",
            "correction",
            partial(stays_in_ball, (LANDING,), EPS),
        ),
        Claim(
            "With lam = 1 the paper's learning rates 1/2, 1 and 2 are one and the same for "
            "landing, because no step above 1 / (2 lam) is safe.",
            "correction",
            rates_are_the_same,
        ),
        Claim(
            "Landing is as accurate as the retraction: its test error is at most "
            f"{SAME_ERROR:.0%} higher.",
            "beyond the paper",
            as_accurate,
        ),
        Claim(
            "Landing ends nearer to the manifold than the exponential retraction.",
            "beyond the paper",
            ends_nearer,
        ),
    ),
    figures=(
        FigureSpec(
            "cifar",
            "ResNet-18 on CIFAR-10, each method with its best learning rate, all with momentum; "
            "with several seeds their median, and behind it each of them. Top: test error. "
            "Bottom: orthogonality error of all kernels together. Left: by time, which is the "
            "iterations times the median time of one, timed in turn with the other methods. "
            "Right: by iteration.",
            draw_training,
        ),
        FigureSpec(
            "cifar-learning-rates",
            "ResNet-18 on CIFAR-10: mean training loss over the last quarter of the run, against "
            "the learning rate of the kernels. The lowest point of each method is its run in the "
            "figure above.",
            draw_learning_rates,
        ),
    ),
    dataset="cifar10",
)
