import math
from dataclasses import asdict, replace

import pytest
import torch

from ortholand.retractions import retract
from ortholand_lab.experiments import stiefel
from ortholand_lab.experiments.stiefel import (
    AFTER,
    FREE,
    GRADIENT,
    HOUSEHOLDER,
    LANDING,
    STIEFEL,
    STIEFEL_LANDINGS,
    STIEFEL_METHODS,
    STIEFEL_RETRACTIONS,
    TIGHT,
    TIMED_METHODS,
    StiefelSettings,
    TimedIteration,
    begin,
    householder_step,
    iterations_timed,
    make_problem,
    plan,
    run_unit,
    start,
    timed_iteration,
    unit_name,
)
from ortholand_lab.study.figures import STYLES, house_style
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions, Store
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import TIMING

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
TIMED = [(method, k) for method in TIMED_METHODS for k in iterations_timed(method)]
SMALL = StiefelSettings(n=30, sizes=(3, 5), iterations=9, every=4, repetitions=2)
TASK = plan(SMALL)[0].task


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_and_the_timing_at_every_size(preset):
    settings = STIEFEL.settings[preset]
    names = [
        n
        for p in sorted(settings.sizes, reverse=True)  # the longest first
        for n in (*(unit_name(m, p) for m in STIEFEL_METHODS), unit_name(TIMING, p))
    ]
    units = STIEFEL.units(preset)
    assert [u.name for u in units] == names
    assert all(u.timed == u.name.startswith(TIMING) for u in units)


def test_the_papers_preset_is_the_issues():
    settings = STIEFEL.settings["paper"]
    assert (settings.n, settings.sizes) == (5000, (100, 200, 500, 1000))


def test_small_matrices_are_timed_more_often():
    units = {u.name: u for u in plan(StiefelSettings(sizes=(50, 100, 200), repetitions=4))}
    timings = [units[unit_name(TIMING, p)] for p in (50, 100, 200)]
    assert [timing.task.repetitions for timing in timings] == [16, 8, 4]


