"""What an attraction to the manifold is and offers, its options, and the registry."""

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
from ortholand.landing.gram import Coefficients, Gram
from ortholand.safe_step import (
    FROBENIUS,
    BetterBounds,
    FieldBounds,
    SafeStepRule,
    spectral_distance,
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
    # Bound on ||A||_2 for the directions A X, A skew, if they have one by construction.
    turn: float | None = None

    @property
    def aim(self) -> float:
        """The largest distance that a step may end at."""
        return self.eps if self.rule is None else self.rule.aim(self.eps)

    @property
    def is_ball_spectral(self) -> bool:
        """Whether the ball is in the spectral norm."""
        return self.rule is not None and self.rule.spectral

    @property
    def start_radius(self) -> float:
        """How far from the manifold a matrix may start: the safe step holds only in the ball."""
        return math.inf if self.rule is None else self.eps


class Move(NamedTuple):
    """Where matrices go, and which of them may go there."""

    moved: Tensor  # (..., n, p)
    taken: Tensor  # (...)


class LimitedMove(Move):
    """A move that also says for which matrices the safe step was less than lr."""

    limited: Tensor

    @classmethod
    def of(cls, moved: Tensor, taken: Tensor, limited: Tensor | None) -> Move:
        """The move; a plain one if lr was safe for all."""
        if limited is None:
            return Move(moved, taken)
        move = cls(moved, taken)
        move.limited = limited
        return move


class Attraction(OfferedInForms):
    """An attraction to the manifold: one object, with up to three forms of the same step.

    Attributes:
        name: its name in the option ``attraction``.
        coefficients: the *Gram form*, ``(gram, options) -> Coefficients``, for tall and wide
            matrices, including rows spread over ranks. If None, they step by :meth:`move`, each
            whole in one place.
        field_coefficients: for an attraction whose step is ``X - eta L`` with one field
            ``L = X a + B b``: ``(D, M, options) -> (a, b)``, with :attr:`along` for the step. A
            whole matrix then needs no more products than L's. If None, :attr:`coefficients` is
            used.
        along: ``(X, L, d, tangency_error, options) -> Move``, for such an attraction.
        sharp: whether the Gram form needs the diagonal of D to full precision, because it removes
            all of D at once.
        compiled: its number in the compiled code (``native/landing.cpp``), or None.

    A subclass that redefines anything inherits none of the faster forms: they would step as its
    parent does. (It inherits ``move``, so redefine that too if it should differ.)
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
        finite may not move; others in the batch are unaffected. No value leaves the device.
        """
        raise NotImplementedError


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
    if type(attraction).move is Attraction.move:
        raise TypeError(f"{type(attraction).__name__} must define move(X, B, options).")
    ATTRACTIONS[attraction.name] = attraction
    return attraction


def find_attraction(name: str) -> Attraction:
    """The attraction with that name."""
    if not isinstance(name, str) or name not in ATTRACTIONS:
        raise ValueError(f"attraction must be one of {tuple(ATTRACTIONS)}, got {name!r}.")
    attraction = ATTRACTIONS[name]
    if isinstance(attraction, Attraction):
        return attraction
    return FunctionAttraction(name, attraction)


Largest = Callable[[Tensor, Tensor], Tensor]  # (bound of a field, distance) -> safe step


class Length(NamedTuple):
    """How far matrices go, with by-products of finding out."""

    eta: Tensor  # min(lr, safe step), (...)
    distance: Tensor  # or a bound of it, in the norm of the rule
    limited: Tensor | None  # where the safe step was less than lr; None: nowhere


def step_length(
    options: LandingOptions, field: FieldBounds, largest: Largest, pull: float | None = None
) -> Length:
    """How far a field may be followed; ``largest`` is the attraction's safe step.

    ``pull``: lam, for a field ``A X + lam X D``; None if the field is not known to have that form.

    The free bounds come first, then better ones: once some allow lr for all matrices, no costlier
    ones are computed. That is a branch, taken on the CPU; elsewhere it would wait for the device,
    so the best bounds are always computed.
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
        # Outside the ball a Frobenius norm says nothing about the spectral one.
        if stops and bool(((safe >= lr) & (distance <= options.aim)).all()):
            return Length(torch.full_like(norm, float(lr)), distance, None)
    return _limited(lr, safe, distance)


def _tightened(
    bound: Tensor, distance: Tensor, options: LandingOptions, pull: float | None
) -> Tensor:
    """The bound on a field, or the one by construction, ``(turn + lam delta) ||X||_2``."""
    rule, turn = options.rule, options.turn
    if turn is None or pull is None or rule is None or rule.is_patched:
        return bound
    if not (rule.spectral and rule.improves):  # another norm, or a custom rule
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
    """What is known about a field L that was formed; ``residual`` returns ``X^H X - I``."""

    def better(stops: bool) -> BetterBounds:
        return better_bounds(options, L, d, residual, stops=stops)

    return FieldBounds(frobenius_norm(L), d, tangency_error, better)


FARTHEST_APART = 2.0**14  # entries that every type can hold


def finite_coefficients(gram: Gram, options: LandingOptions) -> Coefficients:
    """The attraction's Gram form.

    Ranks see only their own rows, but must agree on whether ``X + X a + B1 b`` is finite. Without a
    safe step they agree by a bound on its norm.
    """
    assert options.attraction.coefficients is not None
    found = options.attraction.coefficients(gram, options)
    if options.rule is not None or not gram.apart:
        return found
    a, b = (torch.linalg.vector_norm(M, dim=(-2, -1)) for M in (found.a, found.b))
    size = (1 + gram.distance).sqrt() * (1 + a) + gram.size * b
    return found._replace(taken=found.taken & (size < FARTHEST_APART))


def residual_of(X: Tensor, D: Tensor) -> Callable[[], Tensor]:
    """A function that returns ``X^H X - I = D``, recomputed if it is too large to keep."""
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
    """The rule's bounds on a field that was formed; only the best, unless one may stop early."""
    rule, distance = options.rule, d
    assert rule is not None
    # If the Frobenius norm shows that a matrix is in the ball, it may serve as the distance.
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
    """Whether a field is finite and something moves, or will: not at distance 1 or beyond.

    If no step is safe for now, a matrix that is pulled back stays, but its moments continue:
    they decay. Without a pull it would stay for ever, and counts as not stepped. ``eta * inf`` is
    infinite for steps, and NaN for non-steps. An invalid tensor lr takes no step.
    """
    lr = options.lr
    if isinstance(lr, Tensor):
        bound = torch.where(lr >= 0, bound, math.inf)
        eta = torch.where(lr == 0, 1.0, eta)
    stuck = pull == 0 and (isinstance(lr, Tensor) or lr > 0)
    # A better bound may overflow where the free one does not: eta is NaN then.
    finite = bound < eta * math.inf if stuck else is_finite(bound) & is_finite(eta)
    return finite if options.rule is None else finite & (d < 1)


def unless_zero(lr: float | Tensor, moved: Tensor, X: Tensor) -> Tensor:
    """X itself if lr is zero: such a step changes nothing, not even by attraction."""
    if isinstance(lr, Tensor):
        return torch.where(lr > 0, moved, X)
    return moved if lr > 0 else X
