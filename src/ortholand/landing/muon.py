"""Muon on the manifold: steepest descent in the spectral norm, ``R = msign(Skew(B X^H)) X``.

On the manifold no tangent direction of spectral norm 1 descends faster (``docs/muon.md``). The
relative gradient psi of a tall X is n x n and has rank at most 2p. With the Cholesky factor K of
``S = X^H X``, ``Q = X K^(-H)`` and ``F = B K`` it is ``Skew(F Q^H)``. In a basis ``[Q, W']``, the
columns of W' orthonormal and spanning C, the part of F that is orthogonal to Q, psi is 2p x 2p, and
so is its polar factor N. The direction is again given by a *generator*, so attractions and safe
steps are those of every other method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.fields import product_roundoff
from ortholand.geometry.derivatives import gram_factor, multiplier
from ortholand.geometry.matrices import (
    add_identity,
    add_product,
    add_product_,
    frobenius_norm,
    gram_matrix,
    has_float64,
    identity_like,
    is_square,
    largest_norm,
    per_matrix,
    shared_gram_minus_identity,
    skew,
    sym,
    wide_dtype,
)
from ortholand.geometry.polar import SKEW_STEPS, in_range, skew_polar_factor
from ortholand.landing.attraction import LandingOptions
from ortholand.landing.gram import Gram, cast, combine, trace
from ortholand.landing.moments import Buffered, finite_coefficients
from ortholand.landing.point import Direction, Point
from ortholand.landing.step import GramSums, MatrixStep, PendingStep, Rows

State = dict[str, Tensor]
Sign = Callable[..., Tensor]  # msign of skew matrices; of the library's, the first columns alone


@dataclass(frozen=True)
class MuonMoments(Buffered):
    """A running mean of gradients, as in ``torch.optim.Muon``, and its polar factor."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = SKEW_STEPS
    msign: Sign | None = None
    shows_state = False  # a polar factor is finite whatever the size of what is kept

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:
        """Twice for double precision, which is summed a second time."""
        return super().summed_numbers(p, dtype) + 2 * p * p * (torch.finfo(dtype).bits > 32)

    def averaged(self, B: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The new buffer ``momentum buffer + (1 - momentum) B``; nesterov looks a step ahead."""
        total = torch.lerp(buffer, B, 1 - self.momentum)
        return (torch.lerp(B, total, self.momentum) if self.nesterov else total), total

    def sign(self, psi: Tensor, columns: int | None = None, *, may_look: bool = False) -> Tensor:
        """The polar factor of skew matrices, or its first columns: by ``msign``, or by our own."""
        if self.msign is None:
            return skew_polar_factor(psi, self.steps, columns, may_look=may_look)
        return called(self.msign, psi)[..., :columns]

    def direction(self, point: Point, B: Tensor, G: Tensor) -> Direction:
        """The direction ``msign(psi) X`` of a generator B; what G's rounding hides is zero."""
        X, sign = point.X, partial(self.sign, may_look=point.may_look)
        if is_square(X):
            A = skew(sign(B))
            noise = product_roundoff(X.shape[-2], X.dtype) * point.norm(G)
            return Direction(_unless_noise(A, point.norm(B), noise))
        B = in_range(B, may_look=point.may_look)
        if point.is_landed:
            W, polar = tall_polar(X, B, sign)
            return Direction(W @ polar.of_W, W=polar.N, V=polar.of_Q)
        K = point.factor
        W, polar = tall_polar(X @ inverse(K).mH, B @ K, sign)
        found = polar_at(K, polar)
        return Direction(W @ found.of_B, W=found.M, V=found.of_X)

    def gram_step(
        self, options: LandingOptions, X: Tensor, G: Tensor, state: State, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here.

        A polar factor magnifies rounding in small singular values, and Gram matrices square them.
        So sums are in double precision; weights in double precision are summed a second time.
        """
        buffer = state.get("momentum_buffer")
        B, total, more = G, None, ()
        if buffer is not None:
            B, total = self.averaged(G, buffer)
            if self.nesterov:
                more = (_widened(X.mH @ total),)
        X2, B2 = _widened(X), _widened(B)
        hermitian = (shared_gram_minus_identity(X2, rows.share), gram_matrix(B2))
        sums = GramSums(hermitian, (X2.mH @ B2, *more))
        roundoff = product_roundoff(rows.total, X2.dtype)

        def move(W: Tensor, D: Tensor, polar: PolarGram, sums: GramSums) -> MatrixStep:
            T, d = polar.T, frobenius_norm(D)
            gram = Gram(D, polar.M, T, d, trace(T).sqrt(), roundoff)
            a, b, taken, limited = finite_coefficients(gram, options)
            moved = combine(X2, W, add_product(a, polar.of_X, b), polar.of_B @ b)
            taken = taken & (trace(sums.hermitian[1]).sqrt() < largest_norm(X.dtype))
            state = {}
            if total is not None:
                K = multiplier(D, sums.others[-1])
                if options.rule is None:  # X may be nearly singular, so X K may overflow
                    size = (1 + d).sqrt() * frobenius_norm(K)
                    taken = taken & (size < largest_norm(X.dtype))
                state["momentum_buffer"] = add_product_(total, X, cast(K, X.dtype), alpha=-1)
            return MatrixStep(cast(moved, X.dtype), taken, state, limited)

        def finish(sums: GramSums) -> MatrixStep | PendingStep:
            (D, T), M = sums.hermitian, sums.others[0]
            if X2 is not X:
                noise = product_roundoff(rows.total, X.dtype)
                polar = polar_gram(D, M, T, self.sign, noise, roundoff)
                return move(B2, D, polar, sums)
            first = FirstPass.of(D, M, T)
            L = shifted_cholesky(first.T, 4 * roundoff)
            W = first.basis(X, B, L)

            def finish_second(products: GramSums) -> MatrixStep:
                XW, WW = products.others
                polar = second_pass(first.M, L, solved(first.K, XW), WW, self.sign, roundoff)
                return move(W, D, polar_at(first.K, polar), sums)

            products, nothing = (X.mH @ W, gram_matrix(W)), W[..., :0, :0]
            return PendingStep(GramSums((nothing, nothing), products), finish_second)

        return PendingStep(sums, finish)


class PolarGram(NamedTuple):
    """The generator ``X of_X + B of_B`` of ``msign(psi) X``, with its Gram matrices."""

    of_X: Tensor
    of_B: Tensor
    M: Tensor  # X^H times it
    of_Q: Tensor  # its coefficients in an orthogonal basis
    of_W: Tensor
    WW: Tensor  # that basis' Gram matrix, but for Q^H Q = I

    @property
    def T(self) -> Tensor:
        """Its own Gram matrix."""
        return sym(self.of_Q.mH @ self.of_Q + self.of_W.mH @ (self.WW @ self.of_W))


class Polar(NamedTuple):
    """The generator ``Q of_Q + W of_W`` of ``msign(psi) Q``, ``psi = Skew(F Q^H)``."""

    of_Q: Tensor
    of_W: Tensor
    N: Tensor  # Q^H times it
    WW: Tensor  # Gram matrix of the part of W that is orthogonal to Q


def polar_at(K: Tensor, polar: Polar) -> PolarGram:
    """The same direction at ``X = Q K^H``, in terms of X and W."""
    of_Q, of_W, N = (
        torch.linalg.solve_triangular(K, M, upper=False, left=False)
        for M in (polar.of_Q, polar.of_W, polar.N)
    )
    return PolarGram(solved(K, of_Q, adjoint=True), of_W, K @ N, N, of_W, polar.WW)


class FirstPass(NamedTuple):
    """What one pass over rows tells of F, and of C, the part of it that is orthogonal to Q."""

    K: Tensor  # Cholesky factor of S
    M: Tensor  # Q^H F
    T: Tensor  # C^H C
    unit: Tensor  # by which B is multiplied to have norm 1, in M and T

    @classmethod
    def of(cls, D: Tensor, M: Tensor, T: Tensor) -> "FirstPass":
        """The same from ``D = X^H X - I``, ``M = X^H B`` and ``T = B^H B``."""
        K = gram_factor(D)
        size = trace(T).sqrt()
        unit = per_matrix(1 / size.clamp(min=torch.finfo(size.dtype).tiny ** 0.5), T)
        M = solved(K, M * unit) @ K
        T = sym(K.mH @ (T * unit * unit) @ K - M.mH @ M)
        return cls(K, M, T, unit)

    def basis(self, X: Tensor, B: Tensor, L: Tensor) -> Tensor:
        """Rows of ``W = C L^(-H)``."""
        of_B = solved(L, self.K.mH).mH * self.unit
        of_X = solved(self.K, solved(L, self.M.mH).mH, adjoint=True)
        return add_product_(B @ of_B, X, of_X, alpha=-1)


def tall_polar(Q: Tensor, F: Tensor, sign: Sign) -> tuple[Tensor, Polar]:
    """W, and the generator of ``msign(Skew(F Q^H)) Q`` in terms of Q and W; nothing is n x n.

    C is made orthonormal by Cholesky factors of its Gram matrix, twice. They are shifted by its
    possible rounding error, so the first damps small singular values, which the second restores.
    """
    roundoff = product_roundoff(Q.shape[-2], Q.dtype)
    M = Q.mH @ F
    C = add_product(F, Q, M, alpha=-1)
    T = gram_matrix(C)
    L = shifted_cholesky(T, first_shift(T, roundoff))
    W = C @ inverse(L).mH
    return W, second_pass(M, L, Q.mH @ W, gram_matrix(W), sign, roundoff)


def first_shift(T: Tensor, roundoff: float) -> Tensor:
    """The shift of the first factor: the possible rounding error of ``T = C^H C``."""
    return (4 * roundoff * trace(T) + roundoff**2)[..., None]


def second_pass(M: Tensor, L: Tensor, E: Tensor, WW: Tensor, sign: Sign, roundoff: float) -> Polar:
    """The generator of ``msign(Skew(F Q^H)) Q`` in terms of Q and ``W = C L^(-H)``.

    ``M = Q^H F``, ``WW = W^H W``; ``E = Q^H W`` is the part of Q that rounding has left in C.
    """
    WW = add_product(WW, E.mH, E, alpha=-1)
    second, M = shifted_cholesky(WW, 4 * roundoff), add_product(M, E, L.mH)
    return polar_in(E, second, WW, M, WW @ L.mH, sign, roundoff)


def polar_gram(
    D: Tensor, M: Tensor, T: Tensor, sign: Sign, noise: float, roundoff: float
) -> PolarGram:
    """The generator of ``msign(Skew(B X^H)) X`` from ``X^H X - I``, ``X^H B`` and ``B^H B``.

    Their relative rounding error is roundoff. What is below noise, its root, counts as zero.
    """
    K, M, T, unit = FirstPass.of(D, M, T)
    # The product of both factors of a whole matrix with this noise damps by as much as they do.
    damped = T + 4 * noise * add_identity(T, first_shift(T, noise))
    # T is a difference of Gram matrices of norm 1. Its error makes the factor's matrix positive,
    # and added to T it bounds lengths from above.
    L, WW = shifted_cholesky(damped, 4 * roundoff), add_identity(T, 4 * roundoff)
    polar = polar_at(K, polar_in(M, L, WW, M, T, sign, noise))
    return polar._replace(of_B=(K @ polar.of_B) * unit)


def polar_in(
    E: Tensor, L: Tensor, WW: Tensor, M: Tensor, WC: Tensor, sign: Sign, noise: float
) -> Polar:
    """The generator ``Q N11 + 2 W' N21``, in terms of Q and W.

    ``N = [[N11, -N21^H], [N21, *]]`` is the polar factor of psi in the basis ``[Q, W']``,
    ``W' = (W - Q E) L^(-H)``, and the direction ``Q N11 + W' N21``. Together with Q, the columns
    of W span those of C. ``E = Q^H W``, ``WW = (W - Q E)^H (W - Q E)`` with the shifted Cholesky
    factor L, ``M = Q^H F``, ``WC = (W - Q E)^H C``. What is below noise counts as zero.
    """
    p, lower = WW.shape[-1], solved(L, WC) / 2
    left = torch.cat([skew(M), lower], dim=-2)
    psi = torch.cat([left, torch.cat([-lower.mH, torch.zeros_like(lower)], dim=-2)], dim=-1)
    size = torch.linalg.vector_norm(psi, dim=(-2, -1))
    N11, N21 = _unless_noise(sign(psi, p), size, noise).split(p, dim=-2)
    N11, of_W = skew(N11), solved(L, 2 * N21, adjoint=True)
    return Polar(add_product(N11, E, of_W, alpha=-1), of_W, N11, WW)


def shifted_cholesky(T: Tensor, shift: Tensor | float) -> Tensor:
    """The Cholesky factor L of ``T + shift I``; NaN if that is not positive."""
    L, info = torch.linalg.cholesky_ex(add_identity(T, shift))
    return torch.where((info > 0)[..., None, None], torch.nan, L)


def inverse(L: Tensor) -> Tensor:
    """``L^(-1)`` of lower triangular matrices."""
    return torch.linalg.solve_triangular(L, identity_like(L), upper=False, left=False)


def solved(L: Tensor, M: Tensor, *, adjoint: bool = False) -> Tensor:
    """``L^(-1) M``, or ``L^(-H) M``."""
    return torch.linalg.solve_triangular(L.mH if adjoint else L, M, upper=adjoint)


def called(msign: Sign, psi: Tensor) -> Tensor:
    """What a user's msign makes of skew matrices."""
    N = msign(psi)
    form = [(tuple(M.shape), M.dtype, M.device) for M in (psi, N) if isinstance(M, Tensor)]
    if len(form) < 2 or form[0] != form[1]:
        got = "{}, {} on {}".format(*form[1]) if form[1:] else type(N).__name__
        raise ValueError(
            "msign must return a tensor of the shape and type of its argument, on its device, but "
            "for {}, {} on {} ".format(*form[0])
            + f"it returned {got}. Convert what it returns: "
            "lambda M: f(M.bfloat16()).to(M) does."
        )
    return N


def _unless_noise(A: Tensor, norm: Tensor, noise: Tensor | float) -> Tensor:
    """A, or zero if the matrix whose polar factor it is consists of rounding errors only."""
    zero = norm * 0 + noise * 0  # but NaN if the noise is infinite, as a gradient's may be
    # Not where both are equal: squares of entries below 1e-162 vanish, and with them both norms.
    return torch.where((norm < noise)[..., None, None], per_matrix(zero, A), A)


def _widened(M: Tensor) -> Tensor:
    """The matrices in double precision, on devices that have it."""
    return cast(M, wide_dtype(M)) if has_float64(M) else M
