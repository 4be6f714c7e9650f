"""Records of solvers.py, one JSON file each, and the tables made of them."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ortholand.lab.study.records import write_atomically
from solver_peers import SOLVERS
from solver_problems import PROBLEMS

COLUMNS = (
    "solver",
    "reached",
    "time, s",
    "to best peer",
    "iterations",
    "costs",
    "gradients",
    "Hessians",
    "gradient by",
    "‖XᵀX − I‖",
    "excess cost",
)


@dataclass
class Record:
    """One solver on one problem with one seed and one tolerance."""

    problem: str
    solver: str
    seed: int
    gtol: float
    reached: bool
    seconds: list[float]
    processor_seconds: list[float]
    iterations: int
    costs: int
    gradients: int
    hessian_products: int
    reduction: float  # of the Riemannian gradient, at the point projected onto the manifold
    orthogonality: float  # of the point as the solver left it
    value: float  # cost at the projected point
    start: float  # cost at the start
    optimum: float | None  # least cost, where there is a closed form
    message: str
    tightening: float  # own rule: factor on the tolerance for which the benchmark's rule held
    threads: int
    maxtime: float
    machine: dict[str, str | int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def spent(self, clock: str) -> float:
        """Median time of the repetitions by the "wall" or the "cpu" clock."""
        return statistics.median(self.seconds if clock == "wall" else self.processor_seconds)

    def time(self, clock: str) -> float:
        """The same; infinite if the rule was not reached."""
        return self.spent(clock) if self.reached else math.inf


class Store:
    """Records in a folder: ``<problem>/<solver>-<gtol>-seed<seed>.json``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, problem: str, solver: str, gtol: float, seed: int) -> Path:
        """Where a record has its place."""
        return self.root / problem / f"{solver}-{gtol:.0e}-seed{seed}.json"

    def save(self, record: Record) -> None:
        """Write a record, whole or not at all."""
        path = self.path(record.problem, record.solver, record.gtol, record.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(record), indent=1).encode())

    def find(self, problem: str, solver: str, gtol: float, seed: int) -> Record | None:
        """The record of a run, if there is one."""
        path = self.path(problem, solver, gtol, seed)
        return Record(**json.loads(path.read_text())) if path.exists() else None

    def of_problem(self, problem: str, gtol: float) -> dict[str, list[Record]]:
        """Records of a problem and a tolerance by solver."""
        records: dict[str, list[Record]] = {}
        for path in sorted((self.root / problem).glob(f"*-{gtol:.0e}-seed*.json")):
            record = Record(**json.loads(path.read_text()))
            records.setdefault(record.solver, []).append(record)
        return records

    def tolerances(self, problem: str) -> list[float]:
        """Those with records, the loosest first."""
        paths = (self.root / problem).glob("*.json")
        return sorted({json.loads(path.read_text())["gtol"] for path in paths}, reverse=True)


def median_time(records: Iterable[Record], seeds: int, clock: str) -> float:
    """Median over the seeds. One that did not get there has needed infinitely long.

    Whoever has missed too often is not run with the remaining seeds: these count as missed.
    """
    times = sorted(record.time(clock) for record in records)
    if math.isinf(times[-1]):
        times += [math.inf] * (seeds - len(times))
    return times[(len(times) - 1) // 2]


def rows(records: dict[str, list[Record]], clock: str = "wall") -> list[list[str]]:
    """Cells of a table, the fastest solver first; then who did not get there, the nearest first."""
    seeds = max((len(runs) for runs in records.values()), default=0)
    times = {name: median_time(runs, seeds, clock) for name, runs in records.items()}
    best_peer = min((t for name, t in times.items() if not SOLVERS[name].ours), default=math.inf)
    best_values = _best_values(records)

    def order(name: str) -> tuple[float, float]:
        return times[name], statistics.median(record.reduction for record in records[name])

    return [
        [
            SOLVERS[name].label,
            _share_reached(records[name], seeds),
            *_time_cells(times[name], best_peer, records[name], clock),
            *_other_cells(records[name], best_values),
        ]
        for name in sorted(records, key=order)
    ]


def _share_reached(runs: Sequence[Record], seeds: int) -> str:
    return f"{sum(run.reached for run in runs)} of {len(runs)}" + "*" * (len(runs) < seeds)


def _time_cells(time: float, best_peer: float, runs: Sequence[Record], clock: str) -> list[str]:
    if math.isinf(time):
        return [f"not in {_middle(run.spent(clock) for run in runs):.3g}", ""]
    return [f"{time:.3g}", f"{time / best_peer:.2f}" if math.isfinite(best_peer) else ""]


def _other_cells(runs: Sequence[Record], best_values: dict[int, float]) -> list[str]:
    """Medians of what was counted; the worst of the errors."""
    excess = max((r.value - best_values[r.seed]) / (r.start - best_values[r.seed]) for r in runs)
    return [
        f"{_middle(run.iterations for run in runs) or '?'}",
        f"{_middle(run.costs for run in runs)}",
        f"{_middle(run.gradients for run in runs)}",
        f"{_middle(run.hessian_products for run in runs)}",
        f"{_middle(run.reduction for run in runs):.1e}",
        f"{max(run.orthogonality for run in runs):.0e}",
        f"{excess:.0e}" if excess > 1e-12 else "0",
    ]


def _middle(values: Iterable[float]) -> float:
    return statistics.median_low(sorted(values))


def _best_values(records: dict[str, list[Record]]) -> dict[int, float]:
    """Least cost by seed: the closed form's, or else the least that anyone has found."""
    best: dict[int, float] = {}
    for run in (run for runs in records.values() for run in runs):
        found = run.value if run.optimum is None else run.optimum
        best[run.seed] = min(best.get(run.seed, math.inf), found)
    return best


def _circumstances(store: Store) -> str:
    """With what, and on what, the records were made."""
    paths = sorted(store.root.glob("*/*.json"))
    if not paths:
        return "No records."
    record = Record(**json.loads(paths[-1].read_text()))
    versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    machine = ", ".join(f"{name} {fact}" for name, fact in record.machine.items())
    return f"{versions}. {machine}. At most {record.maxtime:g} s a run."


def markdown(store: Store, clock: str) -> str:
    """All tables, for the documentation."""
    parts = [_circumstances(store)]
    for problem, (label, _) in PROBLEMS.items():
        for gtol in store.tolerances(problem):
            table = [COLUMNS, ["---"] * len(COLUMNS), *rows(store.of_problem(problem, gtol), clock)]
            lines = ["| " + " | ".join(row) + " |" for row in table]
            parts.append(f"### {label}, gradient by {gtol:.0e}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
