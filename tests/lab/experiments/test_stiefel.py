import math
from dataclasses import asdict, replace

import pytest
import torch

import ortholand
from ortholand.lab.experiments import stiefel
from ortholand.lab.experiments.stiefel import (
    AFTER,
    GRADIENT,
    HOUSEHOLDER,
    LANDING,
    LANDINGS,
    LOOKS,
    METHODS,
    RETRACTIONS,
    STIEFEL,
    TIGHT,
    Settings,
    householder_step,
    iteration_action,
    iterations_to,
    make_optimizer,
    make_problem,
    plan,
    run,
    start,
    timing_name,
    unit_name,
)
from ortholand.lab.study.figures import house_style
from ortholand.lab.study.records import Record, Records, Request, Result, RunOptions, Store
from ortholand.lab.study.runner import run_study
from ortholand.lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
SMALL = Settings(n=30, sizes=(3, 5), iterations=9, every=4, repetitions=2)
TASK = plan(SMALL)[0].task


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_and_the_timing_at_every_size(preset):
    settings = STIEFEL.settings[preset]
    names = [
        n for p in settings.sizes for n in (*(unit_name(m, p) for m in METHODS), timing_name(p))
    ]
    assert [u.name for u in STIEFEL.units(preset)] == names


def test_the_papers_preset_is_the_issues():
    settings = STIEFEL.settings["paper"]
    assert (settings.n, settings.sizes) == (5000, (100, 200, 500, 1000))


