"""What is run and measured: solvers in turn, until a rule holds that the benchmark itself checks.

The study's summary says what stops a run, and how the rule is checked.
"""

import gc
import logging
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter, process_time

import torch

from ortholand.geometry import distance
from ortholand_lab.benchmarks.solvers.catalogue import PROBLEMS, USUAL
from ortholand_lab.benchmarks.solvers.oracle import Oracle, Stop
from ortholand_lab.benchmarks.solvers.peers import PARTICIPANTS, Attempt, Solver
from ortholand_lab.benchmarks.solvers.problems import (
    Case,
    Matrix,
    decaying_pca,
    gaussian,
    nearest,
)
from ortholand_lab.benchmarks.solvers.users import laplacian
from ortholand_lab.study.records import Result
from ortholand_lab.study.spec import Context, Unit
from ortholand_lab.study.timing import Action, time_in_turn

TIGHTENINGS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
SHORT = 1.0  # processor seconds; shorter runs are repeated
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SolverSettings:
    """Which solvers are run on what, and for how long. A unit's task has one of the problems."""

    problems: tuple[str, ...] = USUAL
    solvers: tuple[str, ...] = tuple(PARTICIPANTS)
    seeds: int = 5
    gtols: tuple[float, ...] = (1e-6, 1e-10)  # the loosest first
    maxtime: float = 90.0  # processor seconds of a run
    repeats: int = 3  # how often a short run is timed
    patience: int = 3  # seeds that a solver may miss before it is left out


@dataclass(frozen=True)
class SolverRun:
    """One solver with one seed and one tolerance: one entry in each of the record's series."""

    solver: float  # its place among the task's solvers
    seed: float
    gtol: float
    reached: float  # whether the rule holds
    seconds: float  # median of the repetitions, by the clock on the wall
    processor_seconds: float
    iterations: float
    costs: float
    gradients: float
    hessian_products: float
    reduction: float  # of the Riemannian gradient, at the point projected onto the manifold
    orthogonality: float  # of the point as the solver left it
    value: float  # cost at the projected point
    start: float  # cost at the start
    optimum: float  # least cost; NaN where it is not known
    tightening: float  # own rule: factor on the tolerance for which the benchmark's rule held


def plan(settings: SolverSettings) -> list[Unit[SolverSettings]]:
    """A unit for each problem: a solver that misses too many of its seeds skips the rest."""
    steps = settings.seeds * len(settings.gtols) * len(settings.solvers)
    return [
        Unit(name, replace(settings, problems=(name,)), steps, timed=True)
        for name in settings.problems
    ]


class Trial:
    """A solver that is to reduce the gradient norm of a problem to a target."""

    def __init__(self, solver: Solver, case: Case, gtol: float, maxtime: float) -> None:
        self.solver, self.case, self.gtol, self.maxtime = solver, case, gtol, maxtime
        self.target = gtol * case.start_norm
        self.attempts: list[Attempt] = []  # the run that counts, and its repetitions
        self.reached = False  # whether the rule holds after it
        self._tightening = 1.0  # of the solver's own tolerance
        self._last_gradient = math.inf  # where it is stopped from outside
        self._limit = 1_000  # iterations, for solvers that take time for each one allowed

    def settle(self) -> None:
        """Find out how to stop the solver, and run it that way."""
        if self.solver.stops:
            for self._tightening in TIGHTENINGS:
                first = self._unlimited_attempt()
                # A tighter tolerance changes nothing where the solver itself gives up.
                if self.holds(first.X) or not first.success:
                    break
        else:
            first = self.attempt(watched=True)
            if self.holds(first.X):
                self._last_gradient = first.counts[1]
                first = self.attempt()
        self.attempts = [first]
        self.reached = self.holds(first.X)

    def _unlimited_attempt(self) -> Attempt:
        """An attempt that no limit on iterations ended."""
        while (attempt := self.attempt()).limited:
            self._limit *= 10
        return attempt

    def repeat(self) -> None:
        """Run the solver once more, stopped in the same way."""
        self.attempts.append(self.attempt())

    def attempt(self, *, watched: bool = False) -> Attempt:
        """Run and time the solver once; the clocks stop while it is watched."""
        gc.collect()
        begin, processor_begin = perf_counter(), process_time()
        oracle = Oracle(
            self.case,
            deadline=processor_begin + self.maxtime,
            last_gradient=self._last_gradient,
            limit=self._limit,
            watch=self.holds if watched else None,
        )
        attempt = self._run(oracle)
        return replace(
            attempt,
            counts=attempt.counts if any(attempt.counts) else oracle.counts,
            seconds=perf_counter() - begin - oracle.pause,
            processor_seconds=process_time() - processor_begin - oracle.processor_pause,
        )

    def _run(self, oracle: Oracle) -> Attempt:
        try:
            return self.solver.run(oracle, self._tightening * self.target)
        except ImportError:
            raise
        except Exception as error:  # whatever else a solver may raise is a result, too
            if not isinstance(error, Stop):
                logger.warning("%s: %r", self.solver.label, error)
            return Attempt(oracle.last, oracle.iterations)

    def holds(self, X: Matrix) -> bool:
        """Whether the gradient at the projection of X is small enough."""
        # Not near the target, it is not worth a projection.
        if not self.case.riemannian_norm(X) <= 10 * self.target:
            return False
        return self.case.riemannian_norm(nearest(X)) <= self.target

    def as_run(self, place: int, seed: int) -> SolverRun:
        """The record of this trial."""
        case, first = self.case, self.attempts[0]
        projected = nearest(first.X)
        return SolverRun(
            *(place, seed, self.gtol, self.reached),
            statistics.median(attempt.seconds for attempt in self.attempts),
            statistics.median(attempt.processor_seconds for attempt in self.attempts),
            *(first.iterations, *first.counts),
            reduction=case.riemannian_norm(projected) / case.start_norm,
            orthogonality=float(distance(torch.tensor(first.X)).max()),
            value=case.cost(projected),
            start=case.cost(case.X0),
            optimum=case.optimum,
            tightening=self._tightening,
        )


