"""Distillation (the paper's figure 5): a student network learns what a teacher network does."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ortholand.geometry import distance
from ortholand_lab.experiments.descents import (
    FASTER,
    growth,
    iterations_to,
    largest,
    late,
    within_ball,
)
from ortholand_lab.methods import (
    PAPER_METHODS,
    RETRACTION_METHODS,
    TRAINING_METHODS,
    TRIVIALIZATION_METHODS,
    as_in_the_paper,
    has_momentum,
    is_adaptive,
    is_trivialization,
    prepare,
)
from ortholand_lab.models import TanhMLP
from ortholand_lab.study.figures import (
    METHOD_STYLES,
    add_legend,
    draw_by_time_and_iteration,
    listed,
    plot_method,
)
from ortholand_lab.study.records import Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit, Verdict
from ortholand_lab.study.timing import (
    TIMING,
    Action,
    Timing,
    marks,
    seconds_per_iteration,
    time_runs,
    timing_unit,
)

# What is run.


LEARNING_RATES = (1.0, 0.1, 0.01, 0.001)
TIMED_RATE = 0.01  # at the paper's size, where times are costly to take: all learn with it
FIGURE_TIMING = "figure-timing"  # the unit in which the runs of the paper's figure are timed
WARM_UP = 2  # iterations before those that are timed
FIGURE_RATE = 0.5  # "The learning rate is eta = 0.5"
ADAPTIVE_RATE = 1e-3  # Adam's and RMSprop's best in the appendix's grid; 0.5 is none of theirs
FIGURE_METHODS = (*PAPER_METHODS, *RETRACTION_METHODS)  # the last are our careful ones
PAPER_SIZE = (100, 10)  # width and depth
PAPER_ITERATIONS = 10_000


@dataclass(frozen=True)
class DistillationSettings:
    """The paper's settings are the defaults; it does not say how large the test set is."""

    p: int = PAPER_SIZE[0]
    depth: int = PAPER_SIZE[1]
    batch: int = 256
    iterations: int = PAPER_ITERATIONS
    trivialization_share: float = 1.0  # part of these that the trivializations are run for
    momentum: float = 0.9
    test_size: int = 1_000
    timed_size: tuple[int, int] = PAPER_SIZE  # at which, besides the runs' own, times are taken
    repetitions: int = 30  # of the iterations that are timed in turn
    figure_iterations: int = 3_000  # at the step of the paper's figure
    figure_share: float = 1 / 3  # part of these that the trivializations are run for
    trials: int = 3  # of each of these runs


@dataclass(frozen=True)
class DistillationRun:
    """A method with a learning rate."""

    method: str
    lr: float
    p: int
    depth: int
    batch: int
    iterations: int
    momentum: float
    test_size: int


@dataclass(frozen=True)
class FigureRun(DistillationRun):
    """A method at the step of the paper's figure, which suits the loss divided by p only."""

    trial: int = 0  # trials differ in their seeds only


class Point(NamedTuple):
    """What is recorded of a student."""

    iteration: int
    test_loss: float
    orthogonality_error: float  # of all weights together
    largest_error: float  # of a single weight, ||W^T W - I||_F


def plan(settings: DistillationSettings) -> list[Unit[Any]]:
    """The paper's figure; then the appendix's rates, timed at the larger size with one of them."""
    runs = [_run(settings, method, lr) for method in TRAINING_METHODS for lr in LEARNING_RATES]
    p, depth = settings.timed_size
    large = [replace(run, p=p, depth=depth) for run in runs if run.lr == TIMED_RATE]
    timed = tuple(dict.fromkeys([*runs, *large]))  # once, where the sizes are the same
    units = [Unit(f"{run.method}-lr{run.lr:g}", run, run.iterations) for run in runs]
    timing = timing_unit(Timing(timed, WARM_UP, settings.repetitions))
    return [*_plan_figure(settings), *units, timing]


