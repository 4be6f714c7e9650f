"""LeNet-5 on MNIST with orthogonal kernels (the paper's figure 6)."""

import math
from dataclasses import dataclass
from functools import partial

from ortholand.lab.experiments.classification import (
    TIMING,
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
    run_unit,
    stays_in_ball,
    takes_longer,
    timing_unit,
    training_unit,
)
from ortholand.lab.methods import (
    ADAPTIVE_METHODS,
    RETRACTION_METHODS,
    TRAINING_METHODS,
    TRIVIALIZATION_METHODS,
    Trainee,
    prepare,
)
from ortholand.lab.models import LeNet5
from ortholand.lab.study.figures import listed
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)

LANDINGS = ("landing", "landing-momentum")
MOMENTUM = 0.9
EPS = 0.5  # radius of landing's safe ball, the optimizer's default
EPOCH = 15_000  # iterations in which 60,000 images pass in batches of 4
FASTER = 1.5  # "about 50 % faster"
ORDER_OF_MAGNITUDE = 10.0
SAME_ERROR = 0.005  # test errors that differ by less count as the same


@dataclass(frozen=True)
class Settings:
    """The paper's settings are the defaults; it does not say how many iterations, or momentum."""

    batch_size: int = 4
    learning_rates: tuple[float, ...] = tuple(4.0**i for i in range(-5, 1))
    iterations: int = 10 * EPOCH
    trivialization_share: float = 1.0  # part of these that the trivializations are run for
    points: int = 50  # how often a network is tested on its way
    test_images: int = 10_000
    warm_up: int = 20  # iterations before those that are timed in turn
    repetitions: int = 200  # of the iterations that are timed in turn


def plan(settings: Settings) -> list[Unit[Task | Timing]]:
    """Every method with every learning rate, and the timing of them all."""
    tasks = [
        _task(settings, method, lr) for method in TRAINING_METHODS for lr in settings.learning_rates
    ]
    timing = Timing(tuple(tasks), settings.warm_up, settings.repetitions)
    return [*(training_unit(task) for task in tasks), timing_unit(timing)]


def _task(settings: Settings, method: str, lr: float) -> Task:
    share = settings.trivialization_share if method in TRIVIALIZATION_METHODS else 1.0
    return Task(
        method=method,
        lr=lr,
        batch_size=settings.batch_size,
        iterations=math.ceil(share * settings.iterations),
        points=settings.points,
        test_images=settings.test_images,
    )


def start(task: Task, context: Context) -> Training:
    """The training of a task, before its first step."""
    model = LeNet5(seed=context.seed).to(context.device)
    trainee = prepare_lenet(model, task.method, task.lr)
    return Training(trainee, data_of(context), batch_size=task.batch_size, seed=context.seed)


def prepare_lenet(model: LeNet5, method: str, lr: float) -> Trainee:
    """A network that is ready for a method; one learning rate and momentum for all parameters."""
    return prepare(
        model,
        method,
        orthogonal=is_kernel,
        view=VIEW,
        lr=lr,
        momentum=MOMENTUM,
        plain_momentum=MOMENTUM if method.endswith("-momentum") else 0.0,
    )


# Claims.


def landing_is_faster(records: Records) -> Finding:
    """Time of an iteration with each of the retractions, as a multiple of landing's."""
    best = best_rates(records)
    times = {method: best[method].seconds for method in ("landing", *RETRACTION_METHODS)}
    repetitions = records[TIMING].configuration["repetitions"]
    return takes_longer(times, RETRACTION_METHODS, FASTER, repetitions)


def trivializations_are_slower(records: Records) -> Finding:
    """Time of an iteration of the adaptive trivializations, beside each retraction and landing."""
    best = best_rates(records)
    repetitions = records[TIMING].configuration["repetitions"]
    findings = []
    for method in (*RETRACTION_METHODS, "landing"):
        times = {m: best[m].seconds for m in (method, *ADAPTIVE_METHODS)}
        findings.append(takes_longer(times, ADAPTIVE_METHODS, ORDER_OF_MAGNITUDE, repetitions))
    return Finding(
        "; ".join(f.measured for f in findings), Verdict.worst(f.verdict for f in findings)
    )


def ends_nearer(records: Records) -> Finding:
    """Orthogonality error in the end: landing, and each of the retractions."""
    best = best_rates(records)
    ends = {m: best[m].end("orthogonality_error") for m in ("landing", *RETRACTION_METHODS)}
    nearer = all(ends["landing"] < ends[method] for method in RETRACTION_METHODS)
    return _decided(best, listed(ends, ".1e"), nearer)


def adaptive_are_best(records: Records) -> Finding:
    """Whether a trivialization with Adam or RMSprop ends with the smallest test error."""
    best = best_rates(records)
    ends = {method: entry.end("test_error") for method, entry in best.items()}
    smallest = min(ends, key=lambda method: ends[method])
    return _decided(best, listed(ends, ".2%"), smallest in ADAPTIVE_METHODS)


