"""The one timer: actions to be compared take turns, so that disturbances affect all alike.

Also what studies of iterations share: runs whose iterations are timed in turn, and when to
measure a run in progress.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ortholand_lab.study.environment import Stopwatch
from ortholand_lab.study.records import Record, Result
from ortholand_lab.study.spec import Context, Unit

TIMING = "timing"  # the usual name of the unit in which iterations are timed in turn
RunT = TypeVar("RunT")


class Action(NamedTuple):
    """What is timed, and what is done before it, untimed."""

    act: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def time_in_turn(
    actions: Mapping[str, Action],
    *,
    repetitions: int = 0,
    seconds: float = 0.0,
    warm_up: int = 1,
    device: torch.device | None = None,
    clock: Callable[[], float] | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each repetition of each action.

    The order changes every time: an action that follows one of its own kind finds its code in the
    cache.

    Args:
        actions: what is timed, by name.
        repetitions: smallest number of repetitions of each.
        seconds: more repetitions are made while they fit in this time.
        warm_up: repetitions before, which pay for set-up and do not count.
        device: where they compute.
        clock: the clock. By default ``time.process_time`` where one thread of a CPU does all the
            work: on a shared machine a long action is interrupted more often than a short one.
        tick: called after each round.
    """
    device = device or torch.device("cpu")
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    stopwatch = Stopwatch(device, clock or (time.process_time if alone else time.perf_counter))
    times: dict[str, list[float]] = {name: [] for name in actions}
    names, shuffle = list(actions), random.Random(0).shuffle
    start, rounds = time.perf_counter(), -warm_up
    while rounds < repetitions or time.perf_counter() - start < seconds:
        if rounds == 0:
            start = time.perf_counter()
        shuffle(names)
        for name in names:
            actions[name].prepare()
            before = stopwatch.seconds
            with stopwatch:
                actions[name].act()
            if rounds >= 0:
                times[name].append(stopwatch.seconds - before)
        rounds += 1
        tick(1)
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median time of each action."""
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass(frozen=True)
class Timing(Generic[RunT]):
    """Iterations of several runs, timed in turn."""

    runs: tuple[RunT, ...]
    warm_up: int
    repetitions: int


def timing_unit(timing: Timing[Any], name: str = TIMING) -> Unit[Any]:
    """The unit of a timing."""
    return Unit(name, timing, timing.warm_up + timing.repetitions, timed=True)


def time_runs(
    timing: Timing[RunT], start: Callable[[RunT, Context], Action], context: Context
) -> Result:
    """Time single iterations of runs in turn: ``start`` returns the iteration of a run.

    In the series, ``run`` is the index of a run in the timing's ``runs``.
    """
    actions = {str(i): start(run, context) for i, run in enumerate(timing.runs)}
    times = time_in_turn(
        actions,
        repetitions=timing.repetitions,
        warm_up=timing.warm_up,
        device=context.device,
        tick=context.tick,
    )
    turns = [(int(i), seconds) for i, values in times.items() for seconds in values]
    return Result.of_rows(("run", "seconds"), turns)


def seconds_per_iteration(timing: Record, **wanted: object) -> float:
    """Median time of an iteration of the run whose configuration has these values."""
    runs = timing.configuration["runs"]
    place = next(
        i for i, run in enumerate(runs) if all(run[name] == v for name, v in wanted.items())
    )
    turns = zip(timing.series("run"), timing.series("seconds"), strict=True)
    return statistics.median(seconds for i, seconds in turns if i == place)


def marks(iterations: int, ratio: float = 1.05) -> list[int]:
    """Iterations to record: geometric, like the figure's axes, with the first and last."""
    count = math.ceil(math.log(iterations, ratio)) if iterations > 1 else 0
    inner = {min(round(ratio**i), iterations) for i in range(count + 1)}
    return sorted(inner | {0, iterations})


def peak_bytes(action: Callable[[], object]) -> int:
    """How much additional memory an action has allocated at its peak.

    As counted by torch's allocator on the CPU. Memory that is kept, such as new state, counts too:
    call the action once before.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        action()
    assert profile.profiler is not None
    kineto: Any = profile.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    held, peak = 0, 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak
