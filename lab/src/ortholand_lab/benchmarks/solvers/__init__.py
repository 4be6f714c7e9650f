"""``ortholand.minimize`` against pymanopt, cdopt, smopt and torch's L-BFGS on a parametrization."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

from ortholand_lab.benchmarks.solvers.catalogue import LARGE, MINUTE, PROBLEMS, USERS, USUAL
from ortholand_lab.benchmarks.solvers.peers import PARTICIPANTS
from ortholand_lab.benchmarks.solvers.runs import SolverRun, SolverSettings, plan, run
from ortholand_lab.study.records import MissingRecordError, Record, Records
from ortholand_lab.study.spec import Claim, Finding, Study, TableSpec, Verdict

# Tables.


Runs = dict[str, list[SolverRun]]  # by solver
DEFAULT, WITHOUT = "ortholand-default-numpy", "ortholand-default-jac"
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
    """The name of the fastest of ours, or of the peers; empty if none was run.

    Solvers for eigenvalues alone are no peers: they minimise nothing else.
    """
    solvers = {name: PARTICIPANTS[name] for name in times}
    names = [name for name, one in solvers.items() if one.ours == ours and not one.eigen]
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
    for one in itertools.chain.from_iterable(runs.values()):
        found = one.value if math.isnan(one.optimum) else one.optimum
        least[one.seed] = min(least.get(one.seed, math.inf), found)
    return least


SUMMARY = [
    *("problem", "gradient by", "default, s", "best of ours", "s", "best peer", "s"),
    *("default / peer", "without hessp", "best / peer", "µs each: default", "peer"),
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
            for time in (default, times.get(WITHOUT, math.nan), times.get(ours, math.inf))
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


# What is claimed.


NEWTON = "ortholand-newton-numpy"


def best_is_fastest(problem: str, records: Records) -> Finding:
    """The time of our best method over that of the best peer, at each tolerance."""
    words, verdicts = [], []
    for gtol in records[problem].configuration["gtols"]:
        times = median_times(runs_of(records[problem], gtol))
        if all(PARTICIPANTS[name].ours for name in times):
            return Finding("no peer is installed", Verdict.OPEN)
        ours, peer = best(times, ours=True), best(times, ours=False)
        words.append(
            f"{gtol:.0e}: {f'{ours / peer:.2f}' if peer < math.inf else 'none gets there'}"
        )
        verdicts.append(Verdict.of(ours < peer))
    return Finding("; ".join(words), Verdict.worst(verdicts))


def default_is_fast(records: Records) -> Finding:
    """The default's time over that of the best peer: on each problem, and the geometric mean."""
    if not records:
        return Finding("no problem was run", Verdict.OPEN)
    words, verdicts = [], []
    for gtol in (1e-6, 1e-10):
        ratios = []
        for name in records:
            times = median_times(runs_of(records[name], gtol))
            if DEFAULT not in times or all(PARTICIPANTS[other].ours for other in times):
                return Finding("the default or its peers were not run", Verdict.OPEN)
            ours, peer = times[DEFAULT], best(times, ours=False)
            if ours < math.inf and peer == math.inf:
                continue  # alone: there is no ratio
            ratios.append(ours / peer if peer < math.inf else math.inf)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        words.append(f"{gtol:.0e}: mean {mean:.2f}, largest {max(ratios, default=0.0):.2f}")
        verdicts.append(Verdict.of(mean <= 0.8 and max(ratios, default=0.0) <= 1.1))
    return Finding("; ".join(words), Verdict.worst(verdicts))


def newton_gets_there(records: Records) -> Finding:
    """With how many seeds ``"newton"`` reaches 1e-10."""
    if not records:
        return Finding("no problem was run", Verdict.OPEN)
    runs = {name: runs_of(records[name], 1e-10).get(NEWTON, []) for name in records}
    if all(NEWTON not in record.configuration["solvers"] for record in records.values()):
        return Finding("it was not run", Verdict.OPEN)
    shares = {
        name: (sum(bool(run.reached) for run in one), records[name].configuration["seeds"])
        for name, one in runs.items()
    }
    words = "; ".join(f"{name}: {reached} of {seeds}" for name, (reached, seeds) in shares.items())
    return Finding(words, Verdict.of(all(reached == seeds for reached, seeds in shares.values())))


def alone_on_the_large_problem(records: Records) -> Finding:
    """The times of our best method and of the best peer at 1e-6."""
    times = median_times(runs_of(records["brockett-large"], 1e-6))
    ours, peer = best(times, ours=True), best(times, ours=False)
    words = f"ours {ours:.3g} s, the best peer {peer:.3g} s (inf: it does not get there)"
    return Finding(words, Verdict.of(ours <= 90 < peer))


