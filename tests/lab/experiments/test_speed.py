from dataclasses import asdict, replace

import pytest
import torch

from ortholand.geometry import random_orthogonal, skew
from ortholand.retractions import retract
from ortholand_lab.experiments import speed
from ortholand_lab.experiments.speed import (
    CAREFUL,
    OPTIMIZER,
    SPEED,
    TEXTBOOK,
    TEXTBOOK_RETRACTIONS,
    WARM_UP,
    SpeedSettings,
    SpeedTask,
    form_name,
    make_actions,
    plan,
    ratios,
    run,
    unit_name,
)
from ortholand_lab.study.figures import METHOD_STYLES, house_style
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
TASK = SpeedTask(6, SpeedSettings(sizes=(6,), repetitions=3))
FORMS = (TEXTBOOK, CAREFUL, OPTIMIZER)
RETRACTIONS = tuple(TEXTBOOK_RETRACTIONS)


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_size(preset):
    settings = SPEED.settings[preset]
    units = SPEED.units(preset)
    assert [u.name for u in units] == [unit_name(p) for p in settings.sizes]
    assert all(u.steps == WARM_UP + u.task.repetitions for u in units)
    assert all(u.timed for u in units)


def test_the_papers_sizes_and_repetitions():
    settings = SPEED.settings["paper"]
    assert (min(settings.sizes), settings.repetitions) == (10, 500)
    assert max(settings.sizes) >= 1000


def test_large_matrices_have_fewer_repetitions():
    settings = SpeedSettings(sizes=(10, 100, 1000), repetitions=50, least_repetitions=3, work=2e7)
    assert [u.task.repetitions for u in plan(settings)] == [50, 20, 3]


