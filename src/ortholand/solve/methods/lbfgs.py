"""L-BFGS on the relative gradient: curvature learnt from the last steps, by products only.

For square X the relative gradients of all points are skew matrices, so their differences mean the
same as in Euclidean space. For tall X the differences of tangent vectors are used as they are, and
the direction is made tangent: over the length of a step that is a transport.
"""

import math
from typing import Any, ClassVar

import numpy as np

from ortholand.solve import line_search, manifold_cost
from ortholand.solve.arrays import (
    combine,
    from_numpy,
    from_real_vector,
    inner,
    norm,
    product,
    real_vector,
    to_numpy,
    zeros,
)
from ortholand.solve.curvature import BlockUnits, units_for
from ortholand.solve.line_search import Descent, Search, Trial
from ortholand.solve.manifold_cost import RECENT, ManifoldCost, Point, Targets
from ortholand.solve.manifolds import geometry
from ortholand.solve.manifolds.geometry import SquareStiefel, Subspaces, TallStiefel
from ortholand.solve.method import Method, Passed, Progress
from ortholand.solve.methods import search as compiled
from ortholand.solve.options import Rule, is_count

FEWEST, MOST = 10, 40  # pairs kept if the user does not say how many,
ROOM, MOST_ROOM = 4_000, 2**21  # of about this many numbers, and in compiled code at most
MEMORY_COUNTS, FEWER = 50_000, 6  # numbers in X from where fewer are kept
NEWS = 0.3  # weight of the last step in the scale that directions unknown to the pairs get
FLATNESS = 0.9  # largest share of the slope that a line search may leave
KINDS: dict[type, int] = {
    TallStiefel: compiled.TALL,
    SquareStiefel: compiled.SQUARE,
    Subspaces: compiled.SPAN,
}


class Pairs:
    """Steps s and changes y of the gradient, and the inverse Hessian that they imply.

    L-BFGS in its compact form (Byrd, Nocedal and Schnabel, 1994): the pairs are rows of one matrix,
    so that a direction takes two passes over them, however many there are, and small dense algebra.
    A new pair takes the slot of the oldest.
    Where pairs say nothing, the inverse Hessian is ``gamma``, a running geometric mean of
    ``<s, y> / <y, y>``: 5 % fewer evaluations than with that of the last step alone.
    """

    def __init__(self, memory: int, like: Any) -> None:
        self.memory = memory
        self.rows = zeros((2 * memory, len(like)), like)  # s and y of slot 0, of slot 1, ...
        self.order: list[int] = []  # slots, the oldest pair first; what follows is in this order
        self.YY = np.zeros((memory, memory))  # <y_i, y_j>
        self.inverse = np.zeros((memory, memory))  # of R, R_ij = <s_i, y_j> for i <= j
        self.curvatures = np.zeros(memory)  # <s_i, y_i>
        self.products: np.ndarray = np.zeros((2, 0))  # <s_i, g> and <y_i, g> for the last gradient
        self.newest: tuple[float, float] | None = None  # <s, y>, <y, y>, not in the matrices yet

    def add(self, s: Any, y: Any, sy: float, yy: float) -> None:
        """Add a pair; the oldest goes if there are too many."""
        slot = len(self.order)
        if slot == self.memory:
            slot = self.order.pop(0)
            for matrix in (self.YY, self.inverse):
                matrix[:-1, :-1] = matrix[1:, 1:].copy()
            self.curvatures[:-1] = self.curvatures[1:].copy()
            self.products = self.products[:, 1:]
        self.order.append(slot)
        self.rows[2 * slot], self.rows[2 * slot + 1] = s, y
        first = len(self.order) == 1
        self.gamma = sy / yy if first else self.gamma * (sy / yy / self.gamma) ** NEWS
        self.newest = sy, yy

    def direction(self, g: Any) -> Any:
        k, gamma = len(self.order), self.gamma
        rows = self.rows[: 2 * k]
        # In double precision, because sums of squares of small steps are small.
        by_slot = to_numpy(product(rows, g)).reshape(-1, 2).astype(float)
        products = np.ascontiguousarray(by_slot[self.order].T)
        if self.newest is not None:
            self._let_in(products)
        self.products = products
        inverse = self.inverse[:k, :k]
        u = inverse.dot(products[0])
        v = gamma * (products[1] - self.YY[:k, :k].dot(u)) - self.curvatures[:k] * u
        coefficients = np.empty((k, 2))
        coefficients[self.order, 0], coefficients[self.order, 1] = v.dot(inverse), gamma * u
        return combine(product(rows.T, from_numpy(coefficients.reshape(-1), g)), -gamma, g)

    def _let_in(self, products: np.ndarray) -> None:
        """Include the newest pair's products: y is the gradient here minus the one before."""
        assert self.newest is not None
        k = len(self.order) - 1
        sy, yy = self.newest
        change = products[:, :-1] - self.products
        # The inverse of an upper triangular matrix with one column more; the last row is left.
        self.inverse[:k, k] = self.inverse[:k, :k].dot(change[0] / -sy)
        self.inverse[k, :k] = 0
        self.inverse[k, k], self.curvatures[k], self.YY[k, k] = 1 / sy, sy, yy
        self.YY[:k, k] = self.YY[k, :k] = change[1]
        self.newest = None


