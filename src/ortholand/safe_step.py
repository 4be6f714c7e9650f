"""How far a landing step may go without leaving the ball ``||X^H X - I|| <= eps``.

One step ``X' = X - eta L`` gives exactly ``D' = D - 2 eta lam (D + D^2) + eta^2 L^H L``. Hence,
for ``0 <= eta <= 1 / (2 lam)`` and ``d <= eps < 1``,

    d' <= d - 2 eta b + eta^2 q,    b = lam d (1 - d),    q >= ||L^H L||,

and the largest eta for which the right side is at most eps is a safe step, in the Frobenius and in
the spectral norm. A rule bounds the root of ``||L^H L||``, called ``bound`` here. (The paper's own
rule lacks the condition on eta and can leave the ball.) With the default rule, "spectral", the
optimizers *measure*: they move by a trial step, look at the D that it has reached, and shorten the
move only where that is outside the ball.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    frobenius_norm,
    gram_matrix,
    largest_norm,
    max_abs,
    per_matrix,
    tall,
)

DEFAULT_RULE = "spectral"  # of the optimizers and solvers


def safe_step_size(
    field: Tensor,
    distance: Tensor,
    *,
    lam: float = 1.0,
    eps: float = 0.5,
    rule: str = DEFAULT_RULE,
    tangency_error: Tensor | float = 0.0,
) -> Tensor:
    """Largest step, per matrix, that keeps ``||X^H X - I|| <= eps``.

    Args:
        field: landing field L ``(..., n, p)``, with or without momentum.
        distance: ``||X^H X - I||`` of each matrix in the norm of the rule, or a bound on it (the
            Frobenius norm, from :func:`ortholand.geometry.distance`, bounds the spectral norm).
            A matrix already further away than eps gets a step that brings it closer, or a step
            of zero at distance 1 and beyond, where no rule holds.
        lam: the attraction that L was made with.
        eps: radius of the ball, in (0, 1). Inside it X has full rank, so the sign of a
            determinant never changes.
        rule: ``"spectral"``, in the spectral norm, ``q = ||(L^H L)^2||_F^(1/2)``: two products,
            and steps that do not shrink with p; or ``"frobenius"``, ``q = ||L||_F^2``, which is
            free.
        tangency_error: bound on ``||Sym(X^H R)||_F`` for the tangent part R of L, nonzero only
            through rounding (see :func:`ortholand.fields.tangency_bound`).

    Returns:
        A step of shape ``(...)``, finite for every finite L, zero included. No host sync.

    >>> import torch
    >>> L, d = torch.eye(2), torch.tensor(0.0)
    >>> safe_step_size(L, d, lam=0.1, eps=0.5, rule="frobenius").item()  # (eps / q)^(1/2)
    0.5
    """
    chosen = find_rule(rule)
    check_ball(lam, eps)
    # Matrices divided by a power of two near their size have moderate norms.
    size = max_abs(field)
    exponent = torch.frexp(size).exponent - 1
    unit = torch.ldexp(torch.ones_like(size), exponent.to(size.dtype)).clamp(min=1)
    bound = unit * chosen.bound(tall(field / per_matrix(unit, field)))
    step = largest_step(bound, distance, lam, chosen.aim(eps), tangency_error)
    return step.to(distance.dtype)


MARGIN = 1e-4  # of eps: how far inside the ball steps end if distances are only bounded
EDGE = 16  # units of rounding within which a matrix counts as on the edge of the ball


class SafeStepRule:
    """A safe-step rule: a bound on ``||L^H L||^(1/2)``.

    Attributes:
        name: its name in the option ``safe_step``.
        spectral: whether the ball is in the spectral norm rather than the Frobenius norm.
        is_measured: whether steps may go further than :meth:`bound` allows, because the distance
            is measured after the move.
    """

    name: str
    spectral: ClassVar[bool] = False

    @property
    def is_measured(self) -> bool:
        """Only "spectral" is; a subclass that has another bound is not."""
        return type(self).bound is Spectral.bound

    def bound(self, L: Tensor) -> Tensor:
        """A bound for each matrix L. It is the root, because q would overflow."""
        raise NotImplementedError

    def __call__(self, L: Tensor) -> Tensor:
        """Return :meth:`bound`, so that a rule can be called like a function."""
        return self.bound(L)

    def aim(self, eps: float) -> float:
        """The largest distance that a step may end at: a bound of it needs some margin."""
        return eps * (1 - MARGIN) if self.spectral else eps


class Frobenius(SafeStepRule):
    """``q = ||L||_F^2``, which is free."""

    name = "frobenius"

    def bound(self, L: Tensor) -> Tensor:
        """``||L||_F``."""
        return frobenius_norm(L)


class Spectral(SafeStepRule):
    """The ball in the spectral norm, so that steps do not shrink with p; it implies full rank."""

    name = "spectral"
    spectral = True

    def bound(self, L: Tensor) -> Tensor:
        """``||(L^H L)^2||_F^(1/4)``, scaled against overflow."""
        norm = frobenius_norm(L)
        unit = torch.where(norm < math.inf, norm.clamp(max=largest_norm(L.dtype)), math.nan)
        Q = gram_matrix(L / per_matrix(unit.clamp(min=torch.finfo(L.dtype).tiny), L))
        return unit * spectral_bound(Q).sqrt()


class FunctionRule(SafeStepRule):
    """A rule given as a function of L."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        self.name, self.function = name, function

    def bound(self, L: Tensor) -> Tensor:
        """The function's bound."""
        return self.function(L)


# By name: a rule, or just a function that bounds ||L^H L||_F^(1/2) for each matrix L.
RULES: dict[str, SafeStepRule | Callable[[Tensor], Tensor]] = {
    rule.name: rule for rule in (Frobenius(), Spectral())
}


