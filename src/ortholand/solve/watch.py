"""What evaluations say about the user's functions: kinks, noise, a wrong ``jac``, NaN.

Between neighbouring points a and b of a smooth f the trapezoid rule ``(<G_a, d> + <G_b, d>) / 2``,
``d = b - a``, misses ``f(b) - f(a)`` by ``O(||d||^3)``, and ``<G_b - G_a, d>`` is ``O(||d||^2)``.
Pairs of points that a run evaluates anyway are compared. Where several disagree, or nothing lower
is found, the interval between two points is halved a few times: what does not shrink as it should
tells faults apart.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ortholand.solve.arrays import copy_of, inner, norm
from ortholand.solve.options import InterruptedRunError, Status

EVERY = 6  # evaluations from one pair that is compared to the next
ODD = 0.35  # share of the larger slope that the trapezoid rule may miss
SHARPER = 3.0  # times as much as before the gradient may turn: at kinks steps get shorter
PATIENCE = 2  # pairs in a row that must be odd
HALVINGS = 14
CLEARLY = 5  # halvings in a row by which a continuous gradient that is wrong is told from a kink
SMOOTH = 2  # halvings after which a smooth function is almost linear
PROBED = 28  # evaluations after which a pair is examined in any case, and after 3 times as many
NEARBY = 1e-7  # distance, relative to X, within which f does not jump
MOST_BAD = 13  # evaluations in a row that may be infinite or NaN
CHECK = "try ortholand.check_gradient(fun, jac, x0)"


class Sample(NamedTuple):
    """What was evaluated at a point."""

    X: Any
    value: float
    G: Any


class Span(NamedTuple):
    """How f behaves between two points."""

    change: float  # of f
    explained: float  # of it, by the trapezoid rule
    error: float  # what that misses
    bend: float  # how much the slope <G, b - a> changes
    steepest: float  # the larger slope
    reach: float  # ||G|| ||b - a||, the largest slope there may be
    size: float  # |f| + ||G|| ||X||, of which differences have roundings


def between(a: Sample, b: Sample) -> Span:
    d, size, change = b.X - a.X, max(norm(a.G), norm(b.G)), b.value - a.value
    first, last = inner(a.G, d), inner(b.G, d)
    explained, steepest = (first + last) / 2, max(abs(first), abs(last))
    size, reach = abs(a.value) + size * norm(a.X), size * norm(d)
    return Span(
        change, explained, abs(change - explained), abs(last - first), steepest, reach, size
    )


class Watch:
    """Sees every evaluation, and interrupts a run that cannot succeed.

    Args:
        evaluate: f and its gradient.
        eps: precision of X.
        noise: differences of f that mean nothing, as the user says.
        most: evaluations that are allowed.
    """

    def __init__(
        self, evaluate: Callable[[Any], tuple[float, Any]], eps: float, noise: float, most: float
    ) -> None:
        self.evaluate, self.eps, self.noise, self.most = evaluate, eps, noise, most
        self.last: Sample | None = None
        self.count = self.odd = self.bad = 0
        self.sharpest = 0.0  # how much the gradient has turned at most, for each step
        self.next_look = 0  # evaluations before which nothing odd is examined again
        self.next_probe = PROBED
        self.closed = self.examining = False  # closed once the run has ended
        self.end: InterruptedRunError | None = None
        self.targets: Any = None  # of the run, once it has begun
        self.examined: list[tuple[int, int]] = []  # evaluations before and after a look
        self.remark = ""  # what was found and does not end the run

    def before(self, nfev: int) -> None:
        """Interrupt if no evaluation is left, but for one at the end."""
        if self.closed:
            return
        self.nfev = nfev + 1
        if nfev >= max(self.most - 1, 1):
            self._interrupt(Status.MAXFEV, "")
        if self.end is not None and not self.examining:
            raise self.end

    def _interrupt(self, status: Status, fault: str) -> None:
        self.end = self.end or InterruptedRunError(status, fault)
        raise self.end

    def open(self, most: float) -> None:
        self.most, self.examined, self.end, self.closed = most, [], None, False

    def saw(self, X: Any, value: float, G: Any, owned: bool = True) -> None:
        """Note an evaluation; unless it is owned, G may be overwritten later."""
        self.count += 1
        if self.count % EVERY > 1 and not self.bad and value - value == 0:
            return  # nearly always: for small X this must be cheap
        if self.closed or self.examining:
            return
        if not math.isfinite(value + self._look(X, value, G, owned)):
            self.bad, self.last = self.bad + 1, None
            if self.bad > MOST_BAD:
                self._interrupt(Status.NON_FINITE, "")
        else:
            self.bad = 0

    def _look(self, X: Any, value: float, G: Any, owned: bool) -> float:
        """Compare with the evaluation before, now and then; NaN if G is not finite."""
        phase = self.count % EVERY
        if phase > 1:
            return 0.0 * norm(G) if self.bad else 0.0
        before, here = self.last, Sample(X, value, G if owned else copy_of(G))
        self.last = here
        if phase and before is not None:
            self.last = None  # two matrices less to keep
            pair = between(before, here)
            if not math.isfinite(pair.error):
                return math.nan
            if pair.error > 1e3 * self.eps * pair.size + self.noise:
                is_odd = pair.error > ODD * pair.steepest
                self.odd = self.odd + 1 if is_odd else 0
            turn = norm(G - before.G) / (norm(X - before.X) or math.inf)
            sharper, self.sharpest = turn > SHARPER * self.sharpest > 0, max(turn, self.sharpest)
            odd = self.odd >= PATIENCE and self.count >= self.next_look
            if odd or sharper or self.count >= self.next_probe:
                self.odd, self.next_look = 0, 3 * self.count
                self.next_probe = self.next_look if self.count >= PROBED else PROBED
                self.examine(before, here)
        return 0.0 * norm(G)

    def examine(self, a: Sample, b: Sample) -> None:
        """Halve the interval towards what is odd, and interrupt the run if that is a fault."""
        self.examining, began = True, self.nfev
        try:
            fault = self._fault(a, b)
        finally:
            self.examining = False
            self.examined.append((began, self.nfev))
        if fault:
            self._interrupt(Status.STALLED, fault)

    def _fault(self, a: Sample, b: Sample) -> str | None:
        spans, eps = [between(a, b)], self.eps
        near = self.sample(a.X + _short(a, b) * (b.X - a.X))
        if self._is_noisy(between(a, near)):
            return None
        turned, usual = norm(near.G - a.G), norm(b.G - a.G) * _short(a, b)
        if turned > 1e3 * (usual + eps * norm(a.G)) and (fault := self._random(a)):
            return fault
        smooth = 0
        for k in range(1, HALVINGS + 1):
            middle = self.sample((a.X + b.X) / 2)
            parts = between(a, middle), between(middle, b)
            first = parts[0].error + parts[0].bend >= parts[1].error + parts[1].bend
            a, b = (a, middle) if first else (middle, b)
            spans.append(parts[0] if first else parts[1])
            if not math.isfinite(spans[-1].error):
                return None
            smooth = smooth + 1 if _is_smooth(*spans[-2:]) else 0
            if k >= SMOOTH and smooth and not _misses(spans[-1]):
                return None
            if smooth >= CLEARLY:
                break  # the gradient is continuous, but it is not that of f
            if spans[-1].reach < 300 * eps * spans[-1].size:
                break  # from here on there is only rounding
        return self._random(a) or self._verdict(spans)

    def sample(self, X: Any) -> Sample:
        value, G = self.evaluate(X)
        return Sample(X, value, G)

    def _is_noisy(self, near: Span) -> bool:
        """Whether f changes between points so near by more than its gradient allows.

        The run goes on: such differences mean nothing from now on.
        """
        size, rounding = abs(near.change), 100 * self.eps * near.size + self.noise
        if not max(rounding, 3 * near.reach) < size < math.inf:
            return False
        self._allow(near, 10 * size)
        return True

    def _allow(self, near: Span, noise: float) -> None:
        """From now on differences of f up to this size mean nothing."""
        self.noise = max(self.noise, noise)
        if self.targets is not None:
            self.targets.noise = self.noise
        self.remark = (
            f"fun is noisy, or jumps: it changes by {abs(near.change):.1e} between points where "
            f"jac explains {near.explained:.1e}, so changes up to "
            f"{self.noise:.1e} were taken for rounding (options={{'noise': ...}})"
        )

    def _random(self, a: Sample) -> str | None:
        """What to say if jac returns something else when called once more."""
        turned = norm(self.sample(a.X + 0 * a.X).G - a.G)
        if not turned > 1e3 * self.eps * norm(a.G):
            return None
        return (
            f"jac is noisy: called twice at the same X, it differs by {turned:.1e}. Fix its random "
            "numbers, or use ortholand.minimize_finite_sum"
        )

    def _verdict(self, spans: list[Span]) -> str | None:
        k, last = len(spans) - 1, spans[-1]
        # What a wrong jac misses shrinks with the interval; noise does not.
        if k < SMOOTH or any(self._is_noisy(span) for span in spans[k // 2 :]):
            return None
        rounding = 30 * self.eps * last.size + self.noise
        early = spans[max(k - 4, 0)]
        steady = early.bend * 2.0 ** -(1.4 * (k - max(k - 4, 0)))
        if k > 4 and last.bend > max(steady, 100 * self.eps * last.reach):
            return (
                "fun has a kink there: its gradient jumps, however near two points are. Put what "
                "has kinks, such as an l1 norm, into prox=, for example prox=ol.L1(...)"
            )
        if last.error * 2.0 ** (k - k // 2) > 4 * spans[k // 2].error + rounding:
            self._allow(last, 10 * last.error)
        elif last.error > rounding and _misses(last):
            return (
                f"jac is not fun's gradient: along a line f changes by {last.change:.2e}, where "
                f"jac explains {last.explained:.2e}: {CHECK}"
            )
        return None


def _short(a: Sample, b: Sample) -> float:
    """The share of the way from a to b that is very near to a."""
    return min(NEARBY * norm(a.X) / (norm(b.X - a.X) or 1.0), 0.1)


def _is_smooth(before: Span, after: Span) -> bool:
    """Whether the slope's change has shrunk like a square, when the interval was halved."""
    return after.bend <= 0.26 * max(before.bend, 0.01 * before.steepest)


def _misses(span: Span) -> bool:
    """Whether jac does not explain how f changes."""
    return span.error > max(0.05 * max(span.steepest, abs(span.change)), 1e-5 * span.reach)
