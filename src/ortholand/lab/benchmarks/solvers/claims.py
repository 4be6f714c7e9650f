"""Claims about the solvers."""

import math
from collections.abc import Sequence
from functools import partial

from ortholand.lab.benchmarks.solvers.peers import PARTICIPANTS
from ortholand.lab.benchmarks.solvers.problems import PROBLEMS
from ortholand.lab.benchmarks.solvers.tables import DEFAULT, best, median_times, runs_of
from ortholand.lab.study.records import Records
from ortholand.lab.study.spec import Claim, Finding, Verdict

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


_claim = partial(Claim, source="beyond the paper")


def claims_about(problems: Sequence[str]) -> list[Claim]:
    """What is claimed about each of these problems, and about all of them."""
    return [
        *(
            _claim(
                f"{PROBLEMS[name][0]}: our best method is the fastest.",
                check=partial(best_is_fastest, name),
            )
            for name in problems
        ),
        _claim(
            "The default takes at most 1.1 of the best peer's time on each problem that was run, "
            "0.8 in the mean.",
            check=default_is_fast,
        ),
        _claim('"newton" reaches 1e-10 on every problem that was run.', check=newton_gets_there),
    ]


ALONE = _claim(
    "Brockett 1000 x 200 gets to 1e-6 within 90 s, where no peer does.",
    check=alone_on_the_large_problem,
)
