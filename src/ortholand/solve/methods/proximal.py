"""Proximal landing for ``f + g``, where g has kinks: infeasible steps that keep what g makes exact.

A step from X is ``V = prox(X - t (G - X M), t) - X`` with the multiplier M, symmetric, for which
``Sym(X^H V) + D / 2 = 0``: the linearised constraint, so that D is squared from step to step while
zeros stay zeros, which a retraction would fill. M is corrected by ``-(Sym(X^H V) + D / 2) / t``,
Newton's step where g is smooth, a few times. V = 0 and D = 0 are the conditions of optimality, and
``V / t`` takes the gradient's place. t is Barzilai and Borwein's step.
"""

import math
from collections.abc import Sequence
from typing import Any

from ortholand.solve.arrays import gram_product, inner, norm, precision, product, sym
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.manifolds.geometry import Geometry, MatrixGeometry
from ortholand.solve.manifolds.product import Product
from ortholand.solve.method import Method, Progress
from ortholand.solve.objective import Objective
from ortholand.solve.prox import Prox

CORRECTIONS = 8  # of the multiplier in a step, at most,
ACCURATE = 0.01  # until the linearised constraint is missed by less than this share of V
FORGETTING = 0.95  # the safeguard looks back on about 1 / (1 - this) merits
LONGEST = 0.3  # step for each column


class ProximalCost(ManifoldCost):
    """``f + g`` as the method sees it; ``gradient`` of a point is ``-V / t``.

    Args:
        objective: f.
        geometry: of each block: orthonormal columns, or none.
        proxes: g of each block, or None.
    """

    smooth = False

    def __init__(
        self, objective: Objective, geometry: Geometry, proxes: Sequence[Prox | None]
    ) -> None:
        super().__init__(objective, geometry)
        self.proxes = proxes
        self.parts = geometry.geometries if isinstance(geometry, Product) else [geometry]
        self.t = math.nan  # until the first point sets it
        self.M: list[Any] | None = None
        self.before: Point | None = None  # from where the next step length is learnt

    def known(self, X: Any, D: Any, value: float, G: Any, measured: bool = False) -> Point:
        first = self.M is None
        if first or self.M is None:
            self.M = [
                sym(gram_product(x, g)) if isinstance(part, MatrixGeometry) else None
                for part, x, g in zip(self.parts, self._split(X), self._split(G), strict=True)
            ]
            size = norm(G - self._times(X, self.M)) or norm(G) or 1.0
            self.t = 0.1 * math.sqrt(self.geometry.columns(X)) / size
        elif self.before is not None:
            self._learn(X, G)
        value += sum(
            float(one.value(x)) / self.objective.scale
            for one, x in zip(self.proxes, self.objective.variables.outward_blocks(X), strict=True)
            if one is not None
        )
        return self._with_step(X, D, value, G, measured)

    def admissible(self, X: Any) -> Any:
        """X with g finite: the nearest, if g is the indicator of a set."""
        self.t = precision(X)
        return self._joined([self._prox(i, x) for i, x in enumerate(self._split(X))])

    def share_of(self, V: Any) -> float:
        """How much of a step may be taken, so that no matrix moves too far."""
        lengths = [
            norm(v) / (LONGEST * math.sqrt(part.columns(v)))
            for part, v in zip(self.parts, self._split(V), strict=True)
            if part.bounded
        ]
        return 1 / max(1.0, *lengths, 0.0)

    def shorter(self, point: Point, t: float) -> Point:
        self.t = t
        return self._with_step(point.X, point.D, point.value, point.euclidean, point.measured)

    def settled(self, point: Point) -> Point:
        X, where, self.before = point.X, point.X != 0, None
        for _ in range(60):
            D = self.geometry.residual(X)
            if self.geometry.size(D) <= self.geometry.feasible(X) / 2:
                return point if X is point.X else self.at(X, D, measured=True)
            X = X - where * self._times(X, self._listed(D)) / 2
        return super().settled(point)

    def _with_step(self, X: Any, D: Any, value: float, G: Any, measured: bool) -> Point:
        V, M = self._step(X, D, G)
        self.M = M
        correction = sum(
            inner(m, d) / 2 for m, d in zip(M, self._listed(D), strict=True) if m is not None
        )
        size = math.hypot(*(norm(m) for m in M if m is not None))
        distance = self.geometry.size(D)
        point = Point(X, D, value, G, V / -self.t, M, size, distance, correction, measured)
        point.euclidean_norm = norm(G)
        if not point.finite:
            self.saw_non_finite = True
        return point

    def _step(self, X: Any, D: Any, G: Any) -> tuple[Any, list[Any]]:
        """V, and the multipliers with which it was found, once corrected."""
        blocks = zip(self._split(X), self._listed(D), self._split(G), strict=True)
        found = [self._step_of(i, *block) for i, block in enumerate(blocks)]
        return self._joined([v for v, _ in found]), [m for _, m in found]

    def _step_of(self, i: int, X: Any, D: Any, G: Any) -> tuple[Any, Any]:
        t, M = self.t, self.M[i] if self.M is not None else None
        if M is None:
            return self._prox(i, X - t * G) - X, None
        W, least = X - t * (G - product(X, M)), math.inf
        for _ in range(CORRECTIONS):
            V = self._prox(i, W) - X
            miss = sym(gram_product(X, V)) + 0.5 * D
            missed = norm(miss)
            if not missed < least:
                break  # the constraint cannot be met within what g allows
            M, least = M - miss / t, missed
            if missed <= ACCURATE * norm(V):
                break
            W = W - product(X, miss)
        return V, M

    def _prox(self, i: int, W: Any) -> Any:
        one = self.proxes[i]
        if one is None:
            return W
        variables = self.objective.variables
        shown = variables.outward(W) if variables.plain else variables.show(i, W)
        return variables.take(i, one.prox(shown, self.t / self.objective.scale), "prox")

    def _learn(self, X: Any, G: Any) -> None:
        """The long Barzilai-Borwein step, multipliers included; their mean if f bends down."""
        assert self.before is not None
        assert self.M is not None
        s = X - self.before.X
        y = G - self.before.euclidean - self._times(s, self.M)
        ss, sy, yy = inner(s, s), inner(s, y), inner(y, y)
        if ss > 0 and 0 < yy < math.inf:
            t = ss / sy if sy > 0 else math.sqrt(ss / yy)
            self.t = min(max(t, self.t / 100), 100 * self.t)

    def _times(self, X: Any, matrices: Sequence[Any]) -> Any:
        """``X M``, block by block; zero where there is no M."""
        pairs = zip(self._split(X), matrices, strict=True)
        return self._joined([0 * x if m is None else product(x, m) for x, m in pairs])

    def _joined(self, parts: list[Any]) -> Any:
        variables = self.objective.variables
        return parts[0] if variables.single else variables.packing.join(parts)

    def _split(self, X: Any) -> list[Any]:
        return self.objective.variables.split(X)

    def _listed(self, D: Any) -> list[Any]:
        return [D] if self.objective.variables.single else D