def _plan_figure(settings: DistillationSettings) -> list[Unit[Any]]:
    first = [_figure_run(settings, method) for method in FIGURE_METHODS]
    runs = [replace(run, trial=trial) for trial in range(settings.trials) for run in first]
    p, depth = settings.timed_size
    timed = tuple(replace(run, p=p, depth=depth) for run in first)
    units = [Unit(figure_name(run.method, run.trial), run, run.iterations) for run in runs]
    return [*units, timing_unit(Timing(timed, WARM_UP, settings.repetitions), FIGURE_TIMING)]


def figure_name(method: str, trial: int) -> str:
    """Name of a run at the step of the paper's figure."""
    return f"figure-{method}-trial{trial}"


def _figure_run(s: DistillationSettings, method: str) -> FigureRun:
    share = s.figure_share if is_trivialization(method) else 1.0
    lr = ADAPTIVE_RATE if is_adaptive(method) else FIGURE_RATE
    iterations = math.ceil(share * s.figure_iterations)
    return FigureRun(method, lr, s.p, s.depth, s.batch, iterations, s.momentum, s.test_size)


def _run(s: DistillationSettings, method: str, lr: float) -> DistillationRun:
    share = s.trivialization_share if method in TRIVIALIZATION_METHODS else 1.0
    iterations = math.ceil(share * s.iterations)
    return DistillationRun(method, lr, s.p, s.depth, s.batch, iterations, s.momentum, s.test_size)


def run(task: DistillationRun | Timing[DistillationRun], context: Context) -> Result:
    """Train, measuring now and then; or time single iterations."""
    if isinstance(task, Timing):
        return time_runs(task, begin, context)
    lesson = Lesson(task, context)
    points = [lesson.measure()]
    for mark in marks(task.iterations, ratio=1.15)[1:]:
        while lesson.iteration < mark:
            lesson.next_batch()
            lesson.learn()
        points.append(lesson.measure())
        context.tick(mark - points[-2].iteration)
    return Result.of_rows(Point._fields, points)


def begin(task: DistillationRun, context: Context) -> Action:
    """An iteration to be timed, without the time for its examples."""
    lesson = Lesson(task, context)
    return Action(lesson.learn, lesson.next_batch)


