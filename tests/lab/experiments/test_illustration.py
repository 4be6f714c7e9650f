import math
from dataclasses import replace

import pytest
import torch

from ortholand.fields import landing_field
from ortholand.geometry import distance
from ortholand_lab.experiments import illustration
from ortholand_lab.experiments.illustration import (
    AWAY,
    FIELD,
    ILLUSTRATION,
    LANDING,
    RETRACTION,
    SINGULAR,
    IllustrationSettings,
    in_plane,
    make_problem,
    plan,
    rotation,
    run,
)
from ortholand_lab.study.figures import STYLES, house_style
from ortholand_lab.study.records import Records, RunOptions, Store
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
PATHS = (LANDING, RETRACTION, *AWAY, SINGULAR)


class Silent:
    def start(self, study, units, steps): ...
    def advance(self, study, steps): ...
    def unit_done(self, study, unit, outcome): ...


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    store = Store(tmp_path_factory.mktemp("illustration"))
    return run_study(ILLUSTRATION, options, store, Silent()).records


def doctored(records, unit, **series):
    record = records[unit]
    result = replace(record.result, series={**record.result.series, **series})
    return Records({**records, unit: replace(record, result=result)})


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_the_field_and_every_path(preset):
    units = ILLUSTRATION.units(preset)
    assert [u.name for u in units] == [FIELD, *PATHS]
    assert not any(u.timed for u in units)


def test_both_paths_of_the_paper_start_at_the_same_rotation():
    tasks = {u.name: u.task for u in plan(IllustrationSettings())}
    assert replace(tasks[LANDING], method=RETRACTION) == tasks[RETRACTION]
    assert tasks[LANDING].radius == 1
    assert tasks[AWAY[0]].radius < 1 < tasks[AWAY[1]].radius


def test_a_rotation_is_at_its_angle_in_the_figure():
    X = rotation(0.3, CONTEXT)
    assert distance(X) < 1e-15
    assert (X[0, 0].item(), X[0, 1].item()) == pytest.approx((math.cos(0.3), math.sin(0.3)))
    assert torch.linalg.det(X).item() == pytest.approx(1)


def test_the_cost_grows_with_the_angle_to_go():
    problem = make_problem(2.0, CONTEXT)
    cost = problem.fun(rotation(0.5, CONTEXT)).item()
    assert cost == pytest.approx(2 * (1 - math.cos(1.5)))


def test_landings_path_is_that_of_the_formula():
    settings = IllustrationSettings(iterations=5, lr=0.1)
    series = run(plan(settings)[1].task, CONTEXT).series
    X, target = rotation(settings.start, CONTEXT), rotation(settings.target, CONTEXT)
    for k in range(6):
        assert series["x"][k] == pytest.approx(X[0, 0].item(), abs=1e-14)
        assert series["y"][k] == pytest.approx(X[0, 1].item(), abs=1e-14)
        assert series["to_optimum"][k] == pytest.approx((X - target).norm().item())
        G = X - target
        psi = (G @ X.mT - X @ G.mT) / 2
        X = X - 0.1 * (psi + X @ X.mT - torch.eye(2, dtype=X.dtype)) @ X


def test_the_retractions_path_turns_by_the_gradient():
    settings = IllustrationSettings(iterations=3)
    series = run(plan(settings)[2].task, CONTEXT).series
    angle = settings.start
    for k in range(4):
        assert (series["x"][k], series["y"][k]) == pytest.approx((math.cos(angle), math.sin(angle)))
        angle += settings.lr * math.sin(settings.target - angle)


def test_the_arrows_are_the_two_parts_of_the_landing_field():
    task = plan(IllustrationSettings(lam=0.7))[0].task
    columns = {
        k: torch.tensor(v, dtype=torch.float64) for k, v in run(task, CONTEXT).series.items()
    }
    assert len(columns["x"]) == len(task.radii) * task.directions
    X = in_plane(columns["x"], columns["y"])
    radii = (columns["x"].square() + columns["y"].square()).sqrt()
    torch.testing.assert_close(radii.unique().round(decimals=9).unique().tolist(), [*task.radii])
    L = landing_field(X, make_problem(task.target, CONTEXT).grad(X), 0.7)
    torch.testing.assert_close(columns["tangent_x"] + columns["normal_x"], L[:, 0, 0])
    torch.testing.assert_close(columns["tangent_y"] + columns["normal_y"], L[:, 0, 1])
    tangent = in_plane(columns["tangent_x"], columns["tangent_y"])
    normal = in_plane(columns["normal_x"], columns["normal_y"])
    torch.testing.assert_close(columns["scalar_product"], (tangent * normal).sum((-2, -1)))
    sizes = torch.linalg.matrix_norm(tangent) * torch.linalg.matrix_norm(normal)
    torch.testing.assert_close(columns["product_of_norms"], sizes)


