"""Time per batch of LeNet-5 on MNIST against the batch size (the paper's figure 8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from ortholand_lab.experiments.classification import Training, TrainingRun, doubt_of_times, run_unit
from ortholand_lab.experiments.mnist import start_lenet
from ortholand_lab.methods import RETRACTION_METHODS, Trainee, as_in_the_paper
from ortholand_lab.models import LeNet5
from ortholand_lab.study.figures import add_legend, label_plainly, listed, plot_method
from ortholand_lab.study.records import Records
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit
from ortholand_lab.study.timing import Timing, seconds_per_iteration, timing_unit

UNCONSTRAINED = "unconstrained"  # torch's own SGD: what the gradient costs
CONSTRAINED = ("landing", "exponential", "cayley", "polar", "qr", "trivialization-sgd")
TIMED_METHODS = (*CONSTRAINED, UNCONSTRAINED)
BATCH_SIZES = tuple(2**i for i in range(1, 9))
SMALLEST, LARGEST = BATCH_SIZES[0], BATCH_SIZES[-1]
LR = 4.0**-3  # from the middle of the grid on MNIST
HALF = 0.5
TEXTBOOKS = tuple(map(as_in_the_paper, RETRACTION_METHODS))
PAPER_METHODS = ("landing", *TEXTBOOKS, UNCONSTRAINED)  # timed at the ends of the range
NOISE = 0.05  # shares and ratios of times that differ by less count as equal


@dataclass(frozen=True)
class BatchSizeSettings:
    """Settings; the paper does not say over how many batches it took the median."""

    warm_up: int = 20
    repetitions: int = 200


def unit_name(batch_size: int, methods: Sequence[str] = TIMED_METHODS) -> str:
    """Name of the timing of these methods with a batch size."""
    return f"batch-{batch_size}" + ("" if methods == TIMED_METHODS else "-textbook")


def plan(settings: BatchSizeSettings) -> list[Unit[Any]]:
    """A unit for each batch size, with all methods in turn; textbook ones at the two ends."""
    ours = [_unit(size, TIMED_METHODS, settings) for size in BATCH_SIZES]
    return [*ours, *(_unit(size, PAPER_METHODS, settings) for size in (SMALLEST, LARGEST))]


def _unit(batch_size: int, methods: Sequence[str], settings: BatchSizeSettings) -> Unit[Any]:
    warm_up, repetitions = settings.warm_up, settings.repetitions
    lengths = dict(iterations=warm_up + repetitions, points=0, test_images=0)
    runs = tuple(TrainingRun(method, LR, batch_size, **lengths) for method in methods)
    return timing_unit(Timing(runs, warm_up, repetitions), unit_name(batch_size, methods))


def start_any(run: TrainingRun, context: Context) -> Training:
    """The training of a run, before its first step: with a constraint or without."""
    if run.method != UNCONSTRAINED:
        return start_lenet(run, context)
    model = LeNet5(seed=context.seed).to(context.device)
    trainee = Trainee(model, torch.optim.SGD(model.parameters(), lr=run.lr), (), "kernel")
    return Training(trainee, context, batch_size=run.batch_size, seed=context.seed)


# What is claimed.


def times_per_batch(
    records: Records, batch_size: int, methods: Sequence[str] = TIMED_METHODS
) -> dict[str, float]:
    """Median seconds per batch of each method."""
    timing = records[unit_name(batch_size, methods)]
    return {method: seconds_per_iteration(timing, method=method) for method in methods}


def _compared(records: Records, batch_size: int, retractions: Sequence[str]) -> dict[str, float]:
    all_timed = PAPER_METHODS if retractions == TEXTBOOKS else TIMED_METHODS
    return times_per_batch(records, batch_size, all_timed)


def largest_gain_at_small_batches(methods: Sequence[str], records: Records) -> Finding:
    """Time with a retraction as a multiple of landing's, at the smallest and the largest batch."""
    gains = {}
    for batch_size in (SMALLEST, LARGEST):
        times = _compared(records, batch_size, methods)
        gains[batch_size] = {m: times[m] / times["landing"] for m in methods}
    measured = "; ".join(
        f"batches of {batch_size}: {listed(gain, '.2f')} times as long as landing"
        for batch_size, gain in gains.items()
    )
    holds = all(gains[SMALLEST][m] > gains[LARGEST][m] for m in methods)
    return Finding.of(measured, holds, _doubt(records))


