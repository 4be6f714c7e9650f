"""``ortholand.minimize`` against pymanopt, cdopt, smopt and torch's L-BFGS on a parametrization.

Same data, same start, same rule: the norm of the Riemannian gradient has fallen by ``gtol``. The
rule is verified here, in float64, at the point a solver returns, projected onto the manifold (polar
factor; not timed). Solvers with such a rule of their own stop by it; if the verification fails,
their tolerance is tightened until it does not. The others (cdopt, torch; pymanopt's steepest
descent, which takes one step more) are stopped from outside at the first gradient where the rule
holds, found in a first run that is not timed. For each problem and seed the solvers take turns in
shuffled order; runs under a second are repeated.

Run: ``python benchmarks/solvers.py``. Records go to ``--out``; what is there is not run again, so
an interrupted run goes on where it was. ``--report`` prints markdown tables from the records alone.
Peers that are not installed are left out: ``pip install ortholand[benchmarks]``.
"""

import fnmatch
import gc
import random
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from ortholand.lab.study.environment import machine
from solver_peers import SOLVERS, Run, Solver
from solver_problems import PROBLEMS, Matrix, Oracle, Problem, Stop, gaussian_procrustes
from solver_records import COLUMNS, Record, Store, markdown, rows

TIGHTENINGS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
PACKAGES = ("ortholand", "pymanopt", "cdopt", "smopt", "torch", "numpy", "scipy")
SHORT = 1.0  # seconds; shorter runs are repeated
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Settings:
    """What holds for all runs."""

    seeds: int
    gtols: tuple[float, ...]
    threads: int
    maxtime: float
    repeats: int
    patience: int
    fresh: bool


@dataclass
class Attempt:
    """One timed run of a solver."""

    run: Run
    counts: tuple[int, int, int]
    seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class Task:
    """A solver that is to bring down the gradient norm of a problem to a target."""

    solver: Solver
    problem: Problem
    start_norm: float
    gtol: float
    maxtime: float

    @property
    def target(self) -> float:
        """Norm to be reached."""
        return self.gtol * self.start_norm

    def attempt(
        self, tightening: float = 1.0, last_gradient: int | None = None, *, watched: bool = False
    ) -> Attempt:
        """Run the solver once, with the clock."""
        gc.collect()
        begin, processor_begin = perf_counter(), process_time()
        oracle = Oracle(
            self.problem,
            self.start_norm,
            deadline=begin + self.maxtime,
            last_gradient=last_gradient,
            watch=self.holds if watched else None,
        )
        try:
            run = self.solver.run(oracle, tightening * self.target)
        except Stop as stop:
            run = Run(oracle.last, self.solver.iterations(oracle), str(stop))
        except Exception as error:  # whatever a solver may raise is a result, too
            message = f"{type(error).__name__}: {error}"
            run = Run(oracle.last, self.solver.iterations(oracle), message)
        seconds = perf_counter() - begin - oracle.pause
        processor_seconds = process_time() - processor_begin - oracle.pause
        counts = run.counts or (oracle.fun_count, oracle.grad_count, oracle.hess_count)
        return Attempt(run, counts, seconds, processor_seconds)

    def holds(self, X: Matrix) -> bool:
        """Whether the gradient at the projection of X is small enough."""
        # Not near the target, it is not worth a projection.
        if not self.problem.riemannian_norm(X) <= 10 * self.target:
            return False
        return bool(self.problem.riemannian_norm(polar_factor(X)) <= self.target)

    def first(self) -> tuple[Attempt, bool, float, int | None]:
        """The run that counts, whether the rule holds, and how it was stopped."""
        if not self.solver.stops:
            return self._stopped_from_outside()
        attempt, tightening = None, 1.0
        for tightening in TIGHTENINGS:
            attempt = self.attempt(tightening)
            if self.holds(attempt.run.X):
                return attempt, True, tightening, None
            if not attempt.run.success:
                break  # a tighter tolerance would change nothing
        assert attempt is not None
        return attempt, False, tightening, None

    def _stopped_from_outside(self) -> tuple[Attempt, bool, float, int | None]:
        pilot = self.attempt(watched=True)
        if not self.holds(pilot.run.X):
            return pilot, False, 1.0, None
        last_gradient = pilot.counts[1]
        attempt = self.attempt(last_gradient=last_gradient)
        return attempt, self.holds(attempt.run.X), 1.0, last_gradient


