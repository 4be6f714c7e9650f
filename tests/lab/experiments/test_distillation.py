import math
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from matplotlib.figure import Figure

from ortholand_lab.experiments import distillation
from ortholand_lab.experiments.distillation import (
    DISTILLATION,
    FIGURE_ITERATIONS,
    FIGURE_METHODS,
    FIGURE_TIMING,
    LEARNING_RATES,
    PAPER_ITERATIONS,
    TIMED_RATE,
    WARM_UP,
    DistillationRun,
    DistillationSettings,
    FigureRun,
    Lesson,
    Point,
    begin,
    best_runs,
    figure_name,
    iteration_seconds,
    loss,
    plan,
    run,
    takes_longer,
    time_to,
)
from ortholand_lab.methods import (
    PAPER_METHODS,
    RETRACTION_METHODS,
    TRAINING_METHODS,
    TRIVIALIZATION_METHODS,
    is_adaptive,
)
from ortholand_lab.study.figures import house_style
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import TIMING, Timing

CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
TASK = DistillationRun(
    method="landing", lr=0.01, p=5, depth=2, batch=8, iterations=12, momentum=0.9, test_size=20
)
TINY = DistillationSettings(
    p=4,
    depth=2,
    batch=8,
    iterations=3,
    test_size=10,
    timed_size=(5, 2),
    repetitions=1,
    figure_iterations=3,
    trials=1,
)


# The network and its training.


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_with_every_rate_and_the_timing(preset):
    *runs, timing = [u for u in DISTILLATION.units(preset) if not u.name.startswith("figure-")]
    names = [f"{m}-lr{lr:g}" for m in TRAINING_METHODS for lr in LEARNING_RATES]
    assert [u.name for u in runs] == names
    assert all(u.steps == u.task.iterations for u in runs)
    assert timing.name == TIMING
    assert [u.timed for u in (*runs, timing)] == [False] * len(runs) + [True]
    settings = DISTILLATION.settings[preset]
    own, large = (settings.p, settings.depth), settings.timed_size
    for size, rates in {large: (TIMED_RATE,), own: LEARNING_RATES}.items():  # own, if the same
        timed = [(t.method, t.lr) for t in timing.task.runs if (t.p, t.depth) == size]
        assert timed == [(m, lr) for m in TRAINING_METHODS for lr in rates]


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_the_papers_figure_with_its_step_and_baselines(preset):
    *runs, timing = [u for u in DISTILLATION.units(preset) if u.name.startswith("figure-")]
    settings = DISTILLATION.settings[preset]
    trials = range(settings.trials)
    assert [(u.task.method, u.task.trial) for u in runs] == [
        (method, trial) for trial in trials for method in FIGURE_METHODS
    ]
    assert {*PAPER_METHODS, *RETRACTION_METHODS} == set(FIGURE_METHODS)
    assert {u.task.lr for u in runs if not is_adaptive(u.task.method)} == {0.5}
    assert (timing.name, timing.timed) == (FIGURE_TIMING, True)
    assert [(t.method, t.p) for t in timing.task.runs] == [
        (method, settings.timed_size[0]) for method in FIGURE_METHODS
    ]


def test_the_figures_loss_is_divided_by_p_and_its_trials_differ():
    task = FigureRun(**{**asdict(TASK), "lr": 0.5})
    lesson = Lesson(task, CONTEXT)
    assert lesson.measure().test_loss == pytest.approx(
        Lesson(TASK, CONTEXT).measure().test_loss / 5
    )
    other = Lesson(replace(task, trial=1), CONTEXT)
    assert not torch.equal(lesson.trainee.weights()[0], other.trainee.weights()[0])


def test_the_paper_preset_has_the_papers_settings():
    settings = DISTILLATION.settings["paper"]
    assert (settings.p, settings.depth, settings.batch) == (100, 10, 256)
    assert (settings.iterations, settings.trivialization_share) == (10_000, 1.0)
    assert LEARNING_RATES == (1.0, 0.1, 0.01, 0.001)


def test_quick_times_iterations_at_the_papers_size():
    assert DISTILLATION.settings["quick"].timed_size == (100, 10)


