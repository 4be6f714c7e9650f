"""Distillation (the paper's figure 5): a student network learns what a teacher network does.

Both are ``x <- tanh(W x + b)`` with square orthogonal W. New training examples are drawn at every
iteration, the same for all methods.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from ortholand.geometry import distance
from ortholand.lab.methods import (
    RETRACTION_METHODS,
    TRAINING_METHODS,
    TRIVIALIZATION_METHODS,
    Trainee,
    prepare,
)
from ortholand.lab.models import TanhMLP
from ortholand.lab.study.environment import Stopwatch
from ortholand.lab.study.figures import METHOD_STYLES, listed, plot_method
from ortholand.lab.study.records import Record, Records, Result
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)
from ortholand.lab.study.timing import marks

LANDING_METHODS = ("landing", "landing-momentum")
LEARNING_RATES = (1.0, 0.1, 0.01, 0.001)
TIMING = "timing"  # the unit in which the iterations of all methods are timed in turn
PAPER_SIZE = (100, 10)  # width and depth
PAPER_ITERATIONS = 10_000
EPS = 0.5  # radius of landing's safe ball, the optimizer's default
FASTER = 1.05  # times that differ by less than this factor count as the same
SIMILAR = 0.1  # numbers of iterations that differ by less, relatively, count as the same
ENOUGH = 100  # iterations, without which it is too early to compare test losses
LEARNT = 0.1  # a test loss, relative to the first, that counts as having learnt something
GROWN = 1.5  # growth of the orthogonality error that is no longer its fluctuation
ROUNDING = 10.0  # what a few products of rounded matrices may add to the error of one rounding


@dataclass(frozen=True)
class Settings:
    """The paper's settings are the defaults; it does not say how large the test set is."""

    p: int = PAPER_SIZE[0]
    depth: int = PAPER_SIZE[1]
    batch: int = 256
    iterations: int = PAPER_ITERATIONS
    trivialization_share: float = 1.0  # part of these that the trivializations are run for
    momentum: float = 0.9
    test_size: int = 1_000
    timed_size: tuple[int, int] = PAPER_SIZE  # at which, besides the runs' own, times are taken
    warm_up: int = 5  # iterations before those that are timed in turn
    repetitions: int = 30  # of the iterations that are timed in turn


@dataclass(frozen=True)
class Task:
    """One run: a method with a learning rate."""

    method: str
    lr: float
    p: int
    depth: int
    batch: int
    iterations: int
    momentum: float
    test_size: int


@dataclass(frozen=True)
class Timing:
    """Iterations of several runs, timed in turn: what disturbs one disturbs them all alike."""

    runs: tuple[Task, ...]
    warm_up: int
    repetitions: int


class Point(NamedTuple):
    """What is recorded of a student."""

    iteration: int
    test_loss: float
    orthogonality_error: float  # of all weights together
    largest_error: float  # of a single weight, ||W^T W - I||_F


def unit_name(method: str, lr: float) -> str:
    """Name of the run of a method with a learning rate."""
    return f"{method}-lr{lr:g}"


def plan(settings: Settings) -> list[Unit[Task | Timing]]:
    """Every method with every learning rate, and the timing of them all."""
    tasks = [_task(settings, method, lr) for method in TRAINING_METHODS for lr in LEARNING_RATES]
    units: list[Unit[Task | Timing]] = [
        Unit(unit_name(task.method, task.lr), task, task.iterations) for task in tasks
    ]
    p, depth = settings.timed_size
    full_size = [replace(task, p=p, depth=depth) for task in tasks]
    timed = tuple(dict.fromkeys([*tasks, *full_size]))  # once, where the sizes are the same
    timing = Timing(timed, settings.warm_up, settings.repetitions)
    return [*units, Unit(TIMING, timing, len(timed) * (settings.warm_up + settings.repetitions))]


