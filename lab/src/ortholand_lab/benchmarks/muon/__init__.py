"""LandingMuon against manifold Muon by dual ascent and its other rivals, with targets."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

from matplotlib.figure import Figure

from ortholand_lab.benchmarks.muon.contenders import CONTENDERS, DUAL, OURS
from ortholand_lab.benchmarks.muon.directions import PUBLISHED_RATE
from ortholand_lab.benchmarks.muon.searches import (
    DECAYING,
    GAUSSIAN,
    NETWORK,
    TANGENCY,
    VALUE,
    Case,
    CostTask,
    Quality,
    SearchTask,
    Tried,
    cost,
    good_enough,
    search,
)
from ortholand_lab.benchmarks.muon.training import (
    WIDTHS,
    Outcome,
    StepTimes,
    TrainingTask,
    run_training,
    time_steps,
)
from ortholand_lab.datasets import dataset_title
from ortholand_lab.study.figures import add_legend
from ortholand_lab.study.records import MissingRecordError, Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, TableSpec, Unit

# What is run.


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


# What is claimed.


SHARE = 1 / 3  # of the dual ascent's time
POINTS = 0.002  # of test accuracy, that we may be below the dual ascent
LARGEST_ERROR = 1e-5
ENOUGH_SEEDS, ENOUGH_TUNING_SEEDS = 5, 3


# Directions.


def cases_of(records: Records) -> list[Case]:
    """All cases that were searched and timed."""
    found = [records[unit].configuration["case"] for unit in records if unit.startswith("search-")]
    if not found:
        raise MissingRecordError("no search is recorded")
    return [Case(**case) for case in found]


def tall_cases(records: Records) -> list[Case]:
    """The cases in which the dual ascent does not start at the optimum."""
    return [case for case in cases_of(records) if case.rows > case.columns]


def tried_in(search: Record) -> list[Tried]:
    """The directions that a search has seen."""
    rows = zip(*(search.series(name) for name in Tried._fields), strict=True)
    return [Tried(*row) for row in rows]


def needed(search: Record, rate: float | None = None) -> float:
    """The fewest inner steps that suffice, with one rate or with the best; infinite if none do."""
    good = [t.steps for t in tried_in(search) if rate in (None, t.rate) and good_enough(t)]
    return min(good, default=math.inf)


def our_quality(search: Record) -> Quality:
    """The quality of the library's direction."""
    return Quality(*(search.value(f"our_{name}") for name in Quality._fields))


def time_of(case: Case, records: Records, rate: float | None = None) -> float:
    """Seconds of a sufficiently accurate dual ascent, and of the return to the manifold.

    Where it is not with the most steps that were tried, these count: a lower bound.
    """
    search, cost = records[f"search-{case.name}"], records[f"cost-{case.name}"]
    steps = min(needed(search, rate), search.configuration["cap"])
    return steps * cost.value("inner_step") + cost.value("retraction")


def ours_is_good(records: Records) -> Finding:
    """The worst value and the worst tangency of our directions."""
    all_ours = [our_quality(records[f"search-{case.name}"]) for case in cases_of(records)]
    value, tangency = min(q.value for q in all_ours), max(q.tangency for q in all_ours)
    return Finding.of(
        f"in {len(all_ours)} cases: value {value:.4f} and more, tangent to {tangency:.1e}",
        value >= 1 - VALUE and tangency <= TANGENCY,
    )


def ours_is_cheap(rate: float | None, records: Records) -> Finding:
    """Our time relative to the dual ascent's, in every tall case."""
    shares = {
        case.name: records[f"cost-{case.name}"].value("ours") / time_of(case, records, rate)
        for case in tall_cases(records)
    }
    words = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
    few = any(records[f"cost-{name}"].configuration["seconds"] < 1 for name in shares)
    doubt = "too few steps were timed to tell" if few else ""
    return Finding.of(words, max(shares.values(), default=0.0) <= SHARE, doubt)


# Trainings.