def polar_factor(X: Matrix) -> Matrix:
    """The nearest matrix with orthonormal columns."""
    if not np.isfinite(X).all():
        return np.full_like(X, np.nan)
    U, _, Vh = np.linalg.svd(X, full_matrices=False)
    return U @ Vh


def available(patterns: str) -> dict[str, Solver]:
    """The solvers asked for that can be imported, warmed up on a tiny problem."""
    solvers = {}
    tiny = gaussian_procrustes(0, p=5)
    for name, solver in SOLVERS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(",")):
            continue
        task = Task(solver, tiny, tiny.riemannian_norm(tiny.X0), gtol=1e-3, maxtime=10)
        attempt = task.attempt(watched=not solver.stops)
        if attempt.run.message.startswith(("ImportError", "ModuleNotFoundError")):
            console.print(f"left out: {name}: {attempt.run.message}")
        else:
            solvers[name] = solver
    return solvers


def installed() -> dict[str, str]:
    """Versions of all that take part."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class Benchmark:
    """Runs what is not recorded yet."""

    def __init__(self, store: Store, solvers: dict[str, Solver], settings: Settings) -> None:
        self.store = store
        self.solvers = solvers
        self.settings = settings
        self._facts = dict(machine=machine(torch.device("cpu")), versions=installed())

    def run(self, name: str) -> None:
        """All seeds of a problem; solvers in turn within each."""
        for seed in range(self.settings.seeds):
            todo = [
                [solver for solver in self.solvers if self._is_open(name, solver, gtol, seed)]
                for gtol in self.settings.gtols
            ]
            if any(todo):
                problem = PROBLEMS[name][1](seed)
                for gtol, solvers in zip(self.settings.gtols, todo, strict=True):
                    self._in_turn(name, problem, seed, gtol, solvers)

    def _is_open(self, name: str, solver: str, gtol: float, seed: int) -> bool:
        record = self.store.find(name, solver, gtol, seed)
        if record is None or self.settings.fresh:
            return True
        return not record.reached and record.maxtime < self.settings.maxtime

    def _in_turn(
        self, name: str, problem: Problem, seed: int, gtol: float, solvers: list[str]
    ) -> None:
        order = random.Random(f"{name} {seed} {gtol}")
        norm = problem.riemannian_norm(problem.X0)
        again: dict[str, tuple[Record, int | None]] = {}
        for solver in order.sample(solvers, len(solvers)):
            if self._is_hopeless(name, solver, gtol, seed):
                continue
            task = Task(self.solvers[solver], problem, norm, gtol, self.settings.maxtime)
            record, last_gradient = self._record(task, name, solver, seed)
            self.store.save(record)
            self._say(record)
            if record.reached and record.seconds[0] < SHORT:
                again[solver] = record, last_gradient
        for _ in range(self.settings.repeats - 1):
            for solver in order.sample(list(again), len(again)):
                record, last_gradient = again[solver]
                task = Task(self.solvers[solver], problem, norm, gtol, self.settings.maxtime)
                attempt = task.attempt(record.tightening, last_gradient)
                record.seconds.append(attempt.seconds)
                record.processor_seconds.append(attempt.processor_seconds)
                self.store.save(record)

    def _is_hopeless(self, name: str, solver: str, gtol: float, seed: int) -> bool:
        """Whether it missed a looser tolerance here, or this one with too many other seeds."""
        if any(
            (record := self.store.find(name, solver, looser, seed)) and not record.reached
            for looser in self.settings.gtols
            if looser > gtol
        ):
            return True
        earlier = [self.store.find(name, solver, gtol, s) for s in range(seed)]
        # Seeds that were left out because a looser tolerance was missed are misses as well.
        misses = sum(record is None or not record.reached for record in earlier)
        return misses >= self.settings.patience

    def _record(self, task: Task, name: str, solver: str, seed: int) -> tuple[Record, int | None]:
        attempt, reached, tightening, last_gradient = task.first()
        problem, X = task.problem, attempt.run.X
        projected = polar_factor(X)
        costs, gradients, hessian_products = attempt.counts
        return Record(
            problem=name,
            solver=solver,
            seed=seed,
            gtol=task.gtol,
            reached=reached,
            seconds=[attempt.seconds],
            processor_seconds=[attempt.processor_seconds],
            iterations=int(attempt.run.iterations),
            costs=int(costs),
            gradients=int(gradients),
            hessian_products=int(hessian_products),
            reduction=problem.riemannian_norm(projected) / task.start_norm,
            orthogonality=float(np.linalg.norm(X.T @ X - np.eye(X.shape[1]))),
            value=problem.value(projected, problem.share(projected)),
            start=problem.value(problem.X0, problem.share(problem.X0)),
            optimum=problem.optimum,
            message=attempt.run.message,
            tightening=tightening,
            threads=self.settings.threads,
            maxtime=self.settings.maxtime,
            **self._facts,
        ), last_gradient

    def _say(self, record: Record) -> None:
        verdict = "reached" if record.reached else f"not reached ({record.message})"
        if record.tightening < 1:
            verdict += f", its tolerance times {record.tightening:g}"
        console.print(
            f"{record.problem}, seed {record.seed}, {record.gtol:.0e}: {record.solver} "
            f"{record.seconds[0]:.3g} s, {record.gradients} gradients, "
            f"{record.reduction:.1e}, {verdict}"
        )


def show(store: Store, name: str, clock: str) -> None:
    """Print a problem's tables."""
    for gtol in store.tolerances(name):
        table = Table(
            width=max(console.width, 150), title=f"{PROBLEMS[name][0]}, gradient by {gtol:.0e}"
        )
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "solver" else "right")
        for row in rows(store.of_problem(name, gtol), clock):
            table.add_row(*row)
        console.print(table)


