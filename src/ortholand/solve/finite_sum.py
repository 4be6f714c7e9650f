"""Costs that are means of many terms: landing steps from a batch of terms at a time.

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
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient
from ortholand.geometry.matrices import is_square
from ortholand.landing import LandingOptions
from ortholand.landing.point import Direction
from ortholand.safe_step import DEFAULT_RULE, find_rule
from ortholand.solve.arrays import Array, adjoint, minus_product, norm, sym
from ortholand.solve.batches import Source, Stream, open_source
from ortholand.solve.landing import BALL_RULES, COUPLED, MOMENTUM_RULE, lipschitz_constant
from ortholand.solve.loop import Run, Status, reporter
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.manifolds import GeneralizedStiefel, Stiefel
from ortholand.solve.method import StepByStep
from ortholand.solve.objective import Objective, power_of_two_near
from ortholand.solve.options import (
    Rule,
    check_callback,
    check_method,
    check_options,
    display_from,
    is_count,
    is_number,
    is_whole,
    limits_from,
)
from ortholand.solve.result import intermediate_result, result_of
from ortholand.solve.targets import Targets
from ortholand.solve.variables import Variables, one_matrix

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

PROBES = 8  # batches probed for their curvature, if lr is left open
GROWTH = 1.5
REJECTIONS = 20  # halvings of lr in one epoch before SAGA gives up


def minimize_finite_sum(
    fun: Callable[..., Any],
    x0: Array,
    *,
    n_terms: int | None = None,
    data: Iterable[Any] | None = None,
    jac: Callable[..., Any] | bool | None = None,
    manifold: Any = None,
    method: str = "saga",
    batch_size: int | None = None,
    lr: float | None = None,
    lam: float | None = None,
    epochs: int = 100,
    gtol: float | None = None,
    seed: int | torch.Generator = 0,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> "OptimizeResult":
    """Minimise a mean of many terms over matrices with orthonormal columns (rows, if wide).

    Args:
        fun: mean of the terms of a batch: ``fun(X, indices)`` with ``n_terms``, where indices
            is an int64 array or tensor; ``fun(X, batch)`` with ``data``.
        x0: where to start: one matrix with orthonormal columns, NumPy or torch, real or complex.
        n_terms: number of terms, for the interface by indices.
        data: batches, for the interface by data: a list, a DataLoader, or any other iterable that
            can be read repeatedly. Batches are weighted by their number of rows. SAGA needs the
            same batches each time: a DataLoader must not shuffle (SAGA draws the order itself), and
            other iterables are read once and kept.
        jac: mean of the Euclidean gradients, with the arguments of fun; True if fun returns
            (value, gradient); None for tensors: autograd computes it.
        manifold: ``ol.Stiefel()``, the same as None; or ``ol.GeneralizedStiefel(B)``, whose B may
            be ``ol.Covariance(rows)``, or a function (V, batch) that returns the mean of B_i V over
            a batch: B itself is never formed. Then lam is not used, and the result has ``passes``.
            Its options are ``eps``, ``shuffle``, for sgd ``momentum`` (0.9) and ``decay`` (None:
            linearly to 0).
        method: ``"saga"`` or ``"sgd"``.
        batch_size: number of indices in a batch; None: such that there are 100 batches.
        lr: step size; None: a third of the inverse of the largest curvature of some batches' costs,
            found by power iterations on gradient differences at the start. SAGA raises it by half
            after each epoch that lowers f, and its gradient by less than half, until one raises f:
            then it goes back, halves it and keeps it.
        lam: attraction to the manifold; None: ``1 / (4 lr)``, so that each step about halves the
            distance, whatever the scale of f. (The paper's value, 1, suits costs of about that
            scale: scaling the data by ten leaves the iterates at the edge of the ball.)
        epochs: largest number of epochs; an epoch is as many steps as there are batches, and a
            pass over all batches for f and its gradient.
        gtol: the norm of the Riemannian gradient must fall to this fraction of its first value;
            None: the square root of the precision, 1.5e-8 in float64.
        seed: seed of the order of batches.
        callback: called after each epoch, as in :func:`ortholand.minimize`.
        options: ``atol``, ``maxtime`` (seconds, checked after each epoch); ``eps`` and
            ``safe_step`` (its rule); ``shuffle`` (True; False keeps indices or lists of batches in
            their order); for sgd ``momentum`` (0) and ``decay`` (0.5): the step falls like
            ``lr / (1 + epochs)^decay``, and stays constant for 0.

    Returns:
        SciPy's ``OptimizeResult`` as :func:`ortholand.minimize` returns it, with the
        final ``lr`` and ``lam``, and ``shortened``, the share of steps that safety made shorter
        than lr; ``nit`` counts epochs, ``nfev`` and ``njev`` batches.

    SAGA keeps one gradient per batch, n x p numbers each. Each epoch ends on the manifold.

    >>> import torch
    >>> import ortholand as ol
    >>> Z = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)).double()
    >>> Z = Z * torch.arange(1, 7)  # principal component analysis, 500 terms
    >>> x0 = ol.random_orthogonal(6, 2, seed=0, dtype=torch.float64)
    >>> def fun(X, indices):
    ...     return -(Z[indices] @ X).square().sum(1).mean()
    >>> minimize_finite_sum(fun, x0, n_terms=500).success
    True
    """
    check_method(method, METHODS)
    check_callback(callback)
    _check_numbers(epochs, lr, lam)
    limits, rest = limits_from(options, gtol, epochs, epochs)
    display = display_from(rest, None)
    shuffle, random = rest.pop("shuffle", True), _random(seed)
    if not isinstance(shuffle, bool):
        raise ValueError(f"options['shuffle'] must be True or False, got {shuffle!r}.")
    report = reporter(callback, intermediate_result, display)
    if _is_sampled(manifold):
        from ortholand.solve.generalized_sum import solve_sampled  # here: it builds on this file

        _check_no_lam(lam)
        draws = Draws(n_terms, data, batch_size, method, shuffle, random)
        return solve_sampled(fun, x0, jac, manifold, draws, limits, lr, rest, report)
    check_options(method, METHODS[method], rest, SHUFFLE_RULE)
    solver = METHODS[method](random, lr, lam, **rest)
    variables = one_matrix(x0, manifold)
    source = open_source(n_terms, data, batch_size, method, shuffle, random, variables)
    objective = FiniteSum(fun, variables, source, jac=jac, remember=method == "saga")
    variables.check_start()
    with torch.no_grad():
        cost = ManifoldCost(objective)
        run = Run(cost, solver, limits, report)
        status = run.from_point(cost.at(*cost.geometry.settle(variables.start), measured=True))
    point = _returned(run, status)
    result = result_of(run, point, status)
    result.update(lr=solver.lr / objective.scale, lam=solver.lam * objective.scale)
    result.shortened = solver.n_shortened / max(1, solver.n_taken)
    advice = advice_for(method, run, point, result.lr)
    result.message = advice.get(Status(result.status), result.message)
    return result


class Draws(NamedTuple):
    """What batches are drawn from, and how: arguments of ``open_source``."""

    n_terms: int | None
    data: Iterable[Any] | None
    batch_size: int | None
    method: str
    shuffle: bool
    random: torch.Generator


def _is_sampled(manifold: Any) -> bool:
    """Whether B is known by products only; raises unless it is a manifold for finite sums."""
    if isinstance(manifold, GeneralizedStiefel):
        return not manifold.changes_variables
    if manifold is None or type(manifold) is Stiefel or manifold is Stiefel:
        return False
    raise ValueError(
        "manifold must be ol.Stiefel() or ol.GeneralizedStiefel(B) in minimize_finite_sum, got "
        f"{manifold!r}. For others use minimize, with all terms in fun."
    )


def _check_no_lam(lam: Any) -> None:
    if lam is not None:
        raise ValueError(
            "lam has no role where B is known by products only, as each step lands; got "
            f"{lam!r}. Leave it out."
        )


class GradientTable:
    """The last gradient of every batch, and their mean."""

    def __init__(self, n_batches: int, like: Tensor) -> None:
        self.gradients = like.new_zeros(n_batches, *like.shape)
        self.mean = torch.zeros_like(like)
        self.weights = torch.ones(n_batches, dtype=torch.float64)

    def estimate(self, k: int, G: Tensor) -> Tensor:
        """SAGA's estimate of the full gradient from batch k's; remembers G.

        Unbiased if batches are drawn with probabilities ``weights``.
        """
        change = G - self.gradients[k]
        estimate = self.mean + change
        self.mean = torch.add(self.mean, change, alpha=float(self.weights[k]))
        self.gradients[k] = G
        return estimate


def multiplier(X: Tensor, G: Tensor, Y: Tensor) -> Tensor:
    """``K = Sym((X^H Y)^-1 X^H G)``: adding ``Y C``, C Hermitian, to G adds C to it at any X."""
    return sym(torch.linalg.solve(adjoint(X) @ Y, adjoint(X) @ G))


def generator(X: Tensor, G: Tensor) -> Tensor:
    """A generator of the relative gradient: psi for square X, ``G - X K`` for tall X.

    Multipliers do not change it: ``tr(X^H X C)`` is constant on the manifold, but its gradient
    ``X C``, kept while X moves, would come to look like a gradient along the manifold.
    """
    if is_square(X):
        return relative_gradient(X, G)
    return minus_product(G, X, multiplier(X, G, X))


class FiniteSum(Objective):
    """The mean of the terms; a full evaluation is one pass over all batches."""

    def __init__(
        self,
        fun: Callable[..., Any],
        variables: Variables,
        source: Source,
        *,
        jac: Callable[..., Any] | bool | None = None,
        remember: bool = False,
    ) -> None:
        super().__init__(fun, variables, jac=jac)
        self.source, self.n_batches = source, 0
        self.table: GradientTable | None = None
        if remember and not isinstance(source, Stream):
            self.table = GradientTable(len(source), variables.start)

    def batch(self, X: Tensor, batch: Any) -> tuple[float, Tensor]:
        """Cost and gradient of one batch."""
        self.args = (batch,)
        value, G = self._value_and_gradient(X)
        return (value, G) if self.scale == 1 else (value / self.scale, G / self.scale)

    def value_and_gradient(self, X: Tensor) -> tuple[float, Tensor]:
        """Cost and gradient of all terms; the table, if any, then holds those at this X."""
        sizes, value = [], 0.0
        total: Any = 0.0
        for k, (size, batch) in enumerate(self.source):
            v, g = self.batch(X, batch)
            sizes.append(size)
            value += size * v
            total = total + size * g
            if self.table is not None:
                self.table.gradients[k] = self.generator(X, g)
        n = sum(sizes)
        if n == 0:
            raise ValueError("data must have at least one batch with a term in it, got none.")
        self.n_batches = len(sizes)
        value, mean = value / n, total / n
        if self.table is not None:
            self.table.mean = self.generator(X, mean)  # it is linear in G
            self.table.weights = torch.tensor(sizes, dtype=torch.float64) / n
        G = self.euclidean(X, mean)
        if self.unit is None:  # chosen by the first gradient; it is nearly always 1
            self.unit = power_of_two_near(G)
            return (value, G) if self.unit == 1 else self.value_and_gradient(X)
        return value, G

    def generator(self, X: Tensor, G: Tensor) -> Tensor:
        """What steps use and the table keeps of a gradient at X."""
        return generator(X, G)

    def euclidean(self, X: Tensor, mean: Tensor) -> Tensor:  # noqa: ARG002
        """The Euclidean gradient, from the mean over all batches."""
        return mean

    def curvature(self, X: Tensor) -> float:
        """The largest curvature at X of some batches' costs."""
        largest, stride = 0.0, max(1, self.n_batches // PROBES)
        for k, (_, batch) in enumerate(self.source):
            if k % stride or k // stride >= PROBES:
                continue
            part = Objective(self.fun, self.variables, jac=self.jac, args=(batch,))
            part.unit = self.unit
            cost = ManifoldCost(part)
            largest = max(largest, lipschitz_constant(cost, cost.at(X)))
            self.nfev += part.nfev
            self.njev += part.njev
        return largest


class StochasticLanding(StepByStep):
    """What both methods share: one call of :meth:`advance` is an epoch that ends on the manifold.

    Attributes:
        random: draws batches.
        lr: step size; NaN until it is chosen, if the user left it open.
        lam: attraction, likewise.
    """

    name: str = ""
    rules: ClassVar[dict[str, Rule]] = BALL_RULES
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
        """Choose what the user left open."""
        assert isinstance(cost.objective, FiniteSum)
        self.cost, self.sum, self.targets = cost, cost.objective, targets
        unit = cost.objective.scale  # the user's values are for f in its own unit
        self.lr, self.lam = unit * self.lr, self.lam / unit
        if self.chooses_lr:
            self.lr = 1 / (3 * self.sum.curvature(point.X))
        if self.chooses_lam:  # a weight that follows the scale of f, as lr does
            self.lam = 1 / (4 * self.lr)

    def advance(self, point: Point) -> Point | None:
        """One epoch; None if something was not finite."""
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
        """The point after the steps of an epoch; None if something was not finite."""
        raise NotImplementedError

    def restart(self) -> bool:
        """False: nothing helps if an epoch failed."""
        return False

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
    patience = 10
    growth = GROWTH  # of lr after an epoch that went well, until one does not

    def advance(self, point: Point) -> Point | None:
        """One epoch; if lr is not the user's, one that does not raise f."""
        for _ in range(REJECTIONS):
            after = super().advance(point)
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

    def epoch(self, X: Tensor) -> Tensor | None:
        """As many steps as there are batches, drawn in proportion to their numbers of terms."""
        table, source = self.sum.table, self.sum.source
        assert table is not None
        assert not isinstance(source, Stream)
        n = len(source)
        draws = torch.multinomial(table.weights, n, replacement=True, generator=self.random)
        there: Tensor | None = X
        for k in draws.tolist():
            if there is None:
                return None
            B = self.gradient(there, source[k])
            if B is None:
                return None
            there = self.step(there, table.estimate(k, B), self.lr)
        return there


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
        **BALL_RULES,
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

    def epoch(self, X: Tensor) -> Tensor | None:
        """One step for each batch."""
        there: Tensor | None = X
        for batch in self.sum.source.epoch():
            if there is None:
                return None
            B = self.gradient(there, batch)
            if B is None:
                return None
            if self.momentum:
                self.buffer = B = self.momentum * self.buffer + (1 - self.momentum) * B
            lr = self.lr / (1 + self.n_steps / self.sum.n_batches) ** self.decay
            there = self.step(there, B, lr)
            self.n_steps += 1
        return there


METHODS: dict[str, type[StochasticLanding]] = {"saga": SAGA, "sgd": SGD}


def _random(seed: Any) -> torch.Generator:
    if isinstance(seed, torch.Generator) and seed.device.type == "cpu":
        return seed
    if not is_whole(seed):
        raise TypeError(f"seed must be a whole number or a torch.Generator on the CPU, got {seed}.")
    return torch.Generator().manual_seed(int(seed))


def _check_numbers(epochs: Any, lr: Any, lam: Any) -> None:
    if not is_count(epochs):
        raise ValueError(f"epochs must be a whole number >= 1, got {epochs!r}.")
    if lr is not None and not (is_number(lr) and 0 < lr < math.inf):
        raise ValueError(f"lr must be a number > 0, or None to have it chosen, got {lr!r}.")
    if lam is not None and not (is_number(lam) and 0 <= lam < math.inf):
        raise ValueError(f"lam must be a number >= 0, or None to have it chosen, got {lam!r}.")


SHUFFLE_RULE: dict[str, Rule] = {"shuffle": ("True or False", lambda v: isinstance(v, bool))}


def _returned(run: Run, status: Status) -> Point:
    """The lowest point, unless the last is as low up to rounding and flatter. All have landed."""
    best, last = run.best, run.point
    rounding = 1e3 * torch.finfo(last.X.dtype).eps * abs(best.value)
    tied = last.value <= best.value + rounding and last.gradient_norm <= best.gradient_norm
    return last if status is Status.CONVERGED or tied else best


def advice_for(method: str, run: Run, point: Point, lr: float) -> dict[Status, str]:
    """What to do next, where the advice differs from that of ``minimize``."""
    unit = run.cost.objective.scale
    reached = (
        f"the Riemannian gradient's norm is {point.gradient_norm * unit:.1e}, "
        f"asked for {run.targets.goal(point) * unit:.1e}"
    )
    more = {
        "saga": "Raise epochs, start from this x, or take smaller batches: more steps per epoch.",
        "sgd": "Steps along single batches end in noise, which grows with their length: use "
        "method='saga', or another decay or lr.",
    }
    return {
        Status.MAXITER: f"Stopped after epochs={run.limits.maxiter}: {reached}. {more[method]}",
        Status.STALLED: f"Epochs lower neither f nor its gradient, with lr={lr:.1e}: {reached}. "
        "If that is small, it is what the precision of fun allows: raise gtol, or use float64. "
        "Otherwise your lr is too large, or jac is not fun's gradient, or batches change: try "
        "ortholand.check_gradient(fun, jac, x0, args=(batch,)).",
    }
