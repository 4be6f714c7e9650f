"""The method that is used where none is named."""

from typing import Any, ClassVar

from ortholand.solve.arrays import real_vector
from ortholand.solve.bb import BarzilaiBorwein
from ortholand.solve.lbfgs import DENSE, LBFGS
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.method import Method
from ortholand.solve.newton import Newton
from ortholand.solve.options import Rule
from ortholand.solve.targets import Targets

TRIAL = 30  # iterations after which Barzilai-Borwein steps are judged
FAST = 1e-2  # to which they must have brought the gradient by then


class Automatic:
    """Newton where Hessian products are exact; else what the first iterations recommend.

    Without products, X of few numbers are for L-BFGS, which then keeps all it learns. Larger ones
    start with Barzilai-Borwein steps, the cheapest; where these do not get far, the problem is ill
    conditioned, and L-BFGS goes on with fewer evaluations. An option that only one method has
    chooses that one.
    """

    rules: ClassVar[dict[str, Rule]] = {**LBFGS.rules, **Newton.rules}

    def __init__(self, lam: float | None = None, **options: Any) -> None:
        self.lam, self.options = lam, options
        self.method: Method = BarzilaiBorwein()
        self.names: list[str] = []
        self.taken = 0

    @property
    def name(self) -> str:
        """What was used, in this order."""
        return ", ".join(self.names)

    @property
    def patience(self) -> float:
        """That of the method at work."""
        return self.method.patience

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose."""
        self.cost, self.targets, self.first = cost, targets, point.gradient_norm
        if set(self.options) & set(LBFGS.rules):
            return self._use(LBFGS(self.lam, **self.options), point)
        if self.options or cost.objective.has_products:
            return self._use(Newton(self.lam, **self.options), point)
        few = len(real_vector(point.X)) <= DENSE
        return self._use(LBFGS(self.lam) if few else BarzilaiBorwein(self.lam), point)

    def _use(self, method: Method, point: Point) -> None:
        self.method = method
        self.names.append(method.name)
        method.start(self.cost, point, self.targets)

    def advance(self, point: Point) -> Point | None:
        """As the method at work does."""
        slow = self.taken == TRIAL and point.gradient_norm > FAST * self.first
        if slow and isinstance(self.method, BarzilaiBorwein):
            self._use(LBFGS(self.lam), point)
        self.taken += 1
        return self.method.advance(point)

    def restart(self) -> bool:
        """As the method at work does."""
        return self.method.restart()