def test_only_trivializations_are_cut_short():
    settings = DistillationSettings(iterations=100, trivialization_share=0.25)
    planned = {u.task.method: u.steps for u in plan(settings) if type(u.task) is DistillationRun}
    assert {m for m, steps in planned.items() if steps == 25} == set(TRIVIALIZATION_METHODS)
    assert {steps for m, steps in planned.items() if m not in TRIVIALIZATION_METHODS} == {100}


def test_the_loss_is_the_squared_distance_averaged_over_examples():
    outputs, targets = (
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 0.0], [0.0, 3.0]]),
    )
    assert float(loss(outputs, targets)) == (1 + 4 + 9) / 2


def test_a_landing_step_follows_the_gradient_of_the_loss():
    """By hand: backpropagation through two layers, then X - lr L and b - lr g."""
    lesson = Lesson(TASK, CONTEXT)
    (W1, b1), (W2, b2) = layers(lesson.trainee.model)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(4 * 3 + 2)).double()
    y = x
    for W, b in layers(lesson.teacher):
        y = torch.tanh(y @ W.T + b)
    h = torch.tanh(x @ W1.T + b1)
    z = torch.tanh(h @ W2.T + b2)
    d2 = 2 * (z - y) / 8 * (1 - z**2)
    d1 = d2 @ W2 * (1 - h**2)
    iterate(lesson)
    for (W, b), (V, c), d, a in zip(
        [(W1, b1), (W2, b2)], layers(lesson.trainee.model), (d1, d2), (x, h), strict=True
    ):
        A = d.T @ a @ W.T
        field = (A - A.T) / 2 @ W + (W @ W.T - torch.eye(5)) @ W
        torch.testing.assert_close(V, W - 0.01 * field, rtol=0, atol=1e-6)
        torch.testing.assert_close(c, b - 0.01 * d.sum(0), rtol=0, atol=1e-6)


def iterate(lesson):
    lesson.next_batch()
    lesson.learn()


def layers(network):
    return [(m.weight.detach().double(), m.bias.detach().double()) for m in network.layers]


def test_measurements_are_of_the_student_on_the_test_set():
    lesson = Lesson(TASK, CONTEXT)
    iterate(lesson)
    point = lesson.measure()
    inputs = torch.randn(20, 5, generator=torch.Generator().manual_seed(4 * 3 + 3)).double()
    x, y = inputs, inputs
    errors = []
    for (W, b), (V, c) in zip(layers(lesson.trainee.model), layers(lesson.teacher), strict=True):
        x, y = torch.tanh(x @ W.T + b), torch.tanh(y @ V.T + c)
        errors.append(float(torch.linalg.matrix_norm(W.T @ W - torch.eye(5))))
    assert point.iteration == 1
    assert point.test_loss == pytest.approx(float(((x - y) ** 2).sum(1).mean()), rel=1e-5)
    assert point.orthogonality_error == pytest.approx(math.hypot(*errors))
    assert point.largest_error == pytest.approx(max(errors))


def test_a_weight_that_is_not_a_number_is_not_passed_over():
    lesson = Lesson(TASK, CONTEXT)
    lesson.trainee.weights()[1].data.fill_(math.nan)
    assert math.isnan(lesson.measure().largest_error)


@pytest.mark.parametrize("method", FIGURE_METHODS + TRIVIALIZATION_METHODS)
def test_all_methods_start_alike_and_see_the_same_examples(method):
    reference, lesson = (Lesson(replace(TASK, method=m), CONTEXT) for m in ("landing", method))
    assert lesson.measure().test_loss == pytest.approx(reference.measure().test_loss, rel=1e-5)
    for each in (reference, lesson):
        iterate(each)
    assert torch.equal(lesson.draw.get_state(), reference.draw.get_state())
    for W in lesson.trainee.weights():
        assert float(torch.linalg.det(W.detach())) == pytest.approx(1, abs=1e-2)


