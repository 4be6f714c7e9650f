import io
import math
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn

import ortholand
from ortholand_lab.datasets import Dataset
from ortholand_lab.experiments.classification import (
    FEWEST_REPETITIONS,
    MARGIN,
    Training,
    TrainingRun,
    TrainingSettings,
    TrialTiming,
    batches,
    best_rates,
    compare_ends,
    crop_and_flip,
    doubt_of_times,
    draw_learning_rates,
    draw_training,
    even_marks,
    final_loss,
    plan_trainings,
    prepare_kernels,
    run_unit,
    runs_of,
    scale_of,
    stays_in_ball,
    takes_longer,
    train,
    training_figures,
    tried_rates,
    unit_name,
)
from ortholand_lab.experiments.descents import EPS
from ortholand_lab.study.figures import METHOD_STYLES
from ortholand_lab.study.records import (
    MissingRecordError,
    Record,
    Records,
    Request,
    Result,
    RunOptions,
)
from ortholand_lab.study.spec import Context, Finding, Verdict
from ortholand_lab.study.timing import TIMING, Timing, timing_unit

NO_DATA = Context(seed=3, device=torch.device("cpu"), tick=lambda _: None)
RUN = TrainingRun(method="landing", lr=0.05, batch_size=3, iterations=8, points=2, test_images=7)


def random_images(n, channels=1, side=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, channels, side, side), generator=generator, dtype=torch.uint8)


def dataset(n=12, channels=1, side=8):
    labels = torch.arange(n) % 10
    train, test = (random_images(n, channels, side, seed) for seed in (1, 2))
    return Dataset("random", train, labels, test, labels)


CONTEXT = replace(NO_DATA, data=dataset())