class Lesson:
    """A teacher, a student that is trained by a method, and the examples."""

    batch: tuple[Tensor, Tensor]

    def __init__(self, task: DistillationRun, context: Context) -> None:
        self.task, self.device = task, context.device
        figure = isinstance(task, FigureRun)
        self.loss = mean_loss if figure else loss
        seed = context.seed + (1000 * task.trial if figure else 0)
        # A seed each: what one draws must not shift what another does.
        teacher, student, batches, tests = range(4 * seed, 4 * seed + 4)
        self.teacher = self._network(teacher)
        self.trainee = prepare(
            self._network(student),
            task.method,
            orthogonal=lambda name, _: name.endswith("weight"),
            view="matrix",
            lr=task.lr,
            momentum=task.momentum,
            # Methods with momentum have it for the biases too.
            plain_momentum=task.momentum if has_momentum(task.method) else 0.0,
        )
        self.draw = torch.Generator().manual_seed(batches)
        self.tests = self._examples(task.test_size, torch.Generator().manual_seed(tests))
        self.iteration = 0

    def next_batch(self) -> None:
        """Draw the next batch of examples."""
        self.batch = self._examples(self.task.batch, self.draw)

    def learn(self) -> None:
        """One iteration, with the examples at hand."""
        x, y = self.batch
        self.trainee.step(self.loss(self.trainee.model(x), y))
        self.iteration += 1

    @torch.no_grad()
    def measure(self) -> Point:
        """The student as it is now."""
        x, y = self.tests
        errors = [float(distance(W.double())) for W in self.trainee.weights()]
        test_loss = float(self.loss(self.trainee.model(x), y))
        return Point(self.iteration, test_loss, math.hypot(*errors), largest(errors))

    def _network(self, seed: int) -> TanhMLP:
        # Determinants +1: all that the paper's trivializations exp(A) could be.
        return TanhMLP(self.task.p, self.task.depth, seed=seed, special=True).to(self.device)

    @torch.no_grad()
    def _examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs, drawn on the CPU and so the same on every device, and the teacher's answers."""
        x = torch.randn(count, self.task.p, generator=generator).to(self.device)
        return x, self.teacher(x)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The paper's: squared distances, averaged over the examples."""
    return (outputs - targets).square().sum(-1).mean()


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Averaged over the outputs, too: divided by p. With the printed loss 0.5 is too long."""
    return loss(outputs, targets) / outputs.shape[-1]


def runs_of(records: Records, method: str) -> list[Record]:
    """The runs of a method with each learning rate."""
    return [records[f"{method}-lr{lr:g}"] for lr in LEARNING_RATES]


def best_runs(records: Records, methods: Sequence[str]) -> dict[str, Record]:
    """The run of each method with the smallest final test loss."""
    return {method: min(runs_of(records, method), key=final_loss) for method in methods}


def final_loss(run: Record) -> float:
    """The test loss in the end; infinite if it is not a number."""
    value = run.series("test_loss")[-1]
    return math.inf if math.isnan(value) else value


def iteration_seconds(records: Records, run: Record) -> float:
    """Median time of an iteration of a run, timed in turn with all others."""
    wanted = {name: run.configuration[name] for name in ("method", "lr", "p")}
    return seconds_per_iteration(records[TIMING], **wanted)


# What is claimed.


LANDING_METHODS = ("landing", "landing-momentum")
SIMILAR = 0.1  # numbers of iterations that differ by less, relatively, count as the same
ENOUGH = 100  # iterations, without which it is too early to compare test losses
LEARNT = 0.1  # a test loss, relative to the first, that counts as having learnt something
GROWN = 1.5  # growth of the orthogonality error that is no longer its fluctuation
ROUNDING = 10.0  # what a few products of rounded matrices may add to the error of one rounding
MOST_TRIALS = 5
FIGURE_LEVELS = (1e-1, 1e-2, 1e-3, 1e-4)  # of the test loss divided by p, from about 0.5
GRID_LEVELS = (10.0, 1.0, 0.1, 0.01, 0.005)  # of the printed one
FIGURE_ITERATIONS = 3_000  # without which errors at the figure's step decide nothing
LANDED, DRIFTED = 1e-5, 1e-3  # errors of landing and of the retractions in the paper's figure
TOO_EARLY = Finding("some methods have hardly begun to learn", Verdict.OPEN)

_listed = partial(listed, between="; ")  # numbers with the names of their methods


# Learning.


def momentum_is_fastest(
    time: Callable[[Records, str, float], float],
    methods: Sequence[str],
    levels: Sequence[float],
    records: Records,
) -> Finding:
    """Who is first at every level of the test loss that anyone reaches, and who reaches it alone.

    Args:
        time: seconds of a method until the loss is at a level.
        methods: that are compared.
        levels: of the loss.
        records: of all runs.
    """
    measured, first = [], set()
    for level in levels:
        times = {m: time(records, m, level) for m in methods}
        there = sorted((m for m in methods if times[m] < math.inf), key=times.__getitem__)
        if there:
            first.add(there[0])
            alone = " alone" if len(there) == 1 else ""
            seconds = _listed({m: times[m] for m in there[:2]}, ".2g")
            measured.append(f"{level:g}: {seconds}{alone}")
    if len(measured) < 2:
        return TOO_EARLY
    found = f"to a test loss of, in seconds, the first two: {', '.join(measured)}"
    return Finding.of(found, first == {"landing-momentum"})


def landing_needs_as_many_iterations(records: Records) -> Finding:
    """Iterations to a test loss that landing and the retractions reach, each as fast as it can."""
    methods = ("landing", *RETRACTION_METHODS)
    level = common_level(best_runs(records, methods))
    if level is None:
        return TOO_EARLY
    needed = {m: min(_iterations_to(level, run) for run in runs_of(records, m)) for m in methods}
    similar = all(abs(k / needed["landing"] - 1) <= SIMILAR for k in needed.values())
    measured = f"to a test loss of {level:.2g}: {_listed(needed, '.0f')} iterations"
    return Finding.of(measured, similar)


def momentum_helps(records: Records) -> Finding:
    """Final test loss of landing."""
    runs = best_runs(records, LANDING_METHODS)
    if common_level(runs) is None:
        return TOO_EARLY
    losses = {method: final_loss(run) for method, run in runs.items()}
    better = losses["landing-momentum"] < losses["landing"]
    return Finding.of(f"in the end: {_listed(losses, '.2g')}", better)


def time_to(records: Records, method: str, level: float) -> float:
    """Seconds until the test loss is at the level, with the learning rate that is fastest there."""
    return min(
        _iterations_to(level, run) * iteration_seconds(records, run)
        for run in runs_of(records, method)
    )


def common_level(runs: Mapping[str, Record]) -> float | None:
    """The smallest test loss that all runs end at; None if some have hardly begun to learn."""
    level = max(final_loss(run) for run in runs.values())
    start = next(iter(runs.values())).series("test_loss")[0]
    begun = level <= LEARNT * start and all(_iterations(r) >= ENOUGH for r in runs.values())
    return level if begun else None


def _iterations_to(level: float, run: Record) -> float:
    return iterations_to(run, "test_loss", level)


def _iterations(run: Record) -> int:
    return int(run.series("iteration")[-1])


def figure_time_to(records: Records, method: str, level: float) -> float:
    """Seconds until the test loss is at the level, at the figure's step: median of the trials."""
    seconds = seconds_per_iteration(records[FIGURE_TIMING], method=method)
    return median(_iterations_to(level, run) * seconds for run in figure_runs(records, method))