@pytest.mark.parametrize("method", STIEFEL_METHODS)
def test_a_run_is_recorded_now_and_then_and_in_the_end(method):
    ticks = []
    result = run_unit(replace(TASK, method=method), replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == 9
    assert list(result.series["iteration"]) == [0, 4, 8, 9]
    problem = make_problem(TASK, CONTEXT, torch.float64)
    first = start(TASK, CONTEXT).double()
    assert result.series["error"][0] == pytest.approx(problem.subspace_error(first).item())
    assert result.series["error"][-1] < result.series["error"][0]


def test_the_methods_differ_as_they_should():
    options = {}
    for method in STIEFEL_METHODS:
        X, advance = begin(replace(TASK, method=method), CONTEXT)
        iterated, _, optimizer = advance.args
        assert iterated is X
        (options[method],) = optimizer.param_groups
    chosen = {m: (options[m]["safe_step"], options[m]["attraction"]) for m in STIEFEL_LANDINGS}
    assert chosen == {
        LANDING: ("spectral", "coupled"),
        AFTER: ("spectral", "after"),
        FREE: ("frobenius", "coupled"),
        TIGHT: ("tight", "coupled"),
    }
    assert [options[m]["retraction"] for m in STIEFEL_RETRACTIONS] == ["qr", "cayley"]
    assert {o["lr"] for o in options.values()} == {1.0}


def test_householders_step_is_that_of_the_retraction():
    X = start(TASK, CONTEXT).double()
    G = make_problem(TASK, CONTEXT, torch.float64).grad(X)
    expected = retract(X, -0.5 * G, "qr")
    torch.testing.assert_close(householder_step(X, G, 0.5), expected, rtol=1e-6, atol=1e-6)


def test_the_timing_has_every_method_and_two_more():
    timing = plan(SMALL)[len(STIEFEL_METHODS)].task
    ticks = []
    series = run_unit(timing, replace(CONTEXT, tick=ticks.append)).series
    assert [(run.method, run.iteration) for run in timing.runs] == TIMED
    assert list(dict(TIMED)) == [*STIEFEL_METHODS, HOUSEHOLDER, GRADIENT]
    turns = [i for i in range(len(timing.runs)) for _ in range(timing.repetitions)]
    assert sorted(series["run"]) == turns
    assert sum(ticks) == timing.warm_up + timing.repetitions
    assert min(series["seconds"]) > 0


@pytest.mark.parametrize("k", [1, 6])
@pytest.mark.parametrize("method", STIEFEL_METHODS)
def test_a_timed_iteration_is_always_the_same_one_of_its_run(method, k):
    run = TimedIteration(SMALL, method, 3, k)
    Y, advance = begin(run, CONTEXT)
    for _ in range(k):
        before = Y.detach().clone()
        advance()
    action = timed_iteration(run, CONTEXT)
    X = action.act.args[0]
    for _ in range(2):
        action.prepare()
        assert torch.equal(X, before)
        action.act()
        assert torch.equal(X, Y)


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    assert run_unit(TASK, CONTEXT) == run_unit(TASK, CONTEXT)
    assert run_unit(TASK, CONTEXT) != run_unit(TASK, replace(CONTEXT, seed=4))


def test_every_iteration_is_stood_for_once():
    for method in TIMED_METHODS:
        timed = iterations_timed(method)
        first = [1, *(last + 1 for last in timed.values())]
        assert all(a <= k <= b for a, k, b in zip(first, timed, timed.values(), strict=False))
        assert list(timed.values())[-1] == math.inf


# Claims, on records made by hand.

SIZES = (50, 100)


def record(unit, task, series):
    options = RunOptions(preset="quick", seed=0, device="cpu", threads=1)
    request = Request("stiefel", 1, unit, options, asdict(task), {})
    return Record(request, Result(series, {}), {}, 1.0, "")


def timing_series(times):
    """The series of a timing: one of three repetitions is disturbed."""
    turns = [(i, t) for i, (m, _) in enumerate(TIMED) for t in (times[m], 1000 * times[m])]
    turns += [(i, times[m]) for i, (m, _) in enumerate(TIMED)]
    return dict(zip(("run", "seconds"), zip(*turns, strict=True), strict=True))


def hand_made(sizes=SIZES, *, times=None, iterations=None, ends=None, largest=0.1):
    """Records: an iteration takes so long, the accuracy so many, the end is so far away."""
    times = {
        **dict.fromkeys(STIEFEL_METHODS, 2.0),
        **dict.fromkeys(STIEFEL_LANDINGS, 1.0),
        HOUSEHOLDER: 2.0,
        GRADIENT: 3.0,
    } | (times or {})
    iterations = {**dict.fromkeys(STIEFEL_METHODS, 40), FREE: 70, TIGHT: 50} | (iterations or {})
    ends = {**dict.fromkeys(STIEFEL_METHODS, 1e-6), "cayley": 1e-4} | (ends or {})
    records = {}
    for unit in plan(StiefelSettings(sizes=sizes, repetitions=3)):
        if unit.name.startswith("timing"):
            series = timing_series(times)
        else:
            method = unit.task.method
            series = {
                "iteration": [0, iterations[method], 100],
                "error": [5.0, 1e-3, 1e-6],
                "to_manifold": [0.0, largest, ends[method]],
                "spectral_distance": [0.0, largest, ends[method]],
            }
        records[unit.name] = record(unit.name, unit.task, series)
    return Records(records)


def statement(part):
    (found,) = [c for c in STIEFEL.claims if part in c.statement]
    return found


def test_the_first_iterations_of_landing_count_as_what_they_take():
    records = hand_made(iterations={LANDING: 40})
    timing = records[unit_name(TIMING, 50)]
    dear = TIMED.index((LANDING, 2))
    seconds = [
        5.0 if i == dear else s
        for i, s in zip(timing.series("run"), timing.series("seconds"), strict=True)
    ]
    series = {**timing.result.series, "seconds": seconds}
    changed = Records(
        {**records, unit_name(TIMING, 50): replace(timing, result=Result(series, {}))}
    )
    assert stiefel.time_needed(records, LANDING, 50) == pytest.approx(40)
    assert stiefel.time_needed(changed, LANDING, 50) == pytest.approx(3 * 5 + 37)


def test_times_are_medians_and_products():
    records = hand_made()
    assert stiefel.iteration_time(records, LANDING, 50) == 1.0
    assert stiefel.iterations_needed(records, LANDING, 50) == pytest.approx(40)
    assert stiefel.time_needed(records, "qr", 100) == pytest.approx(80)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("one of the Cayley", dict(times={"cayley": 1.04})),
        ("one of the QR", dict(times={"qr": 1.04})),
        ("one of the QR", dict(times={HOUSEHOLDER: 1.04})),
        ("is not much faster", dict(times={"cayley": 2.5})),
        ("as it is by default", dict(iterations={LANDING: 79})),
        ("as it is by default", dict(times={HOUSEHOLDER: 1.04})),
        ("after the move", dict(iterations={AFTER: 79})),
        ("as many iterations as the QR", dict(iterations={LANDING: 45})),
        ("the spectral rule pays", dict(iterations={TIGHT: 41})),
        ("the spectral rule pays", dict(times={FREE: 0.58})),
        ("on the manifold (distance", dict(ends={AFTER: 1e-3})),
        ("nearer to the manifold", dict(ends={AFTER: 2e-4})),
        ("keeps landing", dict(largest=0.51)),
        ("dense C", dict(times={GRADIENT: 0.9})),
    ],
)
def test_claims_can_hold_and_fail(part, change):
    good = hand_made(times={"cayley": 1.9})
    assert statement(part).judge(good).verdict is Verdict.HOLDS
    assert statement(part).judge(hand_made(**change)).verdict is Verdict.FAILS