def judged(training: Record) -> list[Outcome]:
    """The training runs by which a method is judged."""
    return _with_seeds(training, "seeds")


def tuning(training: Record) -> list[Outcome]:
    """The training runs by which its learning rate was chosen."""
    return _with_seeds(training, "tuning_seeds")


def _with_seeds(training: Record, which: str) -> list[Outcome]:
    rows = zip(*(training.series(name) for name in Outcome._fields), strict=True)
    return [o for o in (Outcome(*row) for row in rows) if o.seed in training.configuration[which]]


def accuracy_of(training: Record) -> float:
    """The mean accuracy over the seeds."""
    return fmean(outcome.accuracy for outcome in judged(training))


def is_as_accurate(records: Records) -> Finding:
    """Mean test accuracies of our method and the dual ascent."""
    trainings = {m: records[f"training-{m}"] for m in (OURS, DUAL)}
    means = {m: accuracy_of(training) for m, training in trainings.items()}
    return Finding.of(
        _listed(means, ".2%"), means[OURS] >= means[DUAL] - POINTS, _doubt(trainings.values())
    )


def stays_near(records: Records) -> Finding:
    """The largest error after any step of any seed."""
    names = [m for m in CONTENDERS if m.startswith(OURS) and f"training-{m}" in records]
    trainings = {m: records[f"training-{m}"] for m in names or [OURS]}
    errors = {m: max(o.error for o in judged(t)) for m, t in trainings.items()}
    return Finding.of(
        _listed(errors, ".1e"), max(errors.values()) <= LARGEST_ERROR, _doubt(trainings.values())
    )


def step_is_short(records: Records) -> Finding:
    """The time of our step on the network relative to the dual ascent's."""
    times = records[STEP_TIMES]
    share = times.value(OURS) / times.value(DUAL)
    doubt = "too few steps were timed to tell" if times.configuration["seconds"] < 1 else ""
    words = f"{1e3 * times.value(OURS):.2f} ms against {1e3 * times.value(DUAL):.2f} ms"
    return Finding.of(f"{share:.2f}: {words}", share <= SHARE, doubt)


def _listed(numbers: Mapping[str, float], form: str) -> str:
    return "; ".join(f"{CONTENDERS[m].label} {x:{form}}" for m, x in numbers.items())


def _doubt(trainings: Collection[Record]) -> str:
    """Why training runs decide nothing, if they do not."""
    if any(len(judged(training)) < ENOUGH_SEEDS for training in trainings):
        return f"to tell, it takes {ENOUGH_SEEDS} seeds"
    if any(len(t.configuration["tuning_seeds"]) < ENOUGH_TUNING_SEEDS for t in trainings):
        return f"to choose a learning rate, it takes {ENOUGH_TUNING_SEEDS} seeds"
    title = dataset_title("cifar10")
    if not all(t.request.options.data.startswith(title) for t in trainings):
        return f"not {title}"
    return ""


CLAIMS = (
    Claim.beyond(
        f"Our direction has {1 - VALUE:.0%} of the optimal value or more, and is tangent to "
        f"{TANGENCY:.0e}, in every case.",
        ours_is_good,
    ),
    Claim.beyond(
        "Our step takes at most a third of the time of a dual ascent that is tangent to "
        f"{TANGENCY:.0e} and within {VALUE:.0%} of the optimum, with the published rate, in every "
        "case with more rows than columns.",
        partial(ours_is_cheap, PUBLISHED_RATE),
    ),
    Claim.beyond("The same, with the best rate for each case.", partial(ours_is_cheap, None)),
    Claim.beyond(
        f"Mean test accuracy: LandingMuon's is at most {100 * POINTS:.1f} points below that of "
        "manifold Muon by dual ascent.",
        is_as_accurate,
    ),
    Claim.beyond(
        f"The orthogonality error of LandingMuon is at most {LARGEST_ERROR:.0e} after every step.",
        stays_near,
    ),
    Claim.beyond(
        "A step of LandingMuon on the network takes at most a third of the time of manifold Muon's "
        "by dual ascent.",
        step_is_short,
    ),
)