# Time of an iteration.


def takes_longer(
    timing: str, methods: Sequence[str], others: Sequence[str], records: Records
) -> Finding:
    """Iteration time of each method relative to the slowest other, at the largest size."""
    record = records[timing]
    p = max(run["p"] for run in record.configuration["runs"])
    wanted = dict(lr=TIMED_RATE, p=p) if timing == TIMING else {}
    seconds = {m: seconds_per_iteration(record, method=m, **wanted) for m in (*methods, *others)}
    slowest = max(others, key=seconds.__getitem__)
    ratios = {method: seconds[method] / seconds[slowest] for method in methods}
    one = f"{METHOD_STYLES[slowest].label}, {1e3 * seconds[slowest]:.2g} ms"
    measured = f"p = {p}, in times of {one}: {_listed(ratios, '.2f')}"
    if p < PAPER_SIZE[0]:  # where all is overhead
        return Finding(measured, Verdict.OPEN)
    return Finding.of(measured, min(ratios.values()) > FASTER)


# Orthogonality.


def figure_runs(records: Records, method: str) -> list[Record]:
    """The trials of a method at the step of the paper's figure, as many as there are."""
    names = [figure_name(method, trial) for trial in range(MOST_TRIALS)]
    return [records[name] for name in names[:1] + [n for n in names[1:] if n in records]]


def figure_ends_nearer(
    method: str, retractions: Sequence[str], most: float, least: float, records: Records
) -> Finding:
    """Median orthogonality error over the last tenth of the runs at the figure's step."""
    runs = {m: figure_runs(records, m) for m in (method, *retractions)}
    errors = {m: median(late(r, "orthogonality_error") for r in rs) for m, rs in runs.items()}
    iterations = _iterations(runs[method][0])
    seeds = min(map(len, runs.values()))
    counted = "1 seed" if seeds == 1 else f"{seeds} seeds"
    measured = f"last tenth of {iterations} iterations, {counted}: {_listed(errors, '.1e')}"
    if iterations < FIGURE_ITERATIONS:
        return Finding(f"{measured}; the paper iterates longer", Verdict.OPEN)
    away = min(errors[m] for m in retractions)
    return Finding.of(measured, errors[method] <= min(most, away) and away >= least)


