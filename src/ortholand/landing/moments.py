"""From gradients to a direction: SGD's momentum and Adam, for matrices of any shape; nothing n x n.

Moments are taken of generators (:mod:`.point`). For square X they are skew, so they stay tangent
wherever X goes. For tall X what is kept loses its multipliers first (``cleaned``): a term
``tr(X^H X C) / 2`` of f, which is constant on the manifold, then moves no iterate.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.fields import product_roundoff
from ortholand.geometry.derivatives import (
    gram_factor,
    multiplier_from,
    relative_gradient,
    remove_normal,
)
from ortholand.geometry.matrices import (
    add_product,
    add_product_,
    frobenius_norm,
    gram_matrix,
    is_square,
    per_matrix,
    shared_gram_minus_identity,
    sum_dtype,
    wide_dtype,
)
from ortholand.landing.attraction import LandingOptions
from ortholand.landing.gram import (
    Coefficients,
    Gram,
    cast,
    combine,
    gram_without_multiplier,
    inner,
    times,
)
from ortholand.landing.point import Direction, Point
from ortholand.landing.step import GramSums, MatrixStep, PendingStep, Rows, StateKind

State = dict[str, Tensor]
Hook = Callable[[Tensor, Tensor], Tensor]  # of X and another matrix: what an optimizer redefines
DOUBLE_FROM = 32  # rows per column from which p x p algebra is done in double precision


def generator(X: Tensor, G: Tensor) -> Tensor:
    """A generator of the relative gradient: psi itself for square X, G for tall X."""
    return relative_gradient(X, G) if is_square(X) else G


def accumulate(
    B: Tensor, buffer: Tensor, *, momentum: float, dampening: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Momentum as in ``torch.optim.SGD``, per matrix: (direction, new buffer)."""
    if dampening:
        # The first gradient enters whole, as in torch; a buffer of zeros is one not yet started.
        started = buffer.ne(0).any(dim=(-2, -1), keepdim=True)
        weighted = B * (1 - dampening * started.to(buffer.dtype))
    else:
        weighted = B
    total = torch.add(weighted, buffer, alpha=momentum)
    return torch.add(B, total, alpha=momentum) if nesterov else total, total


def transport(X: Tensor, buffer: Tensor) -> Tensor:
    """The buffer to keep for the next step: without its multipliers if X is tall."""
    return buffer if is_square(X) else remove_normal(X, buffer)


# --- moments