def test_teacher_and_student_differ_and_the_teacher_stays():
    lesson = Lesson(TASK, CONTEXT)
    before = layers(lesson.teacher)
    assert lesson.measure().test_loss > 0.1
    for _ in range(5):
        iterate(lesson)
    for (W, b), (V, c) in zip(before, layers(lesson.teacher), strict=True):
        assert torch.equal(W, V)
        assert torch.equal(b, c)


@pytest.mark.parametrize("method", FIGURE_METHODS + TRIVIALIZATION_METHODS)
def test_every_method_learns(method):
    task = replace(TASK, method=method, lr=0.01, batch=64, iterations=60)
    losses = run(task, CONTEXT).series["test_loss"]
    assert losses[-1] < losses[0] / 2


def test_momentum_is_for_the_biases_too():
    for method, momentum in (("landing", 0.0), ("landing-momentum", 0.9)):
        groups = Lesson(replace(TASK, method=method), CONTEXT).trainee.optimizer.param_groups
        assert [group["momentum"] for group in groups] == [momentum, momentum]


def test_the_same_seed_gives_the_same_numbers_and_another_does_not():
    first, second = run(TASK, CONTEXT), run(TASK, CONTEXT)
    assert first == second
    other = run(TASK, replace(CONTEXT, seed=4))
    assert first.series["test_loss"] != other.series["test_loss"]


def test_ticks_add_up_to_the_steps():
    units = [u for u in plan(TINY) if not u.name.startswith("figure-")]
    for unit in (units[0], units[-1]):
        ticks = []
        run(unit.task, replace(CONTEXT, tick=ticks.append))
        assert sum(ticks) == unit.steps == (3 if unit is units[0] else WARM_UP + 1)


def test_an_iteration_is_timed_without_the_time_for_its_examples(monkeypatch):
    action, lesson = begin(TASK, CONTEXT), Lesson(TASK, CONTEXT)
    timed = action.act.__self__
    for _ in range(2):
        iterate(lesson)
        action.prepare()
        with monkeypatch.context() as patch:
            patch.setattr(timed, "teacher", None)  # nor is the teacher asked
            drawn = timed.draw.get_state()
            action.act()
            assert torch.equal(timed.draw.get_state(), drawn)
    for W, V in zip(timed.trainee.weights(), lesson.trainee.weights(), strict=True):
        assert torch.equal(W, V)


def test_timed_runs_take_turns(monkeypatch):
    calls = []
    monkeypatch.setattr(Lesson, "learn", lambda self: calls.append(self.task.lr))
    timing = Timing((TASK, replace(TASK, lr=1.0)), warm_up=1, repetitions=2)
    result = run(timing, CONTEXT)
    rounds = [calls[:2], calls[2:4], calls[4:]]
    assert all(sorted(turn) == [0.01, 1.0] for turn in rounds)
    assert sorted(result.series["run"]) == [0, 0, 1, 1]  # without the warm-up
    assert len(result.series["seconds"]) == 4


# Claims, on records made by hand.


def record(task, series):
    options = RunOptions(preset="paper", seed=0, device="cpu", threads=1)
    request = Request("distillation", 1, "unit", options, asdict(task), {})
    return Record(request, Result(series, {}), {}, 0.0, "")


def made(method, lr, *, test_loss=(100.0, 1.0, 0.1), error=(1e-5, 1e-5, 2e-5), iterations=None):
    """A run: its test loss and orthogonality error at the start, at 1 % and in the end."""
    total = PAPER_ITERATIONS if iterations is None else iterations
    task = replace(TASK, method=method, lr=lr, p=30, iterations=total)
    points = zip((0, total / 100, total), test_loss, error, error, strict=True)
    series = dict(zip(Point._fields, zip(*points, strict=True), strict=True))
    return record(task, series)


def timing(seconds, sizes=(30, 100)):
    """A timing in which an iteration takes so long: by method, or by method and width.

    With every learning rate at the first width, that of the runs.
    """
    tasks = [
        replace(TASK, method=m, lr=lr, p=p)
        for p in sizes
        for m in TRAINING_METHODS
        for lr in (LEARNING_RATES if p == sizes[0] else (TIMED_RATE,))
    ]
    once = [
        (i, seconds.get((t.method, t.p), seconds.get(t.method, 1.0))) for i, t in enumerate(tasks)
    ]
    disturbed = [(i, 1e3) for i, _ in once]
    turns = [*disturbed, *once, *once]
    series = dict(zip(("run", "seconds"), zip(*turns, strict=True), strict=True))
    return record(Timing(tuple(tasks), 0, 3), series)


