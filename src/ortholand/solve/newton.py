"""Newton's method: truncated CG on the Hessian in a trust region, and landing for the rest.

``H(A) = -psi`` is solved over skew A (tangent vectors of tall X), and ``X + A X`` is brought back
by Newton-Schulz steps: tangent and normal errors both square, without any retraction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ortholand.solve.curvature import Curvatures
from ortholand.solve.line_search import Merit, Search, Trial
from ortholand.solve.points import Point, Terrain, inner, norm
from ortholand.solve.preconditioning import Preconditioner, precondition

WORTH_A_PROBE = 8  # Hessian products in a step from which on one more is worth spending


class Model:
    """The quadratic model of f around a point."""

    def __init__(self, terrain: Terrain, point: Point) -> None:
        self.terrain, self.point = terrain, point
        self.euclidean_hessian = terrain.objective.hessian(point.X, point.euclidean)
        self.products = 0

    def hessian(self, A: Tensor) -> Tensor:
        """Riemannian Hessian, in coordinates."""
        self.products += 1
        frame = self.terrain.frame
        W = self.euclidean_hessian(frame.ambient(self.point.X, A))
        return frame.hessian(self.point, A, W)


@dataclass
class Solution:
    """Where truncated CG ended."""

    step: Tensor
    slope: float  # of f along it
    curvature: float  # of the model along it
    at_boundary: bool
    length: float

    def decrease(self, t: float) -> float:
        """What the model promises for the step times t."""
        return -t * self.slope - t**2 * self.curvature / 2


class Newton:
    """Trust-region Newton-CG.

    A step that does not keep what the model promised is shortened by a line search along it, so
    that the Hessian products it took are not lost, and the radius is set by what was found.
    """

    patience: ClassVar[float] = 100

    def __init__(
        self,
        lam: float | None = None,
        preconditioner: Preconditioner | Literal["auto"] | None = "auto",
        inner_maxiter: int | None = None,
    ) -> None:
        self.merit, self.preconditioner = Merit(lam), preconditioner
        self.inner_maxiter = inner_maxiter

    def start(self, terrain: Terrain, point: Point) -> None:
        """The first radius: half a radian for every column."""
        self.terrain = terrain
        self.merit.start(terrain)
        self.last_norm = point.gradient_norm
        self.forcing = 0.5
        self.largest_radius = math.sqrt(point.X.shape[-1])
        self.radius = self.largest_radius / 2
        self.curvatures = Curvatures(point.X)
        self.effort = 0  # Hessian products in the last step

    def restart(self) -> bool:
        """Nothing is remembered but the radius."""
        return False

    def advance(self, point: Point) -> Point | None:
        """Minimise the model, go there, look."""
        solution = self._minimise_model(point)
        if not solution.slope < 0:
            return None  # nothing is left but rounding
        lam = self.merit.weight(point)
        search = Search(self.terrain, point, solution.step, solution.slope, lam, 0.9)
        trial = search.attempt(1.0)
        ratio = self._ratio(search, trial, solution)
        self._adapt(ratio, solution)
        if ratio > 0.1:
            return trial.point
        found = search.run(0.5 * trial.t if trial.point.finite else 0.1 * trial.t)
        self.merit.judge(search)
        if found is None:
            return None
        self.radius = max(found.t * solution.length, 1e-3 * self.radius)
        return found.point

    def _minimise_model(self, point: Point) -> Solution:
        model = Model(self.terrain, point)
        inverse = self._inverse_hessian(model)
        limit = self.inner_maxiter or 2 * point.X.numel()
        solution = truncated_cg(model, inverse, self.radius, self._accuracy(point), limit)
        self.effort = model.products
        return solution

    def _inverse_hessian(self, model: Model) -> Callable[[Tensor], Tensor]:
        """What CG is preconditioned with. Probes are taken where CG has become long."""
        if self.preconditioner == "auto":
            if self.effort >= WORTH_A_PROBE or self.curvatures.best is not None:
                self.curvatures.learn(model.point.X, model.hessian)
            return partial(self.curvatures.precondition, model.point.X)
        return partial(precondition, self.preconditioner, self.terrain, model.point)

    def _accuracy(self, point: Point) -> float:
        """Residual for CG: Eisenstat and Walker's second choice, which follows the last decrease.

        Quadratic convergence where Newton steps work, little effort where they do not yet; and no
        more than the run asks for or rounding allows, or the last system would be solved in vain.
        """
        decrease = point.gradient_norm / self.last_norm
        self.last_norm = point.gradient_norm
        cautious = 0.9 * self.forcing**2 if self.forcing > 0.3 else 0.0
        self.forcing = min(max(0.9 * decrease**2, cautious), 0.5)
        rounding = 8 * torch.finfo(point.X.dtype).eps * norm(point.euclidean)
        return max(self.forcing * point.gradient_norm, 0.3 * self.terrain.goal, rounding)

    def _ratio(self, search: Search, trial: Trial, solution: Solution) -> float:
        """Actual over predicted decrease; 1 where both are rounding."""
        after = trial.point
        if not after.finite:
            return -math.inf
        size = max(abs(search.start.value), self.terrain.magnitude)
        rounding = 1e3 * torch.finfo(after.X.dtype).eps * size
        actual = search.start.merit(search.lam) - after.merit(search.lam)
        return (actual + rounding) / (solution.decrease(trial.t) + rounding)

    def _adapt(self, ratio: float, solution: Solution) -> None:
        if ratio < 0.25:
            self.radius = solution.length / 4
        elif ratio > 0.75 and solution.at_boundary:
            self.radius = min(2 * self.radius, self.largest_radius)


def truncated_cg(
    model: Model,
    inverse: Callable[[Tensor], Tensor],
    radius: float,
    accuracy: float,
    limit: int,
) -> Solution:
    """Steihaug's: CG on ``H A = -g`` until accurate enough, at the radius, or downwards forever."""
    # Tangent to rounding of its own, not only of the Euclidean gradient: CG would find the rest.
    g = r = model.terrain.frame.tangent(model.point.X, model.point.gradient)
    z = inverse(r)
    d, A = -z, torch.zeros_like(r)
    rz, AA, Ad, dd = inner(r, z), 0.0, 0.0, inner(z, z)
    sharpest, rounding = 0.0, torch.finfo(r.dtype).eps ** (2 / 3)
    for _ in range(limit):
        Hd = model.hessian(d)
        curvature = inner(d, Hd)
        sharpest = max(sharpest, abs(curvature) / dd) if dd else 0.0
        if AA and abs(curvature) <= rounding * sharpest * dd:
            break  # f is constant in this direction; the sign is rounding
        alpha = rz / curvature if curvature > 0 else math.inf
        reach = _to_boundary(AA, Ad, dd, radius)
        if not alpha < reach:  # also if it is NaN
            return _finish(g, A.add_(d, alpha=reach), r.add(Hd, alpha=reach), True)
        A, r = A.add_(d, alpha=alpha), torch.add(r, Hd, alpha=alpha)
        z = inverse(r)
        rz, before = inner(r, z), rz
        if (math.sqrt(rz) if z is r else norm(r)) <= accuracy:
            break
        d = d.mul(rz / before).sub_(z)  # a new one: the user's hessp may have kept the last
        AA += alpha * (2 * Ad + alpha * dd)
        Ad, dd = inner(A, d), inner(d, d)
    return _finish(g, A, r, False)


def _finish(g: Tensor, A: Tensor, r: Tensor, at_boundary: bool) -> Solution:
    """The residual ``r = g + H A`` tells the model's curvature along A."""
    return Solution(A, inner(g, A), inner(A, r - g), at_boundary, norm(A))


def _to_boundary(AA: float, Ad: float, dd: float, radius: float) -> float:
    """The positive t with ``||A + t d|| = radius``, from the inner products."""
    gap = max(radius**2 - AA, 0.0)
    return gap / (Ad + math.sqrt(Ad**2 + dd * gap)) if dd else math.inf