def _task(settings: Settings, method: str, lr: float) -> Task:
    share = settings.trivialization_share if method in TRIVIALIZATION_METHODS else 1.0
    return Task(
        method=method,
        lr=lr,
        p=settings.p,
        depth=settings.depth,
        batch=settings.batch,
        iterations=math.ceil(share * settings.iterations),
        momentum=settings.momentum,
        test_size=settings.test_size,
    )


def run(task: Task | Timing, context: Context) -> Result:
    """Do one unit of work."""
    return run_in_turn(task, context) if isinstance(task, Timing) else run_alone(task, context)


def run_alone(task: Task, context: Context) -> Result:
    """Train, measuring now and then."""
    lesson = Lesson(task, context)
    points = [lesson.measure()]
    for mark in marks(task.iterations, ratio=1.15)[1:]:
        while lesson.iteration < mark:
            lesson.iterate()
        points.append(lesson.measure())
        context.tick(mark - points[-2].iteration)
    return Result(dict(zip(Point._fields, zip(*points, strict=True), strict=True)), {})


def run_in_turn(timing: Timing, context: Context) -> Result:
    """Time single iterations, one of each run in turn; ``run`` is its place in ``runs``."""
    lessons = [Lesson(task, context) for task in timing.runs]
    turns: list[tuple[int, float]] = []
    for k in range(-timing.warm_up, timing.repetitions):
        for i, lesson in enumerate(lessons):
            seconds = lesson.iterate()
            if k >= 0:
                turns.append((i, seconds))
        context.tick(len(lessons))
    return Result(dict(zip(("run", "seconds"), zip(*turns, strict=True), strict=True)), {})


class Lesson:
    """A teacher, a student that is trained by a method, and the examples."""

    def __init__(self, task: Task, context: Context) -> None:
        self.task, self.device = task, context.device
        # A seed each: what one draws must not shift what another does.
        teacher, student, batches, tests = range(4 * context.seed, 4 * context.seed + 4)
        self.teacher = self._network(teacher)
        self.trainee = make_trainee(self._network(student), task)
        self.draw = torch.Generator().manual_seed(batches)
        self.tests = self._inputs(task.test_size, torch.Generator().manual_seed(tests))
        self.solutions = self._answers(self.tests)
        self.iteration = 0

    def iterate(self) -> float:
        """One iteration; the seconds that it took, without those for its examples."""
        x = self._inputs(self.task.batch, self.draw)
        y = self._answers(x)
        stopwatch = Stopwatch(self.device)
        with stopwatch:
            self.trainee.step(loss(self.trainee.model(x), y))
        self.iteration += 1
        return stopwatch.seconds

    @torch.no_grad()
    def measure(self) -> Point:
        """The student as it is now."""
        errors = [float(distance(W.double())) for W in self.trainee.weights()]
        return Point(
            iteration=self.iteration,
            test_loss=float(loss(self.trainee.model(self.tests), self.solutions)),
            orthogonality_error=math.hypot(*errors),
            largest_error=_largest(errors),
        )

    @torch.no_grad()
    def _answers(self, x: Tensor) -> Tensor:
        return self.teacher(x)

    def _network(self, seed: int) -> TanhMLP:
        # Determinants +1: all that the paper's trivializations exp(A) could be.
        network = TanhMLP(self.task.p, self.task.depth, seed=seed, special=True)
        return network.to(self.device)

    def _inputs(self, count: int, generator: torch.Generator) -> Tensor:
        # Drawn on the CPU: the same on every device.
        return torch.randn(count, self.task.p, generator=generator).to(self.device)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The paper's: squared distances, averaged over the examples."""
    return (outputs - targets).square().sum(-1).mean()


def make_trainee(student: nn.Module, task: Task) -> Trainee:
    """The student, ready for its method; methods with momentum have it for the biases too."""
    return prepare(
        student,
        task.method,
        orthogonal=lambda name, _: name.endswith("weight"),
        view="matrix",
        lr=task.lr,
        momentum=task.momentum,
        plain_momentum=task.momentum if task.method.endswith("-momentum") else 0.0,
    )


