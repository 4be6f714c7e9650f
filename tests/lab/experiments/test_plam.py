import math
from dataclasses import asdict, replace

import pytest
import torch

from ortholand.fields import FIELDS, plam_field
from ortholand.geometry import distance
from ortholand_lab.experiments import plam
from ortholand_lab.experiments.plam import (
    EXPLODED,
    INFEASIBLE_METHODS,
    PLAM,
    Example,
    PlamSettings,
    RandomProblems,
    corrected_fate,
    example_gradient,
    fate,
    fates,
    has_exploded,
    printed_fate,
    random_gradient,
    run,
)
from ortholand_lab.study.figures import house_style
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import marks

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
PROBLEMS = RandomProblems(
    method="plam", problems=20, drawn=3, iterations=30, lr=1e-3, lam=1.0, eps=0.5
)
EXAMPLE = Example(
    method="plam",
    starts=((0.5, 0.1), (0.9, 0.1), (0.9, -0.1), (math.sqrt(0.5), 0.1)),
    iterations=1500,
    lr=0.01,
    lam=1.0,
    eps=0.5,
)


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_both_parts_by_both_methods(preset):
    units = PLAM.units(preset)
    assert {u.name for u in units} == {
        f"{part}-{m}" for part in ("problems", "example") for m in INFEASIBLE_METHODS
    }
    assert all(u.steps == u.task.iterations for u in units)


def test_the_papers_settings():
    s = PLAM.settings["paper"]
    assert (s.drawn, s.lr, s.lam, s.problems) == (10, 1e-3, 1.0, 1000)


def test_the_example_has_alphas_on_both_sides_of_both_boundaries():
    alphas = PlamSettings().alphas
    assert min(alphas) < math.sqrt(0.5) < 1 < max(alphas)
    assert {math.sqrt(0.5), 1.0} <= set(alphas)


def test_gradients_are_those_of_the_costs():
    generator = torch.Generator().manual_seed(CONTEXT.seed)
    A, B = torch.randn(2, 4, 2, 2, generator=generator, dtype=torch.float64)
    X = torch.randn(4, 2, 2, generator=generator, dtype=torch.float64)
    alphas = torch.tensor([0.5, 0.6, 0.9, 1.2], dtype=torch.float64)
    target = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    cases = (
        (random_gradient(4, CONTEXT), lambda X: (A @ X - B).square().sum()),
        (example_gradient(alphas), lambda X: (alphas[:, None, None] * X - target).square().sum()),
    )
    for gradient, cost in cases:
        torch.testing.assert_close(gradient(X), torch.func.grad(cost)(X))


@pytest.mark.parametrize("method", INFEASIBLE_METHODS)
def test_the_problems_are_run_by_the_methods_field(method):
    task = replace(PROBLEMS, method=method)
    result = run(task, CONTEXT)
    gradient, field = random_gradient(20, CONTEXT), FIELDS[method]
    X = torch.eye(2, dtype=torch.float64).repeat(20, 1, 1)
    distances = [distance(X)]
    for _ in range(30):
        X = X - 1e-3 * field(X, gradient(X), 1.0)
        distances.append(distance(X))
    recorded = marks(30)
    assert list(result.series["iteration"]) == recorded
    for i in range(3):
        expected = [distances[k][i].item() for k in recorded]
        assert result.series[f"distance_{i}"] == pytest.approx(expected, abs=1e-14)
    assert result.values["largest_distance"] == pytest.approx(torch.stack(distances).max().item())
    near = [(distances[k] < 1e-3).double().mean().item() for k in recorded]
    assert list(result.series["near"]) == near


def test_what_is_not_a_number_has_exploded():
    d = torch.tensor([0.0, EXPLODED / 2, 2 * EXPLODED, math.inf, math.nan])
    assert has_exploded(d).tolist() == [False, False, True, True, True]


def test_an_explosion_is_counted():
    result = run(replace(PROBLEMS, lr=10.0), CONTEXT)
    assert result.series["exploded"][-1] > 0.5
    assert not result.values["largest_distance"] < EXPLODED


