"""The loop that drives every method, and decides when to stop.

Success is claimed in one place only, for a point that is on the manifold up to rounding and whose
gradient was evaluated there.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ortholand.solve.arrays import from_numpy, lanczos, norm, precision, to_numpy
from ortholand.solve.manifold_cost import LOOKS, ManifoldCost, Point
from ortholand.solve.method import Method, Passed, Progress
from ortholand.solve.options import InterruptedRunError, Limits, Status
from ortholand.solve.run import Run
from ortholand.solve.watch import Sample

FAR = 1e9  # times the start: where X may be if f has no minimum
SHARE = 0.05  # of a run's time that may be spent on its second order,
ALWAYS = 60  # and Hessian products, if the run began at a stationary point
AT_ONCE = 12  # evaluations: who is there so soon began in a subspace that f does not leave
WORTH_A_CHECK = 35  # evaluations and products after which hessp is checked, by one of each
OVERHEAD, BEGIN = 5e-5, 2e-4  # seconds around a product, and before the first


class Loop:
    """Follows a run's method until there is a reason to stop.

    Args:
        run: what has not begun yet.
        method: what makes the steps.
        report: called after each iteration; True stops the run.
    """

    def __init__(
        self, run: Run, method: Method, report: Callable[[Run], bool] | None = None
    ) -> None:
        self.run, self.cost, self.method, self.report = run, run.cost, method, report
        self.left_a_saddle = self.checked = False

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A stored result is without its state, which holds the user's functions."""
        return type(None), ()

    def from_point(self, point: Point) -> Status:
        return self._guarded(lambda: self._follow(point))

    def _guarded(self, follow: Callable[[], Status]) -> Status:
        watch = self.cost.objective.watch
        try:
            return follow()
        except InterruptedRunError as end:
            self.run.fault = end.fault
            if not self.run.rows:
                self.run.record(self.method.name)
            return end.status
        finally:
            if watch is not None:
                watch.closed = True

    def resume(self, limits: Limits, report: Callable[[Run], bool] | None) -> Status:
        """Go on from where an earlier run ended, with all that its method has learnt."""
        self.run.again(limits)
        self.report = report
        return self._guarded(self._on)

    def _follow(self, point: Point) -> Status:
        run = self.run
        run.begin(point)
        self.targets = run.targets
        if self.cost.objective.watch is not None:
            self.cost.objective.watch.targets = run.targets
        if not point.finite:
            run.record(self.method.name)
            return Status.NON_FINITE
        self.cost.geometry.check_first(point.X, point.euclidean)
        if self.targets.may_be_stationary(point):
            self.targets.saw(self._curvature(point), point, measured=True)
            self.cost.saw_non_finite = False
        self.method.start(self.cost, point, self.targets)
        return self._on()

    def _on(self) -> Status:
        run = self.run
        while True:
            run.record(self.method.name)
            self._check_products()
            status = self._reason_to_stop()
            if status is None and not self._advance():
                status = Status.NON_FINITE if self.cost.saw_non_finite else Status.STALLED
            if status is Status.STALLED and self._is_rounding_of_x():
                return Status.CONVERGED
            if status is not None:
                return status

    def _curvature(self, point: Point) -> float:
        """Curvature by two power iterations from the gradient, to tell whether that is small."""
        if not self.cost.smooth:
            return 0.0
        length = precision(point.X) ** (1 / 3) * self.targets.length
        direction, curvature = self.cost.geometry.tangent(point.X, point.gradient), 0.0
        if norm(direction) < point.gradient_norm / 2:  # it was rounding, normal to the manifold
            direction = random_tangent(self.cost, point)
        for _ in range(2):
            size = norm(direction)
            if not 0 < size < math.inf:
                break
            direction = self.cost.gradient_change(point, direction, length / size)
            curvature = max(curvature, norm(direction) / length)
        return curvature

    def _is_rounding_of_x(self) -> bool:
        """Whether nothing lower can be found because X has no more digits."""
        point = self.cost.on_manifold(self.run.point)
        if not (point.finite and point.gradient_norm > 0):
            return False
        if not self.targets.is_rounding_of_x(point, self._curvature(point)):
            return False
        self.run.point = point
        return point.distance <= self.cost.geometry.feasible(point.X)

    def _reason_to_stop(self) -> Status | None:
        run, targets, point = self.run, self.targets, self.run.point
        stopped = run.nit > 0 and self.report is not None and self.report(run)
        if targets.is_stationary(point, run.nit == 0) and self._settled():
            self._confirm()
            return Status.CALLBACK if stopped else None if self._left_saddle() else Status.CONVERGED
        if stopped:
            return Status.CALLBACK
        if targets.is_rounding(point):
            return Status.STALLED
        if run.in_vain and run.in_vain > self.method.patience:
            return Status.STALLED
        if run.in_vain in LOOKS and self._is_rounding_of_x():
            return Status.CONVERGED
        if run.nit >= run.limits.maxiter:
            return Status.MAXITER
        if run.last[-1] > run.limits.maxtime:
            return Status.MAXTIME
        return Status.UNBOUNDED if self._escapes() else None

    def _confirm(self) -> None:
        """Examine f near a solution if its last differences were odd."""
        watch, point = self.cost.objective.watch, self.run.point
        if watch is None or not self.cost.smooth:
            return
        if watch.odd:
            step = 0.01 * self.targets.length * random_tangent(self.cost, point)
            V = self.cost.geometry.ambient(point.X, step)
            watch.examine(watch.sample(point.X + V), watch.sample(point.X + 2 * V))

    def _check_products(self) -> None:
        objective, point = self.cost.objective, self.run.point
        counts = objective.nfev + objective.nhev
        if objective.hessp and not self.checked and self.cost.smooth and counts >= WORTH_A_CHECK:
            self.checked = True
            V = self.cost.geometry.ambient(point.X, random_tangent(self.cost, point))
            objective.distrust(point.X, point.euclidean, V)

    def _left_saddle(self) -> bool:
        """Look for negative curvature at a stationary point; whether the run goes on from below."""
        run = self.run
        products = products_allowed(run, self.left_a_saddle)
        lowest = lowest_curvature(self.cost, run.point, products) if products else None
        run.min_curvature = None if lowest is None else lowest.curvature
        if lowest is None or not lowest.negative:
            return False
        lower = lower_point(self.cost, run.point, lowest)
        if lower is None:
            return False
        self.left_a_saddle, run.min_curvature = True, None
        self.method.restart()
        run.point = run.arrive(lower)
        run.flattest = lower.gradient_norm
        run.record(self.method.name)
        return True

    def _escapes(self) -> bool:
        point = self.run.point
        if self.cost.geometry.bounded or not point.value < self.run.first_value:
            return False
        steep = point.gradient_norm > 0.9 * self.targets.first
        far = FAR if steep else FAR**1.5
        return norm(point.X) > far * max(self.targets.length, 1.0)

    def _blame(self, point: Point) -> None:
        """Interrupt the run if f and its gradient disagree along the negative gradient."""
        watch, geometry = self.cost.objective.watch, self.cost.geometry
        if (
            watch is None
            or not self.cost.smooth
            or self.targets.is_rounding(point)
            or not point.finite
        ):
            return
        V = geometry.ambient(point.X, point.gradient)
        t = 0.05 * self.cost.cautious_step(point, point.gradient_norm)
        here = Sample(point.X, point.value, point.euclidean)
        there = watch.sample(point.X - t * V)
        watch.examine(here, there)

    def _advance(self) -> bool:
        """Advance; if the method is stuck, once more from the manifold and without its memory."""
        after = self._next(self.run.point)
        if after is None:
            self._blame(self.run.point)
            forgot = self.method.restart()
            if not forgot and self.run.point.distance <= self.cost.geometry.feasible(
                self.run.point.X
            ):
                return False
            settled = self.cost.settled(self.run.point)
            if not settled.finite:
                return False
            self.run.point = settled
            after = self._next(settled)
        if after is None:
            return False
        self.run.point = after
        self.cost.saw_non_finite = False
        return True

    def _next(self, point: Point) -> Point | None:
        """One iteration, or several if the method can make them and no callback needs each."""
        run, objective = self.run, self.cost.objective
        nfev, njev = objective.nfev, objective.njev
        ahead = run.limits.maxiter - run.nit - 1  # after this one, the last lands closely
        self.cost.lands_closely = ahead <= 0
        left = max(ahead, 1) if self.report is None else 1
        if objective.hessp and not self.checked:
            left = min(left, max(WORTH_A_CHECK - objective.nfev - objective.nhev, 1))
        lowest = run.best.value - run.best.correction
        progress = Progress(lowest, run.flattest, run.in_vain, self.method.patience, left)
        after = self.method.advance(point, progress)
        if not isinstance(after, Passed):
            return None if after is None else run.arrive(after)
        run.nit += len(after.rows)
        run.best = after.best or run.best
        run.flattest, run.in_vain = after.flattest, after.in_vain
        # In the user's unit, and from where this run's counters and clock began.
        unit, shifts = objective.scale, (0, 0, 0, nfev, njev, objective.nhev, -run.began)
        rows = after.rows[:-1] * (unit, unit, 1, 1, 1, 1, 1) + shifts
        for begin, end in objective.watch.examined if objective.watch else ():
            later = (rows[:, 3] >= begin) & (begin > nfev)  # which the method did not count
            rows[:, 3:5] += (later * (end - begin))[:, None]
        run.rows.append(rows)
        return after.point

    def _settled(self) -> bool:
        """Land the point, and say whether it is stationary there too."""
        run = self.run
        self.cost.measure(run.point)
        if run.point.distance > self.cost.geometry.feasible(run.point.X) / 2:
            run.point = self.cost.settled(run.point)
        return run.succeeded(run.point)