def figure_error(method):
    """As in the paper's figure: landing's is small, and textbook retractions' grows."""
    return (1e-6, 1e-4, 4e-3) if method.endswith("-textbook") else (1e-6, 1e-6, 2e-6)


def figure_units(changes, seconds, iterations):
    units = {}
    for method in FIGURE_METHODS:
        for trial in range(3):
            change = {"error": figure_error(method), "test_loss": (0.5, 0.05, 0.002)}
            run = made(method, 0.5, iterations=iterations, **(change | changes.get(method, {})))
            units[figure_name(method, trial)] = run
    tasks = tuple(replace(TASK, method=m, lr=0.5, p=100) for m in FIGURE_METHODS)
    turns = [(i, seconds.get(t.method, 1.0)) for i, t in enumerate(tasks)]
    series = dict(zip(("run", "seconds"), zip(*turns, strict=True), strict=True))
    return {**units, FIGURE_TIMING: record(Timing(tasks, 0, 3), series)}


def records_of(changes=None, seconds=None, iterations=None):
    """Records of all units; ``changes`` to the runs by method, with the learning rate 0.01."""
    units = {TIMING: timing(seconds or {})}
    units |= figure_units(changes or {}, seconds or {}, iterations or FIGURE_ITERATIONS)
    for method in TRAINING_METHODS:
        for lr in LEARNING_RATES:
            change = (changes or {}).get(method, {}) if lr == 0.01 else {"test_loss": (100, 90, 90)}
            units[f"{method}-lr{lr:g}"] = made(method, lr, iterations=iterations, **change)
    return Records(units)


def test_the_best_run_ends_with_the_smallest_test_loss():
    assert best_runs(records_of(), ["landing"])["landing"].configuration["lr"] == 0.01
    broken = records_of({"landing": {"test_loss": (100.0, 1.0, math.nan)}})
    assert best_runs(broken, ["landing"])["landing"].configuration["lr"] != 0.01


def test_the_time_of_an_iteration_is_a_median_at_the_size_asked_for():
    timed = timing({("cayley", 30): 2.0, ("cayley", 100): 7.0})
    records = Records({TIMING: timed})
    assert iteration_seconds(records, made("cayley", 1.0)) == 2.0
    assert iteration_seconds(records, made("landing", 1.0)) == 1.0
    finding = takes_longer(TIMING, ["cayley"], ["landing"], records)
    assert finding.measured == "p = 100, in times of landing, 1e+03 ms: Cayley 7.00"


def test_the_time_to_a_level_is_that_of_the_fastest_learning_rate():
    records = records_of(seconds={"cayley": 2.0})
    early = made("cayley", 1.0, test_loss=(100.0, 10.0, 1.0))  # ends higher, but is sooner at 10
    late = made("cayley", 0.01, test_loss=(100.0, 100.0, 0.1))
    units = {"cayley-lr1": early, "cayley-lr0.01": late}
    assert time_to(Records({**records, **units}), "cayley", 10.0) == pytest.approx(2.0 * 100)


FASTER_LOSS = {"test_loss": (100.0, 0.1, 0.1)}
QUICKLY = {"test_loss": (0.5, 0.002, 0.002)}
LANDED = {"error": (1e-5, 1e-2, 1e-6)}
UNLEARNT = {"test_loss": (100.0, 50.0, 40.0)}
near = partial(distillation.ends_nearer, "landing")
near_with_momentum = partial(distillation.ends_nearer, "landing-momentum")
momentum_is_fastest, figure_is_nearer, errors_accumulate, exact = (
    c.check for c in DISTILLATION.claims[:4]
)
iteration_is_faster, trivializations_are_slower = (
    c.check for c in DISTILLATION.claims if c.statement.startswith("At p = 100")
)

