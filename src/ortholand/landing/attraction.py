"""What an attraction to the manifold is and offers, its options, and those that exist."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ortholand.forms import OfferedInForms
from ortholand.geometry.matrices import (
    SMALL,
    frobenius_norm,
    gram_minus_identity,
    is_finite,
    is_plain_cpu,
)
from ortholand.safe_step import (
    FROBENIUS,
    BetterBounds,
    FieldBounds,
    SafeStepRule,
    spectral_distance,
)


@dataclass(frozen=True)
class LandingOptions:
    """How a matrix lands, whatever made the direction. The optimizers make it from a group."""

    lr: float | Tensor
    attraction: "Attraction"
    rule: SafeStepRule | None  # of the safe step; None: no safeguard
    lam: float = 1.0
    eps: float = 0.5
    omega: float = 0.5
    landings: int = 1  # Newton-Schulz steps after a move, where the attraction is "after"
    # Bound of ||A||_2 for the directions A X, A skew, where they have one by construction.
    turn: float | None = None

    @property
    def aim(self) -> float:
        """The distance that a step may lead to."""
        return self.eps if self.rule is None else self.rule.aim(self.eps)

    @property
    def is_ball_spectral(self) -> bool:
        """Whether the ball is one in the spectral norm."""
        return self.rule is not None and self.rule.spectral

    @property
    def start_radius(self) -> float:
        """How far from the manifold a matrix may start: the safe step holds in the ball only."""
        return math.inf if self.rule is None else self.eps


class Move(NamedTuple):
    """Where matrices go, and which of them may."""

    moved: Tensor  # (..., n, p)
    taken: Tensor  # (...)


class LimitedMove(Move):
    """A move that also tells for which matrices the safe step was less than lr."""

    limited: Tensor

    @classmethod
    def of(cls, moved: Tensor, taken: Tensor, limited: Tensor | None) -> Move:
        """The move; a plain one where lr was safe for all."""
        if limited is None:
            return Move(moved, taken)
        move = cls(moved, taken)
        move.limited = limited
        return move


class Attraction(OfferedInForms):
    """A way to be attracted to the manifold: one object, in up to three forms of the same step.

    Attributes:
        name: what the option ``attraction`` calls it.
        coefficients: the *Gram form*, ``(gram, options) -> Coefficients``, by which tall and wide
            matrices step, also where their rows are spread over ranks; None: they step by
            :meth:`move`, each whole in one place.
        field_coefficients: for an attraction whose step is ``X - eta L`` with one field
            ``L = X a + B b``: ``(D, M, options) -> (a, b)``, and :attr:`along` for the step. Where
            a matrix is whole it then needs no more products than L's; None: by
            :attr:`coefficients`.
        along: ``(X, L, d, tangency_error, options) -> Move``, for such an attraction.
        sharp: whether the Gram form wants the diagonal of D to full precision, because it takes
            all of D away at once.
        compiled: its number in the compiled code (``native/landing.cpp``); None: there is none.

    A subclass that redefines anything inherits none of the faster forms: they would step as its
    parent does. (It inherits ``move``, so redefine that too where it should differ.)
    """

    reference = "move"
    forms = ("coefficients", "field_coefficients", "compiled")
    name: str
    coefficients: Any = None
    field_coefficients: Any = None
    along: Any = None
    sharp: ClassVar[bool] = False
    compiled: ClassVar[int | None] = None

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """The reference: where X ``(..., n, p)``, n >= p, goes with ``eta = min(lr, safe step)``.

        B is the generator of the direction (:mod:`.moments`). A matrix whose step would not be
        finite may not go; its neighbours in the batch are not touched. No value leaves the device.
        """
        raise NotImplementedError


class FunctionAttraction(Attraction):
    """An attraction given as a function ``(X, B, options) -> (moved, taken)``."""

    def __init__(self, name: str, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.name, self.function = name, function

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """What the function says."""
        return Move(*self.function(X, B, options))


# By name: an attraction, or just a function (X, B, options) -> (moved, taken).
ATTRACTIONS: dict[str, Attraction | Callable[..., tuple[Tensor, Tensor]]] = {}


def register(attraction: Attraction) -> Attraction:
    """Enter an attraction under its name, for the option ``attraction`` of the optimizers."""
    if not isinstance(attraction, Attraction):
        raise TypeError(f"An attraction must be an Attraction, got {attraction!r}.")
    if type(attraction).move is Attraction.move:
        raise TypeError(f"{type(attraction).__name__} must define move(X, B, options).")
    ATTRACTIONS[attraction.name] = attraction
    return attraction


def find_attraction(name: str) -> Attraction:
    """The attraction of that name."""
    if not isinstance(name, str) or name not in ATTRACTIONS:
        raise ValueError(f"attraction must be one of {tuple(ATTRACTIONS)}, got {name!r}.")
    attraction = ATTRACTIONS[name]
    if isinstance(attraction, Attraction):
        return attraction
    return FunctionAttraction(name, attraction)


Largest = Callable[[Tensor, Tensor], Tensor]  # (bound of a field, distance) -> safe step


class Length(NamedTuple):
    """How far matrices go, with what was found out on the way."""

    eta: Tensor  # min(lr, safe step), (...)
    distance: Tensor  # or a bound of it, in the norm of the rule
    limited: Tensor | None  # where the safe step was less than lr; None: nowhere


def step_length(
    options: LandingOptions, field: FieldBounds, largest: Largest, pull: float | None = None
) -> Length:
    """How far a field may be followed, ``largest`` being the attraction's safe step.

    ``pull``: lam, for a field ``A X + lam X D``; None: the field is not known to be of that form.

    The free bounds first, then better ones: where some allow lr for all matrices, none is asked
    for that is dearer. That is a branch, on the CPU; elsewhere it would wait for the device, and
    the best are computed always.
    """
    rule, lr, (norm, d) = options.rule, options.lr, field[:2]
    if rule is None:
        return Length(torch.ones_like(norm) * lr, d, None)
    if rule is FROBENIUS and not rule.is_patched:  # free itself
        return _limited(lr, largest(norm, d), d)
    stops = field.may_branch and not isinstance(lr, Tensor) and is_plain_cpu(norm)
    bounds = field.better(stops)
    if stops and rule.improves and not rule.is_patched:
        bounds = chain([(norm, d)], bounds)
    safe, distance = norm, d
    for bound, distance in bounds:
        safe = largest(_tightened(bound, distance, options, pull), distance)
        # Outside of the ball a Frobenius norm promises nothing of the spectral one.
        if stops and bool(((safe >= lr) & (distance <= options.aim)).all()):
            return Length(torch.full_like(norm, float(lr)), distance, None)
    return _limited(lr, safe, distance)


def _tightened(
    bound: Tensor, distance: Tensor, options: LandingOptions, pull: float | None
) -> Tensor:
    """The bound of a field, or what is known by construction, ``(turn + lam delta) ||X||_2``."""
    rule, turn = options.rule, options.turn
    if turn is None or pull is None or rule is None or rule.is_patched:
        return bound
    if not (rule.spectral and rule.improves):  # another norm, or a rule of someone's own
        return bound
    return torch.minimum(bound, (turn + pull * distance) * (1 + distance).sqrt())


def _limited(lr: float | Tensor, safe: Tensor, d: Tensor) -> Length:
    eta = torch.minimum(safe, lr) if isinstance(lr, Tensor) else safe.clamp(max=lr)
    return Length(eta, d, eta < lr)


def field_bounds(
    options: LandingOptions,
    L: Tensor,
    d: Tensor,
    tangency_error: Tensor | float,
    residual: Callable[[], Tensor],
) -> FieldBounds:
    """What is known of a field L that is there; ``residual`` gives ``X^H X - I``."""

    def better(stops: bool) -> BetterBounds:
        return better_bounds(options, L, d, residual, stops=stops)

    return FieldBounds(frobenius_norm(L), d, tangency_error, better)


def residual_of(X: Tensor, D: Tensor) -> Callable[[], Tensor]:
    """Gives ``X^H X - I``, which is D: once more where it is large, so that it is not kept."""
    if X.shape[-1] > SMALL:
        return lambda: gram_minus_identity(X)
    return lambda: D


def better_bounds(
    options: LandingOptions,
    L: Tensor,
    d: Tensor,
    residual: Callable[[], Tensor],
    *,
    stops: bool,
) -> BetterBounds:
    """The rule's bounds of a field that is there; only the best unless one may stop before."""
    rule, distance = options.rule, d
    assert rule is not None
    # Where the Frobenius norm tells that a matrix is in the ball, it may do for the distance.
    does = not rule.spectral or (stops and bool((d <= options.aim).all()))
    if not does:
        distance = spectral_distance(residual(), options.eps).to(d.dtype)
    if stops and rule.quick_bound is not None and not rule.is_patched:
        quick = rule.quick_bound(L)
        if quick is not None:
            yield quick, distance
    bound = rule.bound(L)
    yield bound, distance
    if rule.spectral and does:
        yield bound, spectral_distance(residual(), options.eps).to(d.dtype)


def may_go(bound: Tensor, eta: Tensor, d: Tensor, pull: float, options: LandingOptions) -> Tensor:
    """Whether a field is finite and something moves, or will: not from distance 1 on.

    Where no step is safe for now, a matrix that is pulled back stays and goes on with its moments:
    they decay. With no pull it would stay for ever, and has not stepped. ``eta * inf`` is infinite
    for steps, and NaN for what is none. A tensor lr that is no rate is not stepped by.
    """
    lr = options.lr
    if isinstance(lr, Tensor):
        bound = torch.where(lr >= 0, bound, math.inf)
        eta = torch.where(lr == 0, 1.0, eta)
    stuck = pull == 0 and (isinstance(lr, Tensor) or lr > 0)
    # A better bound than the free one may overflow where that does not: eta is NaN then.
    finite = bound < eta * math.inf if stuck else is_finite(bound) & is_finite(eta)
    return finite if options.rule is None else finite & (d < 1)


def unless_zero(lr: float | Tensor, moved: Tensor, X: Tensor) -> Tensor:
    """X itself where lr is zero: such a step changes nothing, attraction included."""
    if isinstance(lr, Tensor):
        return torch.where(lr > 0, moved, X)
    return moved if lr > 0 else X
