"""Parts g of a cost that have kinks, given by their proximal maps: ``minimize(..., prox=L1(0.1))``.

They work on arrays as the user's functions do, NumPy's or torch's alike.
"""

import math
from collections.abc import Callable
from typing import Any


class Prox:
    """A convex g by its value and ``prox(V, t) = argmin_Y g(Y) + ||Y - V||^2 / (2 t)``.

    Args:
        value: ``value(X)``, a number; 0 for the indicator of a set.
        prox: ``prox(V, t)``, an array like V.
    """

    def __init__(self, value: Callable[[Any], Any], prox: Callable[[Any, float], Any]) -> None:
        if not (callable(value) and callable(prox)):
            raise TypeError(f"value and prox must be functions, got {value!r:.40}, {prox!r:.40}.")
        self.value, self.prox = value, prox

    def __repr__(self) -> str:
        return f"ol.{type(self).__name__}(...)"


class L1(Prox):
    """``weight`` times the sum of absolute values: sparse X."""

    def __init__(self, weight: float) -> None:
        self.weight = _positive(weight)
        super().__init__(lambda X: weight * abs(X).sum(), self._shrink)

    def _shrink(self, V: Any, t: float) -> Any:
        by, size = t * self.weight, abs(V)
        return V - V.clip(-by, by) if size.dtype == V.dtype else _shortened(V, size, by)


class L21(Prox):
    """``weight`` times the sum of the rows' Euclidean norms: rows of zeros."""

    def __init__(self, weight: float) -> None:
        self.weight = _positive(weight)
        super().__init__(lambda X: weight * _row_norms(X).sum(), self._shrink)

    def _shrink(self, V: Any, t: float) -> Any:
        return _shortened(V, _row_norms(V), t * self.weight)


class Box(Prox):
    """Entries from ``low`` to ``high``, one of which may be None."""

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        least, most = (-math.inf if low is None else low), (math.inf if high is None else high)
        if (low is None and high is None) or not least < most:
            raise ValueError(f"low must be less than high, and one of them given: {low}, {high}.")
        super().__init__(lambda X: 0.0, lambda V, t: V.clip(low, high))  # noqa: ARG005


class Nonnegative(Box):
    """Entries that are not negative."""

    def __init__(self) -> None:
        super().__init__(0.0)


def _shortened(V: Any, size: Any, by: float) -> Any:
    return V * (1 - by / size.clip(by or 1.0))


def _row_norms(X: Any) -> Any:
    return ((abs(X) ** 2).sum(-1) ** 0.5)[..., None]


def _positive(weight: Any) -> float:
    if not (isinstance(weight, (int, float)) and weight >= 0):
        raise ValueError(f"weight must be a number >= 0, got {weight!r}.")
    return weight
