"""What a method is to the loop that drives it. A new one is a subclass, in one file."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.options import Rule


class Progress(NamedTuple):
    """How a run is going, and how far it may go before returning to the loop."""

    lowest: float  # value less correction
    flattest: float  # smallest gradient norm
    in_vain: int  # iterations since one of them was last improved
    patience: float  # how many are usual
    iterations: float = math.inf  # how many may follow


class Passed(NamedTuple):
    """Several iterations at once."""

    point: Point  # the last one
    best: Point | None  # the lowest, if one was lower than all before
    flattest: float
    in_vain: int
    rows: np.ndarray  # RECORDED of run.py for each; counted and timed from 0


class Method:
    """How to go from one point to the next: ``minimize(..., method=ASubclass)``.

    Options of ``minimize`` are arguments of the constructor, beside lam.

    Attributes:
        name: the name given in the result.
        rules: what each option must be, in words and as a test.
        patience: how many iterations without progress are usual.
        maxiter: how many iterations there may be if the user does not say.
        begins_on_manifold: whether the start is landed first.
    """

    name: str = ""
    rules: ClassVar[Mapping[str, Rule]] = {}
    patience: float = 100
    maxiter: float = 10_000
    begins_on_manifold = True

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Get ready at the first point. Evaluations here are counted too."""
        raise NotImplementedError

    def advance(self, point: Point, progress: Progress) -> Point | Passed | None:
        """The next point, or several iterations at once; None if no better point was found."""
        raise NotImplementedError

    def restart(self) -> bool:
        """Forget the past; False if there was nothing to forget."""
        return False


def check_method(method: Any, known: Mapping[str, Any], moved: Mapping[str, str] = {}) -> None:
    if isinstance(method, type) and issubclass(method, Method):
        return
    if isinstance(method, str) and method in moved:
        raise ValueError(f"method={method!r} {moved[method]}")
    if not isinstance(method, str) or method not in known:
        raise ValueError(
            f"method must be one of {tuple(known)}, or a subclass of ortholand.solve.Method, got "
            f"{method!r}."
        )
