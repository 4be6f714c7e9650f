"""From gradients to a direction: SGD's momentum and Adam, for matrices of any shape; nothing n x n.

A *generator* is a matrix that represents a direction: for square X a skew matrix A, meaning
``A X``; for tall X an n x p matrix B, meaning ``Skew(B X^H) X``, which is tangent for any B at any
X. Moments are taken of generators.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ortholand.fields import product_roundoff, tangency_bound
from ortholand.geometry.derivatives import multiplier, relative_gradient, remove_normal
from ortholand.geometry.matrices import (
    add_product,
    add_product_,
    frobenius_norm,
    gram_matrix,
    gram_minus_identity,
    is_square,
    largest_norm,
    per_matrix,
    product,
    shared_gram_minus_identity,
    sharp_gram_minus_identity,
    subtract_product_,
    wide_dtype,
)
from ortholand.landing.attraction import LandingOptions, Move, finite_coefficients
from ortholand.landing.gram import Gram, cast, combine, inner, trace
from ortholand.landing.step import GramSums, MatrixStep, PendingStep, Rows, StateKind

State = dict[str, Tensor]
DOUBLE_FROM = 32  # rows per column from which p x p algebra is done in double precision

# --- formulas that every shape shares


def generator(X: Tensor, G: Tensor) -> Tensor:
    """A generator of the relative gradient: psi itself for square X, G for tall X.

    The relative gradient of a tall X is n x n. Any n x p matrix B gives the skew ``Skew(B X^H)``,
    so B represents it without forming it; G represents psi.
    """
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
    """The buffer to keep for the next step.

    Square: relative gradients are accumulated, as in the paper, and kept unchanged; the
    buffer is skew, so ``A X`` is tangent wherever X goes. Tall: the buffer loses its
    normal part, which changes neither the direction now nor the tangency later (any B gives a
    tangent step) and keeps past multipliers out of later directions, exactly at every X: a term
    ``tr(X^H X C) / 2`` of f, C Hermitian, which is constant on the manifold, moves no iterate.
    """
    return buffer if is_square(X) else remove_normal(X, buffer)


def mean_square(norm: Tensor, p: int) -> Tensor:
    """Mean of the squared norms of p columns, from the norm of all; bounded against overflow.

    A bound that is too small only makes the direction longer, which the safe step handles.
    """
    return (norm / math.sqrt(p)).clamp(max=1e18).square()


def one_minus_power(beta: float, step: Tensor) -> Tensor:
    """``1 - beta^step``, to full precision even if the power is almost 1."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)


# --- moments


