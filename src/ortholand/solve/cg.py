"""Conjugate gradients with Hager and Zhang's formula, and plain gradient descent."""

import torch
from torch import Tensor

from ortholand.solve.descent import Descent, cautious_step
from ortholand.solve.line_search import Trial
from ortholand.solve.points import Point, inner, norm
from ortholand.solve.preconditioning import Preconditioner, precondition


class GradientDescent(Descent):
    """Steepest descent with a line search."""

    flatness = 0.4

    def __init__(self, lam: float | None = None) -> None:
        super().__init__(lam)
        self.promised = 0.0

    def direction(self, point: Point) -> Tensor:
        """Down the gradient."""
        return -point.gradient

    def first_step(self, point: Point, slope: float, direction: Tensor) -> float:
        """As far as would decrease f by as much as the last step did."""
        before, self.promised = self.promised, slope
        cautious = cautious_step(point, norm(direction))
        if self.last is None:
            return cautious
        return min(self.last.t * before / slope, 10 * cautious)


class ConjugateGradient(GradientDescent):
    """Nonlinear conjugate gradients; no memory beyond the last direction."""

    flatness = 0.1

    def __init__(
        self, lam: float | None = None, preconditioner: Preconditioner | None = None
    ) -> None:
        super().__init__(lam)
        self.preconditioner = preconditioner
        self.before: tuple[Point, Tensor] | None = None

    def direction(self, point: Point) -> Tensor:
        """``-z + beta d``, d the last direction, z the preconditioned gradient."""
        z = precondition(self.preconditioner, self.terrain, point, point.gradient)
        if self.before is None:
            return -z
        beta, d = self._beta(point, z)
        return torch.add(-z, d, alpha=beta)

    def _beta(self, point: Point, z: Tensor) -> tuple[float, Tensor]:
        """Hager and Zhang (2005), with a lower bound that keeps descent."""
        assert self.before is not None
        old, d = self.before
        frame = self.terrain.frame
        d = frame.tangent(point.X, d)
        y = point.gradient - old.gradient
        dy = inner(d, y)
        if dy <= 0:
            return 0.0, d
        Py = (
            y
            if self.preconditioner is None
            else precondition(self.preconditioner, self.terrain, point, frame.tangent(point.X, y))
        )
        beta = (inner(y, z) - 2 * inner(y, Py) * inner(d, point.gradient) / dy) / dy
        lower = -1 / (norm(d) * min(0.01 * self.first_norm, old.gradient_norm))
        return max(beta, lower), d

    def remember(self, point: Point, direction: Tensor, trial: Trial) -> None:  # noqa: ARG002
        """The direction, at the point that it came from."""
        if self.before is None:
            self.first_norm = point.gradient_norm
        self.before = point, direction

    def restart(self) -> bool:
        """Forget the last direction."""
        forgot, self.before = self.before is not None, None
        self.last = None
        return forgot
