"""The method used when none is named: chosen by what it has gained, and changed if it is slow."""

import math
from collections.abc import Mapping
from typing import Any

from ortholand.solve.arrays import real_vector
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.method import Method, Passed, Progress

FEW = 192  # numbers in X up to which L-BFGS sees most of the Hessian
TRIAL = 30  # a method is judged when it has spent the time of so many evaluations,
LATE = 8  # later ones, and Newton's, which is slow at first, with this many times as much
AGAIN = 4  # a method that comes back has this many times as long, each time
FIRST = 1e-2  # share of the gradient that may be left the first time it is judged
LATER = 1e-1  # share that may be left from one time to the next
BETTER = 4.0  # how much faster another method must have been to come back: first digits are easy


class Automatic(Method):
    """The method that suits X, the functions given and what has been measured.

    For small X L-BFGS comes first, which needs least time around the functions. Elsewhere Newton's
    method does if Hessian products are exact, else Barzilai-Borwein steps. The second method in
    line is tried when the first makes little progress; from then on the one with more digits per
    second goes on, whenever the other is slow. Seconds are those of the user's functions: numbers
    of calls times how long one took, so that decisions do not depend on compiled code. An option
    that only one method has selects that method.

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
        self.name = ""  # of the methods used, in order
        self.reasons: list[str] = []
        self.share = FIRST
        self.patience = 0.0

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose the first method and start it."""
        self.cost, self.targets = cost, targets
        self.flattest = point.gradient_norm
        if self.options:
            named = set(self.options) <= set(self.methods["lbfgs"].rules)
            return self._use("lbfgs" if named else "newton", point, "it has these options")
        few, products = len(real_vector(point.X)) <= FEW, cost.objective.has_products
        small = self.methods["lbfgs"].suits(cost, point)
        if small or (few and not products):
            names = ["lbfgs", "newton"] if products and not few else ["lbfgs"]
        else:
            names = ["newton", "lbfgs"] if products else ["bb", "lbfgs"]
        self.paces = dict.fromkeys(names, math.inf)
        why = "X is small" if small or few else "products are exact" if products else "X is large"
        return self._use(names[0], point, why)

    def _use(self, name: str, point: Point, why: str) -> None:
        self.method = self.methods[name](self.lam, **self.options)
        self.name = ", ".join(filter(None, [self.name, self.method.name]))
        self.reasons.append(f"{name}: {why}")
        # The iterations that one method spends in vain count for the next.
        self.patience = max(self.patience, self.method.patience)
        self.mark, self.spent, self.share = self.flattest, self._spent(), FIRST
        self.method.start(self.cost, point, self.targets)

    def _spent(self) -> float:
        """How long the user's functions took, in evaluations."""
        objective = self.cost.objective
        return max(objective.nfev, objective.njev) + objective.nhev * objective.relative_cost

    def advance(self, point: Point, progress: Progress) -> Point | Passed | None:
        """The method in use advances, at most to where it is judged next."""
        self.flattest = min(self.flattest, progress.flattest)
        if len(self.paces) > 1:
            self._judge(point)
            progress = progress._replace(iterations=min(progress.iterations, TRIAL))
        return self.method.advance(point, progress)

    def _judge(self, point: Point) -> None:
        """Change the method if the gradient has not fallen much and the other may be faster."""
        now, objective = self.method.name, self.cost.objective
        spent = self._spent() - self.spent
        distrusted = bool(objective.distrusted) and now == "newton"
        times = self.name.split(", ").count(now)
        late = now == "newton" or len(self.reasons) > 1
        enough = TRIAL * (LATE if late else 1) * (1 if now == "newton" else AGAIN ** (times - 1))
        if not distrusted and spent < enough:
            return
        gained = math.log10(max(self.mark / (self.flattest or 1.0), 1.0))
        self.paces[now] = gained / spent if spent else 0.0
        slow = self.flattest > self.share * self.mark
        self.mark, self.spent, self.share = self.flattest, self._spent(), LATER
        other = next(name for name in self.paces if name != now)
        if distrusted:
            self.paces = {other: math.inf}
        if distrusted or (slow and self.paces[other] > BETTER * self.paces.get(now, 0.0)):
            self._use(other, point, f"{now} gained {gained:.1f} digits in {spent:.0f} evaluations")

    def restart(self) -> bool:
        """Restart the method in use."""
        return self.method.restart()