def test_ticks_add_up_to_the_steps():
    for unit in plan(IllustrationSettings(iterations=4)):
        ticks = []
        run(unit.task, replace(CONTEXT, tick=ticks.append))
        assert sum(ticks) == unit.steps


def test_the_claims(records):
    found = {c.check: c.judge(records).verdict for c in ILLUSTRATION.claims}
    assert found.pop(illustration.lands_from_anywhere) is Verdict.FAILS
    assert set(found.values()) == {Verdict.HOLDS}


def test_claims_can_fail(records):
    n = len(records[LANDING].series("x"))
    cases = {
        illustration.both_converge: (RETRACTION, dict(to_optimum=[1e-3] * n)),
        illustration.only_landing_leaves: (LANDING, dict(to_manifold=[1e-12] * n)),
        illustration.lands_from_full_rank: (AWAY[1], dict(to_manifold=[0.3] * n)),
        illustration.picture_is_complete: (LANDING, dict(out_of_plane=[1e-3] * n)),
    }
    for check, (unit, series) in cases.items():
        assert check(doctored(records, unit, **series)).verdict is Verdict.FAILS
    off = doctored(records, RETRACTION, to_manifold=[1e-3] * n)
    assert illustration.only_landing_leaves(off).verdict is Verdict.FAILS
    never_back = doctored(records, LANDING, to_manifold=[0.0] + [0.3] * (n - 1))
    assert illustration.only_landing_leaves(never_back).verdict is Verdict.FAILS
    on_all_along = doctored(records, AWAY[0], to_manifold=[0.0] * n)
    assert illustration.lands_from_full_rank(on_all_along).verdict is Verdict.FAILS
    lands_too = doctored(records, SINGULAR, to_manifold=[1.4] * (n - 1) + [0.0])
    assert illustration.lands_from_full_rank(lands_too).verdict is Verdict.FAILS
    assert illustration.lands_from_anywhere(lands_too).verdict is Verdict.HOLDS


def test_parts_that_are_not_orthogonal_are_noticed(records):
    products = list(records[FIELD].series("scalar_product"))
    products[7] = 1e-6
    changed = doctored(records, FIELD, scalar_product=products)
    assert illustration.parts_are_orthogonal(changed).verdict is Verdict.FAILS
    nothing = doctored(records, FIELD, product_of_norms=[0.0] * len(products))
    assert illustration.parts_are_orthogonal(nothing).verdict is Verdict.FAILS


@pytest.mark.parametrize("missing", [FIELD, *PATHS])
def test_without_its_records_a_claim_is_not_decided(records, missing):
    fewer = Records({name: r for name, r in records.items() if name != missing})
    findings = [c.judge(fewer) for c in ILLUSTRATION.claims]
    assert any(missing in f.measured and f.verdict is Verdict.OPEN for f in findings)


def test_the_figure_shows_every_path_and_every_arrow(records):
    with house_style():
        plane, distances = ILLUSTRATION.figures[0].draw(records).axes
    arrows = plane.collections[0]
    assert len(arrows.U) == len(records[FIELD].series("x"))
    tangent, normal = (records[FIELD].series(name) for name in ("tangent_x", "normal_x"))
    rows = zip(arrows.U, tangent, normal, strict=True)
    assert all(drawn * -(t + n) >= 0 for drawn, t, n in rows)
    curves = {line.get_label(): line for line in plane.get_lines()}
    for method in (LANDING, RETRACTION):
        curve = curves[STYLES[method].label]
        assert list(curve.get_xdata()) == list(records[method].series("x"))
        assert list(curve.get_ydata()) == list(records[method].series("y"))
    assert {"landing, from inside", "landing, from outside"} <= set(curves)
    assert distances.get_yscale() == "log"
    assert min(min(line.get_ydata()) for line in distances.get_lines()) > 0
