import math
from dataclasses import replace
from itertools import pairwise
from time import process_time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ortholand.geometry import distance, random_orthogonal, relative_gradient, relative_hessian
from ortholand_lab.experiments import EXPERIMENTS, procrustes
from ortholand_lab.experiments.procrustes import (
    DTYPES,
    LANDINGS,
    PAPER_METHODS,
    PAPER_TIMING,
    PROCRUSTES_METHODS,
    Descent,
    ProcrustesRun,
    ProcrustesSettings,
    compared,
    make_problem,
    plain_step,
    plan,
    run_unit,
    settles,
    timed_iteration,
    times_per_iteration,
    unit_name,
)
from ortholand_lab.problems import Procrustes
from ortholand_lab.study.figures import STYLES
from ortholand_lab.study.records import Records
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import TIMING, Timing, marks
from ortholand_lab.textbook import RETRACTION_FORMS, RETRACTION_NAMES

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
SETTINGS = ProcrustesSettings(p=6)
TASK = ProcrustesRun(
    SETTINGS, method="landing", dtype="float64", iterations=20, momentum=0.0, scaled=True
)


@given(st.integers(1, 100_000))
def test_marks_are_few_and_cover_the_run(iterations):
    places = marks(iterations)
    assert (places[0], places[-1]) == (0, iterations)
    assert all(0 < b - a <= 1 + 0.06 * b for a, b in pairwise(places))
    assert len(places) < 3 + 25 * math.log(iterations + 1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_recorded_step_is_the_one_that_is_taken(momentum, scaled):
    descent = Descent(replace(TASK, momentum=momentum, scaled=scaled), CONTEXT)
    steps = []
    for k in range(1, 15):
        X, step = descent.X.detach().clone(), descent.next_step()
        A = relative_gradient(X, descent.problem.grad(X))
        if momentum and k > 1:
            A = A + momentum * descent.optimizer.state[descent.X]["momentum_buffer"]
        L = (A + X @ X.mT - torch.eye(6, dtype=X.dtype)) @ X
        descent.advance()
        torch.testing.assert_close(X - descent.X.detach(), step * L)
        steps.append(step)
    assert (min(steps) < SETTINGS.lr) == (not scaled or momentum > 0)


@pytest.mark.parametrize("method", PROCRUSTES_METHODS)
def test_every_method_takes_the_step_of_its_plain_formula(method):
    task = replace(TASK, method=method)
    descent = Descent(task, CONTEXT)
    for _ in range(3):
        X = descent.X.detach().clone()
        assert descent.next_step() == SETTINGS.lr
        expected = plain_step(descent.X.detach(), descent.problem, task)
        assert torch.equal(descent.X, X)
        descent.advance()
        torch.testing.assert_close(descent.X.detach(), expected)
        assert (distance(expected) < 1e-13) == (method in RETRACTION_FORMS)


def test_methods_differ_from_each_other():
    reached = []
    for method in PROCRUSTES_METHODS:
        descent = Descent(replace(TASK, method=method), CONTEXT)
        descent.advance()
        reached.append(descent.X.detach())
    for i, X in enumerate(reached):
        assert all(torch.linalg.matrix_norm(X - Y) > 1e-6 for Y in reached[:i])


TIMED = Timing(
    runs=tuple(
        replace(TASK, method=m, dtype=d, plain=plain)
        for d in DTYPES
        for m in PROCRUSTES_METHODS
        for plain in (False, True)
    ),
    warm_up=2,
    repetitions=3,
)


def test_every_timed_run_is_timed_as_often():
    ticks = []
    result = run_unit(TIMED, replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == TIMED.warm_up + TIMED.repetitions
    assert sorted(result.series["run"]) == [i for i in range(len(TIMED.runs)) for _ in range(3)]
    assert all(0 < seconds < 1 for seconds in result.series["seconds"])


def test_the_iterations_that_are_timed_are_those_of_the_run(monkeypatch):
    def slow_step(X, problem, task):
        end = process_time() + 0.002  # what is measured is the processor's time
        while process_time() < end:
            pass
        return X

    monkeypatch.setattr(procrustes, "plain_step", slow_step)
    timing = replace(TIMED, runs=TIMED.runs[:2], repetitions=9)
    result = run_unit(timing, CONTEXT)
    turns = list(zip(result.series["run"], result.series["seconds"], strict=True))
    assert min(seconds for i, seconds in turns if i == 1) >= 0.002  # the formula, made slow
    assert min(seconds for i, seconds in turns if i == 0) < 0.002  # the optimizer


@pytest.mark.parametrize("plain", [False, True])
def test_timed_iterations_go_along_the_run(monkeypatch, plain):
    made = []
    monkeypatch.setattr(
        procrustes, "Descent", lambda *given: made.append(Descent(*given)) or made[0]
    )
    action, descent = timed_iteration(replace(TASK, plain=plain), CONTEXT), Descent(TASK, CONTEXT)
    for _ in range(3):
        action.prepare()
        before = made[0].X.detach().clone()
        action.act()
        assert torch.equal(made[0].X, before) == plain  # a formula leaves the run where it is
        descent.advance()
        assert torch.equal(made[0].X, descent.X)


def test_unscaled_is_the_cost_as_printed():
    problem = make_problem(replace(TASK, scaled=False), CONTEXT, torch.float64)
    printed = Procrustes.gaussian(6, seed=3)
    X = random_orthogonal(6, 6, seed=0, dtype=torch.float64)
    cost = torch.linalg.matrix_norm(X @ printed.A - printed.B) ** 2
    torch.testing.assert_close(problem.fun(X), cost)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_curvature_is_the_smallest_eigenvalue_of_the_hessian(seed):
    p = 4
    descent = Descent(replace(TASK, settings=ProcrustesSettings(p=p)), replace(CONTEXT, seed=seed))
    X = descent.optimum
    basis = []
    for i in range(p):
        for j in range(i):
            E = torch.zeros(p, p, dtype=X.dtype)
            E[i, j], E[j, i] = 0.5**0.5, -(0.5**0.5)
            basis.append(E)
    images = [relative_hessian(X, E, fun=descent.referee.fun) for E in basis]
    H = torch.tensor([[float((E * HF).sum()) for HF in images] for E in basis])
    assert descent.curvature() == pytest.approx(float(torch.linalg.eigvalsh(H)[0]), rel=1e-4)


def test_time_does_not_include_measuring(monkeypatch):
    measured = []
    monkeypatch.setattr(procrustes, "distance", lambda X: measured.append(1) or distance(X))
    run_unit(TIMED, CONTEXT)
    assert not measured
    run_unit(TASK, CONTEXT)
    assert len(measured) >= TASK.iterations
    assert "seconds" not in run_unit(TASK, CONTEXT).series


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    first, second = run_unit(TASK, CONTEXT), run_unit(TASK, CONTEXT)
    other = run_unit(TASK, replace(CONTEXT, seed=4))
    assert first == second
    assert first.series["to_optimum"] != other.series["to_optimum"]


def test_an_iterate_that_is_not_a_number_is_not_passed_over():
    descent = Descent(TASK, CONTEXT)
    good = descent.X.detach().clone()
    descent.X.data.fill_(math.nan)
    descent.advance()
    descent.X.data.copy_(good)
    descent.advance()
    assert math.isnan(descent.largest_distance)


def test_ticks_add_up_to_the_iterations():
    ticks = []
    run_unit(TASK, replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == TASK.iterations


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_in_every_precision_and_the_timing(preset):
    *units, timing, paper = EXPERIMENTS["procrustes"].units(preset)
    methods = (*LANDINGS, *RETRACTION_NAMES)
    all_methods = (*methods, *PAPER_METHODS[1:])
    assert [u.name for u in units] == [unit_name(m, d) for d in DTYPES for m in all_methods]
    assert (paper.name, paper.timed) == (PAPER_TIMING, True)
    assert {(t.method, t.dtype, t.plain) for t in paper.task.runs} == {
        (m, d, True) for m in PAPER_METHODS for d in DTYPES
    }
    assert all(u.steps == u.task.iterations and not u.timed for u in units)
    assert (timing.name, timing.timed) == (TIMING, True)
    by_optimizer = {(m, d, False) for m in methods for d in DTYPES}
    by_formula = {(m, d, True) for m in PROCRUSTES_METHODS for d in DTYPES}
    timed = [(t.method, t.dtype, t.plain) for t in timing.task.runs]
    assert len(timed) == len(set(timed))
    assert set(timed) == by_optimizer | by_formula


def test_iterations_by_method():
    settings = ProcrustesSettings(iterations=100, retraction_share=0.25, extra_iterations=7)
    planned = {u.name: u.steps for u in plan(settings)}
    assert planned["landing-float32"] == 100
    assert planned["qr-float64"] == 25
    assert planned["landing-momentum-float64"] == 7


def test_the_paper_preset_has_the_papers_settings():
    settings = EXPERIMENTS["procrustes"].settings["paper"]
    assert (settings.p, settings.lr, settings.lam, settings.eps) == (40, 0.1, 1.0, 0.5)


# On the smoke run.


def claim(words):
    return next(c for c in EXPERIMENTS["procrustes"].claims if c.words.startswith(words))


similar_iterations = claim("Looking at the distance").check
ends_nearer = claim("The exponential and Cayley").check
DRIFTING = ("exponential-textbook", "cayley-textbook")


def verdicts(records):
    return {c.check: c.judge(records).verdict for c in EXPERIMENTS["procrustes"].claims}


def test_the_claims_of_the_smoke_run(smoke):
    run, _ = smoke
    found = verdicts(run.records)
    assert found[similar_iterations] is Verdict.HOLDS
    assert found[procrustes.projections_do_not_drift] is Verdict.HOLDS
    assert found[procrustes.lands] is Verdict.HOLDS
    assert found[procrustes.unscaled_lands] is Verdict.FAILS
    assert found[procrustes.unscaled_rides_boundary] is Verdict.HOLDS
    assert found[procrustes.stays_in_ball] is Verdict.HOLDS
    assert found[procrustes.local_rate] is Verdict.HOLDS
    assert found[procrustes.momentum_is_faster] is Verdict.HOLDS
    textbook_ends = {m: run.records[f"{m}-float32"].series("to_manifold")[-1] for m in DRIFTING}
    assert min(textbook_ends.values()) > run.records["landing-float32"].series("to_manifold")[-1]


def doctored(records, unit, *, series=None, values=None):
    """The records, with some numbers of a unit replaced."""
    record = records[unit]
    result = replace(
        record.result,
        series={**record.result.series, **(series or {})},
        values={**record.result.values, **(values or {})},
    )
    return Records({**records, unit: replace(record, result=result)})


def constant(records, unit, value):
    return [value] * len(records[unit].series("iteration"))


def test_claims_can_fail(smoke):
    records = smoke[0].records
    at_one = constant(records, "landing-float64", 1.0)
    cases = {
        procrustes.lands: dict(series={"to_manifold": at_one, "to_optimum": at_one}),
        procrustes.stays_in_ball: dict(values={"largest_distance": 0.51}),
        procrustes.local_rate: dict(values={"curvature": 1.0}),
        procrustes.momentum_is_faster: dict(series={"to_optimum": [1e-30 * x for x in at_one]}),
    }
    for check, changes in cases.items():
        assert check(doctored(records, "landing-float64", **changes)).verdict is Verdict.FAILS
    never_left = doctored(records, "landing-float32", values={"largest_distance": 1e-6})
    assert procrustes.lands(never_left).verdict is Verdict.FAILS
    landed = constant(records, "landing-unscaled-float64", 1e-9)
    changed = doctored(records, "landing-unscaled-float64", series={"to_manifold": landed})
    assert procrustes.unscaled_rides_boundary(changed).verdict is Verdict.FAILS


def test_claims_about_retractions_can_fail(smoke):
    records = smoke[0].records
    at_one = constant(records, "landing-float64", 1.0)
    to_optimum = records["qr-textbook-float64"].series("to_optimum")
    half_as_fast = [math.sqrt(to_optimum[0] * d) for d in to_optimum]
    slow = doctored(records, "qr-textbook-float64", series={"to_optimum": half_as_fast})
    assert similar_iterations(slow).verdict is Verdict.FAILS
    aloft = dict(to_manifold=at_one, to_optimum=at_one)
    aloft = doctored(records, "landing-float64", series=aloft)
    assert ends_nearer(aloft).verdict is Verdict.FAILS
    drifting = [1e-15 * k for k in records["polar-float64"].series("iteration")]
    drifting = doctored(records, "polar-float64", series={"to_manifold": drifting})
    assert procrustes.projections_do_not_drift(drifting).verdict is Verdict.FAILS


def test_on_its_way_to_the_optimum_landing_need_not_have_landed(smoke):
    records = smoke[0].records
    assert ends_nearer(records).verdict is Verdict.OPEN  # both still fall
    at_one = constant(records, "landing-float64", 1.0)
    records = doctored(records, "landing-float64", series={"to_manifold": at_one})
    assert procrustes.lands(records).verdict is Verdict.OPEN
    assert ends_nearer(records).verdict is Verdict.OPEN


def test_methods_are_not_compared_far_from_the_optimum(smoke):
    records = smoke[0].records
    for method in PAPER_METHODS:
        unit = unit_name(method, "float64")
        far = [9.0 - k / 1000 for k in records[unit].series("iteration")]
        records = doctored(records, unit, series={"to_optimum": far})
    assert similar_iterations(records).verdict is Verdict.OPEN


def with_times(records, times):
    """The records, with all iterations of a method taking so many seconds: optimizer, plain."""
    timed = records[TIMING].configuration["runs"]
    turns = [int(i) for i in records[TIMING].series("run")]
    seconds = [times[timed[i]["method"]][timed[i]["plain"]] for i in turns]
    for i in range(len(timed)):
        seconds[turns.index(i)] = 1e3  # a disturbance
    return doctored(records, TIMING, series={"seconds": seconds})


def test_the_claims_about_time_rest_on_the_timing(smoke):
    times = dict.fromkeys(LANDINGS, (5e-4, 1e-4)) | dict.fromkeys(RETRACTION_NAMES, (5e-4, 2e-4))
    records = with_times(smoke[0].records, times)
    for dtype in DTYPES:
        assert times_per_iteration(records, LANDINGS, dtype) == dict.fromkeys(LANDINGS, 5e-4)
        assert times_per_iteration(records, ["qr"], dtype, plain=True) == {"qr": 2e-4}
    by_optimizer, by_formula = (
        procrustes.landing_is_faster(TIMING, PROCRUSTES_METHODS, plain, records)
        for plain in (False, True)
    )
    assert by_optimizer.verdict is Verdict.FAILS
    assert by_formula.verdict is Verdict.HOLDS
    assert "100 µs" in by_formula.measured
    assert "Cayley 2.00, QR 2.00" in by_formula.measured
    one_is_as_fast = with_times(records, {**times, "polar": (5e-4, 1e-4)})
    slow = procrustes.landing_is_faster(TIMING, PROCRUSTES_METHODS, True, one_is_as_fast)
    assert slow.verdict is Verdict.FAILS


def test_the_papers_claim_about_time_rests_on_textbook_formulas(smoke):
    records = smoke[0].records
    is_faster = claim("Since one iteration").check
    for factor, verdict in ((2.0, Verdict.HOLDS), (1.04, Verdict.FAILS)):
        runs = records[PAPER_TIMING].configuration["runs"]
        turns = records[PAPER_TIMING].series("run")
        seconds = [1e-4 * (1 if runs[int(i)]["method"] == "landing" else factor) for i in turns]
        timed = doctored(records, PAPER_TIMING, series={"seconds": seconds})
        assert is_faster(timed).verdict is verdict


@pytest.mark.parametrize(("missing", "count"), [("qr-textbook-float64", 1), (TIMING, 1)])
def test_without_its_records_a_claim_is_not_decided(smoke, missing, count):
    records = smoke[0].records
    fewer = Records({name: r for name, r in records.items() if name != missing})
    open_claims = [
        c
        for c in EXPERIMENTS["procrustes"].claims
        if c.judge(fewer).measured == f"the run {missing} is missing"
    ]
    assert len(open_claims) == count
    assert all(c.judge(fewer).verdict is Verdict.OPEN for c in open_claims)


def test_methods_are_compared_up_to_an_iteration_that_all_recorded(smoke):
    records = smoke[0].records
    unit = unit_name("polar", "float32")
    record = records[unit]
    kept = [i for i, k in enumerate(record.series("iteration")) if k < 100]
    series = {name: [y[i] for i in kept] for name, y in record.result.series.items()}
    series["iteration"][-1] += 0.5  # the others have no such point
    cut_runs = compared(doctored(records, unit, series=series), "float32", PROCRUSTES_METHODS)
    assert list(cut_runs) == list(PROCRUSTES_METHODS)
    for cut in cut_runs.values():
        assert cut.series("iteration")[-1] == series["iteration"][-2]
        assert len({len(y) for y in cut.result.series.values()}) == 1


def test_a_series_that_still_falls_decides_nothing(smoke):
    record = smoke[0].records["landing-float64"]
    iterations = record.series("iteration")
    falling = [math.exp(-k / 100) for k in iterations]
    result = replace(record.result, series={"iteration": iterations, "y": falling})
    record = replace(record, result=result)
    assert settles(record, "y", 1e-3) is Verdict.OPEN
    assert settles(record, "y", 0.9) is Verdict.HOLDS
    flat = replace(result, series={**result.series, "y": [1.0] * len(iterations)})
    assert settles(replace(record, result=flat), "y", 1e-3) is Verdict.FAILS


@pytest.mark.parametrize("figure", range(3))
def test_figures_show_every_run_in_four_panels(smoke, figure):
    run, _ = smoke
    dtype = ("float32", "float64", "float64")[figure]
    methods = (PAPER_METHODS, PAPER_METHODS, LANDINGS)[figure]
    panels = EXPERIMENTS["procrustes"].figures[figure].draw(run.records).axes
    assert len(panels) == 4
    names = [("seconds", "to_optimum"), ("iteration", "to_optimum")]
    names += [("seconds", "to_manifold"), ("iteration", "to_manifold")]
    for axes, (x, y) in zip(panels, names, strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        curves = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
        for method, curve in zip(methods, curves, strict=True):
            recorded = run.records[unit_name(method, dtype)]
            assert curve.get_label() == STYLES[method].label
            assert list(curve.get_ydata()) == list(recorded.series(y))[1:]
            if x == "iteration":
                assert list(curve.get_xdata()) == list(recorded.series(x))[1:]


def test_figures_have_the_time_of_the_timing(smoke):
    times = {m: (i + 1, 99) for i, m in enumerate((*LANDINGS, *RETRACTION_NAMES))}
    records = with_times(smoke[0].records, times)
    lines = procrustes.draw_landings("float32", records).axes[0].get_lines()
    curves = [c for c in lines if c.get_label()[0] != "_"]
    for method, curve in zip(LANDINGS, curves, strict=True):
        iterations = records[unit_name(method, "float32")].series("iteration")
        assert list(curve.get_xdata()) == [times[method][0] * k for k in iterations[1:]]


def test_a_run_is_recorded_whole(smoke):
    run, store = smoke
    assert not run.missing
    for name, record in run.records.items():
        assert len({len(series) for series in record.result.series.values()}) == 1
        assert store.find(record.request).record == record
        assert ("seconds" in record.result.series) == (name in (TIMING, PAPER_TIMING))