# How it is drawn.


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = {"gaussian": "-", "decaying": "--", "network": ":"}  # by the kind of the gradient


def draw(records: Records) -> Figure:
    """Value and tangency against inner steps with the published rate; ours at its cost."""
    figure = Figure(figsize=(8, 4.6))
    value, tangency = figure.subplots(1, 2)
    cases = tall_cases(records)
    shapes = list(dict.fromkeys((case.rows, case.columns) for case in cases))
    for case in cases:
        colour = COLOURS[shapes.index((case.rows, case.columns)) % len(COLOURS)]
        look = dict(color=colour, linestyle=DASHES[case.kind], linewidth=1.3)
        search, cost = records[f"search-{case.name}"], records[f"cost-{case.name}"]
        curve = [t for t in tried_in(search) if t.rate == PUBLISHED_RATE]
        steps, ours = [t.steps for t in curve], our_quality(search)
        x = cost.value("ours") / cost.value("inner_step")
        point = dict(color=colour, marker="o", linestyle="none", clip_on=False)
        value.plot(steps, [abs(t.value - 1) for t in curve], label=case.name, **look)
        value.plot([x], [abs(ours.value - 1)], **point)
        tangency.plot(steps, [t.tangency for t in curve], **look)
        tangency.plot([x], [ours.tangency], **point)
    for axes, bound, title in (
        (value, VALUE, "distance of the value from the optimum"),
        (tangency, TANGENCY, r"$\|\mathrm{Sym}(X^\top R)\| / \|R\|$"),
    ):
        axes.axhline(bound, color="#7F7F7F", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="inner steps of the dual ascent", title=title)
    add_legend(figure, value, 4)
    return figure


def direction_table(records: Records) -> list[list[str]]:
    """How many inner steps each case needs, and their cost compared with ours."""
    head = [
        *("case", "inner steps", "with the best rate", "our value", "our tangency"),
        *("inner step, ms", "our step, ms", "ours / dual ascent", "with the best rate"),
    ]
    return [head, *(_direction_row(case, records) for case in cases_of(records))]


def _direction_row(case: Case, records: Records) -> list[str]:
    search, cost = records[f"search-{case.name}"], records[f"cost-{case.name}"]
    cap, ours = search.configuration["cap"], our_quality(search)
    counts = [needed(search, rate) for rate in (PUBLISHED_RATE, None)]
    shares = [cost.value("ours") / time_of(case, records, r) for r in (PUBLISHED_RATE, None)]
    return [
        case.name.replace("-", " "),
        *(f"not in {cap:,}" if math.isinf(count) else f"{count:,.0f}" for count in counts),
        f"{ours.value:.4f}",
        f"{ours.tangency:.0e}",
        f"{1e3 * cost.value('inner_step'):.2f}",
        f"{1e3 * cost.value('ours'):.2f}",
        *(f"{'< ' * math.isinf(n)}{s:.2g}" for n, s in zip(counts, shares, strict=True)),
    ]


def training_table(records: Records) -> list[list[str]]:
    """A row for each trained method, the most accurate first."""
    head = [
        *("method", "lr", "test accuracy", "loss", "step, ms", "value", "tangency"),
        *("largest ‖XᵀX − I‖", "largest singular value"),
    ]
    rows = []
    for method, contender in CONTENDERS.items():
        if (unit := f"training-{method}") in records:
            outcomes = judged(records[unit])
            accuracy = [100 * o.accuracy for o in outcomes]
            spread = f" ± {stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
            milliseconds = 1e3 * records[STEP_TIMES].value(method)
            row = [
                contender.label,
                f"{records[unit].value('best'):g}",
                f"{fmean(accuracy):.2f}{spread} %",
                f"{fmean(o.loss for o in outcomes):.3f}",
                f"{milliseconds:.2f}",
                _or_dash(fmean(o.value for o in outcomes), ".3f"),
                _or_dash(max(o.tangency for o in outcomes), ".0e"),
                f"{max(o.error for o in outcomes):.0e}" if contender.constrained else "-",
                f"{max(o.singular for o in outcomes):.4g}",
            ]
            rows.append((-fmean(accuracy), row))
    if not rows:
        raise MissingRecordError("no training is recorded")
    return [head, *(row for _, row in sorted(rows))]


