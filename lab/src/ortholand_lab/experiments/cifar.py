"""ResNet-18 on CIFAR-10 with orthogonal kernels (the paper's figure 7)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ortholand_lab.experiments import classification
from ortholand_lab.methods import as_in_the_paper
from ortholand_lab.models import resnet18
from ortholand_lab.study.records import Record, Records
from ortholand_lab.study.spec import Claim, Context, Finding, Study, Unit, Verdict
from ortholand_lab.study.timing import Timing, seconds_per_iteration, timing_unit

LANDING, RETRACTION, TRIVIALIZATION = CIFAR_METHODS = (
    "landing-momentum",
    "exponential",
    "trivialization-momentum",
)
PAPER_METHODS = tuple(map(as_in_the_paper, CIFAR_METHODS))
PAPER_FULL_SIZE = "timing-full-size-as-in-the-paper"
FULL_SIZE = "timing-full-size"  # the unit in which the paper's network and batch are timed
PAPER_WIDTH, PAPER_BATCH = 64, 128
EPOCH = 390  # iterations in which 50,000 images pass in batches of 128
TRAINED = 10 * EPOCH  # iterations before which a comparison of test errors means nothing
ENOUGH = {"iterations": TRAINED, "width": PAPER_WIDTH}  # less decides nothing
MOMENTUM = 0.9
LARGEST_STEP = 0.5  # that is ever safe: 1 / (2 lam), with lam = 1
FASTER = 1.5  # "50 % faster"
MUCH = 2.0  # "much more expensive"
FAILED = 0.05  # a test error so far above another's is that of a method that failed
SAME_ERROR = 0.01  # test errors that differ by less count as the same


@dataclass(frozen=True, kw_only=True)
class CifarSettings(classification.TrainingSettings):
    """A ResNet of some width, trained with several seeds, and one that is only timed."""

    methods: tuple[str, ...]
    width: int  # channels in the first stage of the network
    seeds: int
    lr_drop: int  # the iteration from which all learning rates are a tenth
    timed_width: int
    timed_batch: int
    timed_repetitions: int


# The paper does not say how many epochs follow the 100.
PAPER = CifarSettings(
    methods=(*CIFAR_METHODS, *PAPER_METHODS[1:]),
    width=PAPER_WIDTH,
    batch_size=PAPER_BATCH,
    learning_rates=(0.5, 1.0, 2.0),
    seeds=5,
    iterations=150 * EPOCH,
    lr_drop=100 * EPOCH,
    points=150,
    test_images=10_000,
    warm_up=5,
    repetitions=50,
    timed_width=PAPER_WIDTH,
    timed_batch=PAPER_BATCH,
    timed_repetitions=50,
)


@dataclass(frozen=True)
class ResNetRun(classification.TrainingRun):
    """One training run of a ResNet."""

    width: int = PAPER_WIDTH
    lr_drop: int = 100 * EPOCH


# What is run.


def plan(settings: CifarSettings) -> list[Unit[Any]]:
    """Every method with every learning rate and seed, and the times at this and at full size."""
    paper = _full_size(settings, PAPER_METHODS)
    return [
        *plan_trainings(settings),
        timing_unit(_full_size(settings, CIFAR_METHODS), FULL_SIZE),
        timing_unit(replace(paper, repetitions=min(paper.repetitions, 5)), PAPER_FULL_SIZE),
    ]


def plan_trainings(settings: CifarSettings) -> list[Unit[Any]]:
    """Every method with every learning rate and seed, and the times at this size."""
    runs = _runs(settings, settings.methods)
    return classification.plan_trainings(settings, runs, settings.seeds)


def _runs(settings: CifarSettings, methods: Sequence[str]) -> list[ResNetRun]:
    network = dict(width=settings.width, lr_drop=settings.lr_drop)
    return [ResNetRun(**vars(run), **network) for run in classification.runs_of(settings, methods)]


def _full_size(settings: CifarSettings, methods: Sequence[str]) -> Timing[ResNetRun]:
    """The network that the claims about time refer to, whatever is trained here."""
    sizes = dict(width=settings.timed_width, batch_size=settings.timed_batch)
    timed = _runs(replace(settings, learning_rates=(1.0,), **sizes), methods)
    # No warm-up: it would take as long as a repetition, and a median passes over a slow first one.
    return Timing(tuple(timed), 0, settings.timed_repetitions)


def start_resnet(run: ResNetRun, context: Context) -> classification.Training:
    """The training run before its first step; all but the kernels have fixed options."""
    seed = context.seed + 1000 * run.trial
    trainee = classification.prepare_kernels(
        resnet18(width=run.width, seed=seed).to(context.device),
        run.method,
        run.lr,
        momentum=MOMENTUM,
        retraction_momentum=MOMENTUM,
        plain_lr=0.1,
        plain_momentum=MOMENTUM,
        plain_weight_decay=5e-4,
    )
    options = dict(batch_size=run.batch_size, seed=seed, augment=True, lr_drop=run.lr_drop)
    return classification.Training(trainee, context, **options)


# What is claimed.


def is_slower(method: str, factor: float, records: Records) -> Finding:
    """Time of an iteration of a method as a multiple of landing's, at the paper's size."""
    timing = records[FULL_SIZE if method in CIFAR_METHODS else PAPER_FULL_SIZE]
    times = {m: seconds_per_iteration(timing, method=m) for m in (LANDING, method)}
    sizes = {(run["width"], run["batch_size"]) for run in timing.configuration["runs"]}
    whole = sizes == {(PAPER_WIDTH, PAPER_BATCH)}
    doubt = classification.doubt_of_times(timing) if whole else "not the paper's size"
    return classification.takes_longer(times, factor, doubt)


def rates_are_the_same(records: Records) -> Finding:
    """Training losses of landing with all rates of at least 1 / (2 lam), before rates drop."""
    tried = classification.tried_rates(records, (LANDING,))[LANDING]
    tried = [entry for entry in tried if entry.lr >= LARGEST_STEP]
    rates = "rates " + ", ".join(f"{entry.lr:g}" for entry in tried)
    losses = [[loss for run in entry.runs for loss in _losses_before_drop(run)] for entry in tried]
    if len(tried) < 2 or not losses[0]:
        return Finding(f"nothing to compare with: {rates}", Verdict.OPEN)
    same = all(other == losses[0] for other in losses[1:])
    return Finding(
        f"{rates}: the {len(losses[0])} losses recorded with each before they drop "
        f"{'are' if same else 'are not'} the same to the last bit",
        Verdict.of(same),
    )


def _losses_before_drop(run: Record) -> list[float]:
    pairs = zip(run.series("iteration"), run.series("train_loss"), strict=True)
    return [loss for k, loss in pairs if 0 < k <= run.configuration["lr_drop"]]


def trivializations_fail(methods: Sequence[str], records: Records) -> Finding:
    """How far a trivialization ends above landing and the retraction, in this order."""
    landing, retraction, trivialization = methods
    return classification.compare_ends(
        "test_error",
        methods,
        lambda ends: ends[trivialization] >= max(ends[landing], ends[retraction]) + FAILED,
        ENOUGH,
        records,
    )


_TRIVIALIZATIONS_FAIL = (
    "Trivializations fail to reach a high accuracy: their test error ends "
    f"{FAILED:.0%} or more above that of landing and of the retraction."
)
_OURS_FAIL = Claim.beyond(_TRIVIALIZATIONS_FAIL, partial(trivializations_fail, CIFAR_METHODS))

_IN_THE_BALL = classification.ball_claim((LANDING,))

_AS_ACCURATE = Claim.beyond(
    f"Landing is as accurate as the retraction: its test error is at most {SAME_ERROR:.0%} higher.",
    partial(
        classification.compare_ends,
        "test_error",
        (LANDING, RETRACTION),
        lambda ends: ends[LANDING] <= ends[RETRACTION] + SAME_ERROR,
        ENOUGH,
    ),
)

_NEARER = Claim.beyond(
    "Landing ends nearer to the manifold than the exponential retraction.",
    partial(
        classification.compare_ends,
        "orthogonality_error",
        (LANDING, RETRACTION),
        lambda ends: ends[LANDING] < ends[RETRACTION],
        ENOUGH,
    ),
)

_SAME_RATES = Claim(
    "With lam = 1 the paper's learning rates 1/2, 1 and 2 are one and the same for "
    "landing, because no step above 1 / (2 lam) is safe.",
    "correction",
    rates_are_the_same,
)

# About how a training ends.
TRAINING_CLAIMS = (_OURS_FAIL, _IN_THE_BALL, _AS_ACCURATE, _NEARER)

CIFAR_CLAIMS = (
    Claim.of_paper(
        "Landing is 50 % faster than the retraction: an iteration with the exponential "
        f"retraction takes {FASTER} times as long or longer (batches of {PAPER_BATCH}).",
        "The landing algorithm is here once again 50% faster than retraction-based methods.",
        partial(is_slower, as_in_the_paper(RETRACTION), FASTER),
        partial(is_slower, RETRACTION, FASTER),
    ),
    Claim.of_paper(
        "Trivializations are much more expensive than landing: an iteration takes "
        f"{MUCH:.0f} times as long or longer.",
        "trivializations are both much more expensive than the proposed method, and cannot "
        "properly train the network",
        partial(is_slower, as_in_the_paper(TRIVIALIZATION), MUCH),
        partial(is_slower, TRIVIALIZATION, MUCH),
    ),
    Claim.of_paper(
        _TRIVIALIZATIONS_FAIL,
        "trivialization methods fail to reach a high accuracy",
        partial(trivializations_fail, PAPER_METHODS),
        partial(trivializations_fail, CIFAR_METHODS),
    ),
    _IN_THE_BALL,
    _SAME_RATES,
    _AS_ACCURATE,
    _NEARER,
)

CIFAR = Study(
    name="cifar",
    title="ResNet-18 on CIFAR-10 with orthogonal kernels",
    paper_figure="Figure 7",
    summary=(
        "A ResNet-18 with ten outputs. Every slice of every convolution's weight is orthogonal, "
        "as in the paper: 1.2 million 3 x 3 matrices and 192 of 7 x 7. In the three convolutions "
        "of 1 x 1 such a slice is +1 or -1 and never changes. SGD with momentum 0.9 for all: by "
        "landing, by the exponential retraction and by trivializations, as the paper has these and "
        "as we have them (below the paper preset, trained in our form only). Other parameters have "
        "learning rate 0.1, momentum 0.9 and weight decay 5e-4; all rates are divided by 10 after "
        "100 epochs. The curves are those of the learning rate with the smallest training loss "
        "in the end, and medians of five seeds. The paper does not tell how many epochs there "
        "are in all (here 150), nor whether images are shifted and mirrored at random (here they "
        "are, as is usual, and scaled to mean 0 and deviation 1). Below the paper preset a "
        "network with a fraction of the channels (the width below, of 64) is trained with one "
        "seed for less than an epoch, and trivializations for a part of that (their share "
        "below): enough to see them begin to learn, not to compare how well. The claims on time do "
        "not suffer: quick times single iterations of the whole network with batches of 128, the "
        "methods in turn. Exponentials of 3 x 3 matrices are computed by Rodrigues' formula; with "
        "torch's matrix_exp an iteration with trivializations takes five times as long."
    ),
    settings={
        "smoke": replace(
            PAPER,
            methods=CIFAR_METHODS,
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
        "quick": replace(
            PAPER,
            methods=CIFAR_METHODS,
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
        "paper": PAPER,
    },
    plan=plan,
    run=partial(classification.run_unit, start_resnet),
    claims=CIFAR_CLAIMS,
    figures=classification.training_figures(
        "cifar",
        "ResNet-18 on CIFAR-10",
        curves=", all with momentum; with several seeds their median, and behind it each of them",
        rate="learning rate of the kernels",
    ),
    dataset="cifar10",
    seconds={"smoke": 10, "quick": 70},
)