class SmallNet(nn.Module):
    """A convolution, something that differs between training and testing, and a linear layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.linear = nn.Linear(2 * 36, 10)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).flatten(1))


def training(method="landing", lr=0.05, **options):
    trainee = prepare_kernels(SmallNet(), method, lr)
    return Training(trainee, CONTEXT, **dict(batch_size=3, seed=0) | options)


# Images.


def test_the_scale_is_that_of_each_channel():
    images = random_images(5, channels=3)
    images[:, 1] //= 3
    scale = scale_of(images)
    expected = images.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(scale.mean, expected.mean(1).float())
    torch.testing.assert_close(scale.deviation, expected.std(1, correction=0).float())
    scaled = scale.apply(images, torch.device("cpu")).transpose(0, 1).flatten(1)
    torch.testing.assert_close(scaled.mean(1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.std(1, correction=0), torch.ones(3))


def test_images_of_one_grey_stay_finite():
    images = torch.full((2, 1, 4, 4), 9, dtype=torch.uint8)
    assert scale_of(images).apply(images, torch.device("cpu")).eq(0).all()


def take(n_batches, **options):
    source = batches(torch.arange(10), torch.arange(10) + 100, **options)
    return [next(source) for _ in range(n_batches)]


def test_an_epoch_has_every_image_once_with_its_label_and_leaves_out_a_part_of_a_batch():
    taken = take(6, batch_size=3, seed=0)
    for images, labels in taken:
        assert len(images) == 3
        assert torch.equal(images + 100, labels)
    first, second = (torch.cat([x for x, _ in epoch]) for epoch in (taken[:3], taken[3:]))
    assert len(set(first.tolist())) == len(set(second.tolist())) == 9
    assert not torch.equal(first, second)


def test_batches_are_the_seeds():
    first, again, other = (take(4, batch_size=5, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="11 images needs as many, but there are 10"):
        take(1, batch_size=11, seed=0)


def all_crops(image):
    """Every image that shifting and mirroring can make, with how it was made."""
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * MARGIN, width + 2 * MARGIN, dtype=image.dtype)
    canvas[:, MARGIN : MARGIN + height, MARGIN : MARGIN + width] = image
    for i in range(2 * MARGIN + 1):
        for j in range(2 * MARGIN + 1):
            crop = canvas[:, i : i + height, j : j + width]
            yield crop, (i, j, False)
            yield torch.flip(crop, dims=[2]), (i, j, True)


def test_augmented_images_are_shifted_and_mirrored_ones():
    images = random_images(200, channels=3, side=6)
    augmented = crop_and_flip(images, torch.Generator().manual_seed(0))
    assert augmented.dtype == torch.uint8
    ways = [
        next(way for crop, way in all_crops(before) if torch.equal(crop, after))
        for before, after in zip(images, augmented, strict=True)
    ]
    rows, columns, mirrored = zip(*ways, strict=True)
    assert set(rows) == set(columns) == set(range(2 * MARGIN + 1))
    assert 70 < sum(mirrored) < 130
    assert len(set(ways)) > 80  # independently of each other: of 162 ways


def test_batches_are_augmented_on_demand():
    images = random_images(10)
    plain, augmented = (
        next(batches(images, torch.arange(10), batch_size=10, seed=0, augment=augment))
        for augment in (False, True)
    )
    assert torch.equal(plain[1], augmented[1])
    assert torch.equal(plain[0], images[plain[1]])
    assert not torch.equal(plain[0], augmented[0])


# Training.


def scaled(images):
    seen = dataset().train_images.float()
    return (images - seen.mean()) / seen.std(correction=0)


def test_training_steps_down_the_cross_entropy():
    """By hand: a landing step of the kernels and a gradient step of the rest."""
    trained, data = training(), dataset()
    model = ortholand.orthogonalize_(SmallNet(), orthogonal="conv.weight", view="kernel")
    source = batches(data.train_images, data.train_labels, batch_size=3, seed=0)
    losses = []
    for _ in range(4):
        images, labels = next(source)
        scores = model(scaled(images))
        loss = -(scores.exp() / scores.exp().sum(1, keepdim=True))[range(3), labels].log().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p, G in zip(model.parameters(), gradients, strict=True):
                p -= 0.05 * (ortholand.landing_field(p, G, 1.0) if p.ndim == 4 else G)
    trained.advance_to(4)
    for p, q in zip(trained.trainee.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert trained.measure(12).train_loss == pytest.approx(sum(losses) / 4, rel=1e-4)


def test_what_is_measured():
    trained = training()
    first = trained.measure(12)
    assert math.isnan(first.train_loss)
    trained.advance_to(5)
    point = trained.measure(7)
    model, data = trained.trainee.model, trained.data
    assert model.training
    model.eval()
    wrong = (model(scaled(data.test_images[:7])).argmax(1) != data.test_labels[:7]).sum()
    assert point.test_error == pytest.approx(float(wrong) / 7)
    kernels = model.conv.weight.detach().double().flatten(0, 1)
    errors = torch.linalg.matrix_norm(kernels.mT @ kernels - torch.eye(3))
    assert point.orthogonality_error == pytest.approx(float(errors.square().sum().sqrt()))
    assert point.largest_error == pytest.approx(float(errors.max()))
    assert point.largest_error < point.orthogonality_error
    assert point.iteration == 5


def test_measuring_disturbs_nothing():
    undisturbed, measured = training(), training()
    undisturbed.advance_to(6)
    for k in range(7):
        measured.advance_to(k)
        measured.measure(12)
    for p, q in zip(undisturbed.trainee.weights(), measured.trainee.weights(), strict=True):
        assert torch.equal(p, q)


def test_a_nan_is_the_largest_error():
    trained = training()
    with torch.no_grad():
        trained.trainee.model.conv.weight[0] = math.nan
    assert math.isnan(trained.trainee.largest_error())


def test_trivialized_networks_are_measured_as_they_are():
    trained = training("trivialization-sgd")
    trained.advance_to(3)
    before = trained.measure(12)
    assert before.orthogonality_error < 1e-5
    trained.advance_to(40)
    after = trained.measure(12)
    assert after.orthogonality_error < 1e-5
    weight = trained.trainee.model.conv.weight.detach()
    trained.advance_to(41)
    assert not torch.equal(weight, trained.trainee.model.conv.weight)


def test_all_learning_rates_drop_once():
    trained = training(lr_drop=3)
    for k, factor in ((3, 1.0), (4, 0.1), (8, 0.1)):
        trained.advance_to(k)
        rates = [group["lr"] for group in trained.trainee.optimizer.param_groups]
        assert rates == pytest.approx([0.05 * factor, 0.05 * factor])


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_marks_are_even_and_end_at_the_end(iterations, points):
    marks = even_marks(iterations, points)
    assert marks[-1] == iterations
    assert len(marks) == min(iterations, points)
    gaps = [b - a for a, b in zip([0, *marks], marks, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_a_run_is_recorded_at_its_marks():
    ticks = []
    run = replace(RUN, iterations=120, points=4)
    result = train(training(), run, replace(CONTEXT, tick=ticks.append))
    assert list(result.series["iteration"]) == [0, 30, 60, 90, 120]
    assert sum(ticks) == 120
    assert all(0 <= error <= 1 for error in result.series["test_error"])


def test_runs_are_timed_in_turn_after_a_warm_up():
    ticks, trainings = [], []

    def start(run, context):
        trainings.append(training(run.method, run.lr))
        return trainings[-1]

    timing = Timing((RUN, replace(RUN, method="exponential")), warm_up=2, repetitions=3)
    result = run_unit(start, timing, replace(CONTEXT, tick=ticks.append))
    assert sorted(result.series["run"]) == [0, 0, 0, 1, 1, 1]
    assert [t.iteration for t in trainings] == [5, 5]
    assert sum(ticks) == timing_unit(timing).steps == 5
    assert timing_unit(timing).timed
    assert min(result.series["seconds"]) > 0


def test_batches_are_made_before_the_clock_starts():
    trained = training()
    act, prepare = trained.action()
    prepare()
    before = next(trained.batches)
    act()
    assert trained.iteration == 1
    reference = training()
    next(reference.batches)
    assert torch.equal(next(reference.batches)[1], before[1])


def test_timed_iterations_are_those_of_a_training():
    timed, trained = training(lr_drop=2), training(lr_drop=2)
    for _ in range(4):
        act, prepare = timed.action()
        prepare()
        act()
    trained.advance_to(4)
    for p, q in zip(timed.trainee.weights(), trained.trainee.weights(), strict=True):
        assert torch.equal(p, q)


def test_a_unit_is_a_training_or_a_timing():
    started = []

    def start(run, context):
        started.append(run)
        return training(run.method, run.lr)

    other = replace(RUN, method="cayley")
    assert "test_error" in run_unit(start, RUN, CONTEXT).series
    assert "seconds" in run_unit(start, Timing((RUN, other), 0, 1), CONTEXT).series
    assert started == [RUN, RUN, other]


def test_a_training_gives_the_same_numbers_again():
    first, again = (train(training(), RUN, CONTEXT).series for _ in range(2))
    assert {name: values[1:] for name, values in first.items()} == {
        name: values[1:]
        for name, values in again.items()  # no loss yet, NaN, at the start
    }


def test_a_training_without_data_is_refused():
    with pytest.raises(ValueError, match="needs a data set"):
        Training(prepare_kernels(SmallNet(), "landing", 0.1), NO_DATA, batch_size=3, seed=0)


SETTINGS = TrainingSettings(
    batch_size=3,
    learning_rates=(0.5, 0.05),
    iterations=10,
    trivialization_share=0.25,
    points=2,
    test_images=7,
    warm_up=1,
    repetitions=4,
)


def test_runs_are_methods_with_rates_and_only_trivializations_are_shorter():
    runs = runs_of(SETTINGS, ("landing", "trivialization-adam"))
    assert [(run.method, run.lr, run.iterations) for run in runs] == [
        ("landing", 0.5, 10),
        ("landing", 0.05, 10),
        ("trivialization-adam", 0.5, 3),
        ("trivialization-adam", 0.05, 3),
    ]
    assert {(run.batch_size, run.points, run.test_images) for run in runs} == {(3, 2, 7)}


def test_all_trials_are_trained_side_by_side_and_the_first_is_timed_alone():
    *trainings, timing = plan_trainings(SETTINGS, [RUN], trials=3)
    assert [unit.task for unit in trainings] == [replace(RUN, trial=i) for i in range(3)]
    assert not any(unit.timed for unit in trainings)
    assert timing.timed
    assert timing.task == TrialTiming((RUN,), 1, 4, trials=3)


# What the records say.


def record(task, series):
    request = Request("x", 1, "unit", RunOptions("quick", 0, "cpu", 1), asdict(task), {})
    return Record(request, Result(series, {}), {}, 0.0, "")


def curves(losses, **changes):
    """The series of a training with these losses."""
    n = len(losses)
    series = dict(
        iteration=[10 * k for k in range(n + 1)],
        train_loss=[math.nan, *losses],
        test_error=[0.9] + [0.1] * n,
        orthogonality_error=[1e-6] * (n + 1),
        largest_error=[1e-7] * (n + 1),
    )
    return series | changes


def made_records(runs, seconds=None, trials=1, repetitions=FEWEST_REPETITIONS):
    """Records of trainings: (method, lr, trial) -> series, and of their timing."""
    tasks = {key: TrainingRun(*key[:2], 4, 100, 3, 10, trial=key[2]) for key in runs}
    made = {unit_name(*key): record(t, runs[key]) for key, t in tasks.items()}
    timed = tuple(task for key, task in tasks.items() if key[2] == 0)
    timing = TrialTiming(timed, 0, repetitions, trials)
    turns = [(i, (seconds or {}).get(t.method, 1.0)) for i, t in enumerate(timed)] * repetitions
    columns = dict(zip(("run", "seconds"), zip(*turns, strict=True), strict=True))
    return Records({**made, TIMING: record(timing, columns)})


def test_units_are_named_after_method_rate_and_trial():
    assert unit_name("landing", 4.0**-5) == "landing-lr0.000977"
    assert unit_name("landing", 0.05, 2) == "landing-lr0.05-trial2"
    *_, second, _ = plan_trainings(SETTINGS, [RUN], trials=2)
    assert second.name == "landing-lr0.05-trial1"
    rates = [4.0**i for i in range(-5, 1)]
    assert len({unit_name("landing", lr) for lr in rates}) == 6


def test_the_last_quarter_of_a_run_is_its_end():
    loss = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert final_loss(record(RUN, curves(loss))) == 1.5
    assert final_loss(record(RUN, curves([3.0, 2.0]))) == 2.0
    assert final_loss(record(RUN, curves([3.0, math.nan]))) == math.inf


def test_the_best_rate_has_the_smallest_training_loss_whatever_the_test_error():
    records = made_records(
        {
            ("landing", 1.0, 0): curves([2.0, math.nan]),
            ("landing", 0.1, 0): curves([2.0, 0.5], test_error=[0.9, 0.9, 0.9]),
            ("landing", 0.01, 0): curves([2.0, 1.0], test_error=[0.9, 0.0, 0.0]),
            ("cayley", 0.1, 0): curves([2.0, 1.0]),
        },
        {"landing": 0.25, "cayley": 0.5},
    )
    assert [entry.lr for entry in tried_rates(records)["landing"]] == [0.01, 0.1, 1.0]
    best = best_rates(records)
    assert {method: entry.lr for method, entry in best.items()} == {"landing": 0.1, "cayley": 0.1}
    assert best["landing"].end("test_error") == 0.9
    assert best["landing"].seconds == 0.25


def trial_losses(*losses):
    return {("landing", 1.0, i): curves([2.0, loss]) for i, loss in enumerate(losses)}


def test_trials_count_by_their_median():
    records = made_records(trial_losses(1.0, 9.0, 2.0), trials=3)
    assert best_rates(records)["landing"].loss == 2.0
    other = {("landing", 0.5, i): curves([2.0, x]) for i, x in enumerate((1.9, 1.8, 50.0))}
    assert (
        best_rates(made_records(trial_losses(1.0, 9.0, 2.0) | other, trials=3))["landing"].lr == 0.5
    )


def test_a_missing_run_leaves_all_open():
    records = made_records(trial_losses(1.0, 9.0), trials=3)
    with pytest.raises(MissingRecordError, match="landing-lr1-trial2"):
        best_rates(records)


def test_times_are_those_of_the_run_with_its_rate():
    records = made_records({("landing", lr, 0): curves([1.0]) for lr in (1.0, 0.5)})
    series = {"run": [0, 1] * 3, "seconds": [1.0, 5.0, 9.0, 6.0, 2.0, 70.0]}
    timing = replace(records[TIMING], result=Result(series, {}))
    tried = tried_rates(Records({**records, TIMING: timing}))["landing"]
    assert [(entry.lr, entry.seconds) for entry in tried] == [(0.5, 6.0), (1.0, 2.0)]


def test_times_are_compared():
    times = {"landing": 0.002, "exponential": 0.003, "cayley": 0.008}
    finding = takes_longer(times, 1.5, "")
    assert finding.measured == (
        "landing 2.00 ms per iteration; exponential 1.50, Cayley 4.00 times as long"
    )
    assert finding.verdict is Verdict.HOLDS
    assert takes_longer(times, 1.6, "").verdict is Verdict.FAILS
    del times["exponential"]
    assert takes_longer(times, 1.6, "").verdict is Verdict.HOLDS
    assert takes_longer(times, 1.6, "too few").verdict is Verdict.OPEN
    assert takes_longer({"landing": 1.5, "cayley": 3.0}, 2.0, "").measured.startswith(
        "landing 1,500 ms per iteration"
    )


def test_few_times_decide_nothing():
    for repetitions, doubted in ((FEWEST_REPETITIONS - 1, True), (FEWEST_REPETITIONS, False)):
        doubt = doubt_of_times(record(Timing((RUN,), 0, repetitions), {}))
        assert bool(doubt) == doubted


def test_a_doubt_leaves_a_finding_open():
    assert Finding.of("so", holds=True) == Finding("so", Verdict.HOLDS)
    assert Finding.of("so", holds=False) == Finding("so", Verdict.FAILS)
    assert Finding.of("so", holds=True, doubt="why") == Finding("so; why", Verdict.OPEN)


@pytest.mark.parametrize(
    ("enough", "verdict"),
    [({"iterations": 100}, Verdict.HOLDS), ({"iterations": 101}, Verdict.OPEN)],
)
def test_ends_are_compared_if_all_runs_are_long_enough(enough, verdict):
    records = made_records(
        {
            ("landing", 1.0, 0): curves([2.0, 1.0], test_error=[0.9, 0.5, 0.25]),
            ("cayley", 1.0, 0): curves([2.0, 1.0]),
        }
    )
    compare = partial(compare_ends, "test_error", ("landing", "cayley"))
    finding = compare(lambda ends: ends == {"landing": 0.25, "cayley": 0.1}, enough, records)
    assert finding.measured.startswith(
        "last tenth of 100 iterations: landing 25.00%, Cayley 10.00%"
    )
    assert finding.verdict is verdict
    assert compare(lambda _: False, {}, records).verdict is Verdict.FAILS


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(EPS, Verdict.HOLDS), (1.01 * EPS, Verdict.FAILS), (math.nan, Verdict.FAILS)],
)
def test_the_ball_is_watched_at_every_point_of_every_run(error, verdict):
    far = curves([1.0, 1.0], largest_error=[0.0, error, 0.0])
    near = curves([0.1, 0.1])
    outside = curves([1.0, 1.0], largest_error=[7.0, 7.0, 7.0])
    records = made_records(
        {
            ("landing", 1.0, 0): near,
            ("landing-momentum", 1.0, 0): near,
            ("landing-momentum", 0.5, 0): far,
            ("exponential", 1.0, 0): outside,
        }
    )
    assert stays_in_ball(("landing", "landing-momentum"), records).verdict is verdict
    assert stays_in_ball(("landing",), records).verdict is Verdict.HOLDS


# Figures.


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_curves_are_drawn_by_time_and_by_iteration():
    records = made_records(
        {
            ("landing", 1.0, 0): curves([2.0, 1.0], test_error=[0.9, 0.5, 0.25]),
            ("cayley", 1.0, 0): curves([2.0, 1.0]),
        },
        {"landing": 0.125, "cayley": 0.5},
    )
    figure = draw_training(records)
    by_time, by_iteration, *_ = figure.axes
    landing = METHOD_STYLES["landing"].label
    assert list(lines(by_time)[landing].get_xdata()) == [1.25, 2.5]
    assert list(lines(by_time)[landing].get_ydata()) == [0.5, 0.25]
    assert list(lines(by_iteration)[METHOD_STYLES["cayley"].label].get_xdata()) == [10, 20]
    assert list(lines(by_time)[METHOD_STYLES["cayley"].label].get_xdata()) == [5.0, 10.0]
    assert [text.get_text() for text in figure.legends[0].texts] == [landing, "Cayley"]
    figure.savefig(io.BytesIO(), format="svg")


def test_trials_are_drawn_behind_their_median():
    runs = {
        ("landing", 1.0, i): curves([1.0, 1.0], test_error=[0.9, e, e])
        for i, e in enumerate((0.1, 0.2, 0.6))
    }
    axes = draw_training(made_records(runs, trials=3)).axes[0]
    assert len(axes.lines) == 4
    assert list(lines(axes)["landing"].get_ydata()) == [0.2, 0.2]


def test_losses_are_drawn_against_learning_rates():
    runs = {
        ("landing", 1.0, 0): curves([2.0, math.nan]),
        ("landing", 0.25, 0): curves([2.0, 0.5]),
        ("landing", 0.5, 0): curves([2.0, 0.75]),
    }
    figure = draw_learning_rates(made_records(runs))
    assert isinstance(figure, Figure)
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [0.25, 0.5, 1.0]
    assert list(line.get_ydata()) == [0.5, 0.75, math.inf]
    figure.savefig(io.BytesIO(), format="svg")


def test_captions_say_what_is_special():
    first, second = training_figures("x", "Net", curves=", thin", errors="; none", rate="rate")
    assert (first.name, second.name) == ("x", "x-learning-rates")
    assert "Net, each method with its best learning rate, thin. Top" in first.caption
    assert "all kernels together; none. Left" in first.caption
    assert "against the rate. The lowest" in second.caption
