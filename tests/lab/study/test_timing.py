"""The one timer: turns, what counts and what does not; and runs that are timed by it."""

from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter, process_time, sleep

import pytest
import torch

from ortholand_lab.study.environment import torch_threads
from ortholand_lab.study.records import Record, Request, RunOptions
from ortholand_lab.study.spec import Context
from ortholand_lab.study.timing import (
    TIMING,
    Action,
    Timing,
    marks,
    medians,
    peak_bytes,
    seconds_per_iteration,
    time_in_turn,
    time_runs,
    timing_unit,
)

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)


def recorders(names, calls):
    """Actions that note that they are prepared, and done."""
    return {
        name: Action(partial(calls.append, name), partial(calls.append, f"before {name}"))
        for name in names
    }


def turns(calls, count):
    """What was done in each turn, in order."""
    done = calls[1::2]
    return [tuple(done[i : i + count]) for i in range(0, len(done), count)]


def test_actions_take_turns_and_are_prepared_each_time():
    calls, ticks = [], []
    seconds = time_in_turn(recorders("ab", calls), repetitions=3, tick=ticks.append)
    assert calls[::2] == [f"before {name}" for name in calls[1::2]]
    # The first turn is the warm-up; each turn has every action once.
    assert [sorted(turn) for turn in turns(calls, 2)] == [["a", "b"]] * 4
    assert sum(ticks) == 4
    assert {name: len(s) for name, s in seconds.items()} == {"a": 3, "b": 3}


def test_the_order_changes_from_turn_to_turn_and_is_the_same_again():
    first, second = [], []
    for calls in (first, second):
        time_in_turn(recorders("abcd", calls), repetitions=9, warm_up=0)
    orders = turns(first, 4)
    assert len(set(orders)) > 3
    assert {order[0] for order in orders} > {orders[0][0]}
    assert first == second


@pytest.mark.parametrize("warm_up", [0, 1, 4])
def test_the_warm_up_does_not_count(warm_up):
    calls = []
    slow_at_first = Action(lambda: (calls.append("a"), len(calls) <= warm_up and sleep(0.02)))
    times = time_in_turn({"a": slow_at_first}, repetitions=3, warm_up=warm_up)
    assert len(calls) == warm_up + 3
    assert len(times["a"]) == 3
    assert max(times["a"]) < 0.02


def test_repetitions_are_the_least_and_seconds_allow_more():
    once = {"a": Action(lambda: sleep(0.001))}
    assert len(time_in_turn(once, repetitions=5, seconds=0.0)["a"]) == 5
    start = perf_counter()
    assert len(time_in_turn(once, repetitions=2, seconds=0.05)["a"]) > 2
    assert perf_counter() - start >= 0.05


def test_the_warm_up_takes_nothing_from_the_seconds():
    calls = []
    slow_at_first = Action(lambda: (sleep(0.001 if calls else 0.06), calls.append("a")))
    assert len(time_in_turn({"a": slow_at_first}, repetitions=1, seconds=0.05)["a"]) > 1


def compute(seconds):
    """Keep the processor busy, whatever else it does."""
    end = process_time() + seconds
    while process_time() < end:
        pass


def test_what_prepares_an_action_is_not_timed():
    actions = {
        "a": Action(lambda: None, lambda: compute(0.003)),
        "b": Action(lambda: compute(0.003)),
    }
    seconds = time_in_turn(actions, repetitions=4)
    assert min(seconds["a"]) < 0.003 <= min(seconds["b"])


def test_medians_are_of_each():
    assert medians({"a": [1.0, 9.0, 2.0], "b": [4.0, 6.0]}) == {"a": 2.0, "b": 5.0}


@dataclass(frozen=True)
class Nap:
    name: str
    seconds: float
    size: int = 1


NAPS = Timing((Nap("short", 0.0), Nap("long", 0.004), Nap("long", 0.012, size=2)), 2, 3)


def nap_again(run, context):
    assert context.seed == CONTEXT.seed
    return Action(lambda: compute(run.seconds))


def test_a_timing_is_a_unit_that_runs_alone():
    unit = timing_unit(NAPS)
    assert (unit.name, unit.task, unit.steps, unit.timed) == (TIMING, NAPS, 5, True)
    assert timing_unit(NAPS, "timing-2").name == "timing-2"


def test_iterations_of_runs_are_timed_in_turn():
    ticks = []
    result = time_runs(NAPS, nap_again, Context(3, CONTEXT.device, ticks.append))
    assert sum(ticks) == timing_unit(NAPS).steps
    assert sorted(result.series["run"]) == [0] * 3 + [1] * 3 + [2] * 3
    times = zip(result.series["run"], result.series["seconds"], strict=True)
    assert all(seconds >= NAPS.runs[int(run)].seconds for run, seconds in times)


def test_the_time_of_an_iteration_is_the_median_of_the_run_that_is_meant():
    options = RunOptions("smoke", 0, "cpu", 1)
    request = Request("naps", 1, TIMING, options, asdict(NAPS), {})
    result = time_runs(NAPS, nap_again, CONTEXT)
    times = (1.0, 5.0, 2.0, 10.0, 70.0, 20.0, 30.0, 40.0, 900.0)
    result = type(result)({"run": result.series["run"], "seconds": times}, {})
    record = Record(request, result, {}, 1.0, "")
    assert seconds_per_iteration(record, name="short") == 2.0
    assert seconds_per_iteration(record, name="long") == 20.0
    assert seconds_per_iteration(record, name="long", size=2) == 40.0


@pytest.mark.parametrize("iterations", [1, 2, 7, 100, 12_345])
def test_marks_are_geometric_with_the_first_and_the_last(iterations):
    found = marks(iterations)
    assert (found[0], found[-1]) == (0, iterations)
    assert found == sorted(set(found))
    assert all(b <= max(a + 1, 1.05 * a + 1) for a, b in pairwise(found))
    assert len(found) <= 2 + 100 * (1 + iterations).bit_length()


def test_coarser_marks_are_fewer():
    assert len(marks(10_000, ratio=2)) < 20 < len(marks(10_000))


def test_the_peak_counts_what_is_held_at_once():
    x = torch.zeros(1000)

    def two_at_once():
        y = x + 1
        return float((y + 1).sum())

    assert 8000 <= peak_bytes(two_at_once) < 9000
    assert 4000 <= peak_bytes(lambda: float((x + 1).sum())) < 5000


def test_another_clock_may_tell_the_time():
    readings = iter(range(100))
    times = time_in_turn({"a": Action(lambda: None)}, repetitions=3, clock=lambda: next(readings))
    assert times == {"a": [1, 1, 1]}


@pytest.mark.parametrize(("threads", "slept"), [(1, False), (2, True)])
def test_one_thread_is_timed_by_the_processor_which_waiting_does_not_use(threads, slept):
    with torch_threads(threads):
        times = time_in_turn({"nap": Action(lambda: sleep(0.05))}, repetitions=3)
    assert (min(times["nap"]) > 0.04) == slept