# What the records say.


def runs_of(records: Records, method: str) -> list[Record]:
    """The runs of a method with each learning rate."""
    return [records[unit_name(method, lr)] for lr in LEARNING_RATES]


def best_run(records: Records, method: str) -> Record:
    """The run of a method with the smallest final test loss."""
    return min(runs_of(records, method), key=final_loss)


def best_runs(records: Records, methods: Sequence[str]) -> dict[str, Record]:
    """The best run of each method."""
    return {method: best_run(records, method) for method in methods}


def final_loss(run: Record) -> float:
    """The test loss in the end; infinite if it is not a number."""
    value = run.series("test_loss")[-1]
    return math.inf if math.isnan(value) else value


def final_error(run: Record) -> float:
    """The orthogonality error of all weights in the end."""
    return run.series("orthogonality_error")[-1]


def seconds_per_iteration(timing: Record, run: Record, p: int | None = None) -> float:
    """Median time of an iteration, in turn with the others; at the run's own width or at p."""
    configuration = run.configuration if p is None else {**run.configuration, "p": p}
    wanted = [configuration[name] for name in ("method", "lr", "p")]
    place = next(
        i
        for i, timed in enumerate(timing.configuration["runs"])
        if [timed[name] for name in ("method", "lr", "p")] == wanted
    )
    turns = zip(timing.series("run"), timing.series("seconds"), strict=True)
    return median(seconds for i, seconds in turns if i == place)


def time_to(records: Records, method: str, level: float) -> float:
    """Seconds until the test loss is at the level, with the learning rate that is fastest there."""
    return min(
        iterations_to(run, level) * seconds_per_iteration(records[TIMING], run)
        for run in runs_of(records, method)
    )


def iterations_to(run: Record, level: float) -> float:
    """When the test loss first is at the level; between records by interpolation."""
    points = zip(run.series("iteration"), run.series("test_loss"), strict=True)
    for (k0, y0), (k1, y1) in pairwise(points):
        if y1 <= level < y0:
            return k0 + (k1 - k0) * math.log(y0 / level) / math.log(y0 / y1)
    return math.inf


def common_level(runs: Mapping[str, Record]) -> float | None:
    """The smallest test loss that all runs end at; None if some have hardly begun to learn."""
    level = max(final_loss(run) for run in runs.values())
    start = next(iter(runs.values())).series("test_loss")[0]
    begun = level <= LEARNT * start and all(_iterations(r) >= ENOUGH for r in runs.values())
    return level if begun else None


# Claims.

_listed = partial(listed, between="; ")  # numbers with the names of their methods
TOO_EARLY = Finding("some methods have hardly begun to learn", Verdict.OPEN)


def momentum_is_fastest(records: Records) -> Finding:
    """Time to a test loss that every method reaches, each with its fastest learning rate."""
    runs = best_runs(records, TRAINING_METHODS)
    level, p = common_level(runs), runs["landing"].configuration["p"]
    if level is None:
        return TOO_EARLY
    needed = {method: time_to(records, method, level) for method in TRAINING_METHODS}
    fastest = min(needed, key=needed.__getitem__)
    measured = f"p = {p}, to a test loss of {level:.2g}, in seconds: {_listed(needed, '.2g')}"
    return Finding(measured, Verdict.of(fastest == "landing-momentum"))


def landing_needs_as_many_iterations(records: Records) -> Finding:
    """Iterations to a test loss that landing and the retractions reach, each as fast as it can."""
    methods = ("landing", *RETRACTION_METHODS)
    level = common_level(best_runs(records, methods))
    if level is None:
        return TOO_EARLY
    needed = {
        method: min(iterations_to(run, level) for run in runs_of(records, method))
        for method in methods
    }
    similar = all(abs(k / needed["landing"] - 1) <= SIMILAR for k in needed.values())
    measured = f"to a test loss of {level:.2g}: {_listed(needed, '.0f')} iterations"
    return Finding(measured, Verdict.of(similar))


