"""Conjugate gradients with Hager and Zhang's formula, and plain gradient descent."""

from typing import Any, ClassVar

from ortholand.solve.arrays import combine, inner, norm
from ortholand.solve.line_search import Trial
from ortholand.solve.manifold_cost import Point
from ortholand.solve.method import Descent, Step
from ortholand.solve.options import Rule, is_function_or_none
from ortholand.solve.preconditioning import Preconditioner, precondition


class GradientDescent(Descent):
    """Steepest descent with a line search."""

    name = "retraction-gd"
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
        cautious = self.cautious_step(point, length)
        if self.last is None:
            return cautious
        return min(self.last.t * before / slope, 10 * cautious)

    def remember(self, step: Step, trial: Trial) -> None:
        """Learn the curvature from the slopes."""
        length = trial.t * step.length * step.length
        self.targets.saw((trial.slope - step.slope) / length if length else 0.0, step.point)


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
        z = precondition(self.preconditioner, self.cost, point, point.gradient)
        if self.before is None:
            return -z
        beta, d = self._beta(point, z)
        return combine(-z, beta, d)

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
        Py = (
            y
            if self.preconditioner is None
            else precondition(self.preconditioner, self.cost, point, geometry.tangent(point.X, y))
        )
        beta = (inner(y, z) - 2 * inner(y, Py) * inner(d, point.gradient) / dy) / dy
        lower = -1 / (norm(d) * min(0.01 * self.first_norm, old.gradient_norm))
        return max(beta, lower), d

    def remember(self, step: Step, trial: Trial) -> None:
        """Keep the direction and the point where it began."""
        super().remember(step, trial)
        if self.before is None:
            self.first_norm = step.point.gradient_norm
        self.before = step.point, step.direction

    def restart(self) -> bool:
        """Forget the last direction."""
        forgot, self.before = self.before is not None, None
        self.last = None
        return forgot
