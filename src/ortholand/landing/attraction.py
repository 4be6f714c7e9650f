"""What an attraction to the manifold is and offers, its options, and the registry."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import moved_along
from ortholand.landing.point import Direction, Point, looked_at
from ortholand.safe_step import (
    FARTHEST,
    SafeStepRule,
    centred_bound,
    farthest_before_landing,
    is_inside,
    spectral_bound,
)


@dataclass(frozen=True)
class LandingOptions:
    """How a matrix lands, wherever its direction comes from; made from an optimizer's group."""

    lr: float | Tensor
    attraction: "Attraction"
    rule: SafeStepRule | None  # of the safe step; None: no safeguard
    lam: float = 1.0
    eps: float = 0.5
    omega: float = 0.5
    landings: int = 1  # Newton-Schulz steps after a move, if the attraction is "after"
    turns_alike: bool = False  # whether directions turn all planes by about the same angle

    @property
    def aim(self) -> float:
        """The largest distance that a step may end at."""
        return self.eps if self.rule is None else self.rule.aim(self.eps)

    @property
    def limit(self) -> float:
        """The largest distance from which a Newton-Schulz step leads within :attr:`aim`."""
        return farthest_before_landing(self.aim)

    @property
    def is_measured(self) -> bool:
        """Whether a step is as long as the distance after it shows to be safe."""
        return self.rule is not None and self.rule.is_measured

    def point(self, X: Tensor) -> Point:
        """The matrices as a point from which a step starts; on the CPU a step may read values."""
        return Point(X, may_look=self.is_measured and not isinstance(self.lr, Tensor))


class Move(NamedTuple):
    """Where matrices go, and which of them may go there."""

    moved: Tensor  # (..., n, p)
    taken: Tensor  # (...)


class LimitedMove(Move):
    """A move that also says for which matrices the safe step was less than lr."""

    limited: Tensor | None


class Step(NamedTuple):
    """A move as the library's own attractions know it."""

    moved: Tensor  # (..., n, p)
    taken: Tensor | None = None  # which matrices may go there, (...); None: all
    limited: Tensor | None = None  # where the safe step was less than lr; None: nowhere


class Attraction:
    """An attraction to the manifold.

    Attributes:
        name: its name in the option ``attraction``.
        coefficients: the *Gram form*, ``(gram, options) -> Coefficients``, for tall and wide
            matrices whose rows are on several ranks. If None, or if a subclass redefines
            :meth:`move` but not this, each matrix steps whole in one place.
    """

    name: str
    coefficients: Any = None

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """Where X ``(..., n, p)``, n >= p, goes with ``eta = min(lr, safe step)``.

        B is the generator of the direction (:mod:`.point`). A matrix whose step would not be
        finite may not move; others in the batch are unaffected. No value leaves the device.
        """
        moved, taken, limited = self.step(options.point(X), Direction(B), options)
        taken = X.new_ones(X.shape[:-2], dtype=torch.bool) if taken is None else taken
        move = LimitedMove(moved, taken)
        move.limited = limited
        return move

    def step(self, point: Point, direction: Direction, options: LandingOptions) -> Step:
        """:meth:`move` for a point and a direction, of which more may be known already."""
        return Step(*self.move(point.X, direction.of_length_one(point.X).B, options))


def redefined(cls: type, method: str, derived: str) -> bool:
    """Whether a class has a method that is newer than what was made for the method it replaces."""
    for base in cls.__mro__:
        if derived in vars(base) or method in vars(base):
            return derived not in vars(base)
    return False


