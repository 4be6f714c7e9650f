"""Large matrices, one by one: torch's products, and compiled passes between them.

Every form of a step here has its reference in :mod:`ortholand.landing`; it saves passes
over memory, temporaries and, for "move, then land", a product. A matrix is ``(rows, columns)`` as
it lies in memory.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import (
    finite_matrices,
    gram_matrix,
    gram_minus_identity,
    largest_norm,
    tall,
)
from ortholand.geometry.scales import follow, unscaled
from ortholand.landing.after import After
from ortholand.landing.attraction import better_bounds
from ortholand.landing.decoupled import Decoupled
from ortholand.landing.description import LandingStep
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.step import LIMITED, SKIPPED, Slot
from ortholand.native import LARGEST_SIZE, address, large_steps
from ortholand.optim.plan import Plan
from ortholand.safe_step import farthest_before_landing

SMALLEST_RATE = 1e-30  # below it omega / lr overflows


def large_refusal(n: int, p: int, step: LandingStep) -> str | None:
    """Why there is no compiled step for matrices with many columns; None if there is one."""
    attraction, moments = step.options.attraction, step.moments
    along_field = attraction.field_coefficients is not None
    if n > p and not (along_field and isinstance(moments, Momentum) and not moments.momentum):
        what = f"{n} x {p} with {_described(step)}"
        return f"{what}: only square ones and those of up to {LARGEST_SIZE} columns are compiled"
    if not along_field and not isinstance(attraction, After | Decoupled):
        what = f"{n} x {p} with attraction {attraction.name!r}"
        return f"{what}: only matrices of up to {LARGEST_SIZE} columns are compiled"
    return None


def _described(step: LandingStep) -> str:
    if isinstance(step.moments, AdamMoments):
        return "Adam"
    if step.moments.state_kinds:
        return "momentum"
    return f"attraction {step.options.attraction.name!r}"


@torch.no_grad()
def step_large(slot: Slot, plan: Plan, options: bytes) -> None:
    """Step the large matrices of a weight, one by one."""
    assert plan.landing is not None
    passes = large_steps(slot.weight.dtype)
    assert passes is not None  # refusal
    step = _LargeStep(plan, plan.landing, slot.weight.dtype, options, passes)
    skipped = limited = 0
    for matrix in _matrices(slot, plan):
        outcome = step.take(matrix)
        skipped += not outcome.taken
        limited += outcome.limited
    increment_version([slot.weight, *(slot.state[name] for name in plan.state_kinds)])
    for name, count in ((SKIPPED, skipped), (LIMITED, limited)):
        if count:
            slot.state[name].add_(count)


class _Matrix(NamedTuple):
    """A matrix of a weight, its gradient and its state: views of their memory."""

    W: Tensor  # scale times X
    X: Tensor  # W itself at scale 1
    G: Tensor
    state: dict[str, Tensor]


class _Outcome(NamedTuple):
    taken: bool
    limited: bool


class _Kept(NamedTuple):
    """A state after a step that is taken: a multiple of the old one plus one of a tensor."""

    value: Tensor
    share: float = 1.0
    of_old: float = 0.0


class _Generator(NamedTuple):
    """A square matrix's direction ``scale A X``; the first moment to keep is of A."""

    A: Tensor
    scale: float
    state: dict[str, _Kept]  # the new one


def _matrices(slot: Slot, plan: Plan) -> Iterator[_Matrix]:
    weight = slot.weight
    rows = weight.shape[-2] if plan.view == "kernel" else weight.shape[0]
    columns = weight.shape[-1] if plan.view == "kernel" else weight.numel() // rows
    shape = (-1, rows, columns)
    kinds: dict[str, Any] = dict(plan.state_kinds)
    state = {k: slot.state[k].view(shape if v == "matrix" else -1) for k, v in kinds.items()}
    gradients = slot.gradient.view(shape)
    for i, W in enumerate(weight.view(shape)):
        own_state = {name: value[i] for name, value in state.items()}
        yield _Matrix(W, unscaled(W, plan.scale), gradients[i], own_state)


