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

TRIAL = 30  # iterations after which Barzilai-Borwein steps are judged, again and again
FIRST = 1e-2  # to which they must have brought the gradient by the first time
LATER = 1e-1  # to which from one time to the next


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
        self.share = FIRST

    @property
    def name(self) -> str:
        """What was used, in this order."""
        return ", ".join(self.names)

    @property
    def patience(self) -> float:
        """The longest of the methods used: what one has waited counts for the next."""
        waited = BarzilaiBorwein.patience if BarzilaiBorwein.name in self.names else 0
        return max(waited, self.method.patience)

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose."""
        self.cost, self.targets = cost, targets
        self.flattest = self.mark = point.gradient_norm
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
        if isinstance(self.method, BarzilaiBorwein) and self._is_slow(point):
            self._use(LBFGS(self.lam), point)
        self.taken += 1
        return self.method.advance(point)

    def _is_slow(self, point: Point) -> bool:
        """Whether it is time to judge, and the gradient has not fallen much since the last."""
        self.flattest = min(self.flattest, point.gradient_norm)
        if self.taken == 0 or self.taken % TRIAL:
            return False
        slow = self.flattest > self.share * self.mark
        self.mark, self.share = self.flattest, LATER
        return slow

    def restart(self) -> bool:
        """As the method at work does."""
        return self.method.restart()