class LBFGS(Descent, Method):
    """Limited-memory BFGS. On one small matrix compiled code takes the same steps.

    Attributes:
        memory: number of pairs; None: 10 to 40, more for X of few numbers.
    """

    name = "lbfgs"
    flatness = FLATNESS
    rules: ClassVar[dict[str, Rule]] = {
        "memory": ("a whole number >= 1, or None", lambda v: v is None or is_count(v))
    }

    def __init__(self, lam: float | None = None, memory: int | None = None) -> None:
        super().__init__(lam)
        self.memory = memory
        self.pairs: Pairs | None = None
        self.units: BlockUnits | None = None
        self.compiled: Compiled | None = None

    @staticmethod
    def suits(cost: ManifoldCost, point: Point) -> bool:
        """Whether X is so small that L-BFGS is written in compiled code, found or not."""
        return type(cost.geometry) in KINDS and compiled.is_small(point.X)

    @staticmethod
    def is_compiled(cost: ManifoldCost, point: Point) -> bool:
        return type(cost.geometry) in KINDS and compiled.library_for(point.X) is not None

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        super().start(cost, point, targets)
        self.units = units_for(cost.geometry, point.gradient)
        size = len(real_vector(point.X))
        fewest = FEWER if size > MEMORY_COUNTS else FEWEST
        usual = min(max(ROOM // size, fewest), MOST)  # for small X more pairs cost nothing
        # More pairs than there are numbers are not independent.
        self.pairs_kept = min(self.memory or usual, max(size, FEWEST))
        if self.is_compiled(cost, point) and self.pairs_kept * size <= MOST_ROOM:
            twin = Compiled(self, point)
            self.compiled = twin if twin.search.handle else None

    def advance(self, point: Point, progress: Progress) -> Point | Passed | None:
        if self.compiled is not None:
            return self.compiled.run(point, progress)
        return super().advance(point, progress)

    def restart(self) -> bool:
        if self.compiled is not None:
            return self.compiled.forget()
        forgot, self.pairs = self.pairs is not None, None
        self.last = None
        return forgot

    def direction(self, point: Point) -> Any:
        if self.pairs is None:
            return -point.gradient
        if self.units is not None:
            roots = self.units.roots
            scaled = roots * self.pairs.direction(roots * point.gradient)
            return self.cost.geometry.tangent(point.X, scaled)
        flat = self.pairs.direction(real_vector(point.gradient))
        return self.cost.geometry.tangent(point.X, from_real_vector(flat, point.gradient))

    def first_step(self, point: Point, slope: float, length: float) -> float:  # noqa: ARG002
        """1, the quasi-Newton step itself; a cautious one before there are pairs."""
        return self.cost.cautious_step(point, length) if self.pairs is None else 1.0

    def remember(self, search: Search, trial: Trial) -> None:
        y = real_vector(trial.point.gradient - search.start.gradient)
        sy, yy = trial.t * (trial.slope - search.slope), inner(y, y)
        if not (yy > 0 and sy > 1e-10 * trial.t * norm(search.direction) * yy**0.5):
            return  # squares of tiny changes are zero
        self.targets.saw(yy / sy, search.start)
        s = real_vector(search.direction if trial.t == 1 else trial.t * search.direction)
        if self.units is not None:
            self.units.learn(s, y)
            if self.units.froze():
                self.pairs = None  # in other units
            s, y = s / self.units.roots, y * self.units.roots
            yy = inner(y, y)
        if self.pairs is None:
            self.pairs = Pairs(self.pairs_kept, y)
        self.pairs.add(s, y, sy, yy)


VALUES = {**vars(geometry), **vars(manifold_cost), **vars(line_search), **globals()}
CONSTANTS = {name: VALUES[name.upper()] for name in compiled.CONSTANTS}


class Compiled:
    """The compiled twin of a method that has started: the same iterates, with less around them.

    For each evaluation on a 20 x 3 matrix L-BFGS takes a microsecond of arithmetic and forty of
    Python. The twin returns to the loop where that has something to decide.
    """

    def __init__(self, method: LBFGS, point: Point) -> None:
        self.cost, self.targets, self.merit = method.cost, method.targets, method.merit
        library, kind = compiled.library_for(point.X), KINDS[type(self.cost.geometry)]
        self.search = compiled.Search(library, kind, point.X, method.pairs_kept, CONSTANTS)
        self.stuck: Point | None = None  # from where nothing lower was found,
        self.saw_non_finite = False  # and whether f was not finite there

    def forget(self) -> bool:
        self.stuck = None
        return self.search.forget()

    def run(self, point: Point, progress: Progress) -> Passed | None:
        """Run until there is something to decide; None if nothing better is found from here."""
        if point is self.stuck:
            self.cost.saw_non_finite = self.saw_non_finite
            return None
        self._tell(point, progress)
        self.search.numbers.last = math.inf if self.cost.lands_closely else line_search.LAST
        found = self.search
        is_stuck = found.run(self.cost.objective.evaluator(found.X, found.G))
        numbers = found.numbers
        self.merit.caution = numbers.caution
        self.targets.remember(int(numbers.seen), numbers.curvatures)
        self.cost.saw_non_finite = self.saw_non_finite = bool(numbers.saw_non_finite)
        if not numbers.rows:
            return None
        here = best = self._point(numbers.value, of_best=False)
        self.stuck = here if is_stuck else None
        if not numbers.best_is_here:
            best = self._point(numbers.best_value, of_best=True) if numbers.has_best else None
        return Passed(here, best, numbers.flattest, int(numbers.in_vain), found.rows())

    def _tell(self, point: Point, progress: Progress) -> None:
        now, targets, numbers = self.search, self.targets, self.search.numbers
        now.X[...], now.D[...], now.G[...] = point.X, point.D, point.euclidean
        for name in ("eps", "gtol", "atol", "noise", "first", "length", "magnitude"):
            setattr(numbers, name, getattr(targets, name))
        for name, value in progress._asdict().items():
            setattr(numbers, name, value)
        recent = [*targets.curvatures]
        numbers.curvatures = (*[0.0] * (RECENT - len(recent)), *recent)
        numbers.seen, numbers.deadline, numbers.value = targets.seen, targets.deadline, point.value
        numbers.lam = math.nan if self.merit.lam is None else self.merit.lam
        numbers.caution = self.merit.caution

    def _point(self, value: float, of_best: bool) -> Point:
        now = self.search
        now.show(of_best)
        return self.cost.known(now.X.copy(), now.D.copy(), value, now.G.copy())
