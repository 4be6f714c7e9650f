"""L-BFGS on one small matrix in compiled code: Python calls f, and the code does the rest.

For each evaluation on a 20 x 3 matrix, :class:`~ortholand.solve.lbfgs.LBFGS` takes one microsecond
of arithmetic and forty of Python. So ``search.cpp`` repeats the method, its line search and
its rules, and stops where the loop has something to decide. A test holds the two equal.
"""

import ctypes
import math
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ortholand import native
from ortholand.native.recipe import Unit
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.manifolds.stiefel import SquareStiefel, Subspaces, TallStiefel
from ortholand.solve.targets import RECENT, Targets

if TYPE_CHECKING:
    from ortholand.solve.line_search import Merit

KINDS = {TallStiefel: 0, SquareStiefel: 1, Subspaces: 2}
SCALARS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
NUMBERS = np.dtype(np.float64)
MOST_COLUMNS = 32
MOST_PRODUCTS = 2**15  # n p^2: above this BLAS is faster than plain loops
EVALUATE, LOOK, STUCK = range(3)
HERE = 2  # the best point is the last
COLUMNS = 7  # of a row: RECORDED of loop.py, counted and timed from 0, in the solver's units
TOLD, ANSWERED = 20, 12  # numbers told to the code, and answered by it

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
native.SIGNATURES["search"] = {
    "ortholand_search_new": (_POINTER, _INT, *[ctypes.c_int64] * 3, *[_POINTER] * 2),
    "ortholand_search_delete": (None, _POINTER),
    "ortholand_search_start": (_INT, _POINTER),
    "ortholand_search_next": (_INT, _POINTER, _DOUBLE, _DOUBLE),
    "ortholand_search_forget": (_INT, _POINTER),
    "ortholand_search_report": (None, _POINTER),
    "ortholand_search_rows": (None, _POINTER, _POINTER),
    "ortholand_search_point": (None, _POINTER, _INT),
}


class Progress(NamedTuple):
    """How a run is going, and how far it may go before returning to the loop."""

    best: float  # lowest value less correction
    flattest: float  # smallest gradient norm
    in_vain: int  # iterations since one of them was last improved
    patience: float  # how many are usual
    iterations: int  # how many may follow


class Passed(NamedTuple):
    """What happened between two returns to the loop."""

    point: Point  # the last one
    best: Point | None  # the lowest, if one was lower than all before
    flattest: float
    in_vain: int
    rows: np.ndarray  # one for each iteration


def array_address(array: Any, dtype: np.dtype, size: int) -> int:
    """Where the numbers of a NumPy array are: ``size`` of them, of that type, one after the other.

    Raises:
        TypeError: if it is no such array, or cannot be written to.
        ValueError: if there are more or fewer, or with gaps.
    """
    if type(array) is not np.ndarray or array.dtype != dtype:
        given = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"Compiled code takes NumPy arrays of {dtype}, got {given}.")
    if array.size != size or not array.flags.c_contiguous:
        raise ValueError(
            f"Compiled code takes {size} numbers that lie one after the other in memory, got "
            f"shape {array.shape} with strides {array.strides}: use np.ascontiguousarray."
        )
    buffer: Any = array
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # refuses what is read-only


def search_steps(dtype: np.dtype) -> ctypes.CDLL | None:
    """The library of ``search.cpp`` for a type; None where there is none."""
    found = native.library(Unit("search", SCALARS[dtype])) if dtype in SCALARS else ""
    return None if isinstance(found, str) else found


def is_compiled(cost: ManifoldCost, X: Any) -> bool:
    """Whether there is compiled code for points like X."""
    return _library(cost, X) is not None


def _library(cost: ManifoldCost, X: Any) -> Any:
    is_matrix = isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype in SCALARS
    if not is_matrix or type(cost.geometry) not in KINDS:
        return None
    n, p = X.shape
    small = p <= MOST_COLUMNS and n * p * p <= MOST_PRODUCTS
    return search_steps(X.dtype) if small else None


def small_search(cost: ManifoldCost, X: Any, memory: int) -> "SmallSearch | None":
    """The compiled method for a cost near X; None if there is none.

    Args:
        cost: the problem.
        X: a point.
        memory: pairs to keep.
    """
    library = _library(cost, X)
    if library is None:
        return None
    search = SmallSearch(library, KINDS[type(cost.geometry)], X, memory)
    return search if search.handle else None


