"""Honest timings on a noisy machine: interleaved repetitions, medians, ratios within one run."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Action = Callable[[], object]


def interleaved_medians(
    actions: Mapping[str, Action], *, seconds: float = 1.0, least: int = 7
) -> dict[str, float]:
    """Median seconds of each action, run in turn so that disturbances hit all alike.

    In another order every time: whoever follows an action of its own kind finds its code in the
    cache.
    """
    names, shuffle = list(actions), random.Random(0).shuffle
    for action in actions.values():  # warm up
        action()
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < least:
        shuffle(names)
        for name in names:
            action = actions[name]
            begin = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(action: Action) -> int:
    """How much memory an action has allocated at its peak beyond what was there before.

    As torch's allocator counts on the CPU. What is kept, as a new state, counts too: call the
    action once before.
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