def find_rule(name: str) -> SafeStepRule:
    """The rule of that name."""
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"The safe step rule must be one of {tuple(RULES)}, got {name!r}.")
    rule = RULES[name]
    return rule if isinstance(rule, SafeStepRule) else FunctionRule(name, rule)


# --- measured: after a trial move


def trial_step(lr: float | Tensor, norm: Tensor, p: int, longest: float = math.inf) -> Tensor:
    """The step to try along a field of n x p matrices, from its Frobenius norm.

    ``||L||_2 >= norm / sqrt(p)``, so ``sqrt(2 p) / norm`` excludes nothing that is safe.
    """
    t = math.sqrt(2 * p) / norm
    if isinstance(lr, Tensor):
        t = torch.minimum(t, lr)
        return t if longest == math.inf else t.clamp(max=longest)
    return t.clamp(max=min(lr, longest))


def spectral_bound(D: Tensor, *, sharp: bool = False) -> Tensor:
    """``||D^2||_F^(1/2)``, between ``||D||_2`` and ``||D||_F`` for Hermitian D: one product.

    At most ``p^(1/4) ||D||_2``; a sharp one, with another product, ``p^(1/8) ||D||_2``.
    """
    square = gram_matrix(D)
    if sharp:
        return frobenius_norm(gram_matrix(square)).sqrt().sqrt()
    return frobenius_norm(square).sqrt()


def centred_bound(D: Tensor) -> Tensor:
    """``m + ||(D - m I)^2||_F^(1/2)``, m the mean eigenvalue of D, or zero if that is negative.

    It is exact for multiples of the identity: what a move adds that turns all planes alike.
    """
    m = D.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=0)
    C = D.clone()
    C.diagonal(dim1=-2, dim2=-1).sub_(m[..., None])
    return m + spectral_bound(C)


FARTHEST = 1 - 2.0**-20  # distance from which X may be singular, up to rounding


def is_inside(bound: Tensor, d: Tensor, length: Tensor) -> Tensor:
    """Whether ``||D||_2`` may be less than 1, and the length of a step is finite.

    ``||D^2||_F / ||D||_F``, from a :func:`spectral_bound` and d, is at most ``||D||_2``.
    """
    room = torch.addcmul(d, bound, bound, value=-1 / FARTHEST)
    return torch.add(room, length, alpha=0) >= 0  # 0 times infinity is NaN


def share_of_pulled_move(P: Tensor, slope: Tensor, room: Tensor) -> Tensor:
    """The share of a trial move that ends in the ball, where the manifold attracts on the way.

    It is the largest theta with ``delta - 2 theta slope + theta^2 P <= delta + room``.
    """
    return (slope + torch.addcmul(P * room.clamp(min=0), slope, slope).sqrt()) / P


def share_of_tangent_move(P: Tensor, drift: Tensor | None, room: Tensor) -> Tensor:
    """The same where nothing attracts: at most ``delta + theta drift + theta^2 P``."""
    room = room.clamp(min=torch.finfo(room.dtype).tiny)  # so that nothing divides zero by zero
    if drift is None:
        return (room / P).sqrt().clamp(max=1)
    half = drift / 2
    return (room / (half + torch.addcmul(P * room, half, half).sqrt())).clamp(max=1)


# --- bounded before the move


def largest_step(
    bound: Tensor, d: Tensor, lam: float, eps: float, tangency_error: Tensor | float
) -> Tensor:
    """Largest eta with ``d - 2 eta b + eta^2 q <= eps``, at most ``1 / (2 lam)``."""
    b, room = lam * d * (1 - d), eps - d
    if lam == 0:  # nothing pulls away from the edge, so a root left by rounding is not a step
        room = room * (room > EDGE * torch.finfo(room.dtype).eps)
    step = largest_root(bound, b - tangency_error, room)
    return step.clamp(max=1 / (2 * lam)) if lam > 0 else step


def farthest_before_landing(eps: float) -> float:
    """The distance e that one Newton-Schulz step maps to eps at worst (1 for eps = 1).

    ``3/4 e^2 + 1/4 e^3 = eps`` is Chebyshev's ``4 c^3 - 3 c = 2 eps - 1`` for ``e = 2 c - 1``.
    """
    return 2 * math.cos(math.acos(2 * eps - 1) / 3) - 1


def largest_root(bound: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """Largest ``eta >= 0`` with ``eta^2 q - 2 eta b <= room``: ``(b + sqrt(b^2 + q room)) / q``.

    By ``b / sqrt(q)``, against overflow, and cancellation for negative b. If no eta suffices,
    ``b / q``, if positive, reduces d most.
    """
    bound = bound.clamp(min=torch.finfo(bound.dtype).tiny ** (1 / 3))  # quotients can be squared
    slope = b / bound
    reach = (slope.square() + room).clamp(min=0).sqrt()
    away = room.clamp(min=0) / (reach - slope) / bound
    step = torch.where(slope >= 0, (slope + reach) / bound, away)
    # Tiny fields allow more than a float can hold; lr bounds the step anyway.
    return step.clamp(min=0, max=torch.finfo(room.dtype).max)


def check_ball(lam: float, eps: float) -> None:
    """Raise unless the attraction and the radius are valid."""
    if not (math.isfinite(lam) and lam >= 0):
        raise ValueError(f"lam must be finite and at least 0, got {lam}. The paper uses lam=1.")
    if not 0 < eps < 1:
        raise ValueError(
            f"eps must be in (0, 1), got {eps}: at distance 1 a matrix may be singular. "
            "The paper uses eps=0.5."
        )