def _or_dash(number: float, form: str) -> str:
    return "-" if math.isnan(number) else f"{number:{form}}"


def rates_table(records: Records) -> list[list[str]]:
    """The accuracies by which learning rates were chosen."""
    rows = []
    for method, contender in CONTENDERS.items():
        if (unit := f"training-{method}") in records:
            tried: dict[float, list[float]] = {}
            for outcome in tuning(records[unit]):
                tried.setdefault(outcome.lr, []).append(100 * outcome.accuracy)
            cells = ", ".join(f"{lr:g}: {fmean(a):.2f}" for lr, a in sorted(tried.items()))
            rows.append([contender.label, cells])
    if not rows:
        raise MissingRecordError("no training is recorded")
    return [
        ["method", "learning rate: test accuracy, %, mean over the seeds it is chosen with"],
        *rows,
    ]


FIGURES = (
    FigureSpec(
        "muon-directions",
        "Dual ascent with its published rate: how far the value is from the optimum (left) and how "
        "far the direction is from tangent (right), against inner steps. Points: ours, at what its "
        "whole step costs in inner steps. Grey: good enough. Full lines: Gaussian gradients; "
        "dashed: singular values 1, 1/2, 1/3, ...; dotted: the network's own.",
        draw,
    ),
)
TABLES = (
    TableSpec(
        "muon-directions",
        "Inner steps of a dual ascent that is good enough, and ours",
        direction_table,
    ),
    TableSpec("muon-training", "The network on CIFAR-10", training_table),
    TableSpec("muon-rates", "How learning rates were chosen", rates_table),
)


MUON = Study(
    name="muon",
    title="LandingMuon against manifold Muon by dual ascent, SPEL, POGO, torch's Muon and AdamW",
    summary=(
        "Directions: how many inner steps the dual ascent of Bernstein's post on modular manifolds "
        "needs until its direction is tangent to 1e-2 (||Sym(X^T R)|| / ||R||) and within 2 % of "
        "the optimum, with its published rate (0.01, falling linearly to zero over the inner "
        "steps) and with the best of several. Steps are counted in float64 with exact polar "
        "factors, and timed in float32 with the library's msign; both favour it: published code "
        "takes ten iterations in bfloat16 for each. Random gradients have spectral norm 1, "
        "because the rate's effect depends on their scale. For square matrices the dual ascent "
        "starts at the optimum. Training: the post's perceptron 3072-128-64-10 without biases on "
        "CIFAR-10, batches of 1,024, 5 epochs, learning rates that fall linearly to zero; all "
        "three weights on the manifold. Each method takes the rate of its grid with the best mean "
        "test accuracy over other seeds; a grid whose best rate is its edge goes on beyond it. The "
        "value is that of short moves, as a share of the best, summed over the weights; tangency "
        "is that of directions before a retraction."
    ),
    settings={
        "smoke": MuonSettings(
            shapes=((8, 8), (12, 4)),
            layers=((64, 10),),
            cap=20,
            rates=(0.1,),
            seconds=0.02,
            epochs=1,
            grid=1,
            extensions=0,
            tuning_seeds=TUNING_SEEDS[:1],
            seeds=SEEDS[:1],
            test_images=100,
        ),
        "quick": MuonSettings(
            shapes=((64, 64), (128, 64), (300, 100)),
            layers=((128, 64),),
            cap=500,
            seconds=1.0,
            grid=3,
            extensions=0,
            tuning_seeds=TUNING_SEEDS[:1],
            seeds=SEEDS[:2],
        ),
        "full": MuonSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    tables=TABLES,
    dataset="cifar10",
    seconds={"smoke": 20, "quick": 300, "full": 3600},
)
