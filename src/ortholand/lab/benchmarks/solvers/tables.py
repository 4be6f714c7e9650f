"""Tables of the records: medians over the seeds, the fastest solver first."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

from ortholand.lab.benchmarks.solvers.peers import PARTICIPANTS
from ortholand.lab.benchmarks.solvers.problems import PROBLEMS
from ortholand.lab.benchmarks.solvers.runs import SolverRun, SolverSettings
from ortholand.lab.study.records import MissingRecordError, Record, Records
from ortholand.lab.study.spec import TableSpec

Runs = dict[str, list[SolverRun]]  # by solver
DEFAULT = "ortholand-default-numpy"
HEAD = [
    *("solver", "reached", "time, s", "to best peer", "µs each"),
    *("iterations", "costs", "gradients", "Hessians"),
    *("gradient by", "‖XᵀX − I‖", "excess cost"),
]


def runs_of(record: Record, gtol: float) -> Runs:
    """The runs to a tolerance, by solver."""
    names = record.configuration["solvers"]
    found: Runs = {}
    for row in zip(*(record.series(field.name) for field in fields(SolverRun)), strict=True):
        run = SolverRun(*row)
        if run.gtol == gtol:
            found.setdefault(names[int(run.solver)], []).append(run)
    if not found:
        raise MissingRecordError(f"nobody was run to {gtol:.0e} on {record.request.unit}")
    return found


def median_times(runs: Runs) -> dict[str, float]:
    """Median processor seconds over the seeds, by solver; infinite for a run that missed.

    A solver that has missed too often is not run with the remaining seeds: these count as missed.
    """
    times = {
        name: [r.processor_seconds if r.reached else math.inf for r in one]
        for name, one in runs.items()
    }
    for one in times.values():
        if math.inf in one:
            one += [math.inf] * (_count_seeds(runs) - len(one))
    return {name: statistics.median_low(one) for name, one in times.items()}


def fastest(times: dict[str, float], *, ours: bool) -> str:
    """The name of the fastest of ours, or of the peers; empty if none was run."""
    names = [name for name in times if PARTICIPANTS[name].ours == ours]
    return min(names, key=lambda name: times[name], default="")


def best(times: dict[str, float], *, ours: bool) -> float:
    """The shortest time of ours, or of a peer."""
    return times.get(fastest(times, ours=ours), math.inf)


def table(problem: str, gtol: float, records: Records) -> list[list[str]]:
    """The fastest solver first; then those that did not get there, the nearest first."""
    runs = runs_of(records[problem], gtol)
    times, seeds, least = median_times(runs), _count_seeds(runs), _least_costs(runs)
    best_peer = best(times, ours=False)
    rows = [HEAD]
    for name in sorted(runs, key=lambda name: (times[name], _middle(runs[name], "reduction"))):
        one = runs[name]
        reached = f"{sum(bool(run.reached) for run in one)} of {len(one)}"
        label = [PARTICIPANTS[name].label, reached + "*" * (len(one) < seeds)]
        time_cells = _times(times[name], best_peer, one)
        rows.append([*label, *time_cells, *_counts_and_errors(one, least)])
    return rows


def _times(time: float, best_peer: float, runs: Sequence[SolverRun]) -> list[str]:
    each = _each(runs)
    if math.isinf(time):
        return [f"not in {_middle(runs, 'processor_seconds'):.3g}", "", each]
    ratio = f"{time / best_peer:.2f}" if best_peer < math.inf else ""
    return [f"{time:.3g}", ratio, each]


def per_evaluation(run: SolverRun) -> float:
    """Processor seconds per gradient and Hessian product, including the solver's own work."""
    return run.processor_seconds / max(1.0, run.gradients + run.hessian_products)


def _counts_and_errors(runs: Sequence[SolverRun], least: dict[float, float]) -> list[str]:
    """Medians of the counts; the worst of the errors."""
    excess = max((run.value - least[run.seed]) / (run.start - least[run.seed]) for run in runs)
    return [
        f"{_middle(runs, 'iterations'):.0f}" if _middle(runs, "iterations") else "?",
        *(f"{_middle(runs, name):.0f}" for name in ("costs", "gradients", "hessian_products")),
        f"{_middle(runs, 'reduction'):.1e}",
        f"{max(run.orthogonality for run in runs):.0e}",
        "0" if excess <= 1e-12 else f"{excess:.0e}",
    ]


def _middle(runs: Sequence[SolverRun], name: str) -> float:
    return statistics.median_low(getattr(run, name) for run in runs)


def _count_seeds(runs: Runs) -> int:
    return max(len(one) for one in runs.values())


def _least_costs(runs: Runs) -> dict[float, float]:
    """The least cost for each seed: the known one, or the least that any solver has found."""
    least: dict[float, float] = {}
    for run in (run for one in runs.values() for run in one):
        found = run.value if math.isnan(run.optimum) else run.optimum
        least[run.seed] = min(least.get(run.seed, math.inf), found)
    return least


SUMMARY = [
    *("problem", "gradient by", "default, s", "best of ours", "s", "best peer", "s"),
    *("default / peer", "best / peer", "µs each: default", "peer"),
]


def summary(records: Records) -> list[list[str]]:
    """For each problem and tolerance: the default, the best of ours and the best peer."""
    rows = [SUMMARY]
    for problem, (title, _) in PROBLEMS.items():
        for gtol in SolverSettings().gtols:
            try:
                runs = runs_of(records[problem], gtol)
            except MissingRecordError:
                continue
            rows.append([title, f"{gtol:.0e}", *_compared(runs)])
    if len(rows) == 1:
        raise MissingRecordError("no problem was run")
    return rows


def _compared(runs: Runs) -> list[str]:
    times = median_times(runs)
    ours, peer = fastest(times, ours=True), fastest(times, ours=False)
    default, theirs = times.get(DEFAULT, math.nan), times.get(peer, math.inf)
    return [
        f"{default:.3g}",
        PARTICIPANTS[ours].label.removeprefix("ortholand").strip(", ") if ours else "none",
        f"{times.get(ours, math.inf):.3g}",
        PARTICIPANTS[peer].label if theirs < math.inf else "none gets there",
        f"{theirs:.3g}",
        *(
            f"{time / theirs:.2f}" if theirs < math.inf else ""
            for time in (default, times.get(ours, math.inf))
        ),
        *(_each(runs[name]) if name in runs else "" for name in (DEFAULT, peer)),
    ]


def _each(runs: Sequence[SolverRun]) -> str:
    return f"{1e6 * statistics.median_low(map(per_evaluation, runs)):.0f}"


def tables_of(study: str, problems: Sequence[str]) -> list[TableSpec]:
    """A summary, and a table for each problem and tolerance."""
    return [
        TableSpec(f"{study}-summary", "The default, the best of ours and the best peer", summary),
        *(
            TableSpec(
                f"{study}-{name}-{by}",
                f"{PROBLEMS[name][0]}, gradient by {by}",
                partial(table, name, gtol),
            )
            for name in problems
            for gtol in SolverSettings().gtols
            for by in [f"{gtol:.0e}"]
        ),
    ]
