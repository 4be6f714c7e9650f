import io

import pytest
from rich.console import Console

from ortholand_lab.study.progress import Bars, Lines, Pace, duration, make_progress


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_time_left_weighs_experiments_by_their_work(clock):
    pace = Pace({"short": 10, "long": 90}, clock)
    pace.start("short", 4)
    clock.now += 20  # a slow machine: the ten seconds take twenty
    pace.advance("short", 4)
    assert pace.share("short") == 1
    assert pace.total_share == pytest.approx(0.1)
    assert pace.left == pytest.approx(180)
    pace.start("long", 1000)
    pace.advance("long", 500)
    clock.now += 40  # but this goes faster
    assert pace.share("long") == 0.5
    assert pace.total_share == pytest.approx(0.55)
    assert pace.left == pytest.approx(60 * 45 / 55)


def test_studies_may_go_on_side_by_side(clock):
    pace = Pace({"one": 10, "two": 30}, clock)
    pace.start("one", 10)
    pace.start("two", 10)
    pace.advance("two", 5)
    pace.advance("one", 2)
    assert (pace.share("one"), pace.share("two")) == (0.2, 0.5)
    assert pace.total_share == pytest.approx((2 + 15) / 40)


def test_at_first_the_time_left_is_anyones_guess(clock):
    pace = Pace({"one": 10}, clock)
    pace.start("one", 10)
    clock.now += 60
    assert pace.left is None
    pace.advance("one", 1)
    assert pace.left == pytest.approx(540)
    pace = Pace({"one": 10}, clock)
    pace.start("one", 10)
    pace.advance("one", 1)
    clock.now += 1
    assert pace.left is None


def test_what_has_nothing_to_do_is_done(clock):
    pace = Pace({"one": 0}, clock)
    pace.start("one", 0)
    assert pace.share("one") == pace.total_share == 1


def test_durations():
    assert [duration(s) for s in (None, 7.4, 192, 11_520)] == [
        "-:--:--",
        "0:00:07",
        "0:03:12",
        "3:12:00",
    ]


def test_a_line_for_every_unit_and_one_after_a_long_silence(clock):
    console = plain_console()
    with Lines(console, {"toy": 100}, clock) as lines:
        lines.start("toy", 2, 100)
        for _ in range(50):  # a second each
            clock.now += 1
            lines.advance("toy", 1)
        lines.unit_done("toy", "first", "50.0 s")
        clock.now += 9
        lines.advance("toy", 50)
        lines.unit_done("toy", "second", "9.0 s")
    assert written(console) == [
        "toy 0/2  11% done, 0:01:29 left in all",
        "toy 0/2  22% done, 0:01:18 left in all",
        "toy 0/2  33% done, 0:01:07 left in all",
        "toy 0/2  44% done, 0:00:56 left in all",
        "toy 1/2  first: 50.0 s",
        "toy 2/2  second: 9.0 s",
    ]


def test_a_log_of_many_hours_stays_short(clock):
    console = plain_console()
    lines = Lines(console, {"toy": 1}, clock)
    lines.start("toy", 1, 24 * 3600)
    for _ in range(24 * 3600):
        clock.now += 1
        lines.advance("toy", 1)
    assert 50 < len(written(console)) < 500


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_in_a_terminal_there_are_bars_and_a_line_for_every_experiment():
    console = terminal()
    with Bars(console, {"one": 1, "two": 1}) as bars:
        bars.start("one", 2, 10)
        bars.advance("one", 10)
        bars.unit_done("one", "a", "recorded already")
        bars.unit_done("one", "b", "1.0 s")
        bars.start("two", 1, 4)
        bars.advance("two", 2)
        bars.unit_done("two", "c", "1.0 s, redone (damaged record)")
    text = "\n".join(written(console))
    assert "one: 2 runs, 1 of them recorded already, 0:00:00" in text
    assert "two 1/1  c: 1.0 s, redone (damaged record)" in text
    assert "two: 1 run, 0:00:00" in text
    assert "75 %" in text  # of all: the first experiment, and half of the second
    assert " left" in text


def test_a_single_experiment_needs_no_second_bar():
    console = terminal()
    with Bars(console, {"one": 1}) as bars:
        bars.start("one", 1, 10)
        bars.advance("one", 5)
    text = "\n".join(written(console))
    assert "50 %" in text
    assert " left" in text
    assert "all" not in text


@pytest.mark.parametrize(("is_terminal", "kind"), [(True, Bars), (False, Lines)])
def test_bars_are_for_terminals_only(is_terminal, kind):
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    assert type(make_progress(console, {"one": 1.0})) is kind
