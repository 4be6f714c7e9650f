"""The method used when none is named."""

from collections.abc import Callable
from typing import Any, ClassVar

from ortholand.solve.arrays import real_vector
from ortholand.solve.bb import BarzilaiBorwein
from ortholand.solve.lbfgs import LBFGS
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.method import Method, RunAhead
from ortholand.solve.newton import Newton
from ortholand.solve.options import Rule
from ortholand.solve.small import Passed, Progress, is_compiled
from ortholand.solve.targets import Targets

FEW = 192  # numbers in X up to which L-BFGS sees most of the Hessian
TRIAL = 30  # the first method is judged every so many iterations
FIRST = 1e-2  # share of the gradient that may be left the first time it is judged
LATER = 1e-1  # share that may be left from one time to the next


class Automatic:
    """The method that suits X, the functions given and the first iterations.

    Where L-BFGS is compiled, it comes first. If the problem proves ill conditioned and Hessian
    products are exact, Newton's method follows, unless X has so few numbers that the pairs of
    L-BFGS capture most of the Hessian. Elsewhere Newton's method comes first. Without such
    products, L-BFGS is used for few numbers; for more, Barzilai-Borwein steps, the cheapest, come
    first, followed by L-BFGS with fewer evaluations if they make little progress. An option that
    only one method has selects that method.
    """

    rules: ClassVar[dict[str, Rule]] = {**LBFGS.rules, **Newton.rules}

    def __init__(self, lam: float | None = None, **options: Any) -> None:
        self.lam, self.options = lam, options
        self.method: Method  # once it is started
        self.successor: Callable[[float | None], Method] | None = None  # follows if it is slow
        self.names: list[str] = []
        self.taken = 0
        self.share = FIRST
        self.longest = 0.0

    @property
    def name(self) -> str:
        """The methods used, in order."""
        return ", ".join(self.names)

    @property
    def patience(self) -> float:
        """The longest of the methods used: the wait of one counts for the next."""
        return self.longest

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose the first method and start it."""
        self.cost, self.targets = cost, targets
        self.flattest = self.mark = point.gradient_norm
        if set(self.options) & set(LBFGS.rules):
            return self._use(LBFGS(self.lam, **self.options), point)
        if self.options:
            return self._use(Newton(self.lam, **self.options), point)
        return self._use(self._first(point), point)

    def _first(self, point: Point) -> Method:
        few, products = len(real_vector(point.X)) <= FEW, self.cost.objective.has_products
        if is_compiled(self.cost, point.X):
            self.successor = Newton if products and not few else None
            return LBFGS(self.lam)
        if products:
            return Newton(self.lam)
        self.successor = None if few else LBFGS
        return LBFGS(self.lam) if few else BarzilaiBorwein(self.lam)

    def _use(self, method: Method, point: Point) -> None:
        self.method = method
        self.names.append(method.name)
        self.longest = max(self.longest, method.patience)
        method.start(self.cost, point, self.targets)

    def advance(self, point: Point) -> Point | None:
        """One iteration of the method in use."""
        self.taken += 1
        return self.method.advance(point)

    def ahead(self, point: Point) -> RunAhead | None:
        """Several iterations of the method in use, up to the next time it is judged.

        The loop asks before each iteration, so this is where the method is judged.
        """
        self._judge(point)
        run_ahead = self.method.ahead(point)
        if run_ahead is None or self.successor is None:
            return run_ahead

        def limited(point: Point, progress: Progress) -> Passed | None:
            iterations = min(progress.iterations, TRIAL - self.taken % TRIAL)
            passed = run_ahead(point, progress._replace(iterations=iterations))
            self.taken += 0 if passed is None else len(passed.rows)
            return passed

        return limited

    def _judge(self, point: Point) -> None:
        """Switch to the successor if it is time to judge and the gradient has not fallen much."""
        self.flattest = min(self.flattest, point.gradient_norm)
        if self.successor is None or self.taken == 0 or self.taken % TRIAL:
            return
        slow = self.flattest > self.share * self.mark
        self.mark, self.share = self.flattest, LATER
        if slow:
            successor, self.successor = self.successor, None
            self._use(successor(self.lam), point)

    def restart(self) -> bool:
        """Restart the method in use."""
        return self.method.restart()
