"""Orthogonality errors of float32 weights under noise: how large they are, and whether they drift.

Noise: errors after random gradients, as in comparisons with other libraries. Drift: errors along
many short steps; the paper says that retractions drift and landing does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median

import torch
from torch import nn

from ortholand.geometry import random_orthogonal
from ortholand.optim import LandingAdam, LandingSGD, RiemannianSGD
from ortholand.parameters import orthogonality_error
from ortholand_lab.study.records import MissingRecordError, Records, Result
from ortholand_lab.study.spec import Claim, Context, Finding, Study, TableSpec, Unit

NOISE, DRIFT = "noise", "drift"
SETTLED = 1_000  # steps after which an error that does not drift has settled
DRIFTED = 2.0  # growth of an error from then on
Column = Sequence[int]  # number, rows and columns of the matrices; steps before each measurement


def _pogo(weights: list[nn.Parameter], *, lr: float, base: str) -> torch.optim.Optimizer:
    bases = import_module("pogo.base")
    return import_module("pogo").POGO(weights, getattr(bases, base)(), lr, rows=False)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{
        f"{kind.__name__}, {name}": partial(kind, lr=lr, view="kernel", attraction=name)
        for kind, lr in ((LandingSGD, 0.1), (LandingAdam, 0.01))
        for name in ("coupled", "decoupled", "after")
    },
    **{
        f"RiemannianSGD, {name}": partial(RiemannianSGD, lr=0.1, view="kernel", retraction=name)
        for name in ("exponential", "cayley", "polar", "qr")
    },
    "POGO + SGD": partial(_pogo, lr=0.1, base="SGD"),
    "POGO + VectorAdam": partial(_pogo, lr=0.01, base="VectorAdam"),
}
SLOW = ("RiemannianSGD, polar", "RiemannianSGD, exponential")  # not worth the wait if it is large
DRIFTERS = [m for m in OPTIMIZERS if m.startswith(("LandingSGD", "RiemannianSGD"))]


@dataclass(frozen=True)
class OrthogonalitySettings:
    """Columns of both tables."""

    noise: tuple[Column, ...] = (
        (1, 40, 40, 1_000),
        (1, 40, 40, 10_000),
        (1, 100, 100, 1_000),
        (1, 512, 512, 200),
        (1920, 4, 4, 1_000),
        (1, 2000, 100, 200),
    )
    drift: tuple[Column, ...] = ((1, 32, 32, 100, 1_000, 10_000, 100_000),)
    seeds: int = 3  # of noise, for a median


@dataclass(frozen=True)
class OrthogonalityTask:
    """One optimizer in one column."""

    kind: str
    column: Column
    method: str
    settings: OrthogonalitySettings  # of the whole run: claims are about all its columns

    @property
    def seeds(self) -> int:
        """The number of seeds: one suffices along the drift, which takes long."""
        return self.settings.seeds if self.kind == NOISE else 1


def plan(settings: OrthogonalitySettings) -> list[Unit[OrthogonalityTask]]:
    """A unit for each optimizer and column."""
    there = [m for m in OPTIMIZERS if "POGO" not in m or find_spec("pogo")]
    runs = [(NOISE, c, m) for c in settings.noise for m in there if c[1] <= 500 or m not in SLOW]
    runs += [(DRIFT, c, m) for c in settings.drift for m in DRIFTERS]
    tasks = {unit_name(*run): OrthogonalityTask(*run, settings) for run in runs}
    return [Unit(name, task, task.seeds * task.column[-1]) for name, task in tasks.items()]


def unit_name(kind: str, column: Column, method: str) -> str:
    """Name of the unit of an optimizer and column."""
    words = f"{kind} {title(column, column[-1])} {method}"
    return words.lower().replace(",", "").replace(" + ", "-").replace(" ", "-")


def title(column: Column, steps: int) -> str:
    """A heading of the tables."""
    count, rows, columns, *_ = column
    return f"{f'{count} of ' if count > 1 else ''}{rows}x{columns}, {steps:,} steps"


def run(task: OrthogonalityTask, context: Context) -> Result:
    """Errors after each of the column's numbers of steps, medians over the seeds."""
    first = context.seed * task.seeds
    errors = [errors_along(task, first + i, context) for i in range(task.seeds)]
    titles = [title(task.column, steps) for steps in task.column[3:]]
    return Result({}, dict(zip(titles, map(median, zip(*errors, strict=True)), strict=True)))


