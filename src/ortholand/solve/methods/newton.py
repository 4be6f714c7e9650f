"""Newton's method: truncated CG on the Hessian in a trust region, and landing for the rest.

``H(A) = -psi`` is solved over skew A (tangent vectors of tall X), and ``X + A X`` is brought back
by Newton-Schulz steps: tangent and normal errors are both squared, without any retraction.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from ortholand.solve.arrays import combine, inner, norm, precision
from ortholand.solve.curvature import Curvatures, units_for
from ortholand.solve.line_search import Merit, Search, Trial
from ortholand.solve.manifold_cost import ManifoldCost, Point, Preconditioner, Targets
from ortholand.solve.method import Method, Progress
from ortholand.solve.options import Rule, is_count, is_function_or_none

MISSES = (2, 8, 32, 128)  # steps that did not go as predicted, after which products are checked
WORTH_A_PROBE = 8  # Hessian products in a step from which one more is worth spending


class Model:
    """The quadratic model of f around a point."""

    def __init__(self, cost: ManifoldCost, point: Point) -> None:
        self.point, self.geometry = point, cost.geometry
        self.product = cost.hessian(point)
        self.products = 0
        self.sharpest = 0.0  # largest curvature found

    def hessian(self, A: Any) -> Any:
        self.products += 1
        return self.product(A)


class Solution(NamedTuple):
    """Where truncated CG ended."""

    step: Any
    slope: float  # of f along it
    curvature: float  # of the model along it
    at_boundary: bool
    length: float
    residual: float  # of the linear system

    def decrease(self, t: float) -> float:
        """The decrease that the model predicts for t times the step."""
        return -t * self.slope - t * t * self.curvature / 2


class Newton(Method):
    """Trust-region Newton-CG.

    A step that falls short of the model's prediction is shortened by a line search along it, so
    that its Hessian products are not wasted, and the radius is set by the step found.
    """

    name = "newton"
    maxiter = 1_000
    rules: ClassVar[dict[str, Rule]] = {
        "preconditioner": (
            "a function (X, V) -> V, 'auto', or None",
            lambda v: is_function_or_none(v) or (isinstance(v, str) and v == "auto"),
        ),
        "inner_maxiter": ("a whole number >= 1, or None", lambda v: v is None or is_count(v)),
    }

    def __init__(
        self,
        lam: float | None = None,
        preconditioner: Preconditioner | Literal["auto"] | None = "auto",
        inner_maxiter: int | None = None,
    ) -> None:
        self.merit, self.preconditioner = Merit(lam), preconditioner
        self.inner_maxiter = inner_maxiter

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        self.cost, self.targets = cost, targets
        self.merit.start(cost)
        self.last_norm = point.gradient_norm
        self.forcing = 0.5
        columns = math.sqrt(cost.geometry.columns(point.X))
        self.largest_radius = columns if cost.geometry.bounded else math.inf
        self.radius = self.first_radius = columns / 2
        self.curvatures = Curvatures(cost.geometry, point.X)
        self.units = units_for(cost.geometry, point.gradient)
        self.effort = 0  # Hessian products in the last step
        self.misses = 0

    def advance(self, point: Point, progress: Progress) -> Point | None:
        solution = self._minimise_model(point)
        if not math.isfinite(solution.residual) and self._distrusts(point, point.gradient):
            solution = self._minimise_model(point)
        if not math.isfinite(solution.residual):
            self.cost.saw_non_finite = True
        if not solution.slope < 0:
            return None  # nothing is left but rounding
        lam = self.merit.weight(point)
        search = Search(self.cost, self.targets, point, solution.step, solution.slope, lam, 0.9)
        trial = search.attempt(1.0)
        ratio = self._ratio(search, trial, solution)
        if not 0.75 < ratio < 1.25:
            self.misses += 1
            if self.misses in MISSES and self._distrusts(point, solution.step):
                return self.advance(point, progress)
        if ratio < 0.25:
            self.radius = solution.length / 4
        elif ratio > 0.75 and solution.at_boundary:
            growth = 2 if self.cost.geometry.bounded else 8
            self.radius = min(growth * self.radius, self.largest_radius)
        if ratio > 0.1:
            self._learn(point, trial, solution)
            return trial.point
        found = search.run(0.5 * trial.t if trial.point.finite else 0.1 * trial.t)
        self.merit.judge(search)
        if found is None:
            return None
        self.radius = max(found.t * solution.length, 1e-3 * self.radius)
        self._learn(point, found, solution)
        return found.point

    def restart(self) -> bool:
        self.radius = self.first_radius
        return False

    def _distrusts(self, point: Point, step: Any) -> bool:
        """Whether Hessian products are found to be wrong; from then on others are used."""
        V = self.cost.geometry.ambient(point.X, step)
        return self.cost.objective.distrust(point.X, point.euclidean, V)

    def _learn(self, point: Point, trial: Trial, solution: Solution) -> None:
        if self.units is not None:
            change = trial.point.gradient - point.gradient
            self.units.learn(trial.t * solution.step, change)

    def _minimise_model(self, point: Point) -> Solution:
        model = Model(self.cost, point)
        inverse = self._inverse_hessian(model)
        probes = model.products
        limit = self.inner_maxiter or 2 * math.prod(point.X.shape)
        deadline = self.targets.deadline
        accuracy = self._accuracy(point)
        solution = truncated_cg(model, inverse, self.radius, accuracy, limit, deadline)
        self.effort = model.products
        self.targets.saw(model.sharpest, point)
        self.curvatures.judge(model.products - probes, point.gradient_norm, solution.residual)
        return solution

    def _inverse_hessian(self, model: Model) -> Callable[[Any], Any] | None:
        """The preconditioner of CG; probes are taken once CG has become long."""
        if self.preconditioner == "auto":
            if self.effort >= WORTH_A_PROBE or self.curvatures.best is not None:
                self.curvatures.learn(model.point, model.hessian)
            return self.curvatures.preconditioner() if self.units is None else self.units.scaled
        if self.preconditioner is None:
            return None
        return partial(self.cost.precondition, self.preconditioner, model.point)

    def _accuracy(self, point: Point) -> float:
        """Residual for CG: Eisenstat and Walker's second choice, which follows the last decrease.

        Quadratic convergence where Newton steps work, little effort where they do not yet; and no
        more than the run asks for or rounding allows, or the work on the last system would be lost.
        """
        decrease = point.gradient_norm / self.last_norm if self.last_norm else 0.0
        self.last_norm = point.gradient_norm
        cautious = 0.9 * self.forcing**2 if self.forcing > 0.3 else 0.0
        self.forcing = min(max(0.9 * decrease * decrease, cautious), 0.5)
        rounding = 8 * self.targets.eps * point.euclidean_norm
        return max(self.forcing * point.gradient_norm, 0.3 * self.targets.goal(point), rounding)

    def _ratio(self, search: Search, trial: Trial, solution: Solution) -> float:
        """Actual over predicted decrease; 1 where both are rounding."""
        after = trial.point
        if not after.finite:
            return -math.inf
        rounding = self.targets.rounding(search.start.value, 1e3 * self.targets.eps)
        actual = search.merit - after.merit(search.lam)
        return (actual + rounding) / (solution.decrease(trial.t) + rounding)


def truncated_cg(
    model: Model,
    inverse: Callable[[Any], Any] | None,
    radius: float,
    accuracy: float,
    limit: int,
    deadline: float = math.inf,
) -> Solution:
    """Steihaug's CG on ``H A = -g``, until accurate, at the radius or in negative curvature."""
    # Tangent up to its own rounding, not that of the Euclidean gradient: CG would find the rest.
    g = r = model.geometry.tangent(model.point.X, model.point.gradient)
    rr = inner(r, r)
    z = r if inverse is None else inverse(r)
    rz, dd = (rr, rr) if inverse is None else (inner(r, z), inner(z, z))
    d, A = -z, 0 * z
    AA, Ad, sharpest = 0.0, 0.0, 0.0
    rounding = precision(g) ** (2 / 3)
    for _ in range(limit):
        Hd = model.hessian(d)
        curvature = inner(d, Hd)
        if dd and abs(curvature) > sharpest * dd:
            model.sharpest = sharpest = abs(curvature) / dd
        if AA and abs(curvature) <= rounding * sharpest * dd:
            break  # f is constant in this direction; the sign is rounding
        if not math.isfinite(curvature):
            return Solution(A, 0.0, 0.0, False, 0.0, math.nan)
        alpha = rz / curvature if curvature > 0 else math.inf
        reach = _to_boundary(AA, Ad, dd, radius)
        if not alpha < reach:  # also if it is NaN
            return _finish(g, combine(A, reach, d), combine(r, reach, Hd), True)
        A, r = combine(A, alpha, d), combine(r, alpha, Hd)
        rr = inner(r, r)
        if math.sqrt(rr) <= accuracy or time.perf_counter() > deadline:
            break
        AA += alpha * (2 * Ad + alpha * dd)
        z = r if inverse is None else inverse(r)
        rz, before = (rr if inverse is None else inner(r, z)), rz
        d = rz / before * d - z  # a new one: the user's hessp may have kept the last
        # A recurrence would need an orthogonality that rounding spoils.
        Ad, dd = inner(A, d), inner(d, d)
    return _finish(g, A, r, False)


def _finish(g: Any, A: Any, r: Any, at_boundary: bool) -> Solution:
    """The solution A; its residual ``r = g + H A`` gives the model's curvature along A."""
    slope = inner(g, A)
    return Solution(A, slope, inner(A, r) - slope, at_boundary, norm(A), norm(r))


def _to_boundary(AA: float, Ad: float, dd: float, radius: float) -> float:
    """The positive t with ``||A + t d|| = radius``, from the inner products."""
    if radius == math.inf or not dd:
        return math.inf
    gap = max(radius * radius - AA, 0.0)
    return gap / (Ad + math.sqrt(Ad * Ad + dd * gap))