def test_the_examples_field_is_the_corrected_one():
    alpha, x = 0.8, 1.3
    X = torch.diag(torch.tensor([1.0, x], dtype=torch.float64))
    G = example_gradient(torch.tensor([alpha], dtype=torch.float64))(X[None])[0]
    expected = torch.zeros_like(X)
    expected[1, 1] = (2 * alpha**2 - 0.7) * (x - x**3)
    torch.testing.assert_close(plam_field(X, G, 0.7), expected)


def test_fates_of_the_example():
    series = run(EXAMPLE, CONTEXT).series
    ends = [series[f"x_{i}"][-1] for i in range(4)]
    starts = [1 + delta for _, delta in EXAMPLE.starts]
    found = [fate(x0, x) for x0, x in zip(starts, ends, strict=True)]
    assert found == ["lands", "explodes", "becomes singular", "stays"]
    assert found == [corrected_fate(*start, 1.0) for start in EXAMPLE.starts]
    assert [series[f"x_{i}"][0] for i in range(4)] == starts
    assert series["iteration"][-1] == EXAMPLE.iterations


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (math.nan, "explodes"),
        (math.inf, "explodes"),
        (1e4, "explodes"),
        (1.1, "stays"),
        (1.0005, "lands"),
        (0.01, "becomes singular"),
        (1.3, "undecided"),
    ],
)
def test_fate(end, expected):
    assert fate(1.1, end) == expected


def test_the_printed_and_the_corrected_proposition():
    for alpha, printed, corrected in ((0.5, "explodes", "lands"), (1.2, "lands", "explodes")):
        assert printed_fate(alpha, 0.1, 1.0) == printed
        assert corrected_fate(alpha, 0.1, 1.0) == corrected
    assert printed_fate(1.0, 0.1, 1.0) == corrected_fate(1.0, 0.1, 2.0) == "stays"
    assert corrected_fate(1.2, -0.1, 1.0) == printed_fate(0.5, -0.1, 1.0) == "becomes singular"


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    first, second = run(PROBLEMS, CONTEXT), run(PROBLEMS, CONTEXT)
    assert first == second
    assert run(PROBLEMS, replace(CONTEXT, seed=4)) != first


@pytest.mark.parametrize(
    "task", [PROBLEMS, replace(EXAMPLE, iterations=7)], ids=["problems", "example"]
)
def test_ticks_add_up_to_the_iterations(task):
    ticks = []
    run(task, replace(CONTEXT, tick=ticks.append))
    assert sum(ticks) == task.iterations


# Claims, on records made by hand.


def record(unit, task, series, values):
    options = RunOptions(preset="quick", seed=0, device="cpu", threads=1)
    request = Request("plam", 1, unit, options, asdict(task), {})
    return Record(request, Result(series, values), {}, 1.0, "")


def hand_made(
    *, plam=(0.74, 0.23), landing=(0.0, 1.0), largest=0.01, iterations=10_000, problems=1000
):
    """Records with these final shares (exploded, near), and fates of the example as corrected."""
    records = {}
    for method, shares in (("plam", plam), ("landing", landing)):
        task = replace(PROBLEMS, method=method, iterations=iterations, problems=problems)
        ends = [math.inf, 1e-5, 0.5] if method == "plam" else [1e-5] * 3
        series = {"iteration": [0, 1, iterations]}
        series |= {"exploded": [0, 0, shares[0]], "near": [1, 1, shares[1]]}
        series |= {f"distance_{i}": [0, 1e-4, end] for i, end in enumerate(ends)}
        values = {"largest_distance": largest if method == "landing" else math.inf}
        records[f"problems-{method}"] = record(f"problems-{method}", task, series, values)
        records[f"example-{method}"] = example_record(method)
    return Records(records)


def example_record(method, **ends):
    task = replace(EXAMPLE, method=method)
    finals = [1.0, 1e9, 0.0, 1.1] if method == "plam" else [1.0] * 4
    for i, end in ends.items():
        finals[int(i.removeprefix("x"))] = end
    series = {"iteration": [0, 1500]}
    for i, (_, delta) in enumerate(EXAMPLE.starts):
        series[f"x_{i}"] = [1 + delta, finals[i]]
    return record(f"example-{method}", task, series, {})