def products_allowed(run: Run, left_a_saddle: bool) -> int:
    """How many Hessian products the check may take; 0 if they are not exact."""
    objective, less = run.cost.objective, run.targets.less(run.point)
    if objective.watch is None or not run.cost.smooth or not objective.has_products:
        return 0
    size = math.prod(run.point.X.shape)
    at_once = objective.spent <= AT_ONCE
    if at_once or left_a_saddle or run.targets.first <= 0.01 * less:
        return min(ALWAYS, size)
    gradient = objective.quickest["gradient"]
    # Both may be of one call, slow by chance: a product is hardly ever cheaper than a gradient.
    product = min(max(objective.quickest["product"], gradient), 2 * gradient)
    begins = 0 if objective.hessp or objective.keeps_graph else 3  # a graph must be made
    passed = objective.nfev * (gradient + OVERHEAD / 4) + objective.nhev * (product + OVERHEAD / 2)
    left = SHARE * passed - BEGIN - begins * gradient
    allowed = int(left / (product + OVERHEAD)) if math.isfinite(passed) else 0
    return min(allowed, ALWAYS, size) if allowed > 1 else 0


CLEAR = 1e-3  # a curvature this far below zero, relative to the largest, ends the search
NEGATIVE = 1e-7  # below this it may be rounding