def as_accurate(records: Records) -> Finding:
    """Test error of landing beside those of the retractions."""
    best = best_rates(records)
    ends = {m: best[m].end("test_error") for m in ("landing", *RETRACTION_METHODS)}
    lowest = min(ends[method] for method in RETRACTION_METHODS)
    return _decided(best, listed(ends, ".2%"), ends["landing"] <= lowest + SAME_ERROR)


def _decided(best: dict[str, Tried], measured: str, holds: bool) -> Finding:
    """What follows from where the runs end; nothing, if that is before an epoch is over."""
    lengths = [run.configuration["iterations"] for entry in best.values() for run in entry.runs]
    measured = f"after {_span(lengths)} iterations: {measured}"
    if min(lengths) < EPOCH:
        return Finding(f"{measured}; less than an epoch decides nothing", Verdict.OPEN)
    return Finding(measured, Verdict.of(holds))


def _span(lengths: list[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


MNIST = Study(
    name="mnist",
    title="LeNet-5 on MNIST with orthogonal kernels",
    paper_figure="Figure 6",
    summary=(
        "A network of three convolutions and a linear layer learns to read digits. Each 5 x 5 or "
        "4 x 4 slice of a convolution's weight is an orthogonal matrix: 2,022 of them. Batches of "
        "4 images, the same ones for all methods; every parameter with the same learning rate, "
        "of which each method gets the one from 4^-5, ..., 1 with the smallest training loss in "
        "the end. (The appendix of the paper has another grid, 1, 0.1, 0.01, 0.001.) The paper "
        "names neither activations nor pooling, momentum or the number of epochs: here tanh and "
        "means of 2 x 2 as in LeCun's network, 0.9, and 10 epochs. Images are scaled to mean 0 "
        "and deviation 1. Below the paper preset there are fewer learning rates, from the middle "
        "of the grid, and far less than an epoch of 15,000 iterations, of which trivializations "
        "do a part (their share below), tested on some of the test images: enough to see all "
        "methods learn and to time them, not to say which one ends best. "
        "Times rest on a run of its own, in which all methods take turns iteration by "
        "iteration; they include the gradient. Trivializations are W = B exp(A), B the start."
    ),
    settings={
        "smoke": Settings(
            learning_rates=(4.0**-3,),
            iterations=40,
            trivialization_share=0.5,
            points=2,
            test_images=100,
            warm_up=1,
            repetitions=3,
        ),
        "quick": Settings(
            learning_rates=(4.0**-4, 4.0**-3, 4.0**-2),
            iterations=500,
            trivialization_share=0.6,
            points=10,
            test_images=1_000,
            warm_up=5,
            repetitions=30,
        ),
        "paper": Settings(),
    },
    plan=plan,
    run=partial(run_unit, start),
    claims=(
        Claim(
            "Landing is about 50 % faster than the retractions: an iteration with the exponential "
            f"or the Cayley retraction takes {FASTER} times as long or longer.",
            "paper",
            landing_is_faster,
        ),
        Claim(
            "Landing reaches a smaller orthogonality error than the exponential and the Cayley "
            "retraction.",
            "paper",
            ends_nearer,
        ),
        Claim(
            "Trivializations with Adam or RMSprop reach the smallest test error.",
            "paper",
            adaptive_are_best,
        ),
        Claim(
            "These are an order of magnitude slower than the traditional methods: an iteration "
            f"takes at least {ORDER_OF_MAGNITUDE:.0f} times as long as with a retraction or "
            "landing.",
            "paper",
            trivializations_are_slower,
        ),
        Claim(
            "The corrected safe step keeps every kernel within eps of the manifold.",
            "correction",
            partial(stays_in_ball, LANDINGS, EPS),
        ),
        Claim(
            "Landing is as accurate as the retractions: its test error is at most "
            f"{SAME_ERROR:.1%} above that of the better one.",
            "beyond the paper",
            as_accurate,
        ),
    ),
    figures=(
        FigureSpec(
            "mnist",
            "LeNet-5 on MNIST, each method with its best learning rate. Top: test error. Bottom: "
            "orthogonality error of all kernels together; trivializations are exact up to "
            "rounding. Left: by time, which is the iterations times the median time of one, "
            "timed in turn with the other methods. Right: by iteration.",
            draw_training,
        ),
        FigureSpec(
            "mnist-learning-rates",
            "LeNet-5 on MNIST: mean training loss over the last quarter of the run, against the "
            "learning rate. The lowest point of each method is its run in the figure above.",
            draw_learning_rates,
        ),
    ),
    threads=1,  # batches of 4 and small kernels are not worth sharing
    dataset="mnist",
)