def test_small_matrices_are_timed_more_often():
    units = {u.name: u for u in plan(Settings(sizes=(50, 100, 200), repetitions=4))}
    assert [units[timing_name(p)].steps for p in (50, 100, 200)] == [16, 8, 4]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_recorded_now_and_then_and_in_the_end(method):
    ticks = []
    result = run(replace(TASK, method=method), replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == 9
    assert list(result.series["iteration"]) == [0, 4, 8, 9]
    problem = make_problem(TASK, CONTEXT, torch.float64)
    first = start(TASK, CONTEXT).double()
    assert result.series["error"][0] == pytest.approx(problem.subspace_error(first).item())
    assert result.series["error"][-1] < result.series["error"][0]


def test_the_methods_differ_as_they_should():
    options = {}
    for method in METHODS:
        X = torch.nn.Parameter(start(TASK, CONTEXT))
        options[method] = make_optimizer(X, replace(TASK, method=method)).param_groups[0]
    chosen = {m: (options[m]["safe_step"], options[m]["attraction"]) for m in LANDINGS}
    assert chosen == {
        LANDING: ("frobenius", "coupled"),
        TIGHT: ("tight", "coupled"),
        AFTER: ("tight", "after"),
    }
    assert [options[m]["retraction"] for m in RETRACTIONS] == ["qr", "cayley"]
    assert {o["lr"] for o in options.values()} == {1.0}


def test_householders_step_is_that_of_the_retraction():
    X = start(TASK, CONTEXT).double()
    G = make_problem(TASK, CONTEXT, torch.float64).grad(X)
    expected = ortholand.retract(X, -0.5 * G, "qr")
    torch.testing.assert_close(householder_step(X, G, 0.5), expected, rtol=1e-6, atol=1e-6)


def test_the_timing_has_every_method_and_two_more():
    timing = plan(SMALL)[len(METHODS)].task
    ticks = []
    series = run(timing, replace(CONTEXT, tick=ticks.append)).series
    assert set(series) == {*METHODS, HOUSEHOLDER, GRADIENT}
    assert {len(s) for s in series.values()} == {timing.repetitions} == {sum(ticks)}
    assert all(min(s) > 0 for s in series.values())


def test_a_timed_iteration_always_steps_from_the_start():
    action = iteration_action(TASK, CONTEXT)
    X = action.act.args[0]
    reached = []
    for _ in range(2):
        action.prepare()
        assert torch.equal(X, start(TASK, CONTEXT))
        action.act()
        reached.append(X.detach().clone())
    assert torch.equal(*reached)
    assert not torch.equal(X, start(TASK, CONTEXT))


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    assert run(TASK, CONTEXT) == run(TASK, CONTEXT)
    assert run(TASK, CONTEXT) != run(TASK, replace(CONTEXT, seed=4))


# Claims, on records made by hand.

SIZES = (50, 100)


def record(unit, task, series):
    options = RunOptions(preset="quick", seed=0, device="cpu", threads=1)
    request = Request("stiefel", 1, unit, options, asdict(task), {})
    return Record(request, Result(series, {}), {}, 1.0, "")


def hand_made(sizes=SIZES, *, times=None, iterations=None, ends=None, largest=0.1):
    """Records: an iteration takes so long, the accuracy so many, the end is so far away."""
    times = {**dict.fromkeys(METHODS, 2.0), LANDING: 1.0, HOUSEHOLDER: 2.0, GRADIENT: 3.0} | (
        times or {}
    )
    iterations = {**dict.fromkeys(METHODS, 40), LANDING: 60} | (iterations or {})
    ends = {**dict.fromkeys(METHODS, 1e-6), "cayley": 1e-4} | (ends or {})
    records = {}
    for unit in plan(Settings(sizes=sizes, repetitions=3)):
        if unit.name.startswith("timing"):
            # One of three repetitions is disturbed.
            series = {name: [t, 1000 * t, t] for name, t in times.items()}
        else:
            method = unit.task.method
            series = {
                "iteration": [0, iterations[method], 100],
                "error": [5.0, 1e-3, 1e-6],
                "to_manifold": [0.0, largest, ends[method]],
            }
        records[unit.name] = record(unit.name, unit.task, series)
    return Records(records)


def statement(part):
    (found,) = [c for c in STIEFEL.claims if part in c.statement]
    return found


def test_times_are_medians_and_products():
    records = hand_made()
    assert stiefel.seconds_per_iteration(records, LANDING, 50) == 1.0
    assert stiefel.iterations_needed(records, LANDING, 50) == pytest.approx(60)
    assert stiefel.time_needed(records, "qr", 100) == pytest.approx(80)


def test_iterations_to_an_error_are_interpolated():
    series = {"iteration": [0, 10, 20], "error": [1.0, 1e-2, 1e-4], "to_manifold": [0, 0, 0]}
    run_of = record("landing-p-3", TASK, series)
    assert iterations_to(run_of, 1e-1) == pytest.approx(5)
    assert iterations_to(run_of, 1e-3) == pytest.approx(15)
    assert iterations_to(run_of, 1e-5) == math.inf
    exact = replace(run_of, result=Result({**series, "error": [1.0, 1e-2, 0.0]}, {}))
    assert iterations_to(exact, 1e-5) == 20


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("one of the Cayley", dict(times={"cayley": 1.04})),
        ("one of the QR", dict(times={"qr": 1.04})),
        ("one of the QR", dict(times={HOUSEHOLDER: 1.04})),
        ("is not much faster", dict(times={"cayley": 2.5})),
        ("default safe step", dict(iterations={LANDING: 90})),
        ("on the manifold (distance", dict(ends={AFTER: 1e-3})),
        ("nearer to the manifold", dict(ends={TIGHT: 2e-4})),
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


def test_the_tight_rule():
    tight, pays = statement("with the tight safe step finds"), statement("pays")
    fast = hand_made(times={TIGHT: 1.2})
    assert tight.judge(fast).verdict is Verdict.HOLDS
    assert pays.judge(fast).verdict is Verdict.HOLDS
    slow = hand_made(times={TIGHT: 2.0})
    assert tight.judge(slow).verdict is Verdict.FAILS
    assert pays.judge(slow).verdict is Verdict.FAILS


def test_small_matrices_decide_nothing_about_time():
    records = hand_made((10, 20))
    about_time = ("one of the", "faster than the Cayley", "finds it", "pays", "dense C")
    for claim in STIEFEL.claims:
        is_open = claim.judge(records).verdict is Verdict.OPEN
        assert is_open == any(part in claim.statement for part in about_time), claim.statement


@pytest.mark.parametrize("missing", [timing_name(100), unit_name("cayley", 50), "all"])
def test_without_its_records_a_claim_is_not_decided(missing):
    kept = {n: r for n, r in hand_made().items() if missing not in ("all", n)}
    findings = [c.judge(Records(kept)) for c in STIEFEL.claims]
    named = "no timing" if missing == "all" else missing
    undecided = [f for f in findings if named in f.measured]
    assert undecided
    assert all(f.verdict is Verdict.OPEN for f in undecided)


def test_the_figures_show_every_method():
    records = hand_made()
    with house_style():
        errors, distances = STIEFEL.figures[0].draw(records).axes
        single, whole = STIEFEL.figures[1].draw(records).axes
    labels = {LOOKS[m].label for m in METHODS}
    for axes in (errors, distances, single, whole):
        assert axes.get_yscale() == "log"
        curves = {c.get_label(): c for c in axes.get_lines() if not c.get_label().startswith("_")}
        extra = {LOOKS[HOUSEHOLDER].label, LOOKS[GRADIENT].label} if axes is single else set()
        assert set(curves) == labels | extra
    times = next(c for c in whole.get_lines() if c.get_label() == "QR")
    assert list(times.get_ydata()) == pytest.approx([80, 80])
    assert list(times.get_xdata()) == list(SIZES)


def test_a_small_run_from_end_to_end(tmp_path):
    class Silent:
        def start(self, experiment, units, steps): ...
        def advance(self, steps): ...
        def unit_done(self, unit, outcome): ...

    tiny = replace(STIEFEL, settings={"smoke": replace(SMALL, iterations=60)})
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    done = run_study(tiny, options, Store(tmp_path), Silent())
    assert not done.missing
    found = {claim.statement: finding.verdict for claim, finding in done.findings()}
    assert found[statement("All methods").statement] is Verdict.HOLDS
    assert found[statement("keeps landing").statement] is Verdict.HOLDS
