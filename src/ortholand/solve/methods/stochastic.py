"""Stochastic landing, plain and with SAGA's variance reduction: steps from a batch of terms each.

``f(X) = (1/n) sum_i f_i(X)``. A pass over all terms for one step is wasteful when there are many
similar terms. Stochastic landing steps along the gradient of one batch. Its noise never vanishes,
so steps must shrink. SAGA (Ablin, Vary, Gao, Absil, JMLR 2024) remembers the last gradient of each
batch and steps along

    B_k(X) - B_k(where batch k was last evaluated) + mean of all remembered gradients,

which has the right mean, and noise that vanishes with the distance to the solution: steps of
constant length, if short enough, converge at a linear rate to a minimum where the Riemannian
Hessian of f is positive definite along all directions that change f. B_k is the gradient of batch k
without its multiplier, so that neither method depends on how the terms continue off the manifold.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from ortholand.landing import Coupled, LandingOptions
from ortholand.landing.point import Direction
from ortholand.safe_step import DEFAULT_RULE, find_rule
from ortholand.solve.arrays import norm
from ortholand.solve.batches import FiniteSum, GradientTable
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.method import Method, Progress
from ortholand.solve.objective import Objective
from ortholand.solve.options import BALL_RULES, MOMENTUM_RULE, Rule, is_number

COUPLED = Coupled()
PROBES = 8  # batches probed for their curvature, if lr is left open
GROWTH = 1.5
REJECTIONS = 20  # halvings of lr in one epoch before SAGA gives up
SHUFFLE_RULE: dict[str, Rule] = {"shuffle": ("True or False", lambda v: isinstance(v, bool))}


class StochasticLanding(Method):
    """What both methods share: one call of :meth:`advance` is an epoch that ends on the manifold.

    Attributes:
        random: draws batches.
        lr: step size; NaN until it is chosen, if the user left it open.
        lam: attraction, likewise.
    """

    rules: ClassVar[dict[str, Rule]] = {**BALL_RULES, **SHUFFLE_RULE}
    patience: float = math.inf

    def __init__(
        self,
        random: torch.Generator,
        lr: float | None = None,
        lam: float | None = None,
        eps: float = 0.5,
        safe_step: str = DEFAULT_RULE,
    ) -> None:
        self.random = random
        self.chooses_lr, self.chooses_lam = lr is None, lam is None
        self.lr = math.nan if lr is None else float(lr)
        self.lam = math.nan if lam is None else float(lam)
        self.eps, self.rule = eps, find_rule(safe_step)
        self.n_taken = self.n_shortened = 0

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        assert isinstance(cost.objective, FiniteSum)
        self.cost, self.sum, self.targets = cost, cost.objective, targets
        unit = cost.objective.scale  # the user's values are for f in its own unit
        self.lr, self.lam = unit * self.lr, self.lam / unit
        if self.chooses_lr:
            self.lr = 1 / (3 * self._sharpest(point.X))
        if self.chooses_lam:  # a weight that follows the scale of f, as lr does
            self.lam = 1 / (4 * self.lr)

    def advance(self, point: Point, progress: Progress) -> Point | None:  # noqa: ARG002
        after = self.epoch(point.X)
        if after is None:
            self.cost.saw_non_finite = True
            return None
        there = self.cost.at(*self.cost.geometry.settle(after), measured=True)
        if not there.finite:
            return None
        length = norm(there.X - point.X)
        if length > 0:
            self.targets.saw(norm(there.gradient - point.gradient) / length, point)
        return there

    def epoch(self, X: Tensor) -> Tensor | None:
        """The point after a step for each batch; None if something was not finite."""
        for k, batch in self.draws():
            B = self.gradient(X, batch)
            moved = None if B is None else self.step(X, self.direction(k, B), self.next_lr())
            if moved is None:
                return None
            X = moved
        return X

    def draws(self) -> Iterable[tuple[int, Any]]:
        raise NotImplementedError

    def direction(self, k: int, B: Tensor) -> Tensor:
        """What to follow, from the generator of batch k."""
        raise NotImplementedError

    def next_lr(self) -> float:
        return self.lr

    def _sharpest(self, X: Tensor) -> float:
        """The largest curvature at X of some batches' costs."""
        largest, whole = 0.0, self.sum
        stride = max(1, whole.n_batches // PROBES)
        for _, batch in islice(whole.source, 0, stride * PROBES, stride):
            part = Objective(whole.fun, whole.variables, jac=whole.jac, args=(batch,))
            part.unit = whole.unit
            cost = ManifoldCost(part, self.cost.geometry)
            largest = max(largest, cost.lipschitz_constant(cost.at(X)))
            whole.nfev += part.nfev
            whole.njev += part.njev
        return largest

    def gradient(self, X: Tensor, batch: Any) -> Tensor | None:
        """A batch's generator; None if its gradient, or its cost, is not finite."""
        value, G = self.sum.batch(X, batch)
        finite = math.isfinite(value) and bool(G.isfinite().all())
        return self.sum.generator(X, G) if finite else None

    def step(self, X: Tensor, B: Tensor, lr: float) -> Tensor | None:
        """One landing step along a generator, no longer than is safe; None if it overflows."""
        options = LandingOptions(lr, COUPLED, self.rule, lam=self.lam, eps=self.eps)
        moved, taken, limited = COUPLED.step(options.point(X), Direction(B), options)
        self.n_taken += 1
        self.n_shortened += limited is not None and bool(limited)
        return moved if taken is None or taken else None


class SAGA(StochasticLanding):
    """Variance-reduced landing."""

    name = "saga"
    patience: float = 10
    growth = GROWTH  # of lr after an epoch that went well, until one does not

    def advance(self, point: Point, progress: Progress) -> Point | None:
        """One epoch; if lr is not the user's, one that does not raise f."""
        for _ in range(REJECTIONS):
            after = super().advance(point, progress)
            if after is None or not self.chooses_lr:
                return after
            if as_good(after, point):
                if is_slow(after, point):
                    self._change_step(self.growth)
                return after
            self._change_step(0.5)
            self.growth = 1.0
            self.cost.at(point.X)  # refills the table at this point
        return None

    def _change_step(self, factor: float) -> None:
        self.lr *= factor
        if self.chooses_lam:
            self.lam /= factor

    def draws(self) -> Iterable[tuple[int, Any]]:
        """As many batches as there are, drawn in proportion to their numbers of terms."""
        source: Any = self.sum.source
        weights = self._table().weights
        drawn = torch.multinomial(weights, len(source), replacement=True, generator=self.random)
        return ((k, source[k]) for k in drawn.tolist())

    def direction(self, k: int, B: Tensor) -> Tensor:
        return self._table().estimate(k, B)

    def _table(self) -> GradientTable:
        assert self.sum.table is not None
        return self.sum.table


def as_good(after: Point, before: Point) -> bool:
    """Whether f did not rise; where rounding hides that, whether its gradient did not double."""
    rounding = 100 * torch.finfo(after.X.dtype).eps * max(abs(after.value), abs(before.value))
    if abs(after.value - before.value) > rounding:
        return after.value < before.value
    return after.gradient_norm <= 2 * before.gradient_norm


def is_slow(after: Point, before: Point) -> bool:
    """Whether the gradient fell, but not to its half: longer steps may be faster."""
    return before.gradient_norm / 2 < after.gradient_norm < before.gradient_norm


class SGD(StochasticLanding):
    """Stochastic landing, as in the paper, with momentum and shrinking steps.

    Attributes:
        momentum: momentum of the relative gradients, in [0, 1).
        decay: the step falls like ``lr / (1 + epochs)^decay``.
    """

    name = "sgd"
    rules: ClassVar[dict[str, Rule]] = {
        **StochasticLanding.rules,
        "momentum": MOMENTUM_RULE,
        "decay": ("a number >= 0", lambda v: is_number(v) and 0 <= v < math.inf),
    }

    def __init__(
        self,
        random: torch.Generator,
        lr: float | None = None,
        lam: float | None = None,
        momentum: float = 0.0,
        decay: float = 0.5,
        **ball: Any,
    ) -> None:
        super().__init__(random, lr, lam, **ball)
        self.momentum, self.decay = momentum, decay
        self.buffer: Tensor | float = 0.0
        self.n_steps = 0

    def draws(self) -> Iterable[tuple[int, Any]]:
        return enumerate(self.sum.source.epoch())

    def direction(self, k: int, B: Tensor) -> Tensor:  # noqa: ARG002
        if self.momentum:
            self.buffer = B = self.momentum * self.buffer + (1 - self.momentum) * B
        return B

    def next_lr(self) -> float:
        passed = self.n_steps / self.sum.n_batches
        self.n_steps += 1
        return self.lr / (1 + passed) ** self.decay
