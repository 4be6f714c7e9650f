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
from ortholand.solve.arrays import as_tensor, back_from_tensor, norm
from ortholand.solve.manifold_cost import ManifoldCost, Point, Targets
from ortholand.solve.manifolds.generalized import GeneralizedColumns
from ortholand.solve.manifolds.geometry import OrthonormalColumns
from ortholand.solve.method import Method, Progress
from ortholand.solve.options import BALL_RULES, MOMENTUM_RULE, Rule, is_function_or_none, is_number

COUPLED = Coupled()
Steps = float | Callable[[int], float]


class Landing(Method):
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
    begins_on_manifold = False  # the field's attraction brings X there

    def __init__(
        self,
        lam: float | None = None,
        step: Steps | None = None,
        momentum: float = 0.0,
        eps: float = 0.5,
        safe_step: str = DEFAULT_RULE,
    ) -> None:
        if lam == 0:
            raise ValueError("lam must be > 0 for method='landing': nothing lands with 0. Got 0.")
        self.lam, self.step, self.momentum = lam, step, momentum
        self.eps, self.rule = eps, find_rule(safe_step)
        self.buffer: Any = None
        self.k = 0

    def start(self, cost: ManifoldCost, point: Point, targets: Targets) -> None:
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
            self.step = 0.5 / cost.lipschitz_constant(point) / self.unit / longer
        if self.lam is None:  # the first nonzero step shall about halve the distance
            steps = (self._eta(k) for k in range(1, 1001))
            self.lam = 1 / (4 * longer * next((eta for eta in steps if eta > 0), 1.0))
        else:
            self.lam /= self.unit

    def advance(self, point: Point, progress: Progress) -> Point | None:  # noqa: ARG002
        self.k += 1
        assert self.lam is not None  # start
        geometry, eta = self.cost.geometry, self._eta(self.k)
        if isinstance(geometry, GeneralizedColumns):
            G = self._mean_gradient(point.euclidean)
            spectral = self.rule.spectral
            X, taken = geometry.landing_step(point.X, G, eta, self.lam, self.eps, spectral)
        else:
            tensor = as_tensor(point.X)
            B = self._with_momentum(tensor, generator(tensor, as_tensor(point.euclidean)))
            options = LandingOptions(eta, COUPLED, self.rule, lam=self.lam, eps=self.eps)
            moved, all_taken = COUPLED.move(tensor, B, options)
            X, taken = back_from_tensor(moved, point.X), bool(all_taken.all())
        after = self.cost.at(X) if taken else None
        if after is None or not after.finite:
            return None
        length = norm(after.X - point.X)
        if length > 0:
            self.targets.saw(norm(after.gradient - point.gradient) / length, point)
        return after

    def restart(self) -> bool:
        forgot, self.buffer = self.buffer is not None, None
        return forgot

    def _mean_gradient(self, G: Any) -> Any:
        """G with momentum: where ``X^H B X = I`` the field is linear in G."""
        if self.momentum:
            G = (1 - self.momentum) * G
            self.buffer = G = G if self.buffer is None else G + self.momentum * self.buffer
        return G

    def _with_momentum(self, X: Tensor, B: Tensor) -> Tensor:
        if not self.momentum:
            return B
        buffer = torch.zeros_like(X) if self.buffer is None else self.buffer
        B, buffer = accumulate(
            (1 - self.momentum) * B, buffer, momentum=self.momentum, dampening=0, nesterov=False
        )
        self.buffer = transport(X, buffer)
        return B

    def _eta(self, k: int) -> float:
        eta = self.step(k) if callable(self.step) else self.step
        if not isinstance(eta, Real) or not 0 <= float(eta) < math.inf:
            raise ValueError(
                f"options['step'] must return numbers >= 0, got {eta!r} in iteration {k}. "
                "Example: lambda k: 0.1 / k**0.5."
            )
        return self.unit * float(eta)
