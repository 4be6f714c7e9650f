"""How many inner steps the dual ascent needs, and their cost compared with ours."""

from dataclasses import dataclass
from time import process_time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ortholand as ol
from ortholand.geometry import random_orthogonal
from ortholand.geometry.matrices import sym, tall
from ortholand_lab.benchmarks.muon.contenders import DUAL, nearest, our_direction
from ortholand_lab.benchmarks.muon.directions import (
    PUBLISHED_RATE,
    Quality,
    compressed,
    dual_ascent,
    fewest_steps,
    quality,
)
from ortholand_lab.benchmarks.muon.training import prepare_images, start
from ortholand_lab.study.records import Result
from ortholand_lab.study.spec import Context
from ortholand_lab.study.timing import Action, medians, time_in_turn

VALUE, TANGENCY = 0.02, 1e-2  # how near to the optimum and to tangent is near enough
GAUSSIAN, DECAYING, NETWORK = "gaussian", "decaying", "network"
BEYOND = 3  # points of a curve that are good enough
BATCH = 1024  # images behind a gradient of the network


@dataclass(frozen=True)
class Case:
    """A point and a gradient.

    Args:
        kind: of the gradient: Gaussian; of singular values 1, 1/2, 1/3, ...; or of the network at
            its start, on a batch, in its own scale. The first two have spectral norm 1.
        rows: of the point.
        columns: of the point; for the network both tell the layer.
    """

    kind: str
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The case's name, for tables and as a part of units' names."""
        return f"{self.kind}-{self.rows}x{self.columns}"


@dataclass(frozen=True)
class SearchTask:
    """How many inner steps one case needs, at most ``cap``, with each of several rates."""

    case: Case
    cap: int
    rates: tuple[float, ...]


@dataclass(frozen=True)
class CostTask:
    """The costs of an inner step, of the return to the manifold, and of our step."""

    case: Case
    seconds: float


class Tried(NamedTuple):
    """The direction after some inner steps."""

    rate: float
    steps: float
    value: float
    tangency: float
    rms: float


def good_enough(direction: Quality | Tried) -> bool:
    """Whether it is tangent and near the optimum; a non-tangent direction can have any value."""
    return abs(direction.value - 1) <= VALUE and direction.tangency <= TANGENCY


def make_case(case: Case, context: Context) -> tuple[Tensor, Tensor]:
    """Point and gradient, in float64."""
    if case.kind == NETWORK:
        return _of_network(case, context)
    shape = case.rows, case.columns
    X = random_orthogonal(*shape, seed=context.seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1000 + context.seed)
    G = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if case.kind == DECAYING:
        U, s, Vh = torch.linalg.svd(G, full_matrices=False)
        G = U / torch.arange(1, len(s) + 1) @ Vh
    return X, G / torch.linalg.matrix_norm(G, 2)


def _of_network(case: Case, context: Context) -> tuple[Tensor, Tensor]:
    images = prepare_images(context.dataset)
    model, _ = start(DUAL, 0.1, context.seed)
    cross_entropy(model(images.train[:BATCH]), images.train_labels[:BATCH]).backward()
    found = [
        (tall(p.detach().double()), tall(p.grad.double()))
        for p in model.parameters()
        if p.grad is not None
    ]
    return next((X, G) for X, G in found if X.shape == (case.rows, case.columns))


def search(task: SearchTask, context: Context) -> Result:
    """Directions after 1, 2, 4, ... inner steps at the published rate, and those of the search.

    The powers of two go on until well beyond what is good enough; with other rates the search ends
    where an earlier one did.
    """
    X, G = compressed(*make_case(task.case, context))
    tried: dict[tuple[float, int], Tried] = {}

    def reaches(rate: float, steps: int) -> bool:
        if (rate, steps) not in tried:
            found = quality(X, G, dual_ascent(X, G, steps, rate=rate))
            tried[rate, steps] = Tried(rate, steps, *found)
        return good_enough(tried[rate, steps])

    steps, cap, beyond = 1, task.cap, 0
    while steps < cap and beyond < BEYOND:
        beyond += reaches(PUBLISHED_RATE, steps)
        steps *= 2
    for rate in (PUBLISHED_RATE, *task.rates):
        cap = fewest_steps(lambda k, rate=rate: reaches(rate, k), cap) or cap
        context.tick(1)
    X, G = make_case(task.case, context)
    ours = quality(X, G, our_direction(X.float(), G.float()))
    return Result.of_rows(
        Tried._fields, sorted(tried.values()), **{f"our_{k}": v for k, v in ours._asdict().items()}
    )


def cost(task: CostTask, context: Context) -> Result:
    """Median processor seconds, in float32 with one thread, taken in turn."""
    X, G = (M.float().contiguous() for M in make_case(task.case, context))
    weight = nn.Parameter(X.clone())
    weight.grad = G.clone()
    optimizer = ol.LandingMuon([weight], lr=1e-4, momentum=0.0)
    L = -sym(X.mT @ G) / 2

    def inner_step() -> Tensor:
        R = ol.msign(torch.addmm(G, X, L, alpha=2))
        return L - PUBLISHED_RATE * 2 * sym(X.mT @ R)

    actions = {
        "ours": Action(optimizer.step),
        "inner_step": Action(inner_step),
        "retraction": Action(lambda: nearest(torch.add(X, G, alpha=1e-4))),
    }
    times = time_in_turn(
        actions, repetitions=5, seconds=task.seconds, warm_up=2, clock=process_time
    )
    context.tick(1)
    return Result({}, medians(times))
