import io
import math
from dataclasses import replace

import pytest
import torch

import ortholand
from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments.cifar import (
    CIFAR,
    CIFAR_METHODS,
    EPOCH,
    FULL_SIZE,
    LANDING,
    PAPER,
    PAPER_FULL_SIZE,
    PAPER_METHODS,
    RETRACTION,
    TRAINED,
    TRIVIALIZATION,
    ResNetRun,
    plan,
    start_resnet,
)
from ortholand_lab.study.figures import METHOD_STYLES
from ortholand_lab.study.records import Records, RunOptions, Store
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import EXPERIMENT_PRESETS, Context, Verdict
from ortholand_lab.study.timing import TIMING, Timing
from tests.lab.experiments import made


def pictures(n=40):
    """Images of two kinds, that a network can tell apart."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(100, (n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(n) % 2
    images[labels == 1, 0] += 100  # redder
    return Dataset("kinds", images, labels, images, labels)


CONTEXT = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None, data=pictures())
RUN = ResNetRun(
    method=LANDING, lr=1.0, batch_size=20, iterations=4, points=2, test_images=40, width=2
)


# The plan and the training.


@pytest.mark.parametrize("preset", EXPERIMENT_PRESETS)
def test_every_preset_plans_every_method_rate_and_seed_and_two_timings(preset):
    *runs, timing, full_size, paper = CIFAR.units(preset)
    assert (paper.name, paper.timed) == (PAPER_FULL_SIZE, True)
    assert [t.method for t in paper.task.runs] == list(PAPER_METHODS)
    settings = CIFAR.settings[preset]
    rated = [(method, lr) for method in settings.methods for lr in settings.learning_rates]
    assert [(u.task.method, u.task.lr, u.task.trial) for u in runs] == [
        (*pair, trial) for pair in rated for trial in range(settings.seeds)
    ]
    assert len({u.name for u in runs}) == len(runs)
    assert (timing.name, full_size.name) == (TIMING, FULL_SIZE)
    assert [(t.method, t.lr) for t in timing.task.runs] == rated
    assert timing.task.trials == settings.seeds
    assert [t.method for t in full_size.task.runs] == list(CIFAR_METHODS)
    assert [u.timed for u in (*runs, timing, full_size)] == [False] * len(runs) + [True] * 2


def test_the_paper_preset_has_the_papers_settings():
    settings = CIFAR.settings["paper"]
    assert (settings.width, settings.batch_size, settings.seeds) == (64, 128, 5)
    assert set(settings.learning_rates) == {2.0, 1.0, 0.5}
    assert settings.lr_drop == 100 * (50_000 // 128)
    assert settings.iterations > settings.lr_drop
    assert settings.trivialization_share == 1


def test_quick_times_the_papers_network_and_batch():
    *_, full_size, _ = CIFAR.units("quick")
    assert {(t.width, t.batch_size) for t in full_size.task.runs} == {(64, 128)}


def test_only_trivializations_are_cut_short():
    units = plan(replace(PAPER, iterations=100, trivialization_share=0.25, seeds=1))
    steps = {u.task.method: u.steps for u in units if isinstance(u.task, ResNetRun)}
    assert steps == {m: 25 if m.startswith("trivialization") else 100 for m in PAPER.methods}


@pytest.mark.parametrize("method", PAPER.methods)
def test_every_convolution_is_orthogonal_and_the_rest_has_the_papers_options(method):
    trainee = start_resnet(replace(RUN, method=method), CONTEXT).trainee
    convolutions = [m for m in trainee.model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(trainee.weights()) == len(convolutions) == 20
    for convolution in convolutions:
        error = ortholand.orthogonality_error(convolution.weight.detach(), view="kernel")
        assert error < 1e-5
    kernels, others = trainee.optimizer.param_groups
    assert (kernels["lr"], kernels["momentum"]) == (1.0, 0.9)
    assert [others[option] for option in ("lr", "momentum", "weight_decay")] == [0.1, 0.9, 5e-4]
    assert kernels["weight_decay"] == 0


@pytest.mark.parametrize("method", PAPER.methods)
def test_every_method_learns_and_leaves_kernels_of_1_x_1_alone(method):
    training = start_resnet(replace(RUN, method=method, lr=0.1), CONTEXT)
    shortcut = training.trainee.model.layer2[0].downsample[0]
    signs, kernel = shortcut.weight.detach().clone(), training.trainee.weights()[1].detach().clone()
    assert signs.abs().allclose(torch.ones(()))
    training.advance_to(12)
    assert shortcut.weight.detach().allclose(signs)
    assert not training.trainee.weights()[1].allclose(kernel)
    training.measure(40)
    training.advance_to(20)
    assert training.measure(40).train_loss < 0.5


def test_trials_are_other_networks_with_other_batches():
    made.trials_are_other_networks_with_other_batches(start_resnet, RUN, CONTEXT)


def test_images_are_augmented_and_rates_dropped():
    training = start_resnet(replace(RUN, lr_drop=1, batch_size=40), CONTEXT)
    images, _ = next(training.batches)
    seen = {tuple(image.flatten().tolist()) for image in pictures().train_images}
    assert any(tuple(image.flatten().tolist()) not in seen for image in images)
    training.advance_to(2)
    assert [g["lr"] for g in training.trainee.optimizer.param_groups] == pytest.approx([0.1, 0.01])


def test_a_run_from_end_to_end(tmp_path):
    class Source:
        identity, notice, load = "kinds", "", staticmethod(pictures)

    sizes = dict(width=2, batch_size=8, timed_width=2, timed_batch=8)
    lengths = dict(iterations=2, points=2, warm_up=1, repetitions=2, timed_repetitions=2)
    changes = dict(seeds=2, learning_rates=(1.0, 2.0), test_images=8)
    settings = replace(PAPER, **sizes, **lengths, **changes)
    experiment = replace(CIFAR, settings={"smoke": settings})
    options = RunOptions("smoke", 0, "cpu", 1, data="kinds")
    run = run_study(experiment, options, Store(tmp_path), made.Quiet(), Source())
    assert len(run.records) == 5 * 2 * 2 + 3
    assert not run.missing
    verdicts = [finding.verdict for _, finding in run.findings()]
    # Those on the time of a step are decided, on so small a network either way.
    assert [v is Verdict.OPEN for v in verdicts] == [*[True] * 3, *[False] * 2, *[True] * 2]
    for figure in CIFAR.figures:
        figure.draw(run.records).savefig(io.BytesIO(), format="svg")


# Claims, on records made by hand.

FASTER, EXPENSIVE, FAIL, BALL, SAME_RATES, ACCURATE, NEARER = range(7)
TEXTBOOK, IDENTITY = PAPER_METHODS[1:]
GOOD = {  # as the paper has it: seconds, test error, orthogonality error
    LANDING: (0.1, 0.08, 1e-5),
    **dict.fromkeys((RETRACTION, TEXTBOOK), (0.16, 0.08, 1e-3)),
    **dict.fromkeys((TRIVIALIZATION, IDENTITY), (0.4, 0.3, 1e-6)),
}


def made_records(methods, largest_error=0.1, **settings):
    sizes = dict(iterations=TRAINED, seeds=3, learning_rates=(0.5, 2.0), timed_repetitions=5)
    units = {}
    for unit in plan(replace(PAPER, **{**sizes, **settings})):
        if isinstance(unit.task, Timing):
            units[unit.name] = made.record("cifar", unit.task, timed(unit.task, methods))
            continue
        _, test_error, orthogonality_error = methods[unit.task.method]
        failed = unit.task.trial == 2  # one of three, which a median does not see
        units[unit.name] = made.record(
            "cifar",
            unit.task,
            dict(
                iteration=[0, 10, unit.task.iterations],
                train_loss=[math.nan, 2.0, math.inf if failed else 1.0],
                test_error=[0.9, 0.8, 0.9 if failed else test_error],
                orthogonality_error=[1e-7, 1e-7, 1.0 if failed else orthogonality_error],
                largest_error=[1e-7, 1e-7, largest_error],
            ),
        )
    return Records(units)


def timed(timing, methods):
    return made.turns([methods[t.method][0] for t in timing.runs], timing.repetitions)


def verdicts(records):
    return [claim.judge(records).verdict for claim in CIFAR.claims]


def test_all_claims_hold_where_all_is_as_the_paper_says():
    assert verdicts(made_records(GOOD)) == [Verdict.HOLDS] * 7


@pytest.mark.parametrize(
    ("method", "column", "value", "claim"),
    [
        (TEXTBOOK, 0, 0.149, FASTER),
        (IDENTITY, 0, 0.19, EXPENSIVE),
        (IDENTITY, 1, 0.12, FAIL),
        (LANDING, 1, 0.1, ACCURATE),
        (LANDING, 2, 2e-3, NEARER),
    ],
)
def test_a_claim_fails_where_it_should(method, column, value, claim):
    numbers = list(GOOD[method])
    numbers[column] = value
    found = verdicts(made_records({**GOOD, method: tuple(numbers)}))
    expected = [Verdict.HOLDS] * 7
    expected[claim] = Verdict.FAILS
    assert found == expected


def test_the_ball_claim_fails_outside():
    assert verdicts(made_records(GOOD, largest_error=0.6))[BALL] is Verdict.FAILS


@pytest.mark.parametrize(
    ("changes", "open_claims"),
    [
        (dict(iterations=TRAINED - 1), [FAIL, ACCURATE, NEARER]),
        (dict(width=16), [FAIL, ACCURATE, NEARER]),
        (dict(trivialization_share=0.5), [FAIL]),
        (dict(timed_width=16), [FASTER, EXPENSIVE]),
        (dict(timed_batch=16), [FASTER, EXPENSIVE]),
        (dict(timed_repetitions=2), [FASTER, EXPENSIVE]),
        (dict(learning_rates=(0.25, 2.0)), [SAME_RATES]),
    ],
)
def test_reductions_leave_open_what_they_concern(changes, open_claims):
    found = verdicts(made_records(GOOD, **changes))
    assert [i for i, verdict in enumerate(found) if verdict is Verdict.OPEN] == open_claims


@pytest.mark.parametrize(
    ("lr_drop", "verdict"),
    [(9, Verdict.OPEN), (TRAINED - 1, Verdict.HOLDS), (TRAINED, Verdict.FAILS)],
)
def test_losses_of_different_rates_are_compared_until_the_rates_drop(lr_drop, verdict):
    records = made_records(GOOD, lr_drop=lr_drop, learning_rates=(0.25, 0.5, 2.0), seeds=2)
    other = records[f"{LANDING}-lr2-trial1"]
    series = {**other.result.series, "train_loss": [math.nan, 2.0, 1.0 + 1e-12]}
    changed = replace(other, result=replace(other.result, series=series))
    finding = CIFAR.claims[SAME_RATES].judge(Records({**records, f"{LANDING}-lr2-trial1": changed}))
    assert finding.verdict is verdict
    assert "rates 0.5, 2" in finding.measured


def test_an_epoch_is_50_000_images():
    assert EPOCH * 128 <= 50_000 < (EPOCH + 1) * 128


def test_figures_draw_every_method():
    records = made_records(GOOD)
    for spec, methods in zip(CIFAR.figures, (PAPER_METHODS, PAPER.methods), strict=True):
        figure = spec.draw(records)
        labels = [text.get_text() for text in figure.legends[0].texts]
        assert labels == [METHOD_STYLES[method].label for method in methods]