class _LargeStep:
    """The step of a plan, for one matrix at a time."""

    def __init__(
        self,
        plan: Plan,
        landing: LandingStep,
        dtype: torch.dtype,
        options: bytes,
        passes: ctypes.CDLL,
    ) -> None:
        self.landing, self.maximize, self.scale = landing, plan.maximize, plan.scale
        self.dtype = dtype
        self.options, self.packed, self.passes = landing.options, options, passes

    def take(self, matrix: _Matrix) -> _Outcome:
        """Step a matrix, if that is safe."""
        if matrix.X.shape[0] != matrix.X.shape[1]:
            return self._follow(matrix, self._tall_field(matrix))
        generator = self._generator(matrix)
        if isinstance(self.options.attraction, After):
            return self._move_and_land(matrix, generator)
        if isinstance(self.options.attraction, Decoupled):
            return self._follow_decoupled(matrix, generator)
        return self._follow(matrix, self._square_field(matrix, generator, self.options.lam))

    def _address(self, M: Tensor, numel: int) -> int:
        """The address of M, if it has this many numbers of the weight's type."""
        return address(M, self.dtype, numel)

    # --- directions

    def _generator(self, matrix: _Matrix) -> _Generator:
        """The skew matrix that rotates a square one, in one product."""
        _, X, G, state = matrix
        A, moments = torch.mm(G, X.mT), self.landing.moments
        if isinstance(moments, AdamMoments):
            beta1, n = moments.betas[0], X.shape[0]
            norm = self._accumulate(A, state["exp_avg"], beta1, 1 - beta1)
            scale, numbers = moments.scale(A.new_tensor(norm, dtype=torch.float64), n, state)
            kept = {name: _Kept(value) for name, value in numbers.items()}
            return _Generator(A, float(scale), {"exp_avg": _Kept(A), **kept})
        assert isinstance(moments, Momentum)  # refusal
        buffer = state.get("momentum_buffer")
        if buffer is None:
            self._accumulate(A, None, 0.0, 1.0)
            return _Generator(A, 1.0, {})
        damps = moments.dampening and bool(buffer.any())  # the first gradient enters whole
        decay, share = moments.momentum, 1.0 - moments.dampening if damps else 1.0
        kept, direction = _Kept(A), (decay, share)
        if moments.nesterov:
            # Its direction is in A, and what is kept follows from it: no further memory.
            total = 1.0 + decay * share
            direction = decay * decay, total
            kept = _Kept(A, share / total, decay / total)
        self._accumulate(A, buffer, *direction)
        return _Generator(A, 1.0, {"momentum_buffer": kept})

    def _accumulate(self, P: Tensor, buffer: Tensor | None, decay: float, share: float) -> float:
        """Replace P by ``share Skew(P) + decay buffer``; return the norm of Skew(P)."""
        n = P.shape[0]
        place = 0 if buffer is None else self._address(buffer, n * n)
        return self.passes.ortholand_generator(
            self._address(P, n * n), place, n, decay, share, self.packed
        )

    def _square_field(self, matrix: _Matrix, generator: _Generator, pull: float) -> "_Field":
        """``(scale A + pull (X X^T - I)) X``."""
        X, (A, scale, new_state) = matrix.X, generator
        S, n = gram_matrix(X.mT), X.shape[0]
        places = self._address(S, n * n), self._address(A, n * n)
        d = self.passes.ortholand_field(*places, n, scale, pull)
        L = torch.mm(S, X, out=None if new_state else A)
        return _Field(L, d, 0.0, partial(gram_minus_identity, X), new_state)

    def _tall_field(self, matrix: _Matrix) -> "_Field":
        """The field of a tall matrix, or of a wide one by its transpose.

        ``L = X a + G b`` with the attraction's own coefficients, which need no products beyond L's.
        """
        field, options = torch.empty_like(matrix.X), self.options
        X, G, L = tall(matrix.X), tall(matrix.G), tall(field)
        D = gram_minus_identity(X)
        d = self._norm(D)
        assert options.attraction.field_coefficients is not None
        M = torch.mm(X.mT, G)
        if self.maximize:
            M.neg_()
        a, b = options.attraction.field_coefficients(D, M, options)
        torch.mm(G, b.neg_() if self.maximize else b, out=L)
        L.addmm_(X, a)
        error = tangency_bound(X.shape[0], X.dtype, d, self._norm(matrix.G))
        return _Field(field, d, error, lambda: D, {})

    def _norm(self, M: Tensor) -> float:
        return self.passes.ortholand_norm(self._address(M, M.numel()), M.numel())

    # --- attractions

    def _follow(self, matrix: _Matrix, field: "_Field") -> _Outcome:
        """Follow a field as far as is safe.

        Like :func:`ortholand.landing.attraction.step_length`, with better bounds where the free
        ones bind.
        """
        L, d, error, residual, new_state = field
        options, rule, lr = self.options, self.options.rule, self.options.lr
        assert not isinstance(lr, Tensor)
        norm = self._norm(L)
        eta = self.passes.ortholand_step(norm, d, error, self.packed)
        if rule is not None and rule.improves and not (eta >= lr and d <= options.aim):
            free = L.new_tensor(d)
            for bound, distance in better_bounds(options, tall(L), free, residual, stops=True):
                d = float(distance)
                eta = self.passes.ortholand_step(float(bound), d, error, self.packed)
                if eta >= lr and d <= options.aim:
                    break
        taken = self._go(matrix, L, eta, norm, d, options.lam)
        if taken:
            _keep(matrix.state, new_state)
        return _Outcome(taken, rule is not None and eta < lr)

    def _go(
        self, matrix: _Matrix, L: Tensor, eta: float, norm: float, d: float, pull: float
    ) -> bool:
        """Move along a field if the result is finite; return whether it moved."""
        numel = matrix.W.numel()
        places = self._address(matrix.W, numel), self._address(L, numel)
        return bool(self.passes.ortholand_move(*places, numel, eta, norm, d, pull, self.packed))

    def _follow_decoupled(self, matrix: _Matrix, generator: _Generator) -> _Outcome:
        """``X - lr R - omega X D`` in one product, if free bounds show that lr is safe."""
        X, (A, scale, new_state) = matrix.X, generator
        lr, omega, n = self.options.lr, self.options.omega, X.shape[0]
        assert not isinstance(lr, Tensor)
        if lr < SMALLEST_RATE:
            return self._by_reference(matrix, generator)
        length = lr * scale * self._norm(A)
        S = gram_matrix(X.mT)
        places = self._address(S, n * n), self._address(A, n * n)
        d = self.passes.ortholand_field(*places, n, scale, omega / lr)
        if not self._is_pulled_back(length, d):
            del S
            return self._by_reference(matrix, generator)
        L = torch.mm(S, X, out=None if new_state else A)
        taken = self._go(matrix, L, lr, self._norm(L), d, omega)
        if taken:
            _keep(matrix.state, new_state)
        return _Outcome(taken, limited=False)

    def _is_pulled_back(self, length: float, d: float) -> bool:
        """Whether free bounds show that lr and all of omega are safe.

        ``||lr R|| <= length sqrt(1 + d)`` and ``||X D|| <= d sqrt(1 + d)``, as
        :func:`ortholand.safe_step.largest_step_decoupled` needs them.
        """
        if self.options.rule is None:
            return length < math.inf
        omega, stretch = self.options.omega, math.sqrt(1 + d)
        tangent, normal = length * stretch, d * stretch
        pulled = d - 2 * omega * d * (1 - d) + (tangent + omega * normal) ** 2
        return omega * normal * normal <= d * (1 - d) and pulled <= self.options.aim

    def _move_and_land(self, matrix: _Matrix, generator: _Generator) -> _Outcome:
        """Move to ``Y = c (X - lr R)``, then take a Newton-Schulz step from there.

        Y's Gram matrix, which landing needs anyway, nearly always shows that lr was safe, so
        ``X^T X`` is never formed.
        """
        X, (A, scale, new_state) = matrix.X, generator
        lr, n = self.options.lr, X.shape[0]
        assert not isinstance(lr, Tensor)
        R = torch.mm(A, X)
        norm = self._norm(R)
        length = lr * scale * norm
        if norm >= largest_norm(self.dtype) or not self._may_be_safe(length * length, 0.0):
            return self._by_reference(matrix, generator)
        c = 1 / math.sqrt(1 + length * length / n)
        places = self._address(R, n * n), self._address(X, n * n)
        self.passes.ortholand_shift(*places, n * n, lr * scale, c)
        Y, E = R, gram_matrix(R, out=None if new_state else A)
        columns = X.new_empty(n, dtype=torch.float64)
        places = self._address(E, n * n), self._address(Y, n * n)
        sums = address(columns, torch.float64, n)
        overshoot = self.passes.ortholand_overshoot(*places, sums, n, c)
        if not self._may_be_safe(length * length, overshoot):
            return self._by_reference(matrix, generator if new_state else self._generator(matrix))
        if lr > 0 and self.scale == 1:
            torch.addmm(Y, Y, E, alpha=-0.5, out=X)
        elif lr > 0:
            moved = torch.addmm(Y, Y, E, alpha=-0.5)
            matrix.W.copy_(follow(matrix.W, X, moved, self.scale))
        _keep(matrix.state, new_state)
        return _Outcome(taken=True, limited=False)

    def _may_be_safe(self, square: float, overshoot: float) -> bool:
        """Whether the free bound of the safe step allows lr.

        With ``e = ||D + lr^2 R^T R||``, the distance d is at most ``e + lr^2 ||R||^2``, the square.
        """
        distance, farthest = overshoot + square, farthest_before_landing(self.options.aim)
        if self.options.rule is None:  # safe enough not to overflow
            return distance * math.sqrt(distance) * max(self.scale, 1.0) < largest_norm(self.dtype)
        return distance <= self.options.aim and distance + square <= farthest

    def _by_reference(self, matrix: _Matrix, generator: _Generator) -> _Outcome:
        X, (A, scale, new_state) = matrix.X, generator
        move = self.options.attraction.move(X, scale * A, self.options)
        moved, taken = follow(matrix.W, X, move.moved, self.scale), bool(move.taken)
        if taken and self.options.rule is None:
            taken = bool(finite_matrices(moved))
        if taken:
            matrix.W.copy_(moved)
            _keep(matrix.state, new_state)
        limited = getattr(move, "limited", None)
        return _Outcome(taken, limited is not None and bool(limited))


class _Field(NamedTuple):
    """The field of a large matrix, and by-products of forming it."""

    L: Tensor
    distance: float
    tangency_error: float
    residual: Callable[[], Tensor]  # gives X^T X - I, X tall
    new_state: dict[str, _Kept]


def _keep(state: dict[str, Tensor], new: dict[str, _Kept]) -> None:
    for name, (value, share, of_old) in new.items():
        if of_old:
            state[name].mul_(of_old).add_(value, alpha=share)
        else:
            state[name].copy_(value)