def errors_along(task: OrthogonalityTask, seed: int, context: Context) -> list[float]:
    """Distances to the manifold along the way, measured in float64."""
    shape, marks = task.column[:3], task.column[3:]
    X = nn.Parameter(random_orthogonal(*shape, seed=seed))
    # Many short steps for the drift; its gradients are not scaled.
    options, size = ({"lr": 0.003}, 1.0) if task.kind == DRIFT else ({}, shape[1] ** 0.5)
    optimizer = OPTIMIZERS[task.method]([X], **options)
    generator, errors = torch.Generator().manual_seed(1000 + seed), []
    for k in range(1, marks[-1] + 1):
        X.grad = torch.randn(*shape, generator=generator) / size
        optimizer.step()
        context.tick(1)
        if k in marks:
            errors.append(orthogonality_error(X.detach().double(), view="kernel"))
    return errors


# Claims and tables.


def at_or_below(ours: str, theirs: str, records: Records) -> Finding:
    """Whether our errors are at or below theirs in every column of noise."""
    ratios = {}
    for column in records.settings[NOISE]:
        at = title(column, column[-1])
        mine, other = (records[unit_name(NOISE, column, m)].value(at) for m in (ours, theirs))
        ratios[at] = mine / other
    words = "; ".join(f"{column}: {ratio:.2f}" for column, ratio in ratios.items())
    return Finding.of(f"in its units, {words}", max(ratios.values()) <= 1)


def only_retractions_drift(records: Records) -> Finding:
    """Growth of the errors from when they have settled to the end."""
    (column,) = records.settings[DRIFT]
    if column[-1] <= SETTLED:
        raise MissingRecordError(f"no more than {column[-1]} steps at this preset")
    growths = {}
    for method in DRIFTERS:
        record = records[unit_name(DRIFT, column, method)]
        settled, end = (record.value(title(column, k)) for k in (SETTLED, column[-1]))
        growths[method] = end / settled
    retractions = [growths[f"RiemannianSGD, {name}"] for name in ("exponential", "cayley")]
    landing = [growth for method, growth in growths.items() if "Landing" in method]
    words = "; ".join(f"{method} {growth:.1f}" for method, growth in growths.items())
    return Finding.of(
        f"from step {SETTLED:,} to {column[-1]:,}, in factors: {words}",
        min(retractions) > DRIFTED > max(landing),
    )


def make_table(kind: str, records: Records) -> list[list[str]]:
    """Errors of each optimizer in each column."""
    titles = [title(c, steps) for c in records.settings[kind] for steps in c[3:]]
    found: dict[str, dict[str, float]] = {}
    for run in (record for record in records.values() if record.configuration["kind"] == kind):
        found.setdefault(run.configuration["method"], {}).update(run.result.values)
    rows = [[m, *(f"{e[t]:.1e}" if t in e else "-" for t in titles)] for m, e in found.items()]
    return [["", *titles], *rows]


ORTHOGONALITY = Study(
    name="orthogonality",
    title="Orthogonality errors under noise, and whether they drift",
    summary=(
        "Distances ||X^T X - I||_F of float32 weights to the manifold, measured in float64; of a "
        "stack, the largest. Noise: after steps with gradients N(0, 1) / sqrt(rows) and step size "
        "0.1 (Adam 0.01), medians over seeds, POGO's too where it is installed. Drift: along steps "
        "with gradients N(0, 1) and step size 0.003."
    ),
    settings={
        "smoke": OrthogonalitySettings(
            noise=((1, 40, 40, 20), (20, 4, 4, 20), (1, 200, 10, 20)), drift=((1, 4, 4, 10, 100),)
        ),
        "quick": OrthogonalitySettings(
            noise=((1, 40, 40, 1_000), (1, 512, 512, 50), (1920, 4, 4, 200), (1, 2000, 100, 50)),
            drift=((1, 32, 32, 100, 1_000, 10_000),),
        ),
        "full": OrthogonalitySettings(),
    },
    plan=plan,
    run=run,
    claims=(
        *(
            Claim.beyond(
                f"Move, then land: errors of {ours} at or below those of {theirs} in every column.",
                partial(at_or_below, f"{ours}, after", theirs),
            )
            for ours, theirs in (("LandingSGD", "POGO + SGD"), ("LandingAdam", "POGO + VectorAdam"))
        ),
        Claim.beyond(
            "The exponential and Cayley retractions accumulate rounding errors and landing does "
            f"not: from step {SETTLED:,} to the last, under noise, their errors more than double "
            "and landing's, with every attraction, do not.",
            only_retractions_drift,
        ),
    ),
    tables=(
        TableSpec("orthogonality-noise", "Errors under noise", partial(make_table, NOISE)),
        TableSpec("orthogonality-drift", "Errors along many steps", partial(make_table, DRIFT)),
    ),
    seconds={"smoke": 10, "quick": 60, "full": 500},
)