def ends_nearer(method: str, records: Records) -> Finding:
    """The final orthogonality errors of a landing method and of the retractions."""
    runs = best_runs(records, (method, *RETRACTION_METHODS))
    errors = {m: run.series("orthogonality_error")[-1] for m, run in runs.items()}
    measured = f"after {_iterations(runs[method])} iterations: {_listed(errors, '.1e')}"
    if _iterations(runs[method]) < PAPER_ITERATIONS:
        # The retractions' errors add up, and landing's is as small as its gradients are: who is
        # nearer early says little, either way.
        return Finding(f"{measured}; the paper iterates longer", Verdict.OPEN)
    nearer = errors[method] < min(errors[m] for m in RETRACTION_METHODS)
    return Finding.of(measured, nearer)


def retractions_accumulate(methods: Sequence[str], records: Records) -> Finding:
    """Growth of the retractions' error after the first percent of the iterations."""
    runs = {m: figure_runs(records, m) for m in methods}
    growths = {m: median(growth(r, "orthogonality_error") for r in rs) for m, rs in runs.items()}
    iterations = _iterations(runs[methods[0]][0])
    measured = f"growth within {iterations} iterations: {_listed(growths, '.2g')}"
    if min(growths.values()) > GROWN:
        return Finding(measured, Verdict.HOLDS)
    return Finding(measured, Verdict.OPEN if iterations < FIGURE_ITERATIONS else Verdict.FAILS)


def trivializations_are_exact(
    runs_of: Callable[[Records, str], list[Record]], methods: Sequence[str], records: Records
) -> Finding:
    """The largest error of a trivialized weight, in units of the rounding error of its entries."""
    runs = {m: runs_of(records, m) for m in methods}
    rounding = torch.finfo(torch.float32).eps * runs[methods[0]][0].configuration["p"]
    worst = {
        m: largest([largest(r.series("largest_error")) for r in rs]) / rounding
        for m, rs in runs.items()
    }
    measured = f"in units of p times the rounding unit: {_listed(worst, '.2g')}"
    return Finding.of(measured, largest([*worst.values()]) <= ROUNDING)


def stays_in_ball(records: Records) -> Finding:
    """The safe step's guarantee, with every learning rate."""
    runs = [
        run
        for method in LANDING_METHODS
        for run in (*runs_of(records, method), *figure_runs(records, method))
    ]
    return within_ball([largest(run.series("largest_error")) for run in runs], len(runs))