def main(
    problems: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(PROBLEMS),
    methods: Annotated[str, typer.Option(help="Patterns, as pymanopt-*,ortholand-lbfgs-*.")] = "*",
    seeds: int = 5,
    gtol: Annotated[str, typer.Option(help="Factors, separated by commas.")] = "1e-6,1e-10",
    threads: int = 1,
    maxtime: Annotated[float, typer.Option(help="Seconds for a run.")] = 90,
    repeats: Annotated[int, typer.Option(help="Times a run under a second is timed.")] = 3,
    patience: Annotated[
        int, typer.Option(help="Seeds a solver may miss before it is left out; 0: the majority.")
    ] = 0,
    out: Path = Path("results/solvers"),
    clock: Annotated[
        str, typer.Option(help="Times in the tables: wall, or cpu where others use the machine.")
    ] = "wall",
    fresh: Annotated[bool, typer.Option(help="Run also what is recorded.")] = False,
    report: Annotated[bool, typer.Option(help="Only print markdown tables.")] = False,
) -> None:
    """Run what is not recorded yet, and print tables."""
    store = Store(out)
    if report:
        print(markdown(store, clock))
        return
    torch.set_num_threads(threads)
    tolerances = tuple(sorted((float(g) for g in gtol.split(",")), reverse=True))
    settings = Settings(
        seeds, tolerances, threads, maxtime, repeats, patience or seeds // 2 + 1, fresh
    )
    with threadpool_limits(threads):
        benchmark = Benchmark(store, available(methods), settings)
        for name in problems.split(","):
            benchmark.run(name)
            show(store, name, clock)


if __name__ == "__main__":
    typer.run(main)