class SmallSearch:
    """A run of the compiled method.

    Points, gradients and numbers pass through arrays that nobody else sees, checked once.
    """

    def __init__(self, library: Any, kind: int, X: np.ndarray, memory: int) -> None:
        self.library, self.handle = library, None
        n, p = X.shape
        size = 2 * n * p + p * p
        desk, self.numbers = np.empty(size, X.dtype), np.empty(TOLD)
        matrices = desk[: 2 * n * p].reshape(2, n, p)
        self.X, self.G, self.D = matrices[0], matrices[1], desk[2 * n * p :].reshape(p, p)
        places = array_address(desk, X.dtype, size), array_address(self.numbers, NUMBERS, TOLD)
        self.handle = library.ortholand_search_new(kind, n, p, memory, *places)
        self.stuck: Point | None = None  # from where nothing lower was found,
        self.saw_non_finite = False  # and whether f was not finite there

    def __del__(self) -> None:
        if self.handle:
            self.library.ortholand_search_delete(self.handle)

    def forget(self) -> bool:
        """Forget all pairs; whether there were any."""
        self.stuck = None
        return bool(self.library.ortholand_search_forget(self.handle))

    def run(
        self,
        cost: ManifoldCost,
        targets: Targets,
        merit: "Merit",
        point: Point,
        progress: Progress,
    ) -> Passed | None:
        """Run until there is something to decide; None if nothing better is found from here.

        Args:
            cost: evaluates f.
            targets: say when to return; they learn curvatures.
            merit: its weight may grow.
            point: where to begin.
            progress: the progress so far, and how far to go.
        """
        if point is self.stuck:
            cost.saw_non_finite = self.saw_non_finite
            return None
        self._tell(targets, merit, point, progress)
        handle, advance = self.handle, self.library.ortholand_search_next
        evaluate = cost.objective.evaluator(self.X, self.G)
        answer = self.library.ortholand_search_start(handle)
        while answer == EVALUATE:
            answer = advance(handle, evaluate(), perf_counter())
        return self._passed(cost, targets, merit, answer)

    def _tell(self, targets: Targets, merit: "Merit", point: Point, progress: Progress) -> None:
        t, recent = targets, [*targets.curvatures]
        self.X[...], self.D[...], self.G[...] = point.X, point.D, point.euclidean
        self.numbers[:] = (
            *(math.nan if merit.lam is None else merit.lam, merit.caution, t.eps, t.gtol, t.atol),
            *(t.noise, t.first, t.length, t.magnitude, progress.patience),
            *(point.value, progress.best, progress.flattest, progress.in_vain, t.seen),
            *[0.0] * (RECENT - len(recent)),
            *recent,
            *(progress.iterations, t.deadline),
        )

    def _passed(
        self,
        cost: ManifoldCost,
        targets: Targets,
        merit: "Merit",
        answer: int,
    ) -> Passed | None:
        self.library.ortholand_search_report(self.handle)
        answered = self.numbers[:ANSWERED].tolist()
        value, best_value, flattest, in_vain, caution, seen, *rest = answered
        *curvatures, non_finite, count, has_best = rest
        merit.caution = caution
        targets.remember(int(seen), curvatures)
        cost.saw_non_finite = self.saw_non_finite = bool(non_finite)
        if not count:
            return None
        rows = np.empty((int(count), COLUMNS))
        self.library.ortholand_search_rows(self.handle, array_address(rows, NUMBERS, rows.size))
        here = self._point(cost, value, of_best=False)
        self.stuck = here if answer == STUCK else None
        best = self._best(cost, best_value, here, is_here=has_best == HERE) if has_best else None
        return Passed(here, best, flattest, int(in_vain), rows)

    def _best(self, cost: ManifoldCost, value: float, here: Point, is_here: bool) -> Point:
        return here if is_here else self._point(cost, value, of_best=True)

    def _point(self, cost: ManifoldCost, value: float, of_best: bool) -> Point:
        self.library.ortholand_search_point(self.handle, of_best)
        return cost.known(self.X.copy(), self.D.copy(), value, self.G.copy())
