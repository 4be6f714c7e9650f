"""What experiments share: iterations on a problem, and quantities read from records."""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand_lab.problems import Problem
from ortholand_lab.study.records import Record
from ortholand_lab.study.spec import Finding
from ortholand_lab.textbook import RETRACTION_FORMS

FASTER = 1.05  # times that differ by less than this factor count as the same
EPS = 0.5  # radius of landing's safe ball, the optimizers' default


def make_optimizer(X: nn.Parameter, method: str, lr: float, **landing: Any) -> Optimizer:
    """RiemannianSGD, if the method is a retraction, or LandingSGD with these options."""
    if method in RETRACTION_FORMS:
        return RiemannianSGD([X], lr=lr, retraction=RETRACTION_FORMS[method])
    return LandingSGD([X], lr=lr, **landing)


def iterate(X: nn.Parameter, problem: Problem, optimizer: Optimizer) -> None:
    """One iteration: gradient and step."""
    X.grad = problem.grad(X.detach())
    optimizer.step()


def follow(
    marks: Sequence[int],
    advance: Callable[[], object],
    measure: Callable[[], dict[str, float]],
    tick: Callable[[int], None],
) -> dict[str, Sequence[float]]:
    """Series of measurements of a descent at these iterations, beginning with its start."""
    points = [measure()]
    for before, mark in pairwise(marks):
        for _ in range(mark - before):
            advance()
        points.append(measure())
        tick(mark - before)
    return {"iteration": marks, **{name: [p[name] for p in points] for name in points[0]}}


def iterations_to(run: Record, series: str, goal: float) -> float:
    """When a series first reaches the goal, interpolated between records; infinite if never."""
    points = zip(run.series("iteration"), run.series(series), strict=True)
    for (k0, y0), (k1, y1) in pairwise(points):
        if y1 <= goal < y0:
            return k0 + (k1 - k0) * math.log(y0 / goal) / math.log(y0 / y1) if y1 > 0 else k1
    return math.inf


def growth(run: Record, series: str) -> float:
    """The last value of a series divided by the one after 1 % of the iterations."""
    first = run.series("iteration")[-1] / 100
    pairs = zip(run.series("iteration"), run.series(series), strict=True)
    early = next(value for k, value in pairs if k >= max(1, first))
    return run.series(series)[-1] / max(early, sys.float_info.min)


def late(run: Record, series: str) -> float:
    """The median of a series over the last tenth of a run, which one fluctuation does not move."""
    marks = run.series("iteration")
    pairs = zip(marks, run.series(series), strict=True)
    return median(value for k, value in pairs if k >= 0.9 * marks[-1])


def largest(numbers: Sequence[float]) -> float:
    """The maximum; NaN if there is one, which max() may miss."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def within_ball(distances: Sequence[float], runs: int, eps: float = EPS) -> Finding:
    """Whether the safe step's guarantee holds: all distances to the manifold are at most eps."""
    worst = largest(distances)
    return Finding.of(f"at most {worst:.4f} in {runs} runs, eps = {eps}", worst <= eps)