TEXTBOOKS = tuple(map(as_in_the_paper, RETRACTION_METHODS))
IDENTITIES = tuple(map(as_in_the_paper, TRIVIALIZATION_METHODS))
DISTILLATION_CLAIMS = (
    Claim.of_paper(
        "Landing with momentum is the fastest method: it is the first at every level of the test "
        "loss that any method reaches.",
        "The landing flow with momentum is the fastest method.",
        partial(momentum_is_fastest, figure_time_to, PAPER_METHODS, FIGURE_LEVELS),
        # The appendix's rates and the printed loss, with our baselines.
        partial(momentum_is_fastest, time_to, TRAINING_METHODS, GRID_LEVELS),
    ),
    Claim.of_paper(
        "Landing with momentum leads to a smaller orthogonality error than the retractions: at "
        f"most {LANDED:.0e}, the textbook ones at least {DRIFTED:.0e}, as in the paper's figure.",
        "It also leads to smaller orthogonalization error than the other retraction methods.",
        partial(figure_ends_nearer, "landing-momentum", TEXTBOOKS, LANDED, DRIFTED),
        partial(figure_ends_nearer, "landing-momentum", RETRACTION_METHODS, LANDED, 0.0),
    ),
    Claim.of_paper(
        "The exponential and Cayley retractions accumulate numerical errors: over the last 99 % "
        f"of the run their orthogonality error grows more than {GROWN}-fold.",
        "because it does not suffer from accumulation of numerical errors",
        partial(retractions_accumulate, TEXTBOOKS),
        partial(retractions_accumulate, RETRACTION_METHODS),
    ),
    Claim.of_paper(
        f"Trivializations are exact: no weight is further from the manifold than {ROUNDING:.0f} p "
        "rounding units.",
        "Orthogonalization error is not displayed for trivialization methods, since they are "
        "exact.",
        partial(trivializations_are_exact, figure_runs, IDENTITIES),
        partial(
            trivializations_are_exact, lambda r, m: [best_runs(r, (m,))[m]], TRIVIALIZATION_METHODS
        ),
    ),
    Claim.of_paper(
        f"At p = {PAPER_SIZE[0]}, an iteration of landing takes less time than one of the "
        f"exponential and Cayley retractions, by more than {FASTER - 1:.0%}.",
        "Our method is faster than retractions",
        partial(takes_longer, FIGURE_TIMING, TEXTBOOKS, ["landing"]),
        partial(takes_longer, TIMING, RETRACTION_METHODS, ["landing"]),
    ),
    Claim.of_paper(
        f"At p = {PAPER_SIZE[0]}, an iteration of each trivialization takes longer than one of "
        "every other method: the gradient goes through a matrix exponential.",
        "It adds a computational cost which can be significant.",
        partial(takes_longer, FIGURE_TIMING, IDENTITIES, (*LANDING_METHODS, *TEXTBOOKS)),
        partial(
            takes_longer,
            TIMING,
            TRIVIALIZATION_METHODS,
            (*LANDING_METHODS, *RETRACTION_METHODS),
        ),
    ),
    Claim.beyond(
        f"At the figure's step landing without momentum ends as near: at most {LANDED:.0e}.",
        partial(figure_ends_nearer, "landing", TEXTBOOKS, LANDED, DRIFTED),
    ),
    *(
        Claim.beyond(
            f"At the appendix's rates and with the printed loss, {name} ends nearer to the "
            "manifold than our own exponential and Cayley retractions.",
            partial(ends_nearer, method),
        )
        for method, name in (("landing", "landing"), ("landing-momentum", "landing with momentum"))
    ),
    Claim(
        "The corrected safe step keeps every recorded iterate of landing within eps of the "
        "manifold, with every learning rate.",
        "correction",
        stays_in_ball,
    ),
    Claim.beyond(
        "To the same test loss, each with its fastest learning rate, the exponential and Cayley "
        f"retractions need as many iterations as landing, within {SIMILAR:.0%}.",
        landing_needs_as_many_iterations,
    ),
    Claim.beyond(
        "With momentum, landing reaches a smaller test loss in as many iterations.",
        momentum_helps,
    ),
)


# How it is drawn.


_LABELS = {
    "test_loss": "test loss",
    "orthogonality_error": r"orthogonality error, $\|W^\top W - I\|$",
}


def draw_training(records: Records) -> Figure:
    """At the appendix's rates, with our baselines: each method's best run."""
    best = best_runs(records, TRAINING_METHODS)
    figure, _ = draw_by_time_and_iteration(
        {method: [run] for method, run in best.items()},
        {method: iteration_seconds(records, run) for method, run in best.items()},
        _LABELS,
        height=7,
    )
    return figure


def draw_figure(records: Records) -> Figure:
    """The paper's figure, at its step, of the methods with runs: medians of the trials."""
    drawn = ["landing"] + [m for m in PAPER_METHODS[1:] if figure_name(m, 0) in records]
    runs = {method: figure_runs(records, method) for method in drawn}
    seconds = {m: seconds_per_iteration(records[FIGURE_TIMING], method=m) for m in drawn}
    figure, _ = draw_by_time_and_iteration(runs, seconds, _LABELS, height=7)
    return figure


def draw_rates(records: Records) -> Figure:
    """How the learning rates were chosen."""
    figure = Figure(figsize=(8, 4.6))
    axes = figure.subplots()
    for method in TRAINING_METHODS:
        losses = [final_loss(run) for run in runs_of(records, method)]
        plot_method(axes, method, LEARNING_RATES, losses)
        loss, lr = min(zip(losses, LEARNING_RATES, strict=True))
        axes.plot(lr, loss, "o", color=METHOD_STYLES[method].colour, markersize=6)
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test loss in the end")
    axes.minorticks_off()
    add_legend(figure, axes, 3)
    return figure


