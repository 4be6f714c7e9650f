"""Conjugate gradients with Hager and Zhang's formula, and plain gradient descent.

Both by landing, and by retractions for comparison. On 13 of 13 problems of the solver benchmark
``"bb"`` needs fewer evaluations.
"""

from typing import Any, ClassVar

from ortholand.solve.arrays import combine, inner, norm
from ortholand.solve.line_search import Descent, Search, Trial
from ortholand.solve.manifold_cost import ManifoldCost, Point, Preconditioner, Targets
from ortholand.solve.method import Method
from ortholand.solve.options import Rule, is_function_or_none
from ortholand_lab.solvers.retracting import RETRACTION_RULE, with_retraction


class GradientDescent(Descent, Method):
    """Steepest descent with a line search."""

    name = "gd"
    flatness = 0.4

    def __init__(self, lam: float | None = None) -> None:
        super().__init__(lam)
        self.promised = 0.0

    def direction(self, point: Point) -> Any:
        """The negative gradient."""
        return -point.gradient

    def first_step(self, point: Point, slope: float, length: float) -> float:
        """The step that is expected to lower f as much as the last one."""
        before, self.promised = self.promised, slope
        cautious = self.cost.cautious_step(point, length)
        if self.last is None:
            return cautious
        return min(self.last.t * before / slope, 10 * cautious)

    def remember(self, search: Search, trial: Trial) -> None:
        """Learn the curvature from the slopes."""
        length = trial.t * inner(search.direction, search.direction)
        self.targets.saw((trial.slope - search.slope) / length if length else 0.0, search.start)


class ConjugateGradient(GradientDescent):
    """Nonlinear conjugate gradients; no memory beyond the last direction."""

    name = "cg"
    flatness = 0.1
    rules: ClassVar[dict[str, Rule]] = {
        "preconditioner": ("a function (X, V) -> V, or None", is_function_or_none)
    }

    def __init__(
        self, lam: float | None = None, preconditioner: Preconditioner | None = None
    ) -> None:
        super().__init__(lam)
        self.preconditioner = preconditioner
        self.before: tuple[Point, Any] | None = None

    def direction(self, point: Point) -> Any:
        """``-z + beta d``, where d is the last direction and z the preconditioned gradient."""
        z = self._preconditioned(point, point.gradient)
        if self.before is None:
            return -z
        beta, d = self._beta(point, z)
        return combine(-z, beta, d)

    def _preconditioned(self, point: Point, V: Any) -> Any:
        if self.preconditioner is None:
            return V
        return self.cost.precondition(self.preconditioner, point, V)

    def _beta(self, point: Point, z: Any) -> tuple[float, Any]:
        """Hager and Zhang's beta (2005), with a lower bound that ensures descent; and d at X."""
        assert self.before is not None
        old, d = self.before
        geometry = self.cost.geometry
        d = geometry.tangent(point.X, d)
        y = point.gradient - old.gradient
        dy = inner(d, y)
        if dy <= 0:
            return 0.0, d
        Py = y
        if self.preconditioner is not None:
            Py = self._preconditioned(point, geometry.tangent(point.X, y))
        beta = (inner(y, z) - 2 * inner(y, Py) * inner(d, point.gradient) / dy) / dy
        lower = -1 / (norm(d) * min(0.01 * self.first_norm, old.gradient_norm))
        return max(beta, lower), d

    def remember(self, search: Search, trial: Trial) -> None:
        """Keep the direction and the point where it began."""
        super().remember(search, trial)
        if self.before is None:
            self.first_norm = search.start.gradient_norm
        self.before = search.start, search.direction

    def restart(self) -> bool:
        """Forget the last direction."""
        forgot, self.before = self.before is not None, None
        self.last = None
        return forgot


class RetractionGD(GradientDescent):
    """Steepest descent along retractions, with the loop and line search of landing."""

    name = "retraction-gd"
    rules: ClassVar[dict[str, Rule]] = RETRACTION_RULE

    def __init__(self, lam: float | None = None, retraction: Any = "polar") -> None:
        super().__init__(lam)
        self.retraction = retraction

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Let the problem move by the retraction."""
        cost.geometry = with_retraction(cost.geometry, self.retraction)
        super().start(cost, point, targets)


class RetractionCG(ConjugateGradient):
    """Conjugate gradients along retractions."""

    name = "retraction-cg"
    rules: ClassVar[dict[str, Rule]] = {**ConjugateGradient.rules, **RETRACTION_RULE}

    def __init__(
        self,
        lam: float | None = None,
        preconditioner: Preconditioner | None = None,
        retraction: Any = "polar",
    ) -> None:
        super().__init__(lam, preconditioner)
        self.retraction = retraction

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Let the problem move by the retraction."""
        cost.geometry = with_retraction(cost.geometry, self.retraction)
        super().start(cost, point, targets)
