import math
from dataclasses import replace
from itertools import pairwise
from time import sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ortholand
from ortholand.experiments import EXPERIMENTS, procrustes
from ortholand.experiments.procrustes import (
    DTYPES,
    METHODS,
    Descent,
    Task,
    make_problem,
    marks,
    run,
    settles,
    unit_name,
)
from ortholand.experiments.records import Records
from ortholand.experiments.spec import PRESETS, Context, Verdict

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
TASK = Task(
    method="landing",
    dtype="float64",
    p=6,
    iterations=20,
    lr=0.1,
    lam=1.0,
    eps=0.5,
    momentum=0.0,
    scaled=True,
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
        A = ortholand.relative_gradient(X, descent.problem.grad(X))
        if momentum and k > 1:
            A = A + momentum * descent.optimizer.state[descent.X]["momentum_buffer"]
        L = (A + X @ X.mT - torch.eye(6, dtype=X.dtype)) @ X
        descent.advance_to(k)
        torch.testing.assert_close(X - descent.X.detach(), step * L)
        steps.append(step)
    assert (min(steps) < TASK.lr) == (not scaled or momentum > 0)


def test_unscaled_is_the_cost_as_printed():
    problem = make_problem(replace(TASK, scaled=False), CONTEXT, torch.float64)
    printed = ortholand.problems.Procrustes.gaussian(6, seed=3)
    X = ortholand.random_orthogonal(6, 6, seed=0, dtype=torch.float64)
    cost = torch.linalg.matrix_norm(X @ printed.A - printed.B) ** 2
    torch.testing.assert_close(problem.fun(X), cost)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_curvature_is_the_smallest_eigenvalue_of_the_hessian(seed):
    p = 4
    descent = Descent(replace(TASK, p=p), replace(CONTEXT, seed=seed))
    X = descent.optimum
    basis = []
    for i in range(p):
        for j in range(i):
            E = torch.zeros(p, p, dtype=X.dtype)
            E[i, j], E[j, i] = 0.5**0.5, -(0.5**0.5)
            basis.append(E)
    images = [ortholand.relative_hessian(X, E, fun=descent.referee.fun) for E in basis]
    H = torch.tensor([[float((E * HF).sum()) for HF in images] for E in basis])
    assert descent.curvature() == pytest.approx(float(torch.linalg.eigvalsh(H)[0]), rel=1e-4)


def test_time_does_not_include_measuring(monkeypatch):
    def slow_distance(X):
        sleep(0.005)
        return ortholand.distance(X)

    monkeypatch.setattr(procrustes, "distance", slow_distance)
    descent = Descent(TASK, CONTEXT)
    descent.advance_to(1)
    before = descent.stopwatch.seconds
    descent.measure()
    assert descent.stopwatch.seconds == before
    fastest = math.inf
    for k in range(2, 22):
        before = descent.stopwatch.seconds
        descent.advance_to(k)
        fastest = min(fastest, descent.stopwatch.seconds - before)
    assert fastest < 0.005


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    first, second = run(TASK, CONTEXT), run(TASK, CONTEXT)
    other = run(TASK, replace(CONTEXT, seed=4))
    for name, series in first.series.items():
        if name != "seconds":
            assert series == second.series[name]
    assert first.values == second.values
    assert first.series["to_optimum"] != other.series["to_optimum"]


def test_an_iterate_that_is_not_a_number_is_not_passed_over():
    descent = Descent(TASK, CONTEXT)
    good = descent.X.detach().clone()
    descent.X.data.fill_(math.nan)
    descent.advance_to(1)
    descent.X.data.copy_(good)
    descent.advance_to(2)
    assert math.isnan(descent.largest_distance)


def test_ticks_add_up_to_the_iterations():
    ticks = []
    run(TASK, replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == TASK.iterations


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_plans_every_method_in_every_precision(preset):
    units = EXPERIMENTS["procrustes"].units(preset)
    assert {u.name for u in units} == {unit_name(m, d) for m in METHODS for d in DTYPES}
    assert all(u.steps == u.task.iterations for u in units)


def test_the_paper_preset_has_the_papers_settings():
    settings = EXPERIMENTS["procrustes"].settings["paper"]
    assert (settings.p, settings.lr, settings.lam, settings.eps) == (40, 0.1, 1.0, 0.5)


# On the smoke run.


def verdicts(records):
    claims = EXPERIMENTS["procrustes"].claims
    return {c.check: c.judge(records).verdict for c in claims}


def test_the_claims_of_the_smoke_run(smoke):
    run, _ = smoke
    found = verdicts(run.records)
    assert found[procrustes.lands] is Verdict.HOLDS
    assert found[procrustes.unscaled_lands] is Verdict.FAILS
    assert found[procrustes.unscaled_rides_boundary] is Verdict.HOLDS
    assert found[procrustes.stays_in_ball] is Verdict.HOLDS
    assert found[procrustes.local_rate] is Verdict.HOLDS
    assert found[procrustes.momentum_is_faster] is Verdict.HOLDS


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
        procrustes.lands: dict(series={"to_manifold": at_one}),
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


def test_a_series_that_still_falls_decides_nothing(smoke):
    record = smoke[0].records["landing-float64"]
    iterations = record.series("iteration")
    falling = [math.exp(-k / 1000) for k in iterations]
    result = replace(record.result, series={"iteration": iterations, "y": falling})
    record = replace(record, result=result)
    assert settles(record, "y", 1e-3) is Verdict.OPEN
    assert settles(record, "y", 0.9) is Verdict.HOLDS
    flat = replace(result, series={**result.series, "y": [1.0] * len(iterations)})
    assert settles(replace(record, result=flat), "y", 1e-3) is Verdict.FAILS


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_figure_shows_every_run_in_four_panels(smoke, dtype):
    run, _ = smoke
    figure = procrustes.draw(dtype, run.records)
    panels = figure.axes
    assert len(panels) == 4
    for axes in panels:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        curves = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
        assert len(curves) == len(METHODS)
    recorded = run.records[unit_name("landing", dtype)]
    assert list(panels[3].get_lines()[0].get_ydata()) == list(recorded.series("to_manifold"))[1:]


def test_a_run_is_recorded_whole(smoke):
    run, store = smoke
    assert not run.missing
    for record in run.records.values():
        n = len(record.series("iteration"))
        assert all(len(series) == n for series in record.result.series.values())
        assert store.find(record.request).record == record
        assert list(record.series("seconds")) == sorted(record.series("seconds"))