def run(task: SolverSettings, context: Context) -> Result:
    """Run all solvers on one problem."""
    from threadpoolctl import threadpool_limits  # NumPy's threads; torch's are set already

    (name,) = task.problems
    make = PROBLEMS[name][1]
    contest = Contest(task, available(task.solvers), context)
    with threadpool_limits(torch.get_num_threads()):  # of what is imported by now
        for seed in contest.seeds:
            case = make(seed)
            for gtol in task.gtols:
                contest.take_turns(case, seed, gtol)
    names = [field.name for field in fields(SolverRun)]
    return Result({name: [getattr(r, name) for r in contest.runs] for name in names}, {})


def available(names: Sequence[str]) -> list[str]:
    """The solvers that can be imported, warmed up on a tiny problem."""
    found = []
    for name in names:
        solver = PARTICIPANTS[name]
        tiny = decaying_pca(seed=0, n=6, p=2) if solver.of_span else gaussian(seed=0, p=5)
        tiny = laplacian(4, 2, seed=0) if solver.eigen else tiny
        try:
            Trial(solver, tiny, gtol=1e-3, maxtime=10).attempt(watched=not solver.stops)
            found.append(name)
        except ImportError as error:
            logger.info("left out: %s: %s", name, error)
    return found


class Contest:
    """Solvers on one problem, and which of them reached a tolerance."""

    def __init__(self, task: SolverSettings, solvers: Sequence[str], context: Context) -> None:
        self.task, self.solvers, self.context = task, solvers, context
        self.seeds = range(context.seed, context.seed + task.seeds)
        self.runs: list[SolverRun] = []
        self.reached: set[tuple[str, int, float]] = set()

    def take_turns(self, case: Case, seed: int, gtol: float) -> None:
        """Run all that have a chance, in random order; then repeat the short runs in turn."""
        able = [name for name in self.solvers if PARTICIPANTS[name].fits(case)]
        hopeful = [name for name in able if not self._is_hopeless(name, seed, gtol)]
        self.context.tick(len(self.task.solvers) - len(hopeful))
        order = random.Random(f"{self.task.problems} {seed} {gtol}")
        trials: dict[str, Trial] = {}
        for name in order.sample(hopeful, len(hopeful)):
            trials[name] = Trial(PARTICIPANTS[name], case, gtol, self.task.maxtime)
            trials[name].settle()
            self.context.tick(1)
        short = [
            name
            for name, trial in trials.items()
            if trial.reached and trial.attempts[0].processor_seconds < SHORT
        ]
        again = {name: Action(trials[name].repeat) for name in short}
        time_in_turn(again, repetitions=self.task.repeats - 1, warm_up=0)
        for name, trial in trials.items():
            self.runs.append(trial.as_run(self.task.solvers.index(name), seed))
            if trial.reached:
                self.reached.add((name, seed, gtol))

    def _is_hopeless(self, name: str, seed: int, gtol: float) -> bool:
        """Whether a solver missed a looser tolerance here, or this one with too many seeds."""
        looser = [other for other in self.task.gtols if other > gtol]
        earlier = range(self.seeds.start, seed)
        misses = sum((name, other, gtol) not in self.reached for other in earlier)
        here = all((name, seed, other) in self.reached for other in looser)
        return not here or misses >= self.task.patience