def test_the_retractions_are_those_of_the_paper():
    assert RETRACTIONS == ("exponential", "polar", "cayley", "qr")


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("name", RETRACTIONS)
def test_textbook_retractions_are_the_librarys(name, scale):
    X = random_orthogonal(7, 7, seed=0, dtype=torch.float64)
    M = torch.randn(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = scale * skew(M)
    reached = TEXTBOOK_RETRACTIONS[name](X, A)
    torch.testing.assert_close(reached, retract(X, A, name), rtol=1e-9, atol=1e-11)


def test_every_form_of_a_step_goes_to_the_same_place():
    actions = make_actions(TASK, CONTEXT)
    for method in ("landing", *RETRACTIONS):
        reached = [step_of(actions[form_name(form, method)]) for form in FORMS]
        for X in reached[1:]:
            torch.testing.assert_close(X, reached[0], rtol=1e-5, atol=1e-6)


def step_of(action):
    """Where an action leads: what a formula returns, or the parameter of an optimizer."""
    action.prepare()
    result = action.act()
    if result is not None:
        return result
    return action.act.__self__.param_groups[0]["params"][0].detach().clone()


def test_an_optimizer_always_steps_from_the_same_start():
    action = make_actions(TASK, CONTEXT)[form_name(OPTIMIZER, "landing")]
    first, second = step_of(action), step_of(action)
    assert torch.equal(first, second)
    action.act()
    assert not torch.equal(action.act.__self__.param_groups[0]["params"][0], second)


def test_a_unit_times_every_form_of_every_method():
    ticks = []
    series = run(TASK, replace(CONTEXT, tick=ticks.append)).series
    assert sum(ticks) == plan(TASK.settings)[0].steps
    expected = {form_name(form, m) for form in FORMS for m in ("landing", *RETRACTIONS)}
    assert set(series) == expected | {"landing-field", "penalty-field"}
    assert all(len(s) == 3 and min(s) > 0 for s in series.values())


# Claims, on records made by hand.


def hand_made(sizes, device="cpu", **times):
    """Records in which every action takes 2 seconds, landing 1, and some what is asked for."""
    names = {form_name(f, m) for f in FORMS for m in ("landing", *RETRACTIONS)}
    base = dict.fromkeys(names, 2.0) | {"landing": 1.0, form_name(OPTIMIZER, "landing"): 1.0}
    base |= {"landing-field": 1.5, "penalty-field": 1.0}
    base |= {name.replace("_", "-"): t for name, t in times.items()}
    records = {}
    for p in sizes:
        task = SpeedTask(p, SpeedSettings(sizes=tuple(sizes), repetitions=3))
        options = RunOptions(preset="quick", seed=0, device=device, threads=1)
        request = Request("speed", 1, unit_name(p), options, asdict(task), {})
        # One of three repetitions is disturbed.
        series = {name: [t, 100 * t, t] for name, t in base.items()}
        records[unit_name(p)] = Record(request, Result(series, {}), {}, 1.0, "")
    return Records(records)


SIZES = (10, 100, 1000)


def test_ratios_are_those_of_medians():
    record = hand_made(SIZES, textbook_qr=3.0)["p-100"]
    assert ratios(record, TEXTBOOK) == {"exponential": 2, "polar": 2, "cayley": 2, "qr": 3}


@pytest.mark.parametrize("form", FORMS)
def test_landing_is_faster_only_if_it_is_faster_than_every_retraction(form):
    assert speed.landing_is_faster(form, hand_made(SIZES)).verdict is Verdict.HOLDS
    slow = hand_made(SIZES, **{f"{form}_cayley": 1.04})
    assert speed.landing_is_faster(form, slow).verdict is Verdict.FAILS
    others = [f for f in FORMS if f != form]
    assert all(speed.landing_is_faster(f, slow).verdict is Verdict.HOLDS for f in others)


def test_only_large_sizes_count():
    records = hand_made(SIZES, textbook_qr=3.0)
    small = hand_made(SIZES, textbook_qr=0.5)["p-10"]
    mixed = Records({**records, "p-10": small})
    finding = speed.landing_is_faster(TEXTBOOK, mixed)
    assert finding.verdict is Verdict.HOLDS
    assert "p = 100 to 1000" in finding.measured
    assert "QR 3.0 to 3.0" in finding.measured


def test_eight_times_is_said_of_a_gpu():
    eight = {f"textbook_{m}": 8.0 for m in RETRACTIONS}
    on_cpu, on_gpu = hand_made(SIZES, **eight), hand_made(SIZES, device="cuda", **eight)
    assert speed.about_eight_times(False, on_cpu).verdict is Verdict.OPEN
    assert speed.about_eight_times(True, on_cpu).verdict is Verdict.HOLDS
    assert speed.about_eight_times(False, on_gpu).verdict is Verdict.HOLDS
    slower = hand_made(SIZES, device="cuda", **{**eight, "textbook_qr": 5.0})
    assert speed.about_eight_times(False, slower).verdict is Verdict.FAILS
    assert speed.about_eight_times(True, hand_made(SIZES)).verdict is Verdict.FAILS


def test_the_fastest_retraction_is_said_of_a_gpu():
    fast = hand_made(SIZES, device="cuda", textbook_exponential=1.5)
    assert speed.exponential_is_fastest(fast).verdict is Verdict.HOLDS
    for device, verdict in (("cuda", Verdict.FAILS), ("cpu", Verdict.OPEN)):
        finding = speed.exponential_is_fastest(hand_made(SIZES, device=device, textbook_qr=1.5))
        assert finding.verdict is verdict
        assert "p = 1000: QR" in finding.measured


@pytest.mark.parametrize(("factor", "verdict"), [(8.0, "HOLDS"), (5.0, "FAILS"), (13.0, "FAILS")])
def test_the_exponential_at_twice_the_size(factor, verdict):
    records = hand_made((100, 200), textbook_exponential=2.0)
    result = records["p-200"].result
    slower = {**result.series, "textbook-exponential": [2.0 * factor] * 3}
    larger = replace(records["p-200"], result=replace(result, series=slower))
    found = speed.exponential_at_twice_the_size(Records({**records, "p-200": larger}))
    assert found.verdict is Verdict[verdict], found.measured
    assert speed.exponential_at_twice_the_size(hand_made(SIZES)).verdict is Verdict.OPEN


def test_a_step_on_another_device_leaves_nothing_on_the_cpu():
    """torch's meta device stands in for a GPU: it refuses operands from elsewhere."""
    actions = speed.make_actions(TASK, replace(CONTEXT, device=torch.device("meta")))
    names = [form_name(TEXTBOOK, method) for method in RETRACTIONS]
    for name in ("landing", "landing-field", "penalty-field", "optimizer-landing", *names):
        actions[name].prepare()
        actions[name].act()


def test_the_slowest_retraction():
    for device, time, verdict in (
        ("cuda", 30.0, Verdict.HOLDS),
        ("cuda", 10.0, Verdict.FAILS),
        ("cpu", 30.0, Verdict.OPEN),
    ):
        records = hand_made(SIZES, device=device, textbook_polar=time)
        assert speed.polar_is_slowest_by_far(records).verdict is verdict


def test_the_price_of_the_landing_field():
    assert speed.field_costs_half_more(hand_made(SIZES)).verdict is Verdict.HOLDS
    for time in (1.2, 1.8):
        records = hand_made(SIZES, landing_field=time)
        assert speed.field_costs_half_more(records).verdict is Verdict.FAILS
        one_size = Records({**hand_made(SIZES), "p-100": records["p-100"]})
        assert speed.field_costs_half_more(one_size).verdict is Verdict.FAILS


def test_the_price_of_the_landing_field_is_not_decided_by_times_that_scatter():
    records = hand_made(SIZES)
    result = records["p-1000"].result
    noisy = replace(result, series={**result.series, "landing-field": [1.0, 150.0, 2.5]})
    records = Records({**records, "p-1000": replace(records["p-1000"], result=noisy)})
    finding = speed.field_costs_half_more(records)
    assert finding.verdict is Verdict.OPEN
    assert "1.50 (1.25 to 2.00) at p = 1000" in finding.measured


def test_small_matrices_decide_nothing():
    assert {c.judge(hand_made((10, 60))).verdict for c in SPEED.claims} == {Verdict.OPEN}


@pytest.mark.parametrize("kept", [(), (10, 1000)], ids=["none", "some"])
def test_claims_need_every_size(kept):
    records = hand_made(SIZES)
    fewer = Records({unit_name(p): records[unit_name(p)] for p in kept})
    findings = [c.judge(fewer) for c in SPEED.claims]
    assert {f.verdict for f in findings} == {Verdict.OPEN}
    why = "p-100 is missing" if kept else "nothing is recorded"
    assert all(why in f.measured for f in findings)


def test_the_figures_show_medians_and_ratios():
    records = hand_made(SIZES, textbook_qr=3.0, optimizer_qr=5.0)
    with house_style():
        times, relative = SPEED.figures[0].draw(records).axes
        careful, optimizers = SPEED.figures[1].draw(records).axes
    for axes, expected in ((times, 3.0), (relative, 3.0), (careful, 2.0), (optimizers, 5.0)):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        curves = {line.get_label(): line for line in axes.get_lines()}
        assert set(curves) == {METHOD_STYLES[m].label for m in ("landing", *RETRACTIONS)}
        assert list(curves["QR"].get_xdata()) == list(SIZES)
        assert list(curves["QR"].get_ydata()) == [expected] * 3


def test_a_small_run_from_end_to_end(store, watcher):
    settings = SpeedSettings(sizes=(4, 100), repetitions=2, least_repetitions=2)
    tiny = replace(SPEED, settings={"smoke": settings})
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    done = run_study(tiny, options, store, watcher)
    assert not done.missing
    assert watcher.done == watcher.total
    assert all(store.find(r.request).record == r for r in done.records.values())
    found = [finding.verdict for _, finding in done.findings()]
    said_of_a_gpu = [v for c, v in zip(SPEED.claims, found, strict=True) if "a GPU" in c.statement]
    assert said_of_a_gpu == [Verdict.OPEN] * 3
    with house_style():
        assert all(figure.draw(done.records).axes for figure in tiny.figures)