CASES = {
    "fastest": (momentum_is_fastest, {"landing-momentum": QUICKLY}, "HOLDS"),
    "another is sooner": (
        momentum_is_fastest,
        {"landing-momentum": QUICKLY, "landing": {"test_loss": (0.5, 0.001, 0.001)}},
        "FAILS",
    ),
    "another gets further": (
        momentum_is_fastest,
        {"landing-momentum": QUICKLY, "cayley-textbook": {"test_loss": (0.5, 0.05, 5e-4)}},
        "FAILS",
    ),
    "nobody learns": (
        momentum_is_fastest,
        {m: {"test_loss": (0.5, 0.4, 0.2)} for m in FIGURE_METHODS},
        "OPEN",
    ),
    "as many iterations": (distillation.landing_needs_as_many_iterations, {}, "HOLDS"),
    "fewer iterations": (
        distillation.landing_needs_as_many_iterations,
        {"landing": FASTER_LOSS},
        "FAILS",
    ),
    "too early to compare": (
        distillation.landing_needs_as_many_iterations,
        {"exponential": UNLEARNT},
        "OPEN",
    ),
    "momentum helps": (
        distillation.momentum_helps,
        {"landing-momentum": {"test_loss": (100.0, 1.0, 0.09)}},
        "HOLDS",
    ),
    "momentum does not": (distillation.momentum_helps, {}, "FAILS"),
    "landing is nearer": (near, {"landing": LANDED}, "HOLDS"),
    "landing is not": (near, {"landing": {"error": (1e-5, 1e-2, 1e-3)}}, "FAILS"),
    "nearer than one only": (
        near,
        {"landing": LANDED, "cayley": {"error": (1e-7, 1e-7, 1e-7)}},
        "FAILS",
    ),
    "momentum is nearer": (near_with_momentum, {"landing-momentum": LANDED}, "HOLDS"),
    "without only": (near_with_momentum, {"landing": LANDED}, "FAILS"),
    "as in the figure": (figure_is_nearer, {}, "HOLDS"),
    "landing is away": (figure_is_nearer, {"landing-momentum": {"error": (0, 0, 2e-5)}}, "FAILS"),
    "a retraction is near": (
        figure_is_nearer,
        {"cayley-textbook": {"error": (0, 0, 5e-4)}},
        "FAILS",
    ),
    "careful ones do not count": (figure_is_nearer, {"cayley": {"error": (0, 0, 1e-9)}}, "HOLDS"),
    "errors accumulate": (errors_accumulate, {}, "HOLDS"),
    "one does not": (
        errors_accumulate,
        {"cayley-textbook": {"error": (1e-5, 1e-5, 1.4e-5)}},
        "FAILS",
    ),
    "exact": (exact, {}, "HOLDS"),
    "not exact": (
        exact,
        {"trivialization-adam-identity": {"error": (1e-5, 1e-4, 1e-5)}},
        "FAILS",
    ),
    "not a number": (
        exact,
        {"trivialization-adam-identity": {"error": (1e-5, math.nan, 1e-5)}},
        "FAILS",
    ),
    "in the ball": (distillation.stays_in_ball, {"landing": {"error": (0, 0.5, 0)}}, "HOLDS"),
    "outside": (distillation.stays_in_ball, {"landing": {"error": (0, 0.51, 0)}}, "FAILS"),
    "nowhere": (distillation.stays_in_ball, {"landing": {"error": (0, math.nan, 0)}}, "FAILS"),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case):
    check, changes, verdict = CASES[case]
    assert check(records_of(changes)).verdict is Verdict[verdict]


IDENTITIES = tuple(m for m in FIGURE_METHODS if m.endswith("-identity"))
SLOW = dict.fromkeys(IDENTITIES, 2.0)
TIMED_CASES = {
    "faster": (iteration_is_faster, {"landing": 0.9}, "HOLDS"),
    "as fast": (iteration_is_faster, {"landing": 0.97}, "FAILS"),
    "faster than one only": (
        iteration_is_faster,
        {"landing": 0.9, "cayley-textbook": 0.9},
        "FAILS",
    ),
    "slower": (trivializations_are_slower, SLOW, "HOLDS"),
    "one as fast as Cayley": (
        trivializations_are_slower,
        {**SLOW, "cayley-textbook": 2.0},
        "FAILS",
    ),
    "slow iterations": (momentum_is_fastest, {"landing-momentum": 1.1}, "FAILS"),
    "fast iterations": (momentum_is_fastest, {"landing-momentum": 0.9}, "HOLDS"),
}