class ProximalLanding(Method):
    """Steps along V, shortened until the merit falls below a running mean of the past."""

    name = "proximal"
    patience: float = 300

    def __init__(self, lam: float | None = None) -> None:
        self.lam = lam

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:  # noqa: ARG002
        assert isinstance(cost, ProximalCost)
        self.cost, self.targets = cost, targets
        self.lam = None if self.lam is None else self.lam / cost.objective.scale
        self.restart()

    def restart(self) -> bool:
        self.weight, self.reference = 0.0, 0.0
        return False

    def advance(self, point: Point, progress: Progress) -> Point | None:  # noqa: ARG002
        cost, lam = self.cost, 4 * point.multiplier_norm if self.lam is None else self.lam
        self.weight = FORGETTING * self.weight + 1
        self.reference += (point.merit(lam) - self.reference) / self.weight
        allowed = max(self.reference, point.merit(lam))
        allowed += self.targets.rounding(point.value, 1e3 * self.targets.eps)
        for _ in range(40):
            t, V, M = cost.t, -cost.t * point.gradient, cost.M
            length = norm(V)
            V = V * cost.share_of(V)
            cost.before = point
            after = cost.at(point.X + V)
            if after.finite and after.merit(lam) <= allowed - 1e-4 * length * norm(V) / t:
                return after
            cost.before, cost.M = None, M
            point = cost.shorter(point, t / 3)
        return None
