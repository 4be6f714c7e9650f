"""Honest timings on a noisy machine: interleaved repetitions, medians, ratios within one run."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved_medians(
    actions: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, least: int = 7
) -> dict[str, float]:
    """Median seconds of each action, run in turn so that disturbances hit all alike."""
    for action in actions.values():  # warm up
        action()
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < least:
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def with_threads(n_threads: int, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run the work with this many threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        return work()
    finally:
        torch.set_num_threads(before)