@pytest.mark.parametrize("case", TIMED_CASES)
def test_verdicts_on_times(case):
    check, seconds, verdict = TIMED_CASES[case]
    assert check(records_of(seconds=seconds)).verdict is Verdict[verdict]


@pytest.mark.parametrize("check", [near, figure_is_nearer, errors_accumulate])
def test_a_short_run_decides_nothing_against_the_paper(check):
    steady = {m: {"error": (1e-5, 1e-5, 1e-5)} for m in (*RETRACTION_METHODS, "cayley-textbook")}
    short = records_of({**steady, "landing": {"error": (1e-5, 1e-2, 1e-3)}}, iterations=1_000)
    assert check(short).verdict is Verdict.OPEN


def test_a_short_run_does_not_decide_for_landing_either():
    early = records_of({"landing": {"error": (1e-5, 1e-2, 1e-9)}}, iterations=1_000)
    assert near(early).verdict is Verdict.OPEN
    assert near(records_of({"landing": {"error": (1e-5, 1e-2, 1e-9)}})).verdict is Verdict.HOLDS


@pytest.mark.parametrize("iterations", [99, 100])
@pytest.mark.parametrize("name", ["landing_needs_as_many_iterations", "momentum_helps"])
def test_a_few_iterations_decide_nothing_about_learning(name, iterations):
    finding = getattr(distillation, name)(records_of(iterations=iterations))
    assert (finding.verdict is Verdict.OPEN) == (iterations < 100)


@pytest.mark.parametrize("check", [iteration_is_faster, trivializations_are_slower])
def test_times_at_small_sizes_decide_nothing(check):
    for sizes, is_open in (((30,), True), ((30, 100), False)):
        timed = records_of()[FIGURE_TIMING]
        runs = [{**run, "p": sizes[-1]} for run in timed.configuration["runs"]]
        request = replace(timed.request, configuration={**timed.configuration, "runs": runs})
        records = Records({**records_of(), FIGURE_TIMING: replace(timed, request=request)})
        assert (check(records).verdict is Verdict.OPEN) == is_open


def test_what_is_missing_leaves_claims_open():
    records = records_of()
    without = Records({n: r for n, r in records.items() if n != "landing-lr0.01"})
    decided = [c for c in DISTILLATION.claims if c.judge(records).verdict is not Verdict.OPEN]
    assert len(decided) == len(DISTILLATION.claims)
    assert near_with_momentum(without).verdict is not Verdict.OPEN  # needs no run of landing
    assert near_claim().judge(without).verdict is Verdict.OPEN


def near_claim():
    return next(c for c in DISTILLATION.claims if "loss, landing ends" in c.statement)


# The whole.


def test_a_tiny_run_from_plan_to_figures(store, watcher):
    experiment = replace(DISTILLATION, settings={"smoke": TINY})
    options = RunOptions(preset="smoke", seed=0, device="cpu", threads=1)
    done = run_study(experiment, options, store, watcher)
    assert not done.missing
    assert watcher.done == watcher.total
    for _, finding in done.findings():
        assert finding.measured
    with house_style():
        figures = [spec.draw(done.records) for spec in experiment.figures]
    assert [len(figure.axes) for figure in figures] == [4, 4, 1]
    for figure in figures:
        for axes in figure.axes:
            assert {line.get_label() for line in axes.lines} >= labels(figure)
        assert all(axes.get_xlabel() for axes in figure.axes[-2:])  # panels share what is above
        assert all(axes.get_ylabel() for axes in figure.axes[::2])  # and to the right
        figure.draw_without_rendering()


def labels(figure: Figure) -> set[str]:
    (legend,) = figure.legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert len(texts) == len(TRAINING_METHODS)
    return texts
