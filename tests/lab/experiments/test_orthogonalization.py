from dataclasses import asdict, replace

import pytest
import torch

from ortholand.geometry import polar_projection
from ortholand_lab.experiments import orthogonalization
from ortholand_lab.experiments.orthogonalization import (
    AFTER,
    CARRIED,
    DTYPES,
    LANDING,
    ORTHOGONALIZATION,
    PAPER_METHODS,
    STEP_METHODS,
    OneStepRun,
    OneStepSettings,
    draw,
    gamma_grid,
    plan,
    run,
    step,
)
from ortholand_lab.study.figures import STYLES, house_style
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict

METHODS = tuple(dict.fromkeys((*STEP_METHODS, *PAPER_METHODS)))
CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
TASK = OneStepRun(
    method=LANDING,
    dtype="float64",
    p=20,
    sigma=1e-4,
    lr=0.3,
    lam=1.0,
    repetitions=3,
    smallest=1e-5,
    largest=10.0,
    per_decade=1,
)


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_in_every_precision(preset):
    units = ORTHOGONALIZATION.units(preset)
    assert [u.name for u in units] == [f"{m}-{d}" for d in DTYPES for m in METHODS]
    assert all(u.steps == len(gamma_grid(u.task)) for u in units)


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_the_papers_settings(preset):
    s = ORTHOGONALIZATION.settings[preset]
    assert (s.p, s.sigma, s.lr, s.lam, s.repetitions) == (100, 1e-4, 0.3, 1.0, 50)


def test_gammas_are_even_on_a_logarithmic_axis():
    gammas = gamma_grid(OneStepSettings(smallest=1e-2, largest=1e1, per_decade=2))
    assert gammas == pytest.approx([10 ** (-2 + i / 2) for i in range(7)])


def test_starts_and_gradients_have_the_sizes_asked_for():
    generator = torch.Generator().manual_seed(0)
    X, A = draw(replace(TASK, p=60, repetitions=20), 0.5, generator)
    E = X - torch.eye(60)
    assert E.std().item() == pytest.approx(1e-4, rel=0.02)
    assert torch.equal(A, -A.mT)
    rows, columns = torch.tril_indices(60, 60, -1)
    below = A[:, rows, columns]
    assert below.std().item() == pytest.approx(0.5, rel=0.02)


def test_the_step_of_landing_is_the_papers():
    X, A = draw(TASK, 0.1, torch.Generator().manual_seed(0))
    I = torch.eye(20)  # noqa: E741
    torch.testing.assert_close(step(TASK, X, A), X - 0.3 * (A + X @ X.mT - I) @ X)


def test_moving_and_then_landing_is_a_step_of_newton_and_schulz():
    X, A = draw(TASK, 0.1, torch.Generator().manual_seed(0))
    Y = X - 0.3 * A @ X
    expected = 1.5 * Y - 0.5 * Y @ Y.mT @ Y
    torch.testing.assert_close(step(replace(TASK, method=AFTER), X, A), expected)


def test_all_methods_step_in_the_same_direction():
    X, A = draw(TASK, 1e-3, torch.Generator().manual_seed(0))
    X = polar_projection(X)
    for method in METHODS:
        moved = step(replace(TASK, method=method), X, A)
        torch.testing.assert_close(moved, X - 0.3 * A @ X, rtol=0, atol=1e-5)


def test_errors_are_means_over_the_draws():
    result = run(TASK, CONTEXT)
    generator = torch.Generator().manual_seed(CONTEXT.seed)
    for i, gamma in enumerate(gamma_grid(TASK)):
        X, A = draw(TASK, gamma, generator)
        before = [float(torch.linalg.matrix_norm(M.mT @ M - torch.eye(20))) for M in X]
        after = [
            float(torch.linalg.matrix_norm(M.mT @ M - torch.eye(20))) for M in step(TASK, X, A)
        ]
        assert result.series["gamma"][i] == gamma
        assert result.series["before"][i] == pytest.approx(sum(before) / 3)
        assert result.series["after"][i] == pytest.approx(sum(after) / 3)


def test_all_methods_start_from_the_same_draws():
    before = [run(replace(TASK, method=m), CONTEXT).series["before"] for m in METHODS]
    assert all(b == before[0] for b in before)
    other = run(TASK, replace(CONTEXT, seed=4)).series["before"]
    assert other != before[0]


