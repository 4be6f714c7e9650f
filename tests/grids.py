"""What of a test is its core: few cases, with each value of each parameter, and few examples."""

import os
from collections import Counter
from collections.abc import Hashable, Sequence

import hypothesis
import pytest

LEFT_OUT = ("thorough", "slow_distributed", "docs", "ecosystem")  # of the core, as marked


def split(items: Sequence[pytest.Item]) -> None:
    """Mark as ``thorough`` all cases that the core can do without."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, LEFT_OUT)):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = core([values_of(case) for case in cases])
        for i in set(range(len(cases))).difference(kept):
            cases[i].add_marker(pytest.mark.thorough)


def values_of(case: pytest.Function) -> list[Hashable]:
    """What the case has of each parametrisation. Several names in one are one value together."""
    values = {name: id(value) for name, value in case.callspec.params.items()}
    found: list[Hashable] = []
    for marker in case.iter_markers("parametrize"):
        names = marker.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        found.append(tuple(values.pop(name, None) for name in names))
    return [*found, *values.values()]  # the last are those of fixtures


def core(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Positions of few cases in which each value occurs at each place where it does in any.

    >>> core([(n, p) for n in "ab" for p in "xyz"])
    [0, 4, 2]
    """
    places = [set(enumerate(case)) for case in cases]
    missing, used, chosen = set().union(*places), Counter(), []
    while missing:
        best = max(
            range(len(cases)),
            key=lambda i: (len(places[i] & missing), -sum(used[v] for v in places[i]), -i),
        )
        chosen.append(best)
        missing -= places[best]
        used.update(places[best])
    return chosen


def examples(number: int) -> hypothesis.settings:
    """Run this many examples of hypothesis, or a tenth of them in the core."""
    is_core = os.environ.get("HYPOTHESIS_PROFILE") == "core"
    return hypothesis.settings(max_examples=number // 10 if is_core else number)