def test_the_claims_on_shares_as_they_are():
    found = [c.judge(hand_made()).verdict for c in PLAM.claims]
    H, F = Verdict.HOLDS, Verdict.FAILS
    assert found == [F, H, H, H, F, H, H]


def test_plam_always_explodes_only_if_it_does_on_all():
    finding = plam.always_explodes(hand_made(plam=(1.0, 0.0)))
    assert finding.verdict is Verdict.HOLDS
    assert plam.always_explodes(hand_made(plam=(0.999, 0.0))).verdict is Verdict.FAILS
    assert plam.always_explodes(hand_made(iterations=1000)).verdict is Verdict.OPEN
    assert "1 and 1 of the first 3" in finding.measured


def test_the_share_of_explosions():
    for shares in ((0.6, 0.23), (0.9, 0.1), (0.74, 0.1)):
        assert plam.mostly_explodes(hand_made(plam=shares)).verdict is Verdict.FAILS
    assert plam.mostly_explodes(hand_made(problems=100)).verdict is Verdict.OPEN
    assert plam.mostly_explodes(hand_made(iterations=1000)).verdict is Verdict.OPEN


def test_landing_must_land_on_every_problem():
    assert plam.landing_always_lands(hand_made(landing=(0.0, 0.999))).verdict is Verdict.FAILS
    short = hand_made(landing=(0.0, 0.999), iterations=1000)
    assert plam.landing_always_lands(short).verdict is Verdict.OPEN


@pytest.mark.parametrize("largest", [0.51, math.nan])
def test_landing_must_stay_in_its_ball(largest):
    assert plam.landing_stays_near(hand_made(largest=largest)).verdict is Verdict.FAILS


def test_a_fate_that_is_not_as_said_contradicts_the_proposition():
    (check,) = (c for c in PLAM.claims if c.statement.startswith("The example, corrected"))
    for end, verdict in ((1e9, Verdict.FAILS), (1.3, Verdict.OPEN)):
        records = Records({**hand_made(), "example-plam": example_record("plam", x0=end)})
        assert check.judge(records).verdict is verdict
    off = Records({**hand_made(), "example-landing": example_record("landing", x2=0.9)})
    assert plam.example_lands(off).verdict is Verdict.FAILS


def test_fates_are_listed_by_start():
    run_of = hand_made()["example-plam"]
    assert fates(run_of)[(0.9, -0.1)] == "becomes singular"
    measured = plam.example_goes(corrected_fate, hand_made()).measured
    assert "delta 0.1: alpha 0.5 lands, alpha 0.9 explodes, alpha 0.707 stays" in measured


def test_without_its_records_a_claim_is_not_decided():
    assert {c.judge(Records({})).verdict for c in PLAM.claims} == {Verdict.OPEN}


def test_the_figures_show_every_problem_and_every_start():
    with house_style():
        paths, shares = PLAM.figures[0].draw(hand_made()).axes
        left, right = PLAM.figures[1].draw(hand_made()).axes
    assert len(paths.get_lines()) == 6
    ends = [line.get_ydata()[-1] for line in paths.get_lines()]
    assert ends == [EXPLODED, 1e-5, 0.5, 1e-5, 1e-5, 1e-5]  # and nothing that is not finite
    curves = {line.get_label(): list(line.get_ydata()) for line in shares.get_lines()}
    assert curves["PLAM: exploded"] == [0, 74]
    assert curves["landing: near"] == [100, 100]
    for axes, method in ((left, "plam"), (right, "landing")):
        drawn = [list(line.get_ydata()) for line in axes.get_lines()]
        record = hand_made()[f"example-{method}"]
        assert drawn == [list(record.series(f"x_{i}")) for i in range(4)]


def test_a_small_run_from_end_to_end(store, watcher):
    tiny = replace(PLAM, settings={"smoke": PlamSettings(problems=40, iterations=400)})
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    done = run_study(tiny, options, store, watcher)
    assert not done.missing
    assert all(store.find(r.request).record == r for r in done.records.values())
    found = [finding.verdict for _, finding in done.findings()]
    assert found[3:] == [Verdict.HOLDS, Verdict.FAILS, Verdict.HOLDS, Verdict.HOLDS]
    with house_style():
        assert all(figure.draw(done.records).axes for figure in tiny.figures)