class FunctionAttraction(Attraction):
    """An attraction given as a function ``(X, B, options) -> (moved, taken)``."""

    def __init__(self, name: str, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.name, self.function = name, function

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """The function's move."""
        return Move(*self.function(X, B, options))


# By name: an attraction, or just a function (X, B, options) -> (moved, taken).
ATTRACTIONS: dict[str, Attraction | Callable[..., tuple[Tensor, Tensor]]] = {}


def register(attraction: Attraction) -> Attraction:
    """Register an attraction under its name, for the option ``attraction`` of the optimizers."""
    if not isinstance(attraction, Attraction):
        raise TypeError(f"An attraction must be an Attraction, got {attraction!r}.")
    cls = type(attraction)
    if cls.move is Attraction.move and cls.step is Attraction.step:
        raise TypeError(f"{cls.__name__} must define move(X, B, options).")
    ATTRACTIONS[attraction.name] = attraction
    return attraction


def find_attraction(name: str) -> Attraction:
    """The attraction with that name."""
    if not isinstance(name, str) or name not in ATTRACTIONS:
        raise ValueError(f"attraction must be one of {tuple(ATTRACTIONS)}, got {name!r}.")
    found = ATTRACTIONS[name]
    return found if isinstance(found, Attraction) else FunctionAttraction(name, found)


LONGEST_LOOKED_AT = 2.0**20  # lr beyond which what underflows in a norm that is read may matter
# How far matrices go, min(lr, safe step); which of them may; where that is less than lr (or None).
Length = tuple[Tensor, Tensor, Tensor | None]


class Field(NamedTuple):
    """What the length of a step depends on, of whole matrices or of Gram matrices alike."""

    norm: Tensor  # ||L||_F of the field
    D: Tensor  # X^H X - I, or another matrix of the same singular values
    d: Tensor  # ||D||_F
    error: Tensor  # bound of ||Sym(X^H R)||, R the tangent part of L, due to rounding
    bound: Callable[[SafeStepRule], Tensor]  # a rule's bound of L
    reached: Callable[[Tensor], Tensor]  # Y^H Y - I after a step
    unknown: Tensor | None = None  # bound of the error of L^H L in that; None: zero

    def measured(
        self,
        t: Tensor,
        free: Tensor,
        share: Callable[[Tensor, Tensor], Tensor],
        pull: float,
        options: LandingOptions,
    ) -> Length:
        """How much of a trial step by t is taken: all, if a bound shows that it ends in the ball.

        That is the ``free`` one, or the one that is measured. ``share(delta, after)`` is the share
        that is safe, from bounds of the distances now, which is at most eps, and after the step.
        They are sharper where nothing pulls, because a matrix inside must not look as if it were
        at the edge.
        """

        def bound(D: Tensor) -> Tensor:
            found = spectral_bound(D, sharp=pull == 0)
            return torch.minimum(centred_bound(D), found) if options.turns_alike else found

        now, after = bound(self.D), bound(self.reached(t))
        if self.unknown is not None:
            after = torch.addcmul(after, self.unknown, t.square())
        part = share(now.clamp(max=options.eps), after)
        # A field of zero gives 0 / 0, and may be followed by any step.
        is_safe = torch.minimum(free, after) <= options.aim
        eta = torch.where(is_safe, t, torch.fmin(t, t * part))
        taken = is_inside(now, self.d, t * self.norm)
        taken = taken if pull else taken & goes(eta, pull, options.lr)
        return eta, is_valid(taken, options.lr), eta < options.lr


def is_free(
    X: Tensor,
    L: Tensor,
    D: Tensor,
    direction: Direction,
    options: LandingOptions,
    bound: Callable[[float, float], float],
) -> bool:
    """Whether the free bound, read on the CPU, shows that lr is safe for all matrices.

    ``bound(d, length)`` bounds the distance after a step from distance d by ``length = lr ||L||``.
    """
    lr, aim = float(options.lr), options.aim
    d, length = looked_at(D), lr * looked_at(L)
    if not (d <= aim and length < 1 and lr < LONGEST_LOOKED_AT):
        return False
    return bound(d, length) + 2 * lr * direction.tangency_error(X, d, looked_at) <= aim


def bounded_length(
    safe: Tensor | None, norm: Tensor, d: Tensor, pull: float | Tensor, options: LandingOptions
) -> Length:
    """A safe step that is known before the move, or lr if that is less; None: no safe step.

    If no step is safe for now, a matrix that is pulled back stays, but its moments continue.
    Without a pull it would stay for ever, and counts as not stepped.
    """
    lr = options.lr
    if safe is None:
        eta = torch.ones_like(norm) * lr
        return eta, is_valid((norm < math.inf) & (eta < math.inf), lr), None
    eta = at_most(lr, safe)
    taken = (norm < math.inf) & (d < FARTHEST) & goes(eta, pull, lr)
    return eta, is_valid(taken, lr), eta < lr


def at_most(lr: float | Tensor, safe: Tensor) -> Tensor:
    """``min(lr, safe step)``."""
    return torch.minimum(safe, lr) if isinstance(lr, Tensor) else safe.clamp(max=lr)


def moved_by_lr(X: Tensor, L: Tensor, lr: float | Tensor) -> Tensor:
    """``X - lr L`` on the CPU, the same whether or not another matrix steps by less than lr."""
    if X.ndim == 2 and not isinstance(lr, Tensor):
        return torch.sub(X, L, alpha=lr)
    return moved_along(X, L, torch.ones(X.shape[:-2], dtype=torch.float64, device=X.device) * lr)


def goes(eta: Tensor, pull: float | Tensor, lr: float | Tensor) -> Tensor:
    """Whether eta is a finite step, or something pulls, or lr is zero."""
    return (eta < math.inf) & ((eta > 0) | (pull > 0)) | (lr == 0)


def is_valid(taken: Tensor, lr: float | Tensor) -> Tensor:
    """Which steps are taken; with an invalid tensor lr there are none."""
    return taken & (lr >= 0) if isinstance(lr, Tensor) else taken


def unless_zero(lr: float | Tensor, moved: Tensor, X: Tensor) -> Tensor:
    """X itself if lr is zero: such a step changes nothing, not even by attraction."""
    if isinstance(lr, Tensor):
        return torch.where(lr > 0, moved, X)
    return moved if lr > 0 else X