def test_ticks_add_up_to_the_gammas():
    ticks = []
    run(TASK, replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == len(gamma_grid(TASK)) == 7


# Claims, on records made by hand.

GAMMAS = (1e-5, 1e-2, 1e4)
AS_THEY_ARE = {
    LANDING: [0.004, 0.01, 1e9],
    AFTER: [1e-5, 1e-5, 1e9],
    "exponential": [0.01, 0.01, 0.01],
    "cayley": [0.01, 0.01, 0.01],
    "polar": [1e-14, 1e-14, 1e-14],
    "qr": [1e-14, 1e-14, 1e-14],
}


def hand_made(**changes):
    """Records with an error of 0.01 before the step; changes by the name of a unit."""
    records = {}
    for unit in plan(OneStepSettings()):
        after = changes.get(
            unit.name.replace("-", "_"), AS_THEY_ARE[unit.task.method.removesuffix("-textbook")]
        )
        series = {"gamma": list(GAMMAS), "before": [0.01] * 3, "after": after}
        options = RunOptions(preset="quick", seed=0, device="cpu", threads=1)
        request = Request("orthogonalization", 1, unit.name, options, asdict(unit.task), {})
        records[unit.name] = Record(request, Result(series, {}), {}, 1.0, "")
    return Records(records)


def verdicts(records):
    return [c.judge(records).verdict for c in ORTHOGONALIZATION.claims]


def statement(source, part):
    (found,) = [c for c in ORTHOGONALIZATION.claims if c.source == source and part in c.statement]
    return found


def claimed(part):
    return statement("paper", part).check


def test_the_claims_on_errors_as_they_are():
    records = hand_made()
    failing = [c for c in ORTHOGONALIZATION.claims if c.judge(records).verdict is Verdict.FAILS]
    assert failing == [statement("paper", "large enough"), statement("paper", "about 10")]
    assert set(verdicts(records)) == {Verdict.HOLDS, Verdict.FAILS}


@pytest.mark.parametrize(
    ("check", "unit", "errors"),
    [
        (claimed("projection"), "polar_textbook_float32", [1e-6, 1e-2, 1e-6]),
        (claimed("as it is."), "cayley_textbook_float64", [0.009, 0.01, 0.01]),
        (orthogonalization.carried_always, "exponential_float64", [0.01, 0.01, 0.011]),
        (claimed("corrects itself"), "landing_float64", [0.01, 0.01, 1.0]),
        (orthogonalization.landing_errs_when_large, "landing_float64", [0.004, 0.01, 0.009]),
        (orthogonalization.move_then_land, "landing_after_float64", [1e-3, 1e-3, 1.0]),
    ],
)
def test_claims_can_fail(check, unit, errors):
    assert check(hand_made()).verdict is Verdict.HOLDS
    assert check(hand_made(**{unit: errors})).verdict is Verdict.FAILS


def test_rounding_in_float32_is_told_but_does_not_contradict_the_correction():
    records = hand_made(exponential_float32=[0.01, 0.01, 0.08])
    finding = orthogonalization.carried_always(records)
    assert finding.verdict is Verdict.HOLDS
    assert "exponential in float32 8.0000 (from gamma = 1e+04 on)" in finding.measured
    increases = claimed("large enough")
    assert increases(records).verdict is Verdict.FAILS
    for count, verdict in ((1, Verdict.FAILS), (2, Verdict.HOLDS)):
        grown = {f"{m}_textbook_float32": [0.01, 0.01, 0.08] for m in CARRIED[:count]}
        assert increases(hand_made(**grown)).verdict is verdict


def test_ten_times_and_two_and_a_half_times_exclude_each_other():
    ten, corrected = statement("paper", "about 10"), statement("correction", "2.5 times")
    by_ten = hand_made(landing_float64=[0.001, 0.01, 1e9])
    assert ten.judge(by_ten).verdict is Verdict.HOLDS
    assert corrected.judge(by_ten).verdict is Verdict.FAILS
    assert corrected.judge(hand_made()).verdict is Verdict.HOLDS


def test_without_its_records_a_claim_is_not_decided():
    assert set(verdicts(Records({}))) == {Verdict.OPEN}


def test_a_real_step_reduces_the_error_as_corrected():
    series = run(replace(TASK, p=100), CONTEXT).series
    assert series["before"][0] / series["after"][0] == pytest.approx(2.5, rel=1e-3)
    carried = run(replace(TASK, method="exponential"), CONTEXT).series
    assert carried["after"] == pytest.approx(carried["before"], rel=1e-6)


def test_the_figure_has_a_panel_for_each_precision():
    records = hand_made(qr_textbook_float32=[1e-6, 2e-6, 3e-6])
    with house_style():
        panels = ORTHOGONALIZATION.figures[0].draw(records).axes
    assert [axes.get_title() for axes in panels] == list(DTYPES)
    for axes, expected in zip(panels, ([1e-14] * 3, [1e-6, 2e-6, 3e-6]), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        curves = {line.get_label(): line for line in axes.get_lines()}
        assert set(curves) >= {STYLES[method].label for method in PAPER_METHODS}
        assert list(curves["QR (textbook)"].get_ydata()) == expected
        assert list(curves["QR (textbook)"].get_xdata()) == list(GAMMAS)


def test_a_small_run_from_end_to_end(store, watcher):
    tiny = replace(
        ORTHOGONALIZATION, settings={"smoke": OneStepSettings(p=30, repetitions=2, per_decade=1)}
    )
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    done = run_study(tiny, options, store, watcher)
    assert not done.missing
    assert all(store.find(r.request).record == r for r in done.records.values())
    found = [finding.verdict for _, finding in done.findings()]
    assert found.count(Verdict.FAILS) == 2
    with house_style():
        assert all(figure.draw(done.records).axes for figure in tiny.figures)