def momentum_helps(records: Records) -> Finding:
    """Test loss of landing in the end."""
    runs = best_runs(records, LANDING_METHODS)
    if common_level(runs) is None:
        return TOO_EARLY
    losses = {method: final_loss(run) for method, run in runs.items()}
    return Finding(
        f"in the end: {_listed(losses, '.2g')}",
        Verdict.of(losses["landing-momentum"] < losses["landing"]),
    )


def iteration_is_faster(records: Records) -> Finding:
    """Time of an iteration of each retraction as a multiple of landing's, at the largest size."""
    p, seconds = _times_at_largest(records, ("landing", *RETRACTION_METHODS))
    landing = seconds.pop("landing")
    ratios = {method: s / landing for method, s in seconds.items()}
    measured = f"p = {p}: landing {1e3 * landing:.2g} ms, {_listed(ratios, '.2f')} times as long"
    return _at_size(p, Finding(measured, Verdict.of(min(ratios.values()) > FASTER)))


def trivializations_are_slower(records: Records) -> Finding:
    """Time of an iteration of each trivialization as a multiple of the slowest other method's."""
    p, seconds = _times_at_largest(records, TRAINING_METHODS)
    slow = {method: seconds.pop(method) for method in TRIVIALIZATION_METHODS}
    slowest = max(seconds, key=seconds.__getitem__)
    ratios = {method: s / seconds[slowest] for method, s in slow.items()}
    measured = f"p = {p}, in times of {METHOD_STYLES[slowest].label}: {_listed(ratios, '.2f')}"
    return _at_size(p, Finding(measured, Verdict.of(min(ratios.values()) > FASTER)))


def ends_nearer(method: str, records: Records) -> Finding:
    """The orthogonality error of a landing method in the end, beside the retractions'."""
    runs = best_runs(records, (method, *RETRACTION_METHODS))
    errors = {m: final_error(run) for m, run in runs.items()}
    measured = f"after {_iterations(runs[method])} iterations: {_listed(errors, '.1e')}"
    if _iterations(runs[method]) < PAPER_ITERATIONS:
        # The retractions' errors add up, and landing's is as small as its gradients are: who is
        # nearer early says little, either way.
        return Finding(f"{measured}; the paper iterates longer", Verdict.OPEN)
    return Finding(
        measured, Verdict.of(errors[method] < min(errors[m] for m in RETRACTION_METHODS))
    )


def retractions_accumulate(records: Records) -> Finding:
    """Growth of the retractions' error after the first percent of the iterations."""
    runs = best_runs(records, RETRACTION_METHODS)
    growths = {method: growth(run) for method, run in runs.items()}
    iterations = _iterations(runs["exponential"])
    measured = f"growth within {iterations} iterations: {_listed(growths, '.2g')}"
    if min(growths.values()) > GROWN:
        return Finding(measured, Verdict.HOLDS)
    decided = iterations >= PAPER_ITERATIONS
    return Finding(measured, Verdict.FAILS if decided else Verdict.OPEN)


def trivializations_are_exact(records: Records) -> Finding:
    """The largest error of a trivialized weight beside what rounding its entries makes."""
    runs = best_runs(records, TRIVIALIZATION_METHODS)
    rounding = torch.finfo(torch.float32).eps * runs["trivialization-sgd"].configuration["p"]
    largest = {m: _largest(run.series("largest_error")) / rounding for m, run in runs.items()}
    measured = f"in units of p times the rounding unit: {_listed(largest, '.2g')}"
    return Finding(measured, Verdict.of(_largest([*largest.values()]) <= ROUNDING))


def stays_in_ball(records: Records) -> Finding:
    """The promise of the safe step, with every learning rate."""
    runs = [records[unit_name(m, lr)] for m in LANDING_METHODS for lr in LEARNING_RATES]
    largest = _largest([_largest(run.series("largest_error")) for run in runs])
    return Finding(
        f"at most {largest:.4f} in {len(runs)} runs, eps = {EPS}", Verdict.of(largest <= EPS)
    )