@dataclass(frozen=True)
class Buffered:
    """Moments that keep one buffer, if there is momentum."""

    momentum: float = 0.0
    nesterov: bool = False

    @property
    def why_not_apart(self) -> str | None:
        """Why rows on several ranks cannot step where they are; None if they can."""
        return None

    @property
    def state_kinds(self) -> Mapping[str, StateKind]:
        """The momentum buffer, if there is momentum."""
        return {"momentum_buffer": "matrix"} if self.momentum else {}

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """How many numbers a step sums over rows, for a matrix with p columns."""
        return (3 if self.momentum and self.nesterov else 2) * p * p + p

    def averaged(self, B: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """What the direction is made of, and the new buffer."""
        raise NotImplementedError

    def direction(self, point: Point, B: Tensor, G: Tensor) -> Direction:  # noqa: ARG002
        """The direction that is made of that; G is the gradient."""
        return Direction(B)

    def advance(
        self, point: Point, G: Tensor, state: State, make: Hook = generator, keep: Any = None
    ) -> tuple[Direction, State]:
        """The direction of a step, and the state after it.

        ``make`` gives the generator of a gradient, and ``keep``, if given, the buffer to keep.
        """
        B = make(point.X, G)
        if not self.momentum:
            return self.direction(point, B, G), {}
        B, total = self.averaged(B, state["momentum_buffer"])
        direction = self.direction(point, B, G)
        if keep or is_square(point.X):
            return direction, {"momentum_buffer": keep(point.X, total) if keep else total}
        cleaned = point.cleaned(total)
        direction = cleaned if direction.B is total else direction
        return direction, {"momentum_buffer": cleaned.B}


@dataclass(frozen=True)
class Momentum(Buffered):
    """SGD: the gradient, or with momentum the accumulated gradients."""

    dampening: float = 0.0

    @property
    def shows_state(self) -> bool:
        """Whether a direction is finite only if the new state is."""
        return not self.nesterov

    @property
    def why_not_apart(self) -> str | None:
        """Why rows on ranks cannot step there: at 1 nothing is left of a first gradient."""
        return "dampening=1" if self.momentum and self.dampening == 1 else None

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:
        """With dampening also whether the buffer has started."""
        return super().summed_numbers(p, dtype) + bool(self.momentum and self.dampening)

    def averaged(self, B: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """As in ``torch.optim.SGD``."""
        return accumulate(B, buffer, **vars(self))

    def gram_step(
        self, options: LandingOptions, X: Tensor, G: Tensor, state: State, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here."""
        buffer, more = state.get("momentum_buffer"), ()
        B = total = G
        if buffer is not None:
            # Only all ranks know whether a buffer has started.
            weighted = (1 - self.dampening) * G if self.dampening else G
            B = total = torch.add(weighted, buffer, alpha=self.momentum)
        if self.nesterov:
            B = torch.add(G, total, alpha=self.momentum)
            more = (X.mH @ total,)
        elif buffer is not None and self.dampening:
            more = (buffer.ne(0).flatten(1).any(1).to(X.dtype),)

        def finish(sums: GramSums) -> MatrixStep:
            D, T, M = in_algebra_type(X, rows, *sums.hermitian, sums.others[0])
            unit = torch.ones_like(frobenius_norm(D))
            if len(sums.others) > 1 + self.nesterov:  # the flags of all ranks
                # The first gradient enters whole, as in torch; no nesterov with dampening.
                first = 1 - sums.others[-1].real.clamp(max=1).double()
                unit = unit + first * (1 / (1 - self.dampening) - 1)
            L, roundoff = gram_factor(D), product_roundoff(rows.total, X.dtype)
            gram, K = gram_without_multiplier(D, L, M, T, roundoff)
            step = moved_in_gram(X, B, unit, gram, K, options)
            if buffer is None:
                return step
            if self.nesterov:
                K = multiplier_from(L, cast(sums.others[1], D.dtype))
            kept = add_product_(total, X, cast(K, X.dtype), alpha=-1).mul_(per_matrix(unit, X))
            return step._replace(state={"momentum_buffer": kept})

        return PendingStep(gram_sums(X, B, rows, X.mH @ B, *more), finish)


@dataclass(frozen=True)
class AdamMoments:
    """Adam with one second moment per matrix."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    why_not_apart = None
    shows_state = True  # a direction is finite only if the new state is

    @property
    def state_kinds(self) -> Mapping[str, StateKind]:
        """Adam's two moments, and the number of steps that each matrix has taken."""
        return {"exp_avg": "matrix", "exp_avg_sq": "number", "step": "number"}

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """How many numbers a step sums over rows, for a matrix with p columns."""
        return 3 * p * p + p + 2

    def advance(
        self,
        point: Point,
        G: Tensor,
        state: State,
        make: Any = None,
        keep: Any = None,  # noqa: ARG002
    ) -> tuple[Direction, State]:
        """As :meth:`Buffered.advance`, but the mean needs no ``keep``."""
        B = make(point.X, G) if make else self.generator(point, G)
        norm, p = point.norm(B), B.shape[-1]
        is_read = point.may_look and not norm.ndim and self.eps > 0  # numbers of Python are quicker
        length, numbers = (self.length_read if is_read else self.length)(norm, p, state)
        # A generator of the library is in new memory.
        out = None if make else B
        mean = torch.lerp(state["exp_avg"], B, 1 - self.betas[0], out=out)
        return Direction(mean, length), {"exp_avg": mean, **numbers}

    @staticmethod
    def generator(point: Point, G: Tensor) -> Tensor:
        """A generator of the relative gradient: for tall X, G without its normal part."""
        if is_square(point.X):
            return relative_gradient(point.X, G)
        return add_product(G, point.X, point.multiplier(point.X.mH @ G), alpha=-1)

    def length(self, norm: Tensor, p: int, state: State) -> tuple[Tensor, State]:
        """The factor of the mean, from the norm of a generator; and the new numbers.

        The second moment is the mean squared norm of the p columns, bounded against overflow.
        """
        beta1, beta2 = self.betas
        step = state["step"].to(norm.dtype) + 1  # in double: powers may be almost 1
        norm = norm.clamp(max=1e18 * math.sqrt(p))
        square = torch.addcmul(beta2 * state["exp_avg_sq"], norm, norm, value=(1 - beta2) / p)
        root = (square / (1 - torch.pow(beta2, step))).sqrt() + self.eps
        length = (root * (1 - torch.pow(beta1, step))).reciprocal()
        return length, {"exp_avg_sq": square, "step": step}

    def length_read(self, norm: Tensor, p: int, state: State) -> tuple[float, State]:
        """:meth:`length` of one matrix on the CPU."""
        numbers = (*self.betas, state["step"], state["exp_avg_sq"])
        beta1, beta2, step, old = map(np.float64, map(float, numbers))
        step, mean = step + 1, min(float(norm), 1e18 * math.sqrt(p)) ** 2 / p
        with np.errstate(all="ignore"):  # Python would raise where a state is none of Adam's
            square = beta2 * old + (1 - beta2) * mean
            root = np.sqrt(square / (1 - beta2**step)) + float(self.eps)
            length = float(1 / (root * (1 - beta1**step)))
        new = norm.new_tensor([square, step])
        return length, {"exp_avg_sq": new[0], "step": new[1]}

    def gram_step(
        self, options: LandingOptions, X: Tensor, G: Tensor, state: State, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here.

        The mean is ``F - X C``, ``F = beta1 m + (1 - beta1) G``, without the multipliers of the
        gradient. It is known only when all ranks know ``X^H G``; but ``X C X^H`` is Hermitian, so
        F represents the same direction as the mean.
        """
        beta1, m = self.betas[0], state["exp_avg"]
        F = torch.mul(G, 1 - beta1).add_(m, alpha=beta1)
        squares = [frobenius_norm(M).square().to(X.dtype) for M in (m, G)]

        def finish(sums: GramSums) -> MatrixStep:
            D, T, XF, XG = in_algebra_type(X, rows, *sums.hermitian, *sums.others[:2])
            norm_m, norm_G = (cast(square.real, T.real.dtype).sqrt() for square in sums.others[2:])
            roundoff = product_roundoff(rows.total, X.dtype)
            L = gram_factor(D)
            K = multiplier_from(L, XG)
            norm = tangent_norm(K, D, XG, norm_G, roundoff)
            length, numbers = self.length(norm, X.shape[-1], state)
            gram, C = gram_without_multiplier(D, L, XF, T, roundoff)
            gram = gram._replace(size=beta1 * norm_m + (1 - beta1) * norm_G)
            step = moved_in_gram(X, F, length, gram, C, options)
            mean = add_product_(F, X, cast((1 - beta1) * K, X.dtype), alpha=-1)
            return step._replace(state={"exp_avg": mean, **numbers})

        return PendingStep(gram_sums(X, F, rows, X.mH @ F, X.mH @ G, *squares), finish)


# --- rows on several ranks


def gram_sums(X: Tensor, B: Tensor, rows: Rows, *others: Tensor) -> GramSums:
    """What the local rows add to the Gram matrices of X and B."""
    return GramSums((shared_gram_minus_identity(X, rows.share), gram_matrix(B)), others)


def moved_in_gram(
    X: Tensor, B: Tensor, unit: Tensor, gram: Gram, K: Tensor, options: LandingOptions
) -> MatrixStep:
    """The attraction's step along ``unit B``, from the Gram matrices of ``B - X K``."""
    a, b, taken, limited = finite_coefficients(gram.scaled(unit), options)
    b = times(unit, b)
    return MatrixStep(combine(X, B, a - K @ b, b), taken, {}, limited)


FARTHEST_APART = 2.0**14  # entries that every type can hold


def finite_coefficients(gram: Gram, options: LandingOptions) -> Coefficients:
    """The attraction's Gram form.

    Without a safe step ranks agree on whether ``X + X a + B b`` is finite by a bound on its norm.
    """
    found = options.attraction.coefficients(gram, options)
    if options.rule is not None:
        return found
    size = (1 + gram.d).sqrt() * (1 + frobenius_norm(found.a)) + gram.size * frobenius_norm(found.b)
    return found._replace(taken=found.taken & (size < FARTHEST_APART))


def in_algebra_type(X: Tensor, rows: Rows, *matrices: Tensor) -> list[Tensor]:
    """p x p matrices, in double precision if that costs little compared with passes over rows."""
    single = torch.finfo(X.dtype).bits <= 32 and sum_dtype(X) is not None
    if not single or rows.total < DOUBLE_FROM * X.shape[-1]:
        return list(matrices)
    return [cast(M, wide_dtype(X)) for M in matrices]


def tangent_norm(K: Tensor, D: Tensor, M: Tensor, norm: Tensor, roundoff: float) -> Tensor:
    """``||G - X K||_F`` for Hermitian K, ``M = X^H G`` and ``norm = ||G||_F``.

    Never below its rounding error: too small a second moment makes steps too long.
    """
    size = norm.square()
    normal = inner(K, 2 * M - add_product(K, D, K))
    return torch.maximum(size - normal, roundoff * size).sqrt()
