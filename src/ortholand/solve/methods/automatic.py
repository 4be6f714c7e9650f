"""The method used when none is named: chosen by what it has gained, and changed if it is slow."""

import math
from collections.abc import Mapping
from typing import Any

from ortholand.solve.arrays import real_vector
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.method import Method, Passed, Progress

FEW = 192  # numbers in X up to which L-BFGS sees most of the Hessian
LOOK = 25  # iterations from one look at the method to the next; the first digits do not count
TRIAL = 70  # a method is judged whenever it has spent the time of so many evaluations,
BETTER = 2.0  # and comes back if it was this many times as fast; both grow with every change


class Automatic(Method):
    """The method that suits X, the functions given and what has been measured.

    L-BFGS comes first for small X, because it needs least time around the functions, and
    Barzilai-Borwein's method for large X. Where that is slow, Newton's is tried if Hessian products
    are exact, then L-BFGS. From then on the one with more digits per second goes on, whenever the
    one in use is slow. Seconds are those of the user's functions: numbers of calls times how long
    one took, so that decisions do not depend on compiled code. An option that only one method has
    selects that method.

    Args:
        methods: the constructors, by name.
        lam: weight of N in the merit function.
        options: options of "lbfgs" or of "newton".

    Attributes:
        reasons: what was chosen, and why.
    """

    def __init__(
        self, methods: Mapping[str, Any], lam: float | None, options: dict[str, Any]
    ) -> None:
        self.methods, self.lam, self.options = methods, lam, options
        self.method: Method  # once it is started
        self.paces: dict[str, float] = {}  # digits per second; infinite if not tried
        self.totals: dict[str, tuple[float, float]] = {}  # digits and evaluations
        self.name = ""  # of the methods used, in order
        self.reasons: list[str] = []
        self.patience, self.left = 0.0, LOOK

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        self.cost, self.targets = cost, targets
        self.flattest = point.gradient_norm
        if self.options:
            named = set(self.options) <= set(self.methods["lbfgs"].rules)
            return self._use("lbfgs" if named else "newton", point, "it has these options")
        small = self.methods["lbfgs"].suits(cost, point) or len(real_vector(point.X)) <= FEW
        names = ["lbfgs"] if small else ["bb"]
        names += ["newton"] * cost.objective.has_products + ["lbfgs"] * (not small)
        self.paces = dict.fromkeys(names, math.inf)
        return self._use(names[0], point, "X is small" if small else "X is large")

    def _use(self, name: str, point: Point, why: str) -> None:
        self.method = self.methods[name](self.lam, **self.options)
        self.name = ", ".join(filter(None, [self.name, self.method.name]))
        self.reasons.append(f"{name}: {why}")
        # The iterations that one method spends in vain count for the next.
        self.patience = max(self.patience, self.method.patience)
        # The first digits are easy: those of the first method count from the first look on.
        self.mark = self.flattest if len(self.reasons) > 1 else 0.0
        self.spent = self.cost.objective.spent
        self.method.start(self.cost, point, self.targets)

    def advance(self, point: Point, progress: Progress) -> Point | Passed | None:
        self.flattest = min(self.flattest, progress.flattest)
        if self.cost.objective.distrusted:
            known = self.paces.pop("newton", None) is not None
            if known and self.method.name == "newton":
                self._use(next(iter(self.paces)), point, "Hessian products are wrong")
        if len(self.paces) < 2:
            return self.method.advance(point, progress)
        if self.left <= 0:
            self._judge(point)
            self.left = LOOK
        ahead = min(progress.iterations, self.left)
        after = self.method.advance(point, progress._replace(iterations=ahead))
        # Looks are at the same iterations, whether compiled code makes many at once or not.
        self.left -= len(after.rows) if isinstance(after, Passed) else 1
        return after

    def _judge(self, point: Point) -> None:
        """Change the method if much is left to do and another may be faster."""
        now, changes, spent = self.method.name, len(self.reasons) - 1, self.cost.objective.spent
        used = spent - self.spent if self.mark else 0.0
        if self.mark and used < TRIAL * 2 ** max(changes - 1, 0):
            return
        gained = math.log10(max(self.mark / (self.flattest or 1.0), 1.0))
        self.mark, self.spent = self.flattest, spent
        if not used:
            return  # from here on digits count
        digits, evaluations = self.totals.get(now, (0.0, 0.0))
        self.totals[now] = digits, evaluations = digits + gained, evaluations + used
        self.paces[now] = pace = digits / evaluations
        left = math.log10(max(self.flattest / (self.targets.goal(point) or math.inf), 1.0))
        other = max((name for name in self.paces if name != now), key=self.paces.__getitem__)
        if left > TRIAL * pace and self.paces[other] > BETTER**changes * pace:
            self._use(other, point, f"{now} gained {gained:.1f} digits in {used:.0f} evaluations")

    def restart(self) -> bool:
        return self.method.restart()
