"""L-BFGS on the relative gradient: curvature learnt from the last steps, by products only.

For square X the relative gradients of all points are skew matrices, so that differences of them
mean what they mean in Euclidean space. For tall X the differences of tangent vectors are taken as
they are, and the direction is made tangent: at the distance of a step that is a transport.
"""

import numpy as np
import torch
from torch import Tensor

from ortholand.solve.descent import Descent, cautious_step
from ortholand.solve.line_search import Trial
from ortholand.solve.points import Point, inner, norm


class LBFGS(Descent):
    """Limited-memory BFGS in its compact form (Byrd, Nocedal and Schnabel, 1994).

    The pairs (s, y) are rows of one matrix, so that a direction takes two passes over them
    however many they are, and small dense algebra.
    """

    flatness = 0.9

    def __init__(self, lam: float | None = None, memory: int = 10) -> None:
        super().__init__(lam)
        self.memory = memory
        self.restart()

    def restart(self) -> bool:
        """Forget all pairs."""
        forgot = bool(getattr(self, "order", []))
        self.last = None
        self.order: list[int] = []  # rows of the pairs, oldest first, as in the small matrices
        self.newest: Tensor | None = None  # y of a pair that the small matrices do not know yet
        self.YY = np.zeros((0, 0))  # <y_i, y_j>
        self.curvatures = np.zeros(0)  # <s_i, y_i>
        self.inverse = np.zeros((0, 0))  # of R, R_ij = <s_i, y_j> for i <= j
        return forgot

    def direction(self, point: Point) -> Tensor:
        """``-H g``."""
        if not self.order:
            return -point.gradient
        g = _real_vector(point.gradient)
        coefficients, gamma = self._coefficients(g)
        flat = torch.addmv(g, self.pairs.mT, coefficients, beta=-gamma)
        return self.terrain.frame.tangent(point.X, _matrix_like(flat, point.gradient))

    def _coefficients(self, g: Tensor) -> tuple[Tensor, float]:
        """Of the rows of ``[S; Y]`` in ``-H g``, and gamma, the factor of -g itself."""
        m, order = self.memory, np.array(self.order)
        columns = [g] if self.newest is None else [g, self.newest]
        products = (self.pairs @ torch.stack(columns, -1)).cpu().double().numpy()
        Sg, Yg = products[order, 0], products[order + m, 0]
        if self.newest is not None:
            self._join(products[order, 1], products[order + m, 1])
        gamma = float(self.curvatures[-1] / self.YY[-1, -1])
        u = self.inverse @ Sg
        of_s = (self.curvatures * u + gamma * (self.YY @ u - Yg)) @ self.inverse
        coefficients = np.zeros(2 * m)
        coefficients[order], coefficients[order + m] = -of_s, gamma * u
        return torch.from_numpy(coefficients).to(g), gamma

    def _join(self, Sy: np.ndarray, Yy: np.ndarray) -> None:
        """Let the newest pair into the small matrices, and the oldest out if they are full."""
        keep = slice(len(self.curvatures) - len(Sy) + 1, None)
        old, YY = self.inverse[keep, keep], self.YY[keep, keep]
        k = len(Sy) - 1
        self.inverse, self.YY = np.zeros((k + 1, k + 1)), np.empty((k + 1, k + 1))
        self.inverse[:k, :k], self.YY[:k, :k] = old, YY
        # The inverse of an upper triangular matrix with one column more.
        self.inverse[:k, k], self.inverse[k, k] = old @ Sy[:k] / -Sy[k], 1 / Sy[k]
        self.YY[:, k] = self.YY[k, :] = Yy
        self.curvatures = np.append(self.curvatures[keep], Sy[k])
        self.newest = None

    def first_step(self, point: Point, slope: float, direction: Tensor) -> float:  # noqa: ARG002
        """The quasi-Newton step itself."""
        return 1.0 if self.order else cautious_step(point, norm(direction))

    def remember(self, point: Point, direction: Tensor, trial: Trial) -> None:
        """Keep the pair if it shows curvature."""
        y = trial.point.gradient - point.gradient
        s, y = _real_vector(direction) * trial.t, _real_vector(y)
        if not inner(s, y) > 1e-10 * norm(s) * norm(y):
            return
        row = self.order.pop(0) if len(self.order) == self.memory else len(self.order)
        if not self.order and row == 0:
            self.pairs = torch.zeros(2 * self.memory, len(s), dtype=s.dtype, device=s.device)
        self.pairs[row], self.pairs[self.memory + row] = s, y
        self.order.append(row)
        self.newest = y


def _real_vector(A: Tensor) -> Tensor:
    return (torch.view_as_real(A) if A.is_complex() else A).reshape(-1)


def _matrix_like(flat: Tensor, A: Tensor) -> Tensor:
    if A.is_complex():
        return torch.view_as_complex(flat.reshape(*A.shape, 2))
    return flat.reshape(A.shape)