class Lowest(NamedTuple):
    """The smallest curvature that was found, and along which direction."""

    curvature: float
    direction: Any
    negative: bool  # beyond rounding


def lowest_curvature(cost: ManifoldCost, point: Point, products: int) -> Lowest | None:
    """Lanczos' method on the Riemannian Hessian from a random vector; None if it fails."""
    start = random_tangent(cost, point)
    found = lanczos(cost.hessian(point), start, products, NEGATIVE, CLEAR)
    if found is None:
        return None
    values, direction = found
    negative = values[0] < -max(NEGATIVE, 100 * precision(point.X)) * abs(values).max()
    return Lowest(float(values[0]), direction, bool(negative))


def random_tangent(cost: ManifoldCost, point: Point) -> Any:
    """Coordinates of a tangent vector of length 1; zero where there are none."""
    random, shape = np.random.default_rng(0), tuple(point.X.shape)
    noise = random.standard_normal(shape)
    if to_numpy(point.X[:1]).dtype.kind == "c":
        noise = noise + 1j * random.standard_normal(shape)
    v = cost.geometry.coordinates(point.X, from_numpy(noise, point.X))
    size = norm(v)
    return v / size if size > 1e-8 * math.sqrt(math.prod(shape)) else 0 * v


def lower_point(cost: ManifoldCost, point: Point, lowest: Lowest) -> Point | None:
    """A point at which f is lower, along a direction of negative curvature and either sign."""
    step = cost.cautious_step(point, 1.0)
    for _ in range(12):
        for sign in (1.0, -1.0):
            there, t = cost.go(cost.line(point, sign * lowest.direction), step, near=0.0)
            promised = -lowest.curvature * t * t / 2
            if there.finite and there.value < point.value - 0.01 * promised:
                return there
        step /= 4
    return None
