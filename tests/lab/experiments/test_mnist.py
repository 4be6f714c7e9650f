import io
import math
from dataclasses import replace

import pytest
import torch

import ortholand
from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments.classification import PAPER_TIMING, TrainingRun
from ortholand_lab.experiments.mnist import EPOCH, LANDINGS, MNIST, PAPER, plan, start_lenet
from ortholand_lab.methods import (
    ADAPTIVE_METHODS,
    PAPER_METHODS,
    RETRACTION_METHODS,
    TRAINING_METHODS,
    TRIVIALIZATION_METHODS,
    as_in_the_paper,
    careful,
    has_momentum,
    is_adaptive,
)
from ortholand_lab.study.figures import METHOD_STYLES
from ortholand_lab.study.records import Records, RunOptions, Store
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import Timing
from ortholand_lab.textbook import textbook
from tests.lab.experiments import made


def digits(n=40):
    """Images of ten kinds, that a network can tell apart."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(256, (10, 1, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.arange(n) % 10
    return Dataset("kinds", kinds[labels], labels, kinds[labels], labels)


BASELINES = tuple(method for method in PAPER_METHODS if method not in TRAINING_METHODS)
CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None, data=digits())
RUN = TrainingRun(method="landing", lr=0.02, batch_size=4, iterations=8, points=2, test_images=40)


# The plan and the training.


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_with_every_rate_and_times_them(preset):
    *runs, timing, paper = plan(replace(MNIST.settings[preset], finals=()))
    assert (paper.name, paper.timed) == (PAPER_TIMING, True)
    assert [t.method for t in paper.task.runs] == list(PAPER_METHODS)
    assert {t.lr for t in paper.task.runs} <= {4.0**-2, 4.0**-4}
    rates = MNIST.settings[preset].learning_rates
    expected = [(m, lr) for m in TRAINING_METHODS for lr in rates]
    assert [(u.task.method, u.task.lr) for u in runs] == expected
    assert [(t.method, t.lr) for t in timing.task.runs] == expected
    assert len({u.name for u in runs}) == len(runs)
    assert all(u.steps == u.task.iterations for u in runs)
    assert timing.timed
    assert not any(u.timed for u in runs)
    assert set(rates) <= {4.0**i for i in range(-5, 1)}


def test_the_paper_preset_has_the_papers_settings():
    settings = MNIST.settings["paper"]
    assert settings.batch_size == 4
    assert settings.learning_rates == (1 / 1024, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1)
    assert settings.trivialization_share == 1


def test_the_paper_preset_trains_each_methods_best_for_an_epoch_with_five_seeds():
    finals = [unit.task for unit in MNIST.units("paper") if unit.name.startswith("final-")]
    assert [(run.method, run.trial) for run in finals] == [
        (method, trial) for trial in range(5) for method in (*TRAINING_METHODS, *BASELINES)
    ]
    rates = {run.method: run.lr for run in finals}
    assert all(rates[method] == rates[careful(method)] for method in BASELINES)
    assert all(run.iterations == EPOCH and run.test_images == 10_000 for run in finals)
    assert {run.lr for run in finals} <= set(MNIST.settings["paper"].learning_rates)


def test_trials_are_other_networks_with_other_batches():
    made.trials_are_other_networks_with_other_batches(start_lenet, RUN, CONTEXT)


def test_only_trivializations_are_cut_short():
    units = plan(replace(PAPER, iterations=100, trivialization_share=0.5, learning_rates=(1.0,)))
    steps = {u.task.method: u.steps for u in units if isinstance(u.task, TrainingRun)}
    assert {m for m, n in steps.items() if n == 50} == set(TRIVIALIZATION_METHODS)
    assert set(steps.values()) == {50, 100}


@pytest.mark.parametrize("method", [*TRAINING_METHODS, *map(textbook, RETRACTION_METHODS)])
def test_all_methods_start_at_the_same_network_with_orthogonal_kernels(method):
    reference = start_lenet(RUN, CONTEXT).trainee
    trainee = start_lenet(replace(RUN, method=method), CONTEXT).trainee
    weights = trainee.weights()
    assert [tuple(W.shape) for W in weights] == [(6, 1, 5, 5), (16, 6, 5, 5), (120, 16, 4, 4)]
    assert sum(W.shape[:2].numel() for W in weights) == 2022  # as the summary says
    for W, V in zip(weights, reference.weights(), strict=True):
        assert ortholand.orthogonality_error(W.detach(), view="kernel") < 1e-5
        torch.testing.assert_close(W, V)
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(trainee.model(images), reference.model(images))


def test_from_the_identity_the_start_differs_by_the_signs_of_columns_only():
    """Half of the kernels have determinant -1, which no exp(A) reaches."""
    reference = start_lenet(RUN, CONTEXT).trainee
    trainee = start_lenet(replace(RUN, method="trivialization-sgd-identity"), CONTEXT).trainee
    for W, V in zip(trainee.weights(), reference.weights(), strict=True):
        assert (torch.linalg.det(W) > 0).all()
        flipped = torch.linalg.det(V) < 0
        assert flipped.any()
        signs = torch.where(flipped, -1.0, 1.0)[..., None]
        torch.testing.assert_close(W[..., 0], signs * V[..., 0], rtol=0, atol=1e-4)
        torch.testing.assert_close(W[..., 1:], V[..., 1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", TRAINING_METHODS + BASELINES)
def test_every_method_learns(method):
    lr = 0.001 if is_adaptive(method) or has_momentum(method) else 0.01
    training = start_lenet(replace(RUN, method=method, lr=lr), CONTEXT)
    before = training.measure(40).test_error
    training.advance_to(25)
    point = training.measure(40)
    assert point.test_error < 0.5 < before
    assert point.largest_error < 0.5


def test_momentum_is_for_all_parameters():
    for method, expected in (("landing", 0.0), ("landing-momentum", 0.9), ("exponential", 0.0)):
        trainee = start_lenet(replace(RUN, method=method), CONTEXT).trainee
        assert [g["momentum"] for g in trainee.optimizer.param_groups] == [expected] * 2


def test_a_run_from_end_to_end(tmp_path):
    class Source:
        identity, notice, load = "kinds", "", staticmethod(digits)

    lengths = dict(iterations=3, points=2, test_images=20, warm_up=0, repetitions=2)
    settings = replace(PAPER, learning_rates=(0.01,), **lengths)
    options = RunOptions("smoke", 0, "cpu", 1, data="kinds")
    experiment = replace(MNIST, settings={"smoke": settings})
    run = run_study(experiment, options, Store(tmp_path), made.Quiet(), Source())
    assert len(run.records) == len(TRAINING_METHODS) + 2
    assert not run.missing
    verdicts = [finding.verdict for _, finding in run.findings()]
    assert verdicts == [*[Verdict.OPEN] * 4, Verdict.HOLDS, Verdict.OPEN]
    for figure in MNIST.figures:
        figure.draw(run.records).savefig(io.BytesIO(), format="svg")


# Claims, on records made by hand.

GOOD = {  # as the paper has it: seconds, test error, orthogonality error
    "landing": (0.001, 0.020, 1e-6),
    "landing-momentum": (0.001, 0.019, 1e-6),
    "exponential-textbook": (0.0016, 0.020, 1e-4),
    "cayley-textbook": (0.0015, 0.021, 1e-5),
    "trivialization-sgd-identity": (0.02, 0.020, 1e-7),
    "trivialization-momentum-identity": (0.02, 0.02, 1e-7),
    "trivialization-adam-identity": (0.02, 0.010, 1e-7),
    "trivialization-rmsprop-identity": (0.02, 0.012, 1e-7),
}


def made_records(methods, iterations=EPOCH, repetitions=10, largest_error=0.1, **finals):
    lengths = dict(iterations=iterations, repetitions=repetitions)
    # The paper's baselines have no runs but finals.
    of_paper = tuple((method, 0.1) for method in BASELINES)
    changes = dict(learning_rates=(0.1,), **{"finals": (), "trials": 1, **finals})
    changes["finals"] = (*changes["finals"], *of_paper)
    changes.setdefault("final_iterations", iterations if iterations < EPOCH // 10 else EPOCH)
    if iterations == EPOCH - 1:
        changes["final_iterations"] = iterations
    *runs, timing, paper = plan(replace(PAPER, **changes, **lengths))
    units = {}
    for unit in runs:
        _, test_error, orthogonality_error = methods[as_in_the_paper(unit.task.method)]
        units[unit.name] = made.record(
            "mnist",
            unit.task,
            dict(
                iteration=[0, unit.task.iterations],
                train_loss=[math.nan, 1.0],
                test_error=[0.9, test_error],
                orthogonality_error=[1e-7, orthogonality_error],
                largest_error=[1e-7, largest_error],
            ),
        )
    for unit in (timing, paper):
        assert isinstance(unit.task, Timing)
        times = [methods[as_in_the_paper(t.method)][0] for t in unit.task.runs]
        taken = made.record("mnist", unit.task, made.turns(times, repetitions))
        units[unit.name] = replace(taken, request=replace(taken.request, unit=unit.name))
    return Records(units)


FASTER, NEARER, ADAPTIVE_BEST, SLOWER, BALL, ACCURATE = range(6)


def verdicts(records):
    return [claim.judge(records).verdict for claim in MNIST.claims]


def test_all_claims_hold_where_all_is_as_the_paper_says():
    assert verdicts(made_records(GOOD)) == [Verdict.HOLDS] * 6


@pytest.mark.parametrize(
    ("method", "column", "value", "claim"),
    [
        ("landing", 0, 0.00101, FASTER),
        ("cayley-textbook", 0, 0.00149, FASTER),
        ("exponential-textbook", 0, 0.0014, FASTER),
        ("landing", 2, 1.1e-5, NEARER),
        ("exponential-textbook", 2, 1e-7, NEARER),
        ("landing-momentum", 1, 0.009, ADAPTIVE_BEST),
        ("trivialization-sgd-identity", 1, 0.009, ADAPTIVE_BEST),
        ("trivialization-rmsprop-identity", 0, 0.0159, SLOWER),
        ("cayley-textbook", 0, 0.0021, SLOWER),
        ("landing", 1, 0.026, ACCURATE),
    ],
)
def test_a_claim_fails_where_it_should(method, column, value, claim):
    numbers = list(GOOD[method])
    numbers[column] = value
    found = verdicts(made_records({**GOOD, method: tuple(numbers)}))
    expected = [Verdict.HOLDS] * 6
    expected[claim] = Verdict.FAILS
    assert found == expected


def test_where_the_retractions_are_nearer_but_drift_on_longer_runs_would_decide():
    away = {**GOOD, "landing": (0.001, 0.02, 2e-4)}
    assert verdicts(made_records(away))[NEARER] is Verdict.FAILS
    for growth, verdict in ((1.9, Verdict.OPEN), (1.1, Verdict.FAILS)):
        records = made_records(away)
        for method in ("exponential-textbook", "cayley-textbook"):
            name = f"final-{method}-lr0.1-trial0"
            run = records[name]
            end = run.series("orthogonality_error")[-1]
            series = {name: [y[0], *y] for name, y in run.result.series.items()}
            series["iteration"] = [0, EPOCH / 2, EPOCH]
            series["orthogonality_error"] = [1e-7, end / growth, end]
            drifting = replace(run, result=replace(run.result, series=series))
            records = Records({**records, name: drifting})
        assert verdicts(records)[NEARER] is verdict


def test_the_ball_claim_fails_outside():
    assert verdicts(made_records(GOOD, largest_error=0.6))[BALL] is Verdict.FAILS


def test_less_than_an_epoch_decides_nothing_but_times_and_the_ball():
    expected = [Verdict.OPEN] * 6
    expected[FASTER] = expected[SLOWER] = expected[BALL] = Verdict.HOLDS
    assert verdicts(made_records(GOOD, iterations=EPOCH - 1)) == expected


def test_an_epoch_of_the_searchs_best_decides_and_another_rates_does_not():
    finals = tuple((method, 0.1) for method in TRAINING_METHODS)
    records = made_records(GOOD, iterations=EPOCH // 10, finals=finals, trials=3)
    assert verdicts(records) == [Verdict.HOLDS] * 6
    measured = MNIST.claims[NEARER].judge(records).measured
    assert "last tenth of 15,000 iterations, 3 seeds" in measured
    others = tuple((method, 0.2) for method in TRAINING_METHODS)
    records = made_records(GOOD, iterations=EPOCH // 10, finals=others)
    assert verdicts(records)[NEARER] is Verdict.OPEN


def test_finals_count_for_the_ball():
    finals = tuple((method, 0.1) for method in TRAINING_METHODS)
    records = made_records(GOOD, finals=finals, trials=3)
    outside = {**records["final-landing-lr0.1-trial2"].result.series, "largest_error": [0.0, 0.6]}
    task = next(u.task for u in plan(replace(PAPER, finals=finals)) if u.name.endswith("trial2"))
    moved = Records({**records, "final-landing-lr0.1-trial2": made.record("mnist", task, outside)})
    assert [verdicts(r)[BALL] for r in (records, moved)] == [Verdict.HOLDS, Verdict.FAILS]


def test_few_repetitions_decide_no_times():
    found = verdicts(made_records(GOOD, repetitions=2))
    assert [i for i, verdict in enumerate(found) if verdict is Verdict.OPEN] == [FASTER, SLOWER]


@pytest.mark.parametrize(
    ("method", "concerned"),
    [
        ("cayley", [NEARER, ADAPTIVE_BEST, ACCURATE]),
        ("landing", [NEARER, ADAPTIVE_BEST, BALL, ACCURATE]),
        ("landing-momentum", [ADAPTIVE_BEST, BALL]),
        ("trivialization-adam", [ADAPTIVE_BEST]),
    ],
)
def test_a_missing_run_leaves_open_what_is_claimed_of_its_method(method, concerned):
    records = made_records(GOOD)
    missing = Records({unit: records[unit] for unit in records if unit != f"{method}-lr0.1"})
    findings = [claim.judge(missing) for claim in MNIST.claims]
    assert [i for i, f in enumerate(findings) if f.verdict is Verdict.OPEN] == concerned
    assert all(f"{method}-lr0.1 is missing" in findings[i].measured for i in concerned)


def test_the_methods_of_the_claims_are_trained():
    assert {*LANDINGS, *RETRACTION_METHODS, *ADAPTIVE_METHODS} <= set(TRAINING_METHODS)


def test_figures_draw_every_method():
    records = made_records(GOOD)
    for spec, methods in zip(MNIST.figures, (PAPER_METHODS, TRAINING_METHODS), strict=True):
        figure = spec.draw(records)
        labels = {text.get_text() for text in figure.legends[0].texts}
        assert labels == {METHOD_STYLES[method].label for method in methods}
