"""The paper's Algorithm 1: landing steps of a given length, shortened only for safety.

    for k = 1, 2, ...:  eta_k <- min(eta*, eta_k),  X <- X - eta_k (psi(X) X + lam (X X^H - I) X)

with the safe step eta* in its corrected form; with momentum, the relative gradient is replaced by
``A <- momentum A + (1 - momentum) psi(X)``.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from ortholand.landing import Coupled, LandingOptions
from ortholand.landing.moments import accumulate, generator, transport
from ortholand.safe_step import DEFAULT_RULE, find_rule
from ortholand.safe_step import RULES as SAFE_STEP_RULES
from ortholand.solve.arrays import as_tensor, back_from_tensor, norm, precision
from ortholand.solve.manifold_cost import ManifoldCost, Point
from ortholand.solve.manifolds.generalized import GeneralizedColumns
from ortholand.solve.manifolds.stiefel import OrthonormalColumns
from ortholand.solve.method import StepByStep
from ortholand.solve.options import Rule, is_function_or_none, is_number
from ortholand.solve.targets import Targets

COUPLED = Coupled()
MOMENTUM_RULE: Rule = ("a number in [0, 1)", lambda v: is_number(v) and 0 <= v < 1)
BALL_RULES: dict[str, Rule] = {
    "eps": ("a number in (0, 1)", lambda v: is_number(v) and 0 < v < 1),
    "safe_step": (f"one of {tuple(SAFE_STEP_RULES)}", lambda v: v in tuple(SAFE_STEP_RULES)),
}
Steps = float | Callable[[int], float]
POWER_ITERATIONS = 8


class Landing(StepByStep):
    """Landing with a step sequence: no line search, and no use of f's values.

    Attributes:
        step: eta, or a function k -> eta_k of the iteration 1, 2, ...; None: half the inverse of
            the gradient's Lipschitz constant near the start, from a few gradients.
        lam: attraction to the manifold; None: a quarter of the inverse of the first step, so
            that each step about halves the distance.
        momentum: momentum of the relative gradients, in [0, 1).
        eps: radius of the ball that the safe step keeps the iterates in.
        safe_step: rule of the safe step.
    """

    name = "landing"
    rules: ClassVar[dict[str, Rule]] = {
        "step": (
            "a number > 0, a function k -> eta_k, or None",
            lambda v: is_function_or_none(v) or (is_number(v) and 0 < v < math.inf),
        ),
        **BALL_RULES,
        "momentum": MOMENTUM_RULE,
    }
    patience = math.inf

    def __init__(
        self,
        lam: float | None = None,
        step: Steps | None = None,
        momentum: float = 0.0,
        eps: float = 0.5,
        safe_step: str = DEFAULT_RULE,
    ) -> None:
        self.lam, self.step, self.momentum = lam, step, momentum
        self.eps, self.rule = eps, find_rule(safe_step)
        self.buffer: Any = None
        self.k = 0

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
        """Choose what the user left open."""
        if not isinstance(cost.geometry, (OrthonormalColumns, GeneralizedColumns)):
            raise ValueError(
                "method='landing' is for one matrix, or a stack of them, with orthonormal columns "
                "or X^H B X = I. Use another method for products."
            )
        self.cost, self.targets, self.unit = cost, targets, cost.objective.scale
        # With B the field and its attraction are longer by up to this factor.
        geometry: Any = cost.geometry
        by_products = isinstance(geometry, GeneralizedColumns)
        longer = geometry.field_scale(point.X) if by_products else 1.0
        if self.step is None:
            self.step = 0.5 / lipschitz_constant(cost, point) / self.unit / longer
        self.lam = self._attraction() / longer if self.lam is None else self.lam / self.unit

    def advance(self, point: Point) -> Point | None:
        """One landing step; None if it fails."""
        self.k += 1
        if isinstance(self.cost.geometry, GeneralizedColumns):
            return self._advance_by_products(self.cost.geometry, point)
        X, G = as_tensor(point.X), as_tensor(point.euclidean)
        B = generator(X, G)
        if self.momentum:
            B = self._with_momentum(X, B)
        assert self.lam is not None  # start
        options = LandingOptions(self._eta(self.k), COUPLED, self.rule, lam=self.lam, eps=self.eps)
        X, taken = COUPLED.move(X, B, options)
        if not bool(taken.all()):
            return None
        after = self.cost.at(back_from_tensor(X, point.X))
        if not after.finite:
            return None
        self._look(point, after)
        return after

    def _advance_by_products(self, geometry: GeneralizedColumns, point: Point) -> Point | None:
        """One step with ``X^H B X = I``. The field is linear in G, so momentum applies to G."""
        G = point.euclidean
        if self.momentum:
            G = (1 - self.momentum) * G
            G = G if self.buffer is None else G + self.momentum * self.buffer
            self.buffer = G
        assert self.lam is not None  # start
        eta, spectral = self._eta(self.k), self.rule.spectral
        X, taken = geometry.landing_step(point.X, G, eta, self.lam, self.eps, spectral)
        after = self.cost.at(X) if taken else None
        if after is None or not after.finite:
            return None
        self._look(point, after)
        return after

    def _look(self, before: Point, after: Point) -> None:
        length = norm(after.X - before.X)
        if length > 0:
            self.targets.saw(norm(after.gradient - before.gradient) / length, before)

    def restart(self) -> bool:
        """Forget the momentum, the only memory; whether there was any."""
        forgot, self.buffer = self.buffer is not None, None
        return forgot

    def _with_momentum(self, X: Tensor, B: Tensor) -> Tensor:
        buffer = torch.zeros_like(X) if self.buffer is None else self.buffer
        B, buffer = accumulate(
            (1 - self.momentum) * B, buffer, momentum=self.momentum, dampening=0, nesterov=False
        )
        self.buffer = transport(X, buffer)
        return B

    def _attraction(self) -> float:
        """The attraction with which the first nonzero step about halves the distance."""
        steps = (self._eta(k) for k in range(1, 1001))
        return 1 / (4 * next((eta for eta in steps if eta > 0), 1.0))

    def _eta(self, k: int) -> float:
        """The step for f in the solver's unit, from the user's step."""
        eta = self.step(k) if callable(self.step) else self.step
        if not isinstance(eta, Real) or not 0 <= float(eta) < math.inf:
            raise ValueError(
                f"options['step'] must return numbers >= 0, got {eta!r} in iteration {k}. "
                "Example: lambda k: 0.1 / k**0.5."
            )
        return self.unit * float(eta)


def lipschitz_constant(cost: ManifoldCost, point: Point) -> float:
    """Largest curvature found by a power iteration on differences of Riemannian gradients."""
    if point.distance > cost.geometry.feasible(point.X):
        point = cost.settled(point)  # the trial points below are landed, so this must be too
    direction, largest = point.gradient, 0.0
    length = precision(point.X) ** 0.3 * math.sqrt(cost.columns(point))
    for _ in range(POWER_ITERATIONS):
        size = norm(direction)
        if size == 0:
            break
        change = cost.gradient_change(point, direction, length / size)
        curvature = norm(change) / length
        if not curvature < math.inf:
            break
        direction, largest = change, max(largest, curvature)
    return largest or 1.0
