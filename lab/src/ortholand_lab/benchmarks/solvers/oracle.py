"""Answers to solvers' questions about a problem, counted, and the end of a run."""

from collections.abc import Callable
from time import perf_counter, process_time

import numpy as np
from torch import Tensor

from ortholand_lab.benchmarks.solvers.problems import Case, Matrix, Parts


class Stop(Exception):  # noqa: N818
    """Ends a run from outside, whatever its solver would do."""


class Point:
    """What is known about a problem at a point."""

    def __init__(self, X: Matrix, at: Callable[[Matrix], Parts]) -> None:
        self.X = X.copy()  # solvers may go on to change theirs
        self.compute_cost, self.compute_gradient, self.hessian = at(self.X)
        self.cost: float | None = None
        self.gradient: Matrix | None = None


class Oracle:
    """Answers a solver's questions, counts them, and ends the run when it is time.

    A question asked again at one of the last two points is neither computed nor counted again.

    Args:
        case: the problem.
        deadline: ``process_time()`` after which the next question raises Stop.
        last_gradient: number of the gradient after which to raise Stop.
        limit: limit on iterations, for solvers that need one.
        watch: called with every point where a gradient was asked for, with the clocks stopped;
            Stop is raised if it returns True.
    """

    def __init__(
        self,
        case: Case,
        *,
        deadline: float = np.inf,
        last_gradient: float = np.inf,
        limit: int = 1_000,
        watch: Callable[[Matrix], bool] | None = None,
    ) -> None:
        self.case, self.deadline = case, deadline
        self.last_gradient, self.limit, self.watch = last_gradient, limit, watch
        self.costs = self.gradients = self.hessian_products = 0
        self.iterations = 0  # for the solver to count, if its run may be stopped from outside
        self.pause = self.processor_pause = 0.0  # seconds for which the clocks stood
        self.last = case.X0  # where a gradient was last asked
        self._points: list[Point] = []

    @property
    def counts(self) -> tuple[int, int, int]:
        """Costs, gradients and Hessian products so far."""
        return self.costs, self.gradients, self.hessian_products

    def fun(self, X: Matrix) -> float:
        """Cost at X."""
        point = self._find(X)
        if point.cost is None:
            self.costs += 1
            point.cost = float(point.compute_cost())
        return point.cost

    def grad(self, X: Matrix) -> Matrix:
        """Euclidean gradient at X."""
        point = self._find(X)
        if point.gradient is None:
            point.gradient = point.compute_gradient()
            self.took_gradient(point.X)
        return point.gradient

    def fun_and_grad(self, X: Matrix) -> tuple[float, Matrix]:
        """Cost and Euclidean gradient at X."""
        return self.fun(X), self.grad(X)

    def hessp(self, X: Matrix, V: Matrix) -> Matrix:
        """Euclidean Hessian at X applied to V."""
        self.hessian_products += 1
        self._check_time()
        return self._find(X).hessian(V)

    def torch_fun(self, X: Tensor) -> Tensor:
        """Cost in torch, differentiable. Who takes its gradient must call :meth:`took_gradient`."""
        self.costs += 1
        self.last = X.detach().numpy()
        self._check_time()
        assert self.case.problem is not None
        return self.case.problem.fun(X)

    def took_gradient(self, X: Matrix) -> None:
        """Count a gradient at X, and stop if it was the last one."""
        self.gradients += 1
        self.last = X
        done = self.gradients >= self.last_gradient
        if self.watch is not None:
            start, processor_start = perf_counter(), process_time()
            done = self.watch(X)
            self.pause += perf_counter() - start
            self.processor_pause += process_time() - processor_start
        if done:
            raise Stop

    def _find(self, X: Matrix) -> Point:
        for point in self._points:
            if X.flat[0] == point.X.flat[0] and np.array_equal(X, point.X):
                return point
        self._check_time()
        self._points = [Point(X, self.case.at), *self._points[:1]]
        return self._points[0]

    def _check_time(self) -> None:
        if process_time() - self.processor_pause > self.deadline:
            raise Stop