def claims_about(problems: Sequence[str]) -> list[Claim]:
    """What is claimed about each of these problems, and about all of them."""
    return [
        *(
            Claim.beyond(
                f"{PROBLEMS[name][0]}: our best method is the fastest.",
                partial(best_is_fastest, name),
            )
            for name in problems
        ),
        Claim.beyond(
            "The default takes at most 1.1 of the best peer's time on each problem that was run, "
            "0.8 in the mean.",
            default_is_fast,
        ),
        Claim.beyond('"newton" reaches 1e-10 on every problem that was run.', newton_gets_there),
    ]


ALONE = Claim.beyond(
    "Brockett 1000 x 200 gets to 1e-6 within 90 s, where no peer does.",
    alone_on_the_large_problem,
)


OURS = (
    "ortholand-default-numpy",
    "ortholand-default-jac",
    "ortholand-newton-numpy",
    "ortholand-lbfgs-numpy",
    "ortholand-bb-numpy",
)
PEERS = tuple(name for name, solver in PARTICIPANTS.items() if not solver.ours)

SOLVERS = Study(
    name="solvers",
    title="minimize against pymanopt, cdopt, smopt and torch's L-BFGS",
    summary=(
        "Same data, same start, same rule: the norm of the Riemannian gradient has fallen by gtol. "
        "The rule is checked here, at the point a solver returns, projected onto the manifold. "
        "Solvers with such a rule of their own stop by it, with a tighter tolerance if the check "
        "fails; the others are stopped from outside, at the first gradient where it holds. Solvers "
        "take turns in random order, and runs under a second are repeated. Processor time of one "
        "thread, medians over the seeds: "
        "a run that does not get there has taken infinitely long, and whoever has missed too many "
        "seeds is not run with the rest (*), nor at the tighter tolerance with a seed that missed "
        "the looser one. Peers that are not installed are left out."
    ),
    settings={
        "smoke": SolverSettings(
            problems=("procrustes-planted",),
            solvers=("ortholand-default-numpy", "ortholand-bb-torch", "pymanopt-sd", "pymanopt-tr"),
            seeds=1,
            gtols=(1e-6,),
            maxtime=5.0,
            repeats=2,
        ),
        "quick": SolverSettings(
            solvers=(
                *OURS,
                "pymanopt-cg",
                "pymanopt-tr",
                "pymanopt-cg-grassmann",
                "pymanopt-tr-grassmann",
                "smopt-slpg",
                "cdopt-lbfgs",
                "eigsh",
                "lobpcg",
            ),
            maxtime=1.5,
            patience=1,
        ),
        "full": SolverSettings(),
    },
    plan=plan,
    run=run,
    claims=claims_about(USUAL),
    tables=tables_of("solvers", USUAL),
    seconds={"smoke": 5, "quick": 180, "full": 3 * 3600},
)

_LARGE = SolverSettings(problems=LARGE, solvers=(*OURS, *PEERS), seeds=1, maxtime=150.0)

SOLVERS_LARGE = replace(
    SOLVERS,
    name="solvers-large",
    title="minimize against its peers on two large problems",
    settings={
        "smoke": replace(
            _LARGE,
            problems=LARGE[:1],
            solvers=("ortholand-default-numpy", "pymanopt-tr-grassmann"),
            gtols=(1e-6,),
            maxtime=5.0,
            repeats=1,
        ),
        "quick": replace(
            _LARGE,
            solvers=("ortholand-default-numpy", "pymanopt-tr", "pymanopt-tr-grassmann"),
            gtols=(1e-6,),
            maxtime=30.0,
        ),
        "full": _LARGE,
    },
    claims=[*claims_about(LARGE), ALONE],
    tables=tables_of("solvers-large", LARGE),
    seconds={"smoke": 10, "quick": 120, "full": 3600},
)

SOLVERS_MINUTE = replace(
    SOLVERS,
    name="solvers-minute",
    title="minimize against its peers on problems of less than a millisecond",
    settings={
        preset: replace(settings, problems=MINUTE) for preset, settings in SOLVERS.settings.items()
    },
    claims=claims_about(MINUTE),
    tables=tables_of("solvers-minute", MINUTE),
    seconds={"smoke": 5, "quick": 60, "full": 900},
)

SOLVERS_USERS = replace(
    SOLVERS_MINUTE,
    name="solvers-users",
    title="minimize against its peers on problems as users bring them",
    settings={
        preset: replace(settings, problems=USERS[:1] if preset == "smoke" else USERS)
        for preset, settings in SOLVERS.settings.items()
    },
    claims=claims_about(USERS),
    tables=tables_of("solvers-users", USERS),
    seconds={"smoke": 5, "quick": 300, "full": 3600},
)
