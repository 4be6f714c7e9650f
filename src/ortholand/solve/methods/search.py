"""``search.cpp``: L-BFGS on one small matrix in compiled code, from one evaluation to the next."""

import ctypes
from collections.abc import Callable, Mapping
from math import nan
from time import perf_counter
from typing import Any

import numpy as np

from ortholand import native
from ortholand.native.recipe import Unit
from ortholand.solve.options import InterruptedRunError

SCALARS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
MOST_COLUMNS = 32
MOST_PRODUCTS = 2**15  # n p^2: above this BLAS is faster than plain loops
TALL, SQUARE, SPAN = range(3)  # kinds of coordinates
EVALUATE, LOOK, STUCK = range(3)
ROW = 7  # numbers about an iteration

_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
native.SIGNATURES["search"] = {
    "ortholand_search_new": (_POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, _POINTER),
    "ortholand_search_delete": (None, _POINTER),
    "ortholand_search_start": (_INT, _POINTER),
    "ortholand_search_next": (_INT, _POINTER, _DOUBLE, _DOUBLE),
    "ortholand_search_forget": (_INT, _POINTER),
    "ortholand_search_rows": (None, _POINTER, _POINTER),
    "ortholand_search_point": (None, _POINTER, _INT),
}
CONSTANTS = (
    *("decrease", "flattened", "last", "max_trials", "many_trials", "flatness", "news"),
    *("first_angle", "near", "farthest", "cubic", "warm", "share", "looks"),
)
THREE = ("looks", "curvatures")  # these are three numbers each


class Numbers(ctypes.Structure):
    """The struct of this name in ``search.cpp``, which explains it; all are doubles."""

    _fields_ = [
        (name, 3 * _DOUBLE if name in THREE else _DOUBLE)
        for name in (
            *CONSTANTS,
            *("lam", "eps", "gtol", "atol", "noise", "first", "length", "magnitude", "patience"),
            *("iterations", "deadline"),
            *("value", "lowest", "flattest", "in_vain", "caution", "seen", "curvatures"),
            *("saw_non_finite", "rows", "has_best", "best_is_here", "best_value"),
        )
    ]


def is_small(X: Any) -> bool:
    """Whether X is of a type and size for which there is compiled code."""
    if not (isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype in SCALARS):
        return False
    n, p = X.shape
    return p <= MOST_COLUMNS and n * p * p <= MOST_PRODUCTS


def library_for(X: Any) -> ctypes.CDLL | None:
    """The library for points like X; None where there is none, or NumPy is faster."""
    if not is_small(X):
        return None
    found = native.library(Unit("search", SCALARS[X.dtype]))
    return None if isinstance(found, str) else found


class Search:
    """A run of the compiled method, from a point like ``like``.

    Matrices and numbers pass through memory that is allocated here and that nobody else sees: X is
    the point to evaluate, or the one asked for, G its gradient, D its residual. ``handle`` is None
    if there is too little memory.
    """

    def __init__(
        self, library: Any, kind: int, like: np.ndarray, memory: int, constants: Mapping[str, Any]
    ) -> None:
        self.library, self.handle = library, None
        (n, p), self.numbers = like.shape, Numbers(**constants)
        desk = np.empty(2 * n * p + p * p, like.dtype)
        matrices = desk[: 2 * n * p].reshape(2, n, p)
        self.X, self.G, self.D = matrices[0], matrices[1], desk[2 * n * p :].reshape(p, p)
        places = desk.ctypes.data, ctypes.addressof(self.numbers)
        self.handle = library.ortholand_search_new(kind, n, p, memory, *places)

    def __del__(self) -> None:
        if self.handle:
            self.library.ortholand_search_delete(self.handle)

    def run(self, evaluate: Callable[[], float]) -> bool:
        """Run until there is something to decide; whether nothing lower was found at the end.

        ``evaluate`` returns f at X and writes its gradient to G.
        """
        handle, advance = self.handle, self.library.ortholand_search_next
        answer = self.library.ortholand_search_start(handle)
        try:
            while answer == EVALUATE:
                answer = advance(handle, evaluate(), perf_counter())
        except InterruptedRunError:  # it comes again, after what was done is collected
            while answer == EVALUATE:
                answer = advance(handle, nan, perf_counter())
        return answer == STUCK

    def rows(self) -> np.ndarray:
        rows = np.empty((int(self.numbers.rows), ROW))
        self.library.ortholand_search_rows(self.handle, rows.ctypes.data)
        return rows

    def show(self, of_best: bool) -> None:
        """Write the last point, or the best one, to X, D and G."""
        self.library.ortholand_search_point(self.handle, of_best)

    def forget(self) -> bool:
        return bool(self.library.ortholand_search_forget(self.handle))
