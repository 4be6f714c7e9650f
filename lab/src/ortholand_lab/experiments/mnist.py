"""LeNet-5 on MNIST with orthogonal kernels (the paper's figure 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ortholand_lab.experiments import classification
from ortholand_lab.methods import ADAPTIVE_METHODS, RETRACTION_METHODS, TRAINING_METHODS
from ortholand_lab.models import LeNet5
from ortholand_lab.study.records import Records
from ortholand_lab.study.spec import Claim, Context, Finding, Study, Unit, Verdict
from ortholand_lab.study.timing import TIMING

LANDINGS = ("landing", "landing-momentum")
COMPARED = ("landing", *RETRACTION_METHODS)
MOMENTUM = 0.9
EPOCH = 15_000  # iterations in which 60,000 images pass in batches of 4
ENOUGH = {"iterations": EPOCH}  # less decides nothing
FASTER = 1.5  # "about 50 % faster"
ORDER_OF_MAGNITUDE = 10.0
SAME_ERROR = 0.005  # test errors that differ by less count as the same


@dataclass(frozen=True, kw_only=True)
class MnistSettings(classification.TrainingSettings):
    """A search for learning rates, and longer training runs with the best ones."""

    # Methods with their rates. Where a search finds another one best, its finals decide nothing.
    finals: tuple[tuple[str, float], ...] = ()
    final_iterations: int = EPOCH
    final_points: int = 15
    trials: int = classification.MOST_TRIALS  # of each final


# In the search with seed 0 of the paper preset.
BEST_RATES = {
    "landing": 4.0**-2,
    "landing-momentum": 4.0**-4,
    "exponential": 4.0**-2,
    "cayley": 4.0**-2,
    "trivialization-sgd": 4.0**-2,
    "trivialization-momentum": 4.0**-4,
    "trivialization-adam": 4.0**-4,
    "trivialization-rmsprop": 4.0**-4,
}

# The paper does not say how many iterations, or momentum.
PAPER = MnistSettings(
    batch_size=4,
    learning_rates=tuple(4.0**i for i in range(-5, 1)),
    iterations=EPOCH // 10,
    points=4,
    test_images=10_000,
    warm_up=20,
    repetitions=200,
)


# What is run.


def plan(settings: MnistSettings) -> list[Unit[Any]]:
    """Every method with every learning rate, the finals, and the timing of every rate."""
    *search, timing = classification.plan_trainings(
        settings, classification.runs_of(settings, TRAINING_METHODS)
    )
    return [*search, *_finals(settings), timing]


def _finals(settings: MnistSettings) -> list[Unit[Any]]:
    """The final runs: one trial of all methods after another."""
    lengths = (settings.final_iterations, settings.final_points, settings.test_images)
    trainings = [
        classification.TrainingRun(method, lr, settings.batch_size, *lengths, trial)
        for trial in range(settings.trials)
        for method, lr in settings.finals
    ]
    return [
        Unit(classification.final_name(t.method, t.lr, t.trial), t, t.iterations) for t in trainings
    ]


def start_lenet(run: classification.TrainingRun, context: Context) -> classification.Training:
    """The training run before its first step; all parameters share one rate and momentum."""
    seed = context.seed + 1000 * run.trial
    model = LeNet5(seed=seed).to(context.device)
    plain_momentum = MOMENTUM if run.method.endswith("-momentum") else 0.0
    options = dict(momentum=MOMENTUM, plain_momentum=plain_momentum)
    trainee = classification.prepare_kernels(model, run.method, run.lr, **options)
    return classification.Training(trainee, context, batch_size=run.batch_size, seed=seed)


# What is claimed.


def are_slower(
    methods: Sequence[str], others: Sequence[str], factor: float, records: Records
) -> Finding:
    """Time of an iteration of some methods, as a multiple of that of each of the others."""
    best = classification.best_rates(records, (*methods, *others))
    doubt, findings = classification.doubt_of_times(records[TIMING]), []
    for other in others:
        times = {method: best[method].seconds for method in (other, *methods)}
        findings.append(classification.takes_longer(times, factor, doubt))
    measured = "; ".join(finding.measured for finding in findings)
    return Finding(measured, Verdict.worst(finding.verdict for finding in findings))


MNIST_CLAIMS = (
    Claim(
        "Landing is about 50 % faster than the retractions: an iteration with the exponential "
        f"or the Cayley retraction takes {FASTER} times as long or longer.",
        "paper",
        partial(are_slower, RETRACTION_METHODS, ("landing",), FASTER),
    ),
    Claim(
        "Landing reaches a smaller orthogonality error than the exponential and the Cayley "
        "retraction.",
        "paper",
        partial(
            classification.compare_ends,
            "orthogonality_error",
            COMPARED,
            lambda ends: all(ends["landing"] < ends[m] for m in RETRACTION_METHODS),
            ENOUGH,
        ),
    ),
    Claim(
        "Trivializations with Adam or RMSprop reach the smallest test error.",
        "paper",
        partial(
            classification.compare_ends,
            "test_error",
            TRAINING_METHODS,
            lambda ends: min(ends, key=lambda m: ends[m]) in ADAPTIVE_METHODS,
            ENOUGH,
        ),
    ),
    Claim(
        "These are an order of magnitude slower than the traditional methods: an iteration "
        f"takes at least {ORDER_OF_MAGNITUDE:.0f} times as long as with a retraction or "
        "landing.",
        "paper",
        partial(are_slower, ADAPTIVE_METHODS, (*RETRACTION_METHODS, "landing"), ORDER_OF_MAGNITUDE),
    ),
    classification.ball_claim(LANDINGS),
    Claim.beyond(
        "Landing is as accurate as the retractions: its test error is at most "
        f"{SAME_ERROR:.1%} above that of the better one.",
        partial(
            classification.compare_ends,
            "test_error",
            COMPARED,
            lambda ends: ends["landing"] <= min(ends[m] for m in RETRACTION_METHODS) + SAME_ERROR,
            ENOUGH,
        ),
    ),
)

MNIST = Study(
    name="mnist",
    title="LeNet-5 on MNIST with orthogonal kernels",
    paper_figure="Figure 6",
    summary=(
        "A network of three convolutions and a linear layer learns to read digits. Each 5 x 5 or "
        "4 x 4 slice of a convolution's weight is an orthogonal matrix: 2,022 of them. Batches of "
        "4 images, the same ones for all methods; every parameter with the same learning rate, "
        "of which each method gets the one from 4^-5, ..., 1 with the smallest training loss after "
        "a tenth of an epoch; with it, it is trained for an epoch, with five seeds. (The appendix "
        "of the paper has another grid, 1, 0.1, 0.01, 0.001.) The paper names neither activations "
        "nor pooling, momentum or the number of epochs: here tanh and means of 2 x 2 as in LeCun's "
        "network, 0.9, and one epoch. Images are scaled to mean 0 and deviation 1. Below the paper "
        "preset there are fewer learning rates, from the middle of the grid, one seed and far less "
        "than an epoch of 15,000 iterations, of which trivializations do a part (their share "
        "below), tested on some of the test images: enough to see all methods learn and to time "
        "them, not to say which one ends best. "
        "Times rest on a run of its own, in which all methods take turns iteration by "
        "iteration; they include the gradient. Trivializations are W = B exp(A), B the start."
    ),
    settings={
        "smoke": replace(
            PAPER,
            learning_rates=(4.0**-3,),
            iterations=40,
            trivialization_share=0.5,
            points=2,
            test_images=100,
            warm_up=1,
            repetitions=3,
        ),
        "quick": replace(
            PAPER,
            learning_rates=(4.0**-4, 4.0**-3, 4.0**-2),
            iterations=500,
            trivialization_share=0.6,
            points=10,
            test_images=1_000,
            warm_up=5,
            repetitions=30,
        ),
        "paper": replace(PAPER, finals=tuple(BEST_RATES.items())),
    },
    plan=plan,
    run=partial(classification.run_unit, start_lenet),
    claims=MNIST_CLAIMS,
    figures=classification.training_figures(
        "mnist",
        "LeNet-5 on MNIST",
        curves="; with several seeds their median, and behind it each of them",
        errors="; trivializations are exact up to rounding",
    ),
    dataset="mnist",
    seconds={"smoke": 8, "quick": 90},
)
