"""When to measure a run, and how to time actions that are compared."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ortholand.experiments.environment import Stopwatch
from ortholand.experiments.spec import Context


class Action(NamedTuple):
    """What is timed, and what is done before, untimed."""

    act: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def time_in_turn(
    actions: Mapping[str, Action], repetitions: int, context: Context
) -> dict[str, list[float]]:
    """Seconds of each repetition of each action. What disturbs one disturbs them all alike."""
    for action in actions.values():  # the first time pays for set-up
        action.prepare()
        action.act()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repetitions):
        for name, action in actions.items():
            action.prepare()
            stopwatch = Stopwatch(context.device)
            with stopwatch:
                action.act()
            seconds[name].append(stopwatch.seconds)
        context.tick(1)
    return seconds


def marks(iterations: int, ratio: float = 1.05) -> list[int]:
    """Iterations to record: geometric, as the axes of the figure are, with the first and last."""
    count = math.ceil(math.log(iterations, ratio)) if iterations > 1 else 0
    inner = {min(round(ratio**i), iterations) for i in range(count + 1)}
    return sorted(inner | {0, iterations})
