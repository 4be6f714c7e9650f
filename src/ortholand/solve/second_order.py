"""Whether a stationary point is a minimum: the smallest curvature, by a few Lanczos steps."""

import math
from typing import Any, NamedTuple

import numpy as np

from ortholand.solve.arrays import combine, from_numpy, inner, norm, precision, to_numpy
from ortholand.solve.manifold_cost import ManifoldCost, Point

CLEAR = 1e-3  # a curvature this far below zero, relative to the largest, ends the search
NEGATIVE = 1e-7  # below this it may be rounding


class Lowest(NamedTuple):
    """The smallest curvature that was found, and along which direction."""

    curvature: float
    direction: Any
    negative: bool  # beyond rounding


def lowest_curvature(cost: ManifoldCost, point: Point, products: int) -> Lowest | None:
    """Lanczos' method on the Riemannian Hessian from a random vector; None if it fails."""
    hessian, v = cost.hessian(point), random_tangent(cost, point)
    size, basis = norm(v), []
    diagonal: list[float] = []
    beside: list[float] = []
    found = None
    while size and len(basis) < products:
        v = v / size
        basis.append(v)
        w = hessian(v)
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
        if values[0] < -CLEAR * largest or size <= NEGATIVE * largest:
            break
        beside.append(size)
    if found is None:
        return None
    direction = sum(float(c) * u for c, u in zip(found[1], basis, strict=True))
    return Lowest(found[0], direction, found[2])


def random_tangent(cost: ManifoldCost, point: Point) -> Any:
    """Coordinates of a tangent vector of length 1; zero where there are none."""
    random, shape = np.random.default_rng(0), tuple(point.X.shape)
    noise = random.standard_normal(shape)
    if to_numpy(point.X[:1]).dtype.kind == "c":
        noise = noise + 1j * random.standard_normal(shape)
    v = cost.geometry.coordinates(point.X, from_numpy(noise, point.X))
    size = norm(v)
    return v / size if size > 1e-8 * math.sqrt(math.prod(shape)) else 0 * v


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