DISTILLATION_FIGURES = (
    FigureSpec(
        "distillation",
        "A student network with orthogonal weights, at the step of the paper's figure and with its "
        "baselines: textbook retractions, and trivializations from the identity, which run for a "
        "part of the iterations, as far as they are recorded. Top: loss on a test set, divided by "
        "p. Bottom: orthogonality error of all weights together. Left: by time. Right: by "
        "iteration. Medians of the seeds, and behind them each of them.",
        draw_figure,
    ),
    FigureSpec(
        "distillation-appendix",
        "The same at the appendix's learning rates, each method with its best one, and with our "
        "own retractions and trivializations. Top: loss on a test set. Bottom: orthogonality "
        "error of all weights together. Left: by time, which is the iterations times the "
        "median time of one, timed in turn with the other methods. Right: by iteration. Curves "
        "end where the runs do.",
        draw_training,
    ),
    FigureSpec(
        "distillation-rates",
        "Loss on the test set at the end of each run, by learning rate. A dot marks the learning "
        "rate with which the method is shown and compared.",
        draw_rates,
    ),
)


DISTILLATION = Study(
    name="distillation",
    title="Distillation: a tanh network with orthogonal weights learns from another",
    paper_figure="Figure 5",
    summary=(
        "A student network x <- tanh(W x + b), layer after layer, with square orthogonal W, "
        "learns to do what a teacher of the same kind does: the loss is the squared distance of "
        "their outputs, averaged over a batch of standard normal inputs that are new at every "
        "iteration. Weights start Haar-distributed with determinant +1 and biases standard "
        "normal, for teacher and student; all methods start at the same student and see the same "
        "inputs. The paper's main text names the learning rate 0.5. That works for the loss "
        "divided by p, where it gives the paper's figure; with the printed loss landing rides the "
        "boundary of its safe ball. So the runs of the figure have 0.5, the loss divided by p, "
        "textbook retractions (exp(A) X by torch's matrix_exp, Cayley by a solve) and "
        "trivializations W = exp(A), with 1e-3 for Adam and RMSprop, their best in the appendix's "
        "grid; our own retractions run beside them. In a second setting each method runs with the "
        "appendix's rates 1, 0.1, 0.01 and 0.001, with the printed loss and our own retractions "
        "and trivializations. There it is shown "
        "with the rate of the smallest final test loss; where time or iterations to a given test "
        "loss are compared, with the one that gets there first. Biases have the same "
        "learning rate, momentum where the weights have it, and Adam or RMSprop where these step "
        "the weights. Our own trivialization is W = B exp(A), from A = 0 and the student's "
        "weight B, where the exponential is cheapest. Everything is in float32; "
        "errors are measured in float64. The time of an iteration is the median of forward pass, "
        "backward pass and step of the student, without drawing inputs and asking the teacher, in "
        "a run in which all methods and learning rates take turns. Where times at p = 100 are "
        "compared, the learning rate is 0.01. The preset paper has the paper's size: p = 100, "
        "depth 10, 3,000 iterations of the figure with three seeds, and 10,000 of the appendix's "
        "rates, which take hours. Quick has the paper's depth and batch, but "
        "narrower networks (p = 30) and 800 iterations, of which the costly trivializations do a "
        "quarter; single iterations are timed at the paper's size, too. So it shows who learns "
        "faster, and less of how errors add up over thousands of iterations."
    ),
    settings={
        "smoke": DistillationSettings(
            p=10,
            depth=3,
            batch=32,
            iterations=30,
            test_size=100,
            timed_size=(10, 3),
            repetitions=5,
            figure_iterations=30,
            trials=1,
        ),
        "quick": DistillationSettings(
            p=30,
            iterations=800,
            trivialization_share=0.25,
            repetitions=9,
            figure_iterations=800,
            trials=1,
        ),
        "paper": DistillationSettings(),
    },
    plan=plan,
    run=run,
    claims=DISTILLATION_CLAIMS,
    figures=DISTILLATION_FIGURES,
)