def gradient_share(
    batch_size: int, larger: bool, methods: Sequence[str], records: Records
) -> Finding:
    """Whether the gradient is the larger, or the smaller, part of the time with a retraction."""
    times = _compared(records, batch_size, methods)
    shares = {m: times[UNCONSTRAINED] / times[m] for m in methods}
    measured = f"of the time, without a constraint it takes: {listed(shares, '.0%')}"
    excess = min(share - HALF if larger else HALF - share for share in shares.values())
    close = "too close to a half to tell" if -NOISE <= excess < NOISE else ""
    return Finding.of(measured, excess >= NOISE, close or _doubt(records))


def landing_is_fastest(records: Records) -> Finding:
    """The nearest rival of landing at each batch size."""
    rivals, holds = [], True
    for batch_size in BATCH_SIZES:
        times = times_per_batch(records, batch_size)
        rival = min(CONSTRAINED[1:], key=lambda method, times=times: times[method])
        ratio = times[rival] / times["landing"]
        rivals.append(f"{batch_size}: {listed({rival: ratio}, '.2f')}")
        holds = holds and ratio > 1 - NOISE
    return Finding.of(f"next fastest, as a multiple: {'; '.join(rivals)}", holds, _doubt(records))


def _doubt(records: Records) -> str:
    return max(doubt_of_times(timing) for timing in records.values())  # "" is the least


# How it is drawn.


def draw(records: Records) -> Figure:
    """Time per batch against the batch size."""
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    times = [times_per_batch(records, batch_size) for batch_size in BATCH_SIZES]
    for method in TIMED_METHODS:
        plot_method(axes, method, BATCH_SIZES, [1e3 * by_method[method] for by_method in times])
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCH_SIZES, [str(n) for n in BATCH_SIZES])
    axes.set(xlabel="batch size", yscale="log", ylabel="median time per batch, milliseconds")
    label_plainly(axes.yaxis)
    add_legend(figure, axes, 4)
    return figure


_RETRACTION_NAMES = "the exponential and the Cayley retraction"

BATCH_SIZE = Study(
    name="batch-size",
    title="Time per batch of LeNet-5 on MNIST, against the batch size",
    paper_figure="Figure 8",
    summary=(
        "The network and the orthogonal kernels of the experiment mnist, with batches of 2 to 256 "
        "images and the learning rate 1/64. For each batch size all methods take turns, batch by "
        "batch, and the median time is that of forward pass, gradient and step. The paper "
        "compares fewer methods; besides its textbook ones there are ours, the polar and QR "
        "retractions, and "
        "torch's SGD without a constraint, which tells what the gradient alone costs. Below the "
        "paper preset fewer batches are timed; nothing else differs."
    ),
    settings={
        "smoke": BatchSizeSettings(warm_up=1, repetitions=2),
        "quick": BatchSizeSettings(warm_up=2, repetitions=15),
        "paper": BatchSizeSettings(),
    },
    plan=plan,
    run=partial(run_unit, start_any),
    claims=(
        Claim.of_paper(
            f"Landing's gain over {_RETRACTION_NAMES} is greater with batches of {SMALLEST} than "
            f"with batches of {LARGEST}.",
            "The landing method yields the greatest computational benefit when the batch size is "
            "small",
            partial(largest_gain_at_small_batches, TEXTBOOKS),
            partial(largest_gain_at_small_batches, RETRACTION_METHODS),
        ),
        Claim.of_paper(
            f"With batches of {SMALLEST} the retraction is the bottleneck: with {_RETRACTION_NAMES}"
            " more than half of the time is not the gradient's.",
            "because in this case, the computational bottleneck is computing the retraction",
            partial(gradient_share, SMALLEST, False, TEXTBOOKS),
            partial(gradient_share, SMALLEST, False, RETRACTION_METHODS),
        ),
        Claim.of_paper(
            f"With batches of {LARGEST} the gradient dominates: with {_RETRACTION_NAMES} it takes "
            "more than half of the time.",
            "As the batch size increases, the computational cost is dominated by backpropagation",
            partial(gradient_share, LARGEST, True, TEXTBOOKS),
            partial(gradient_share, LARGEST, True, RETRACTION_METHODS),
        ),
        Claim.beyond(
            f"At no batch size does landing take longer, by more than {NOISE:.0%}, than any "
            "retraction or than trivializations.",
            landing_is_fastest,
        ),
    ),
    figures=(
        FigureSpec(
            "batch-size",
            "Median time per batch of LeNet-5 on MNIST: forward pass, gradient and step. The "
            "dotted black curve is what a batch costs without a constraint.",
            draw,
        ),
    ),
    dataset="mnist",
    seconds={"smoke": 5, "quick": 25},
)