@dataclass(frozen=True)
class Momentum:
    """SGD: the gradient, or with momentum the accumulated gradients."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    go_along_fields = True  # whether B is known before X^H B is, so that its field may be formed
    gram_pays = True  # whether the Gram form may be the quicker one of whole matrices

    @property
    def compiled(self) -> int:
        """Its number in the compiled code."""
        return 1 if self.momentum else 0

    @property
    def state_kinds(self) -> Mapping[str, StateKind]:
        """The momentum buffer, if there is momentum."""
        return {"momentum_buffer": "matrix"} if self.momentum else {}

    @property
    def why_not_apart(self) -> str | None:
        """Why rows on several ranks cannot step where they are; None if they can."""
        if self.momentum and self.dampening == 1:
            # Nothing is left of a first gradient that only all ranks together know to be the first.
            return "dampening=1"
        return None

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """How many numbers a step sums over rows, for a matrix with p columns."""
        blocks = 3 if self.momentum and self.nesterov else 2
        return blocks * p * p + p + bool(self.momentum and self.dampening)

    def gram_step(
        self, X: Tensor, G: Tensor, state: State, options: LandingOptions, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here."""
        buffer = state.get("momentum_buffer")
        if rows.apart:
            return self._apart_step(X, G, buffer, options, rows)
        if options.attraction.field_coefficients is not None:
            return PendingStep.known(self._field_step(X, G, buffer, options, rows))
        return PendingStep.known(self._whole_step(X, G, buffer, options, rows))

    def _whole_step(
        self, X: Tensor, G: Tensor, buffer: Tensor | None, options: LandingOptions, rows: Rows
    ) -> MatrixStep:
        """The step of tall matrices that are whole, along generators without normal part."""
        (D,) = _in_algebra_type(X, rows, _residual(X, options, rows))
        if buffer is None:
            return _move_along(X, _remove_normal_(X, D, G.clone()), D, 1.0, options, rows)
        B = total = _remove_normal_(X, D, self._accumulated(G, buffer, rows))
        if self.nesterov:
            B = _remove_normal_(X, D, torch.add(G, total, alpha=self.momentum))
        step = _move_along(X, B, D, 1.0, options, rows)
        return step._replace(state={"momentum_buffer": total})

    def _field_step(
        self, X: Tensor, G: Tensor, buffer: Tensor | None, options: LandingOptions, rows: Rows
    ) -> MatrixStep:
        """The step of an attraction along a field: without ``B^H B``."""
        B, more = G, ()
        if buffer is not None:
            B, more = self._direction(X, G, buffer, rows)
        D, M = gram_minus_identity(X), X.mH @ B
        move = _step_along_field(X, B, D, M, frobenius_norm(B), options)
        state = {}
        if buffer is not None:
            if self.nesterov:
                B.copy_(buffer).mul_(self.momentum).add_(G)
                M = more[0]
            state["momentum_buffer"] = subtract_product_(B, X, multiplier(D, M))
        return MatrixStep.of(move, state)

    def _apart_step(
        self, X: Tensor, G: Tensor, buffer: Tensor | None, options: LandingOptions, rows: Rows
    ) -> PendingStep:
        """The step of rows that others share: B keeps its normal part until all know it."""
        B, more = G, ()
        if buffer is not None:
            B, more = self._direction(X, G, buffer, rows)
        sums = GramSums((_residual(X, options, rows), gram_matrix(B)), (X.mH @ B, *more))

        def finish(sums: GramSums) -> MatrixStep:
            return self._finish(X, G, B, buffer, sums, options, rows)

        return PendingStep(sums, finish)

    def _direction(
        self, X: Tensor, G: Tensor, buffer: Tensor, rows: Rows
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The direction in its own memory, and further sums over rows.

        Nesterov's direction replaces the accumulated gradient, which is recomputed when it is
        stored: products and memory are expensive, but passes are cheap.
        """
        total = self._accumulated(G, buffer, rows)
        if self.nesterov:
            XB = X.mH @ total
            return total.mul_(self.momentum).add_(G), (XB,)
        if self.dampening and rows.apart:  # only all ranks know whether it has started
            return total, (buffer.ne(0).flatten(1).any(1).to(X.dtype),)
        return total, ()

    def _accumulated(self, G: Tensor, buffer: Tensor, rows: Rows) -> Tensor:
        weighted = (1 - self.dampening) * G if rows.apart and self.dampening else G
        damped = 0.0 if rows.apart else self.dampening
        return accumulate(
            weighted, buffer, momentum=self.momentum, dampening=damped, nesterov=False
        )[1]

    def _finish(
        self,
        X: Tensor,
        G: Tensor,
        B: Tensor,
        buffer: Tensor | None,
        sums: GramSums,
        options: LandingOptions,
        rows: Rows,
    ) -> MatrixStep:
        D, T, M = _in_algebra_type(X, rows, *sums.hermitian, sums.others[0])
        others, size = sums.others[1:], trace(T).sqrt()
        unit = torch.ones_like(size)
        if len(others) > bool(self.nesterov):  # the flags of all ranks
            # The first gradient enters whole, as in torch; no nesterov with dampening.
            first = 1 - others[-1].real.clamp(max=1).double()
            unit = unit + first * (1 / (1 - self.dampening) - 1)
        gram = _gram(D, M, T, unit, size, rows, X.dtype)
        step = _moved(X, B, gram, options)
        if buffer is None:
            return step
        # B is free now.
        if self.nesterov:
            B.copy_(buffer).mul_(self.momentum).add_(G)
            M = cast(others[0], D.dtype)
        K = cast(multiplier(D, M), X.dtype)
        kept = subtract_product_(B, X, K).mul_(per_matrix(unit, X))
        return step._replace(state={"momentum_buffer": kept})


@dataclass(frozen=True)
class AdamMoments:
    """Adam with one second moment per matrix."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    compiled = 2
    why_not_apart = None
    go_along_fields = False
    gram_pays = True

    @property
    def state_kinds(self) -> Mapping[str, StateKind]:
        """Adam's two moments, and the number of steps that each matrix has taken."""
        return {"exp_avg": "matrix", "exp_avg_sq": "number", "step": "number"}

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """How many numbers a step sums over rows, for a matrix with p columns."""
        return 3 * p * p + p + 2

    def direction(self, B: Tensor, state: State) -> tuple[Tensor, State]:
        """The direction from the generator B of a gradient, and the new state."""
        mean = self.betas[0] * state["exp_avg"] + (1 - self.betas[0]) * B
        scale, numbers = self.scale(frobenius_norm(B), B.shape[-1], state)
        return mean * per_matrix(scale, B), {"exp_avg": mean, **numbers}

    def scale(self, norm: Tensor, p: int, state: State) -> tuple[Tensor, State]:
        """The factor of the mean, from the norm of a generator; and the new numbers."""
        beta1, beta2 = self.betas
        step = state["step"] + 1
        square = beta2 * state["exp_avg_sq"] + (1 - beta2) * mean_square(norm, p)
        root = (square / one_minus_power(beta2, step)).sqrt() + self.eps
        return 1 / (one_minus_power(beta1, step) * root), {"exp_avg_sq": square, "step": step}

    def gram_step(
        self, X: Tensor, G: Tensor, state: State, options: LandingOptions, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here.

        The mean is ``F - X C``, ``F = beta1 m + (1 - beta1) G``, without the normal part of the
        gradient. On ranks it is known only when all know ``X^H G``; but ``X C X^H`` is Hermitian,
        so F represents the same direction as the mean.
        """
        if not rows.apart:
            return PendingStep.known(self._whole_step(X, G, state, options, rows))
        beta1, m = self.betas[0], state["exp_avg"]
        F = torch.mul(G, 1 - beta1).add_(m, alpha=beta1)
        squares = [frobenius_norm(M).square().to(X.dtype) for M in (m, G)]
        hermitian = (_residual(X, options, rows), gram_matrix(F))
        sums = GramSums(hermitian, (X.mH @ F, X.mH @ G, *squares))

        def finish(sums: GramSums) -> MatrixStep:
            return self._finish(X, F, state, sums, options, rows)

        return PendingStep(sums, finish)

    def _whole_step(
        self, X: Tensor, G: Tensor, state: State, options: LandingOptions, rows: Rows
    ) -> MatrixStep:
        """The step of tall matrices that are whole: the mean is formed, then measured."""
        (D,) = _in_algebra_type(X, rows, _residual(X, options, rows))
        B, beta1 = _remove_normal_(X, D, G.clone()), self.betas[0]
        scale, numbers = self.scale(frobenius_norm(B), X.shape[-1], state)
        mean = B.mul_(1 - beta1).add_(state["exp_avg"], alpha=beta1)
        step = _move_along(X, mean, D, scale, options, rows)
        return step._replace(state={"exp_avg": mean, **numbers})

    def _finish(
        self,
        X: Tensor,
        F: Tensor,
        state: State,
        sums: GramSums,
        options: LandingOptions,
        rows: Rows,
    ) -> MatrixStep:
        beta1 = self.betas[0]
        D, T, XF, XG = _in_algebra_type(X, rows, *sums.hermitian, *sums.others[:2])
        norm_m, norm_G = (square.real.to(trace(T).dtype).sqrt() for square in sums.others[2:])
        roundoff = product_roundoff(rows.total, X.dtype)
        K = multiplier(D, XG)
        scale, numbers = self.scale(_tangent_norm(K, D, XG, norm_G, roundoff), X.shape[-1], state)
        size = beta1 * norm_m + (1 - beta1) * norm_G
        step = _moved(X, F, _gram(D, XF, T, scale, size, rows, X.dtype), options)
        # F is free now.
        mean = subtract_product_(F, X, cast((1 - beta1) * K, X.dtype))
        return step._replace(state={"exp_avg": mean, **numbers})


def _remove_normal_(X: Tensor, D: Tensor, B: Tensor) -> Tensor:
    """B without its normal part, in B's memory; D is in the type of p x p algebra."""
    K = multiplier(D, cast(X.mH @ B, D.dtype))
    return subtract_product_(B, X, cast(K, X.dtype))


def _move_along(
    X: Tensor, B: Tensor, D: Tensor, scale: Tensor | float, options: LandingOptions, rows: Rows
) -> MatrixStep:
    """The step of whole matrices along ``scale B``; B is divided by its norm meanwhile."""
    norm = per_matrix(unit := _in_range(frobenius_norm(B), X), X)
    B1 = B.div_(norm)
    M, T = _in_algebra_type(X, rows, X.mH @ B1, gram_matrix(B1))
    step = _moved(X, B1, _gram(D, M, T, scale * unit, trace(T).sqrt(), rows, X.dtype), options)
    B1.mul_(norm)
    return step


def _moved(X: Tensor, B1: Tensor, gram: Gram, options: LandingOptions) -> MatrixStep:
    """The attraction's step along a generator with these Gram matrices."""
    a, b, taken, limited = finite_coefficients(gram, options)
    return MatrixStep(combine(X, B1, a, b), taken, {}, limited)


def _step_along_field(
    X: Tensor, B: Tensor, D: Tensor, M: Tensor, norm: Tensor, options: LandingOptions
) -> Move:
    """The move along ``L = X a + B b``, for B of this norm with ``X^H B = M``."""
    attraction = options.attraction
    assert attraction.field_coefficients is not None
    assert attraction.along is not None
    a, b = attraction.field_coefficients(D, M, options)
    L = add_product_(product(B, b), X, a)
    d = torch.linalg.vector_norm(D, dim=(-2, -1))
    error = tangency_bound(X.shape[-2], X.dtype, d, norm)
    return attraction.along(X, L, d, error, options)


def _residual(X: Tensor, options: LandingOptions, rows: Rows) -> Tensor:
    """``X^H X - I``, or the local rows' share of it."""
    if rows.apart:
        return shared_gram_minus_identity(X, rows.share)
    if options.attraction.sharp:
        return sharp_gram_minus_identity(X)
    return gram_minus_identity(X)


def _gram(
    D: Tensor,
    M: Tensor,
    T: Tensor,
    unit: Tensor,
    size: Tensor | float,
    rows: Rows,
    dtype: torch.dtype,
) -> Gram:
    d = torch.linalg.vector_norm(D, dim=(-2, -1))
    return Gram(D, M, T, d, unit, size, product_roundoff(rows.total, dtype), rows.apart)


def _in_range(norm: Tensor, like: Tensor) -> Tensor:
    """Norms by which matrices of this type can be divided."""
    return norm.clamp(min=torch.finfo(like.dtype).tiny, max=largest_norm(like.dtype))


def _in_algebra_type(X: Tensor, rows: Rows, *matrices: Tensor) -> list[Tensor]:
    """p x p matrices, in double precision if that costs little compared with passes over rows."""
    single = torch.finfo(X.dtype).bits <= 32 and X.device.type != "mps"
    if not single or rows.total < DOUBLE_FROM * X.shape[-1]:
        return list(matrices)
    return [cast(M, wide_dtype(X)) for M in matrices]


def _tangent_norm(K: Tensor, D: Tensor, M: Tensor, norm: Tensor, roundoff: float) -> Tensor:
    """``||G - X K||_F`` for Hermitian K, ``M = X^H G`` and ``norm = ||G||_F``.

    Never below its rounding error: too small a second moment makes steps too long.
    """
    size = norm.square()
    normal = inner(K, 2 * M - add_product(K, D, K))
    return torch.maximum(size - normal, roundoff * size).sqrt()