def growth(run: Record) -> float:
    """The last orthogonality error over the one after 1 % of the iterations."""
    pairs = zip(run.series("iteration"), run.series("orthogonality_error"), strict=True)
    early = next(error for k, error in pairs if k >= _iterations(run) / 100)
    return final_error(run) / early


def _iterations(run: Record) -> int:
    return int(run.series("iteration")[-1])


def _times_at_largest(records: Records, methods: Sequence[str]) -> tuple[int, dict[str, float]]:
    """The largest width that was timed, and there each method's seconds per iteration."""
    timing, runs = records[TIMING], best_runs(records, methods)
    p = max(run["p"] for run in timing.configuration["runs"])
    return p, {method: seconds_per_iteration(timing, run, p) for method, run in runs.items()}


def _at_size(p: int, finding: Finding) -> Finding:
    """The finding; not decided if the matrices are smaller, where all is overhead, than claimed."""
    return finding if p >= PAPER_SIZE[0] else replace(finding, verdict=Verdict.OPEN)


def _largest(numbers: Sequence[float]) -> float:
    """The maximum; NaN if there is one, which max() may pass over."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


# Figures.


def draw_training(records: Records) -> Figure:
    """The paper's figure, by time as there, and by iteration: each method's best run."""
    runs = best_runs(records, TRAINING_METHODS)
    figure = Figure(figsize=(8, 7))
    grid = figure.subplots(2, 2, sharex="row", sharey="col")
    for method, run in runs.items():
        iterations = run.series("iteration")
        # By the clocks of their own runs, methods would seem slow that met a busy machine.
        seconds = seconds_per_iteration(records[TIMING], run)
        by_time = [seconds * k for k in iterations]
        for row, x in enumerate((by_time, iterations)):
            for column, y in enumerate(("orthogonality_error", "test_loss")):
                # Without the start, for which a logarithmic axis has no place.
                plot_method(grid[row, column], method, x[1:], run.series(y)[1:])
    for axes in grid.flat:
        _logarithmic(axes)
    for row, label in zip(grid, ("time, seconds", "iterations"), strict=True):
        row[0].set_ylabel(r"orthogonality error, $\|W^\top W - I\|$")
        row[1].set_ylabel("test loss")
        for axes in row:
            axes.set_xlabel(label)
    _legend(figure, grid[0, 0])
    return figure


def draw_rates(records: Records) -> Figure:
    """How the learning rates were chosen."""
    figure = Figure(figsize=(8, 4.6))
    axes = figure.subplots()
    for method in TRAINING_METHODS:
        losses = [final_loss(run) for run in runs_of(records, method)]
        plot_method(axes, method, LEARNING_RATES, losses)
        best = min(zip(losses, LEARNING_RATES, strict=True))
        axes.plot(best[1], best[0], "o", color=METHOD_STYLES[method].colour, markersize=6)
    _logarithmic(axes)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("test loss in the end")
    _legend(figure, axes)
    return figure


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)


DISTILLATION = Study(
    name="distillation",
    title="Distillation: a tanh network with orthogonal weights learns from another",
    paper_figure="Figure 5",
    summary=(
        "A student network x <- tanh(W x + b), layer after layer, with square orthogonal W, learns "
        "to do what a teacher of the same kind does: the loss is the squared distance of their "
        "outputs, averaged over a batch of standard normal inputs that are new at every "
        "iteration. Weights start Haar-distributed with determinant +1 and biases standard "
        "normal, for teacher and student; all methods start at the same student and see the same "
        "inputs. Each method runs with the learning rates 1, 0.1, 0.01 and 0.001, and is shown "
        "with the one whose test loss is smallest in the end; where the time or the iterations to "
        "a given test loss are compared, with the one that gets there first. (The paper's "
        "appendix has these four and takes the fastest; its main text names 0.5 for all.) Biases "
        "have the same learning rate, and momentum where the weights have it; with Adam and "
        "RMSprop they are stepped by these. A trivialization is W = B exp(A), started at A = 0 "
        "with the student's weight as B, where the exponential is cheapest; the paper writes "
        "W = exp(A). Everything is in float32; errors are measured in float64. The time of an "
        "iteration is that of the student's forward and backward pass and the step, not of "
        "drawing inputs and asking the teacher; it comes from a run of its own, in which all "
        "methods and learning rates take turns, and is a median. The preset paper has the "
        "paper's size: p = 100, depth 10, 10,000 iterations, which take hours. Quick has the "
        "paper's depth and batch, but narrower networks (p = 30) and 800 iterations, of which "
        "the costly trivializations do a quarter; it takes the times of single iterations at the "
        "paper's size too. So it shows who learns faster, and less of how errors add up over "
        "thousands of iterations. Smoke is for seeing that all works: tiny networks and a few "
        "iterations, which decide little."
    ),
    settings={
        "smoke": Settings(
            p=10,
            depth=3,
            batch=32,
            iterations=30,
            test_size=100,
            timed_size=(10, 3),
            warm_up=1,
            repetitions=5,
        ),
        "quick": Settings(
            p=30, iterations=800, trivialization_share=0.25, warm_up=2, repetitions=12
        ),
        "paper": Settings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim(
            "Landing with momentum is the fastest method: it takes the least time to a test loss "
            "that all methods reach.",
            "paper",
            momentum_is_fastest,
        ),
        Claim(
            "Landing with momentum leads to a smaller orthogonality error than the exponential "
            "and Cayley retractions.",
            "paper",
            partial(ends_nearer, "landing-momentum"),
        ),
        Claim(
            "Landing without momentum does so too.",
            "paper",
            partial(ends_nearer, "landing"),
        ),
        Claim(
            "The exponential and Cayley retractions accumulate numerical errors: over the last "
            f"99 % of the run their orthogonality error grows more than {GROWN}-fold.",
            "paper",
            retractions_accumulate,
        ),
        Claim(
            "Trivializations are exact: no weight is further from the manifold than "
            f"{ROUNDING:.0f} p rounding units.",
            "paper",
            trivializations_are_exact,
        ),
        Claim(
            f"At p = {PAPER_SIZE[0]}, an iteration of landing takes less time than one of the "
            f"exponential and Cayley retractions, by more than {FASTER - 1:.0%}.",
            "paper",
            iteration_is_faster,
        ),
        Claim(
            f"At p = {PAPER_SIZE[0]}, an iteration of each trivialization takes longer than one of "
            "every other method: the gradient goes through a matrix exponential.",
            "paper",
            trivializations_are_slower,
        ),
        Claim(
            "The corrected safe step keeps every recorded iterate of landing within eps of the "
            "manifold, with every learning rate.",
            "correction",
            stays_in_ball,
        ),
        Claim(
            "To the same test loss, each with its fastest learning rate, the exponential and "
            f"Cayley retractions need as many iterations as landing, within {SIMILAR:.0%}.",
            "beyond the paper",
            landing_needs_as_many_iterations,
        ),
        Claim(
            "With momentum, landing reaches a smaller test loss in as many iterations.",
            "beyond the paper",
            momentum_helps,
        ),
    ),
    figures=(
        FigureSpec(
            "distillation",
            "A student network with orthogonal weights is trained by each method with its best "
            "learning rate. Left: orthogonality error of all weights together. Right: loss on a "
            "test set. Top: by time, which is the iterations times the median time of one, timed "
            "in turn with the other methods. Bottom: by iteration. Curves end where the runs do.",
            draw_training,
        ),
        FigureSpec(
            "distillation-rates",
            "Loss on the test set at the end of each run, by learning rate. A dot marks the "
            "learning rate with which the method is shown and compared.",
            draw_rates,
        ),
    ),
    threads=1,  # such small matrices are not worth sharing
)