def test_every_method_must_find_the_subspace():
    records, unit = hand_made(), unit_name("qr", 100)
    assert statement("All methods").judge(records).verdict is Verdict.HOLDS
    series = {**records[unit].result.series, "error": [5.0, 4.0, 3.0]}
    lost = replace(records[unit], result=Result(series, {}))
    finding = statement("All methods").judge(Records({**records, unit: lost}))
    assert finding.verdict is Verdict.FAILS
    assert "QR inf" in finding.measured
    unit = unit_name(FREE, 100)
    lost = replace(records[unit], result=Result(series, {}))
    finding = statement("All methods").judge(Records({**records, unit: lost}))
    assert finding.verdict is Verdict.HOLDS
    assert "Frobenius rule inf" in finding.measured


def test_small_matrices_decide_nothing_about_time():
    records = hand_made((10, 20))
    about_time = ("one of the", "faster than the Cayley", "finds it", "pays", "dense C")
    for claim in STIEFEL.claims:
        is_open = claim.judge(records).verdict is Verdict.OPEN
        assert is_open == any(part in claim.statement for part in about_time), claim.statement


@pytest.mark.parametrize("missing", [unit_name(TIMING, 100), unit_name("cayley", 50), "all"])
def test_without_its_records_a_claim_is_not_decided(missing):
    kept = {n: r for n, r in hand_made().items() if missing not in ("all", n)}
    findings = [c.judge(Records(kept)) for c in STIEFEL.claims]
    named = "nothing is recorded" if missing == "all" else missing
    undecided = [f for f in findings if named in f.measured]
    assert undecided
    assert all(f.verdict is Verdict.OPEN for f in undecided)


def test_the_figures_show_every_method():
    records = hand_made()
    with house_style():
        errors, distances = STIEFEL.figures[0].draw(records).axes
        single, whole = STIEFEL.figures[1].draw(records).axes
    labels = {STYLES[m].label for m in STIEFEL_METHODS}
    for axes in (errors, distances, single, whole):
        assert axes.get_yscale() == "log"
        curves = {c.get_label(): c for c in axes.get_lines() if not c.get_label().startswith("_")}
        extra = {STYLES[HOUSEHOLDER].label, STYLES[GRADIENT].label} if axes is single else set()
        assert set(curves) == labels | extra
    times = next(c for c in whole.get_lines() if c.get_label() == "QR")
    assert list(times.get_ydata()) == pytest.approx([80, 80])
    assert list(times.get_xdata()) == list(SIZES)


def test_a_small_run_from_end_to_end(tmp_path, watcher):
    tiny = replace(STIEFEL, settings={"smoke": replace(SMALL, iterations=60)})
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    done = run_study(tiny, options, Store(tmp_path), watcher)
    assert not done.missing
    found = {claim.statement: finding.verdict for claim, finding in done.findings()}
    assert found[statement("All methods").statement] is Verdict.HOLDS
    assert found[statement("keeps landing").statement] is Verdict.HOLDS
