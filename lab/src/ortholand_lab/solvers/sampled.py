"""Finite sums with a constraint ``X^H B X = I`` whose B is a mean over batches as well.

After Vary, Ablin, Gao and Absil, "Optimization without retraction on the random generalized Stiefel
manifold" (ICML 2024): B itself is never available, only ``B_i X`` for the current batch, and the
product of two estimates from one batch is biased. Here, with ``Y = B_i X``,

    g = G - Y M,    V = b - X Sym(Y^H b),    X <- (X - eta V) (I + gain D + eta^2 V^H B_i V)^(-1/2)

where M comes from *earlier* batches, and so is independent of Y: it is the multiplier where the
epoch began, and what a running mean of ``Sym(X^H (G - Y M))`` adds to that; b is the momentum of g;
and only a small share, the gain, of ``D = X^H Y - I``, linear in B_i, is used. Adding ``Y C`` to G,
the gradient of ``tr(X^H B_i X C) / 2``, adds C to M, and changes no step. If B is the same for all
batches, each loses its own multiplier first.
The mean of g vanishes exactly where the constrained problem is stationary; the bias is along
``X S``, S Hermitian, and landing removes it. After each epoch a pass over all batches measures
``X^H B X``, and its p x p root lands X up to rounding.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ortholand.solve.arrays import adjoint, all_finite, norm, sym
from ortholand.solve.batches import FiniteSum, GradientTable, Indices, Source, Stream, open_source
from ortholand.solve.finite_sum import advice_for, random_from
from ortholand.solve.loop import Loop
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.manifolds import GeneralizedStiefel, one_matrix
from ortholand.solve.manifolds.generalized import GeneralizedColumns, inverse_root
from ortholand.solve.manifolds.geometry import FARTHEST_START
from ortholand.solve.manifolds.operators import (
    ASYMMETRY,
    Covariance,
    Operator,
    check_size,
    not_hermitian,
    operator_for,
)
from ortholand.solve.method import Method, Progress
from ortholand.solve.methods.stochastic import GROWTH, REJECTIONS, SHUFFLE_RULE, as_good, is_slow
from ortholand.solve.objective import power_of_two_near
from ortholand.solve.options import (
    BALL_RULES,
    MOMENTUM_RULE,
    Rule,
    check_options,
    is_number,
    limits_from,
)
from ortholand.solve.run import Run, best_on_manifold, reporter, result_of
from ortholand.solve.variables import Manifold, Variables

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

PROBES, POWER_ITERATIONS = 4, 6  # batches probed for their curvature, and how often
GAIN = 0.05  # share of a batch's residual that is used


def multiplier(X: Tensor, G: Tensor, Y: Tensor) -> Tensor:
    """``K = Sym((X^H Y)^-1 X^H G)``: adding ``Y C``, C Hermitian, to G adds C to it at any X."""
    return sym(torch.linalg.solve(adjoint(X) @ Y, adjoint(X) @ G))


def is_sampled(B: Any) -> bool:
    """Whether B can be sampled in batches: rows of data, or a function."""
    return isinstance(B, Covariance) or (callable(B) and not hasattr(B, "shape"))


def batch_product(B: Covariance, V: Tensor, indices: Any) -> Tensor:
    """``B_i V`` for the mean B_i of these rows: its mean over all batches is ``B V``."""
    rows = [
        block[torch.as_tensor(indices)]
        if isinstance(block, Tensor)
        else block[indices.cpu().numpy() if isinstance(indices, Tensor) else indices]
        for block in B.blocks
    ]
    return Covariance(rows, B.ridge)(V)


class BatchProduct:
    """``B_i V`` of a batch; the same for all batches if B is a matrix or an operator."""

    def __init__(self, B: Any, variables: Variables, source: Source) -> None:
        self.B, self.variables = B, variables
        self.fixed: Operator | None = None
        if not is_sampled(B):
            self.fixed = operator_for(B, variables.start, variables.numpy)
            self.fixed.check(variables.start)
        elif isinstance(B, Covariance) and (
            not isinstance(source, Indices) or source.n_terms != B.n_terms
        ):
            found = f"n_terms={source.n_terms}" if isinstance(source, Indices) else "data"
            raise ValueError(
                f"ol.Covariance of {B.n_terms} rows needs n_terms={B.n_terms} and indices, got "
                f"{found}. With data, make B a function (V, batch) -> B_i V."
            )

    def __call__(self, V: Tensor, batch: Any) -> Tensor:
        """``B_i V`` for a batch."""
        if self.fixed is not None:
            return self.fixed.apply(V)
        if isinstance(self.B, Covariance):
            return batch_product(self.B, V, batch)
        try:
            W = self.B(self.variables.outward(V), batch)
        except TypeError as error:
            raise TypeError(
                "In minimize_sampled B is a function (V, batch), or (V, indices), that returns "
                f"the mean of B_i V over a batch; it failed with: {error}"
            ) from error
        return self.variables.inward(W, "B", gradient=False).clone()


class GeneralizedSum(FiniteSum):
    """The mean of the terms, and of the products with B: one visit to a batch serves both.

    Attributes:
        visits: how many batches were read.
    """

    def __init__(
        self, fun: Callable[..., Any], variables: Variables, source: Source, B: Any, **options: Any
    ) -> None:
        super().__init__(fun, variables, source, **options)
        self.product = BatchProduct(B, variables, source)
        self.geometry = SampledColumns(Operator(self._full_product, variables.start.shape[0]))
        self.visits = 0
        if self.table is not None and not isinstance(source, Stream):
            self.table = GradientTable(len(source), _stack(variables.start, variables.start))

    def batch(self, X: Tensor, batch: Any) -> tuple[float, Tensor]:
        """Cost of one batch; its gradient and ``B_i X``, stacked."""
        self.visits += 1
        value, G = super().batch(X, batch)
        return value, _stack(G, self.product(X, batch))

    def generator(self, X: Tensor, G: Tensor) -> Tensor:
        """The gradient without its multiplier, if that leaves the mean right; and ``B_i X``.

        If B differs between batches, a multiplier from the same batch would be biased.
        """
        if self.product.fixed is None:
            return G
        G, Y = _parts(G)
        return _stack(G - Y @ multiplier(X, G, Y), Y)

    def value_and_gradient(self, X: Tensor) -> tuple[float, Tensor]:
        """Cost and gradient of all terms; ``B X`` is kept in the geometry."""
        value, mean = self.mean(X)
        G, Y = _parts(mean)
        self.geometry.know(X, Y.clone())
        if self.unit is None:
            self.unit = power_of_two_near(G)
            return (value, G) if self.unit == 1 else self.value_and_gradient(X)
        return value, G

    def _full_product(self, V: Tensor) -> Tensor:
        """``B V``, by a pass over all batches unless B is the same for all."""
        if self.product.fixed is not None:
            return self.product.fixed.apply(V)
        count, total = 0, torch.zeros_like(V)
        for size, batch in self.source:
            self.visits += 1
            total.add_(self.product(V, batch), alpha=size)
            count += size
        return total / count

    def check_product(self, X: Tensor) -> None:
        """Raise unless a batch's B is Hermitian; learn the size of B."""
        batch = next(iter(self.source))[1]
        random = torch.Generator().manual_seed(0)
        U, V = (torch.randn(X.shape, generator=random, dtype=X.dtype).to(X) for _ in range(2))
        self.visits += 1
        BU, BV = self.product(U, batch), self.product(V, batch)
        apart, scale = norm(adjoint(U) @ BV - adjoint(BU) @ V), norm(BU) * norm(V)
        if not math.isfinite(scale):
            raise ValueError("B must be finite, but its product with a matrix is not.")
        rounding = ASYMMETRY * torch.finfo(X.dtype).eps * math.sqrt(len(X))
        if apart > rounding * scale:
            raise ValueError(not_hermitian(apart / scale))
        for _ in range(POWER_ITERATIONS):
            V = BV / (norm(BV) or 1.0)
            BV = self.product(V, batch)
        self.geometry.operator.norm = norm(BV)

    def steepest(self, X: Tensor, M: Tensor) -> float:
        """The largest curvature of some batches' fields ``g = G - Y M``, by power iterations."""
        largest, stride = 0.0, max(1, self.n_batches // PROBES)
        for k, (_, batch) in enumerate(self.source):
            if k % stride or k // stride >= PROBES:
                continue
            G, Y = _parts(self.batch(X, batch)[1])
            own = M if self.product.fixed is None else multiplier(X, G, Y)
            direction = G - Y @ own
            for _ in range(POWER_ITERATIONS):
                size = norm(direction)
                if size == 0:
                    break
                h = torch.finfo(X.dtype).eps ** (1 / 3) * norm(X) / size
                change = (FiniteSum.batch(self, X + h * direction, batch)[1] - G) / h
                change = change - self.product(direction, batch) @ own
                largest = max(largest, norm(change) / size)
                direction = change / size
        return largest or 1.0


class SampledColumns(GeneralizedColumns):
    """``X^H B X = I`` where a product with B is a pass over all batches: at most one is made.

    ``X (X^H B X)^(-1/2)`` is on the manifold wherever X was, by p x p algebra.
    """

    def residual(self, X: Any) -> Any:
        """The residual, by the product that came with f, if there is one."""
        return self._residual(X)

    def settle(self, X: Any) -> tuple[Any, Any]:
        """Land X up to rounding, by at most one product; None: the residual is not measured."""
        return X @ inverse_root(adjoint(X) @ self.product(X)), None


def _stack(G: Tensor, Y: Tensor) -> Tensor:
    return torch.cat([G, Y], dim=-2)


def _parts(both: Tensor) -> tuple[Tensor, Tensor]:
    n = both.shape[-2] // 2
    return both[..., :n, :], both[..., n:, :]


def check_first(point: Point, name: str = "x0") -> None:
    """Raise unless the start is near the manifold."""
    if not point.distance <= FARTHEST_START and math.isfinite(point.distance):
        raise ValueError(
            f"{name} must satisfy X^H B X = I up to ||X^H B X - I|| <= {FARTHEST_START}, but it is "
            f"{point.distance:.2g} away. A few rows of the data are enough to project it: "
            "x0 = ol.GeneralizedStiefel(ol.Covariance(rows)).project(x0)."
        )


class GeneralizedLanding(Method):
    """What both methods share: one call of :meth:`advance` is an epoch that ends on the manifold.

    Attributes:
        eps: how far a step may lead, in ``||eta^2 V^H B V||``.
    """

    patience: float = math.inf
    rules: ClassVar[dict[str, Rule]] = {"eps": BALL_RULES["eps"], **SHUFFLE_RULE}
    gain: ClassVar[float] = GAIN
    reach: ClassVar[float] = 1.0  # default step, in inverse curvatures

    def __init__(
        self, random: torch.Generator, lr: float | None, epochs: float, eps: float = 0.5
    ) -> None:
        self.random, self.epochs, self.eps = random, epochs, eps
        self.chooses_lr, self.lr = lr is None, math.nan if lr is None else float(lr)
        self.n_steps = 0
        self.buffer: Tensor | None = None
        self.momentum = 0.0

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose the step, if the user left it open."""
        assert isinstance(cost.objective, GeneralizedSum)
        self.cost, self.sum, self.targets = cost, cost.objective, targets
        self.lr = cost.objective.scale * self.lr
        if self.chooses_lr:
            self.lr = self.reach / self.sum.steepest(point.X, self._multiplier(point))

    def _multiplier(self, point: Point) -> Tensor:
        """The multiplier of what steps use, on the manifold."""
        both = _stack(point.euclidean, self.sum.geometry.product(point.X))
        return sym(adjoint(point.X) @ _parts(self.sum.generator(point.X, both))[0])

    def advance(self, point: Point, progress: Progress) -> Point | None:  # noqa: ARG002
        """One epoch, with a smaller lr if it fails and lr is ours to choose; None if all fail."""
        taken, buffer = self.n_steps, self.buffer
        for _ in range(REJECTIONS):
            after = self._epoch_from(point)
            if after is not None and (not self.chooses_lr or self.accepts(after, point)):
                length = norm(after.X - point.X)
                if length > 0:
                    change = norm(after.gradient - point.gradient)
                    self.targets.saw(change / length, point)
                return after
            if not self.chooses_lr:
                return None
            self.lr /= 2
            self.n_steps, self.buffer = taken, buffer
            self.forget(point)
        return None

    def accepts(self, after: Point, point: Point) -> bool:  # noqa: ARG002
        """Whether to keep an epoch: here always, since noise may raise f."""
        return True

    def _epoch_from(self, point: Point) -> Point | None:
        self.first = self.M = self._multiplier(point)
        start: Any = self.cost.geometry.settle(point.X)[0]  # no pass: B X is known
        X: Any = self.epoch(start)
        if X is not None:
            X = self.cost.geometry.settle(X)[0]
        if X is None or not all_finite(X):
            self.cost.saw_non_finite = True
            return None
        there = self.cost.at(X)
        return there if there.finite else None

    def epoch(self, X: Tensor) -> Tensor | None:
        """The point after the steps of an epoch; None if something was not finite."""
        raise NotImplementedError

    def forget(self, point: Point) -> None:
        """Undo the effects of a rejected epoch."""

    def step(self, X: Tensor, both: Tensor, batch: Any, lr: float) -> Tensor | None:
        """One step along the field, from estimates of G and ``B X``; None if it is not finite."""
        G, Y = _parts(both)
        g = G - Y @ self.M
        found = self.first + sym(adjoint(X) @ (G - Y @ self.first))
        self.M = self.M + self.gain * (found - self.M)
        if self.momentum:
            old = g if self.buffer is None else self.buffer
            g = self.buffer = self.momentum * old + (1 - self.momentum) * g
        V = g - X @ sym(adjoint(Y) @ g)
        Q = sym(adjoint(V) @ self.sum.product(V, batch))
        eta = min(lr, math.sqrt(self.eps / max(norm(Q), 1e-300)))
        E = self.gain * (sym(adjoint(X) @ Y) - _eye(X)) + eta * eta * Q
        X = (X - eta * V) @ inverse_root(_eye(X) + E)
        return X if bool(X.isfinite().all()) else None


def _eye(X: Tensor) -> Tensor:
    return torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


class GeneralizedSGD(GeneralizedLanding):
    """Shrinking steps along single batches, with momentum.

    Attributes:
        momentum: momentum of the fields, in [0, 1).
        decay: the step falls like ``lr / (1 + epochs)^decay``; None: linearly, to zero at the
            end of the last epoch.
    """

    name = "sgd"
    reach = 2.0  # momentum averages the noise, and would allow more
    rules: ClassVar[dict[str, Rule]] = {
        **GeneralizedLanding.rules,
        "momentum": MOMENTUM_RULE,
        "decay": (
            "a number >= 0, or None",
            lambda v: v is None or (is_number(v) and 0 <= v < math.inf),
        ),
    }

    def __init__(
        self,
        random: torch.Generator,
        lr: float | None,
        epochs: float,
        momentum: float = 0.9,
        decay: float | None = None,
        **ball: Any,
    ) -> None:
        super().__init__(random, lr, epochs, **ball)
        self.momentum, self.decay = float(momentum), decay

    def epoch(self, X: Tensor) -> Tensor | None:
        """One step for each batch."""
        there: Tensor | None = X
        for batch in self.sum.source.epoch():
            if there is None:
                return None
            value, both = self.sum.batch(there, batch)
            if not math.isfinite(value):
                return None
            both = self.sum.generator(there, both)
            there = self.step(there, both, batch, self._lr())
            self.n_steps += 1
        return there

    def _lr(self) -> float:
        passed = self.n_steps / self.sum.n_batches
        if self.decay is not None:
            return self.lr / (1 + passed) ** self.decay
        return self.lr * max(0.0, 1 - passed / self.epochs)


class GeneralizedSAGA(GeneralizedLanding):
    """Variance-reduced: the last gradient and product with B of each batch are remembered."""

    name = "saga"
    patience: float = 10
    gain = 0.5
    reach = 1 / 3
    growth = GROWTH  # of lr after an epoch that went well, until one does not

    def accepts(self, after: Point, point: Point) -> bool:
        """Whether an epoch has not raised f; adapt lr to that."""
        if not as_good(after, point):
            self.growth = 1.0
            return False
        if is_slow(after, point):
            self.lr *= self.growth
        return True

    def epoch(self, X: Tensor) -> Tensor | None:
        """As many steps as there are batches, drawn in proportion to their numbers of terms."""
        table, source = self.sum.table, self.sum.source
        assert table is not None
        assert not isinstance(source, Stream)
        draws = torch.multinomial(
            table.weights, len(source), replacement=True, generator=self.random
        )
        there: Tensor | None = X
        for k in draws.tolist():
            if there is None:
                return None
            value, both = self.sum.batch(there, source[k])
            if not math.isfinite(value):
                return None
            both = table.estimate(k, self.sum.generator(there, both))
            there = self.step(there, both, source[k], self.lr)
        return there

    def forget(self, point: Point) -> None:
        """Refill the table at the point."""
        self.cost.at(point.X)


class Sampled(Manifold):
    """The constraint as variables see it: only its shapes matter."""

    def __init__(self, B: Any) -> None:
        self.B = B

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise unless the shape is tall and fits B."""
        check_size(self.B, shape, name)


def minimize_sampled(
    fun: Callable[..., Any],
    x0: Any,
    manifold: GeneralizedStiefel,
    *,
    n_terms: int | None = None,
    data: Iterable[Any] | None = None,
    jac: Callable[..., Any] | bool | None = None,
    method: str = "saga",
    batch_size: int | None = None,
    lr: float | None = None,
    epochs: int = 100,
    gtol: float | None = None,
    seed: int | torch.Generator = 0,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> "OptimizeResult":
    """Minimise a mean of many terms with ``X^H B X = I``, where B is known by products only.

    Args:
        fun: mean of the terms of a batch, as for :func:`ortholand.minimize_finite_sum`.
        x0: where to start, at most 1/2 away from the manifold.
        manifold: ``ol.GeneralizedStiefel(B)``, whose B may be ``ol.Covariance(rows)``, or a
            function (V, batch) that returns the mean of B_i V over a batch: B is never formed.
        n_terms: number of terms, for ``fun(X, indices)``.
        data: batches, for ``fun(X, batch)``.
        jac: mean of the Euclidean gradients; True if fun returns the pair; None: autograd.
        method: ``"saga"`` or ``"sgd"``.
        batch_size: number of indices in a batch; None: such that there are 100 batches.
        lr: step size; None: from curvatures of some batches.
        epochs: largest number of epochs.
        gtol: share of the gradient's first norm that may remain.
        seed: seed of the order of batches.
        callback: called after each epoch, as in :func:`ortholand.minimize`.
        options: ``eps``, ``shuffle``, ``atol``, ``maxtime``; for sgd ``momentum`` (0.9) and
            ``decay`` (None: linearly to 0).

    Returns:
        SciPy's ``OptimizeResult`` with the final ``lr`` and ``passes``, batches read per number
        of batches.
    """
    if method not in SAMPLED:
        raise ValueError(f"method must be one of {tuple(SAMPLED)}, got {method!r}.")
    if lr is not None and not (is_number(lr) and 0 < lr < math.inf):
        raise ValueError(f"lr must be a number > 0, or None to have it chosen, got {lr!r}.")
    limits, rest = limits_from(options, gtol, epochs, epochs)
    report = reporter(callback, limits.display)
    check_options(method, SAMPLED[method].rules, rest)
    shuffle, random = rest.pop("shuffle", True), random_from(seed)
    solver = SAMPLED[method](random, lr, epochs=limits.maxiter, **rest)
    variables = one_matrix(x0, Sampled(manifold.B))
    source = open_source(n_terms, data, batch_size, method, shuffle, random, variables)
    remember = method == "saga"
    objective = GeneralizedSum(fun, variables, source, manifold.B, jac=jac, remember=remember)
    variables.check_finite()
    with torch.no_grad():
        objective.check_product(variables.start)
        cost = ManifoldCost(objective, objective.geometry)
        run = Run(cost, limits)
        loop = Loop(run, solver, report)
        first = cost.at(variables.start)
        check_first(first)
        status = loop.from_point(cost.on_manifold(first))
        lr = solver.lr / objective.scale
        advice = advice_for(method, epochs, lr)
        result = result_of(run, best_on_manifold(run, status), status, advice)
    result.update(lr=lr, passes=objective.visits / objective.n_batches)
    return result


SAMPLED: dict[str, type[GeneralizedLanding]] = {"saga": GeneralizedSAGA, "sgd": GeneralizedSGD}
