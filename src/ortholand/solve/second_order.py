"""Whether a stationary point is a minimum: the smallest curvature, by a few Lanczos steps."""

import math
from typing import Any, NamedTuple

import numpy as np

from ortholand.solve.arrays import combine, from_numpy, inner, norm, precision, to_numpy
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.methods.newton import Model
from ortholand.solve.run import Run

SHARE = 0.05  # of a run's time that may be spent here,
ALWAYS = 60  # and Hessian products, if the run began at a stationary point
OVERHEAD, BEGIN = 5e-5, 2e-4  # seconds around a product, and before the first
CLEAR = 1e-3  # a curvature this far below zero, relative to the largest, ends the search
NEGATIVE = 1e-7  # below this it may be rounding


class Lowest(NamedTuple):
    """The smallest curvature that was found, and along which direction."""

    curvature: float
    direction: Any
    negative: bool  # beyond rounding


def products_allowed(run: Run, left_a_saddle: bool) -> int:
    """How many Hessian products the check may take; 0 if they are not exact."""
    objective, less = run.cost.objective, run.targets.less(run.point)
    if objective.watch is None or not run.cost.smooth or not objective.has_products:
        return 0
    size = math.prod(run.point.X.shape)
    if run.nit == 0 or left_a_saddle or run.targets.first <= 0.01 * less:
        return min(ALWAYS, size)
    gradient = objective.quickest["gradient"]
    product = min(objective.quickest["product"], 2 * gradient)
    begins = 0 if objective.hessp or objective.keeps_graph else 3  # a graph must be made
    passed = objective.nfev * (gradient + OVERHEAD / 4) + objective.nhev * (product + OVERHEAD / 2)
    left = SHARE * passed - BEGIN - begins * gradient
    allowed = int(left / (product + OVERHEAD)) if math.isfinite(passed) else 0
    return min(allowed, ALWAYS, size) if allowed > 1 else 0


def lowest_curvature(cost: ManifoldCost, point: Point, products: int) -> Lowest | None:
    """Lanczos' method on the Riemannian Hessian from a random vector; None if it fails."""
    model, geometry = Model(cost, point), cost.geometry
    random = np.random.default_rng(0)
    noise = random.standard_normal(tuple(point.X.shape))
    if to_numpy(point.X[:1]).dtype.kind == "c":
        noise = noise + 1j * random.standard_normal(noise.shape)
    v = geometry.coordinates(point.X, from_numpy(noise, point.X))
    size, basis = norm(v), []
    diagonal: list[float] = []
    beside: list[float] = []
    found = None
    while size > 1e-8 * math.sqrt(math.prod(point.X.shape)) and len(basis) < products:
        v = v / size
        basis.append(v)
        w = model.hessian(v)
        diagonal.append(inner(v, w))
        if not math.isfinite(diagonal[-1]):
            return None
        for _ in range(2):  # once more: rounding would show the same curvatures again
            for u in basis:
                w = combine(w, -inner(u, w), u)
        values, vectors = np.linalg.eigh(
            np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        )
        largest = float(abs(values).max())
        negative = values[0] < -max(NEGATIVE, 100 * precision(point.X)) * largest
        found = float(values[0]), vectors[:, 0], bool(negative)
        size, v = norm(w), w
        if values[0] < -CLEAR * largest or size <= 1e-10 * largest:
            break
        beside.append(size)
    if found is None:
        return None
    direction = sum(float(c) * u for c, u in zip(found[1], basis, strict=True))
    return Lowest(found[0], direction, found[2])


def lower_point(cost: ManifoldCost, point: Point, lowest: Lowest) -> Point | None:
    """A point at which f is lower, along a direction of negative curvature and either sign."""
    step = cost.cautious_step(point, 1.0)
    for _ in range(12):
        for sign in (1.0, -1.0):
            there, t = cost.go(cost.line(point, sign * lowest.direction), step, near=0.0)
            promised = -lowest.curvature * t * t / 2
            if there.finite and there.value < point.value - 0.01 * promised:
                return there
        step /= 4
    return None
