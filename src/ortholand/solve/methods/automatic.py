"""The method used when none is named."""

from collections.abc import Mapping
from typing import Any

from ortholand.solve.arrays import real_vector
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.method import Method, Passed, Progress

FEW = 192  # numbers in X up to which pairs of L-BFGS span most of the Hessian
TRIAL = 30  # the first method is judged every so many iterations
FIRST = 1e-2  # share of the gradient that may be left the first time it is judged
LATER = 1e-1  # share that may be left from one time to the next


class Automatic(Method):
    """The method that suits X, the functions given and the first iterations.

    Where L-BFGS is compiled, it comes first. If the problem proves ill conditioned and Hessian
    products are exact, Newton's method follows, unless X has so few numbers that the pairs of
    L-BFGS capture most of the Hessian. Elsewhere Newton's method comes first. Without such
    products, L-BFGS is used for few numbers; for more, Barzilai-Borwein steps, the cheapest, come
    first, followed by L-BFGS with fewer evaluations if they make little progress. An option that
    only one method has selects that method.

    Args:
        methods: the constructors, by name.
        lam: weight of N in the merit function.
        options: options of "lbfgs" or of "newton".
    """

    def __init__(
        self, methods: Mapping[str, Any], lam: float | None, options: dict[str, Any]
    ) -> None:
        self.methods, self.lam, self.options = methods, lam, options
        self.method: Method  # once it is started
        self.successor: str | None = None  # follows if the first one is slow
        self.name = ""  # of the methods used, in order
        self.taken = 0
        self.share = FIRST
        self.patience = 0.0

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose the first method and start it."""
        self.cost, self.targets = cost, targets
        self.flattest = self.mark = point.gradient_norm
        if self.options:
            named = set(self.options) <= set(self.methods["lbfgs"].rules)
            return self._use("lbfgs" if named else "newton", point)
        few, products = len(real_vector(point.X)) <= FEW, cost.objective.has_products
        if self.methods["lbfgs"].is_compiled(cost, point):
            self.successor = "newton" if products and not few else None
            return self._use("lbfgs", point)
        if products or few:
            return self._use("newton" if products else "lbfgs", point)
        self.successor = "lbfgs"
        return self._use("bb", point)

    def _use(self, name: str, point: Point) -> None:
        self.method = self.methods[name](self.lam, **self.options)
        self.name = ", ".join(filter(None, [self.name, self.method.name]))
        # The iterations that one method spends in vain count for the next.
        self.patience = max(self.patience, self.method.patience)
        self.method.start(self.cost, point, self.targets)

    def advance(self, point: Point, progress: Progress) -> Point | Passed | None:
        """The method in use advances, at most to where it is judged next."""
        self._judge(point)
        if self.successor is not None:
            left = TRIAL - self.taken % TRIAL
            progress = progress._replace(iterations=min(progress.iterations, left))
        after = self.method.advance(point, progress)
        self.taken += len(after.rows) if isinstance(after, Passed) else 1
        return after

    def _judge(self, point: Point) -> None:
        """Switch to the successor if it is time to judge and the gradient has not fallen much."""
        self.flattest = min(self.flattest, point.gradient_norm)
        if self.successor is None or self.taken == 0 or self.taken % TRIAL:
            return
        slow = self.flattest > self.share * self.mark
        self.mark, self.share = self.flattest, LATER
        if slow:
            successor, self.successor = self.successor, None
            self._use(successor, point)

    def restart(self) -> bool:
        """Restart the method in use."""
        return self.method.restart()
