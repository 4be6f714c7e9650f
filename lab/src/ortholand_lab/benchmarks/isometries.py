"""Time and memory of a training step of one orthogonal convolution, by how it is kept orthogonal.

The rival is AOC of orthogonium: Björck's iteration on every factor, in each forward pass.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ortholand_lab.benchmarks.certified.contenders import AOC, CONTENDERS, FREE, LANDING
from ortholand_lab.models.seeding import seeded
from ortholand_lab.study.records import MissingRecordError, Records, Result
from ortholand_lab.study.spec import Claim, Context, Finding, Study, TableSpec, Unit
from ortholand_lab.study.timing import Action, medians, peak_bytes, time_in_turn

METHODS = (LANDING, AOC, FREE)
SHARE = 0.8  # of AOC's time
ENOUGH = 5  # repetitions that tell
LAYERS = {  # channels in and out, kernel size, stride
    "64-64-k3": (64, 64, 3, 1),
    "64-128-k3": (64, 128, 3, 1),
    "128-128-k3": (128, 128, 3, 1),
    "64-128-k4-s2": (64, 128, 4, 2),
    "128-128-k5": (128, 128, 5, 1),
}


@dataclass(frozen=True)
class IsometrySettings:
    """Images, and how often a step is timed."""

    batch_size: int = 32
    pixels: int = 16
    repetitions: int = 15


@dataclass(frozen=True)
class IsometryTask:
    """One layer, trained by each method that is installed."""

    layer: tuple[int, int, int, int]
    settings: IsometrySettings


def plan(settings: IsometrySettings) -> list[Unit[IsometryTask]]:
    """A unit for each layer."""
    tasks = {name: IsometryTask(layer, settings) for name, layer in LAYERS.items()}
    return [Unit(name, t, settings.repetitions + 2, timed=True) for name, t in tasks.items()]


def run(task: IsometryTask, context: Context) -> Result:
    """Time of the step, of its passes alone, and the memory that a step takes beyond the model."""
    with seeded(context.seed):
        steps = {m: training_step(m, task) for m in METHODS if CONTENDERS[m].installed}
    actions = {f"{m}-{part}": Action(act) for m, parts in steps.items() for part, act in parts}
    times = time_in_turn(
        actions,
        repetitions=task.settings.repetitions,
        warm_up=2,
        clock=time.process_time,  # the machine is shared
        tick=context.tick,
    )
    values = medians(times)
    for method, parts in steps.items():
        values[f"{method}-bytes"] = float(peak_bytes(dict(parts)["step"]))
    return Result({}, values)


def training_step(
    method: str, task: IsometryTask
) -> tuple[tuple[str, Callable[[], object]], tuple[str, Callable[[], object]]]:
    """A step on random images, and its forward and backward passes."""
    channels, outputs, k, stride = task.layer
    contender, settings = CONTENDERS[method], task.settings
    layer = contender.convolution(channels, outputs, k, stride)
    optimizer = contender.optimizer(layer, 1e-3)
    x = torch.randn(settings.batch_size, channels, settings.pixels, settings.pixels)
    target = torch.randn_like(layer(x).detach())

    def passes() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x.requires_grad_()), target).backward()
        x.grad = None

    def step() -> None:
        passes()
        optimizer.step()

    return ("step", step), ("passes", passes)


def ratio(records: Records, layer: str, quantity: str, rival: str = AOC) -> float:
    """A quantity of landing in units of a rival's."""
    record = records[layer]
    if f"{rival}-step" not in record.result.values:
        raise MissingRecordError(f"{CONTENDERS[rival].label} is not installed")
    return record.value(f"{LANDING}-{quantity}") / record.value(f"{rival}-{quantity}")


def is_at_most(quantity: str, share: float, records: Records) -> Finding:
    """The ratios of all layers against a share."""
    ratios = {layer: ratio(records, layer, quantity) for layer in LAYERS}
    words = ", ".join(f"{layer} {r:.3f}" for layer, r in ratios.items())
    few = min(records[layer].configuration["settings"]["repetitions"] for layer in LAYERS) < ENOUGH
    return Finding.of(words, max(ratios.values()) <= share, "too few repetitions" if few else "")


def make_table(records: Records) -> list[list[str]]:
    """Times and memory of all layers and methods."""
    rows = [["layer", "method", "passes, ms", "step, ms", "to landing", "memory, MB"]]
    for layer in LAYERS:
        record = records[layer]
        for method in (m for m in METHODS if f"{m}-step" in record.result.values):
            step = record.value(f"{method}-step")
            rows.append([layer, CONTENDERS[method].label])
            rows[-1] += [f"{1e3 * record.value(f'{method}-passes'):.1f}", f"{1e3 * step:.1f}"]
            rows[-1] += [f"{step / record.value(f'{LANDING}-step'):.2f}"]
            rows[-1] += [f"{record.value(f'{method}-bytes') / 2**20:.1f}"]
    return rows


ISOMETRIES = Study(
    name="isometries",
    title="A training step of an orthogonal convolution, against AOC of orthogonium",
    summary=(
        "One layer, circular padding, images of 16 x 16 pixels in batches of 32, float32, one "
        "thread. A step: forward and backward passes, of images too, and the optimizer "
        "(LandingAdam, or torch's Adam for the others). Processor time, medians of steps taken in "
        "turn. Memory: the peak beyond what the model and the optimizer keep."
    ),
    settings={
        "smoke": IsometrySettings(batch_size=2, pixels=8, repetitions=1),
        "quick": IsometrySettings(repetitions=ENOUGH),
        "full": IsometrySettings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim.beyond(
            f"A step takes at most {SHARE} of the time of AOC's, from 64 to 128 channels.",
            partial(is_at_most, "step", SHARE),
        ),
        Claim.beyond("A step needs no more memory than AOC's.", partial(is_at_most, "bytes", 1.0)),
    ),
    tables=(TableSpec("isometries", "Time and memory of a step", make_table),),
    seconds={"smoke": 5, "quick": 25, "full": 60},
)
