"""Muon on the manifold: steepest descent in the spectral norm, ``R = msign(Skew(B X^H)) X``.

On the manifold no tangent direction of spectral norm 1 descends faster (``docs/muon.md``). The
relative gradient psi of a tall X is n x n and has rank at most 2p. With ``X = Q S^(1/2)``,
``S = X^H X``, and an orthonormal basis W' of C, the part of ``B S^(1/2)`` that is orthogonal to X,
psi is 2p x 2p in the basis ``[Q, W']``, and so is its polar factor N. The direction is again given
by a *generator*, so attractions and safe steps are those of every other method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.fields import product_roundoff
from ortholand.geometry.derivatives import multiplier
from ortholand.geometry.matrices import (
    add_product,
    frobenius_norm,
    gram_matrix,
    is_square,
    largest_norm,
    per_matrix,
    product,
    shared_gram_minus_identity,
    skew,
    subtract_product_,
    sym,
    wide_dtype,
)
from ortholand.geometry.polar import (
    STEPS,
    gram_roots,
    in_range,
    polar_factor,
)
from ortholand.landing.attraction import LandingOptions
from ortholand.landing.gram import Gram, cast, combine, trace
from ortholand.landing.moments import accumulate, finite_coefficients, generator
from ortholand.landing.point import Direction, Point
from ortholand.landing.step import GramSums, MatrixStep, PendingStep, Rows, StateKind

State = dict[str, Tensor]


@dataclass(frozen=True)
class MuonMoments:
    """A running mean of gradients, as in ``torch.optim.Muon``, and its polar factor."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = STEPS
    why_not_apart = None
    shows_state = False  # a polar factor is finite whatever the size of what is kept

    @property
    def state_kinds(self) -> Mapping[str, StateKind]:
        """The momentum buffer, if there is momentum."""
        return {"momentum_buffer": "matrix"} if self.momentum else {}

    def summed_numbers(self, p: int, dtype: torch.dtype) -> int:
        """How many numbers a step sums over rows, for a matrix with p columns."""
        blocks = 3 if self.momentum and self.nesterov else 2
        if torch.finfo(dtype).bits > 32:  # which is summed a second time
            blocks += 2
        return blocks * p * p + p

    def averaged(self, B: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The direction, and the new buffer ``momentum buffer + (1 - momentum) B``.

        With nesterov the direction is ``momentum (new buffer) + (1 - momentum) B``.
        """
        return accumulate(
            B * (1 - self.momentum),
            buffer,
            momentum=self.momentum,
            dampening=0.0,
            nesterov=self.nesterov,
        )

    def advance(self, point: Point, G: Tensor, state: State) -> tuple[Direction, State]:
        """The direction of a step, and the state after it."""
        B = generator(point.X, G)
        if not self.momentum:
            return self.polar_direction(point, B, frobenius_norm(G)), {}
        B, total = self.averaged(B, state["momentum_buffer"])
        direction = self.polar_direction(point, B, frobenius_norm(G))
        kept = total if is_square(point.X) else point.cleaned(total).B
        return direction, {"momentum_buffer": kept}

    def polar_direction(self, point: Point, B: Tensor, size: Tensor) -> Direction:
        """The direction ``msign(psi) X`` for the psi that the generator B represents.

        Args:
            point: matrices ``(..., n, p)``, n >= p.
            B: psi itself for square X, else n x p.
            size: ``||G||_F`` of the gradients: anything at their rounding level counts as zero.
        """
        X = point.X
        if is_square(X):
            A = skew(polar_factor(B, self.steps))
            noise = product_roundoff(X.shape[-2], X.dtype) * size
            return Direction(_unless_noise(A, frobenius_norm(B), noise))
        W, polar = tall_polar(point, B, self.steps)
        generator = add_product(product(X, polar.of_X), W, polar.of_B)
        return Direction(generator, W=polar.M)

    def gram_step(
        self, X: Tensor, G: Tensor, state: State, options: LandingOptions, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here.

        A polar factor magnifies rounding errors in small singular values, and a Gram matrix
        squares them, so it needs twice the digits. Sums over ranks are in double precision,
        which is enough for single-precision weights. No type is wide enough for
        double-precision ones: their ranks sum a second time, products of a better basis.
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
            step = moved_by_polar(X2, W, D, polar, options, roundoff)
            taken = step.taken & (trace(sums.hermitian[1]).sqrt() < largest_norm(X.dtype))
            step = step._replace(moved=cast(step.moved, X.dtype), taken=taken)
            if total is None:
                return step
            K = multiplier(D, sums.others[-1])
            if options.rule is None:  # X may be nearly singular, so X K may overflow
                size = (1 + frobenius_norm(D)).sqrt() * frobenius_norm(K)
                step = step._replace(taken=step.taken & (size < largest_norm(X.dtype)))
            kept = subtract_product_(total, X, cast(K, X.dtype))
            return step._replace(state={"momentum_buffer": kept})

        def finish(sums: GramSums) -> MatrixStep | PendingStep:
            (D, T), M = sums.hermitian, sums.others[0]
            if X2 is not X:
                noise = product_roundoff(rows.total, X.dtype)
                polar = polar_gram(D, M, T, self.steps, options.eps, noise, roundoff)
                return move(B2, D, polar, sums)
            first = FirstPass.of(D, M, T, options.eps)
            L = shifted_cholesky(first.T, gram_error(roundoff))
            W = first.basis(X, B, L)

            def finish_second(products: GramSums) -> MatrixStep:
                XW, WW = products.others
                polar = second_pass(first, L, XW, WW, self.steps, roundoff)
                return move(W, D, polar, sums)

            return PendingStep(GramSums.of(X.mH @ W, gram_matrix(W)), finish_second)

        return PendingStep(sums, finish)


class PolarGram(NamedTuple):
    """The generator ``X of_X + B of_B`` of ``msign(psi) X``, with its Gram matrices."""

    of_X: Tensor
    of_B: Tensor
    M: Tensor  # X^H times it
    T: Tensor  # its own


def moved_by_polar(
    X: Tensor,
    B: Tensor,
    D: Tensor,
    polar: PolarGram,
    options: LandingOptions,
    roundoff: float,
) -> MatrixStep:
    """The attraction's step along the generator ``X of_X + B of_B``, which has no multipliers."""
    gram = Gram(D, polar.M, polar.T, frobenius_norm(D), trace(polar.T).sqrt(), roundoff)
    a, b, taken, limited = finite_coefficients(gram, options)
    moved = combine(X, B, add_product(a, polar.of_X, b), product(polar.of_B, b))
    return MatrixStep(moved, taken, {}, limited)


class Basis(NamedTuple):
    """``[Q, (W - Q E) L^(-H)]``, with orthonormal columns wherever those of C are not zero.

    ``Q = X S^(-1/2)``, and the columns of W span those of X and C together with Q.
    """

    root: Tensor  # S^(1/2)
    inverse: Tensor  # S^(-1/2)
    E: Tensor  # Q^H W
    T: Tensor  # (W - Q E)^H (W - Q E)
    L: Tensor  # Cholesky factor of T, shifted


class FirstPass(NamedTuple):
    """What one pass over rows tells of C, the part of ``B S^(1/2)`` that is orthogonal to X."""

    root: Tensor  # S^(1/2)
    inverse: Tensor  # S^(-1/2)
    M: Tensor  # Q^H B S^(1/2)
    T: Tensor  # C^H C
    unit: Tensor  # by which B is multiplied to have norm 1, in M and T

    @classmethod
    def of(cls, D: Tensor, M: Tensor, T: Tensor, eps: float) -> "FirstPass":
        """The same from ``D = X^H X - I``, ``M = X^H B`` and ``T = B^H B``."""
        root, inverse = gram_roots(D, eps)
        size = trace(T).sqrt()
        unit = per_matrix(1 / size.clamp(min=torch.finfo(size.dtype).tiny ** 0.5), T)
        M = product(product(inverse, M * unit), root)
        T = sym(product(product(root, T * unit * unit), root) - product(M.mH, M))
        return cls(root, inverse, M, T, unit)

    def basis(self, X: Tensor, B: Tensor, L: Tensor) -> Tensor:
        """Rows of ``W = C L^(-H)``."""
        of_B = solved(L, self.root).mH * self.unit
        of_X = product(self.inverse, solved(L, self.M.mH).mH)
        return subtract_product_(product(B, of_B), X, of_X)


def tall_polar(point: Point, B: Tensor, steps: int) -> tuple[Tensor, PolarGram]:
    """W, and the generator of ``msign(Skew(B X^H)) X`` in terms of X and W; nothing is n x n.

    C is made orthonormal by Cholesky factors of its Gram matrix, twice. They are shifted by the
    Gram matrix's possible rounding error, so small singular values are damped by the first and
    restored by the second. That one needs no pass over rows: W is well conditioned, so the
    second factor is part of the coefficients.
    """
    X, D = point.X, point.D
    roundoff = product_roundoff(X.shape[-2], X.dtype)
    root, inverse = gram_roots(D, point.radius)
    B = in_range(B)
    M = product(inverse, product(X.mH, B))
    C = subtract_product_(B, X, product(inverse, M))
    T = product(product(root, gram_matrix(C)), root)
    L = shifted_cholesky(T, first_shift(T, roundoff))
    W = product(C, solved(L, root).mH)
    first = FirstPass(root, inverse, product(M, root), T, D.new_ones(()))
    XW, WW = product(X.mH, W), gram_matrix(W)
    return W, second_pass(first, L, XW, WW, steps, roundoff)


def first_shift(T: Tensor, roundoff: float) -> Tensor:
    """The shift of the first factor: the possible rounding error of ``T = C^H C``."""
    return (4 * roundoff * trace(T) + roundoff**2)[..., None]


def gram_error(roundoff: float) -> float:
    """The possible rounding error of T where it is a difference of Gram matrices of norm 1."""
    return 4 * roundoff


def second_pass(
    first: FirstPass, L: Tensor, XW: Tensor, WW: Tensor, steps: int, roundoff: float
) -> PolarGram:
    """The generator of ``msign(Skew(B X^H)) X`` in terms of X and ``W = C L^(-H)``.

    Args:
        first: what is known of C.
        L: a factor of its Gram matrix, shifted.
        XW: ``X^H W``, W as it was rounded.
        WW: ``W^H W``.
        steps: steps of msign.
        roundoff: relative rounding error of these products.
    """
    E = product(first.inverse, XW)  # the part of Q that rounding has left in C
    T = add_product(WW, E.mH, E, alpha=-1)
    basis = Basis(first.root, first.inverse, E, T, shifted_cholesky(T, 4 * roundoff))
    return polar_in(basis, add_product(first.M, E, L.mH), product(T, L.mH), steps, roundoff)


def polar_gram(
    D: Tensor, M: Tensor, T: Tensor, steps: int, eps: float, noise: float, roundoff: float
) -> PolarGram:
    """The generator of ``msign(Skew(B X^H)) X`` from Gram matrices of X and B.

    Args:
        D: ``X^H X - I``.
        M: ``X^H B``.
        T: ``B^H B``.
        steps: steps of msign.
        eps: radius of the ball.
        noise: relative rounding error of X and B. What is below it counts as zero.
        roundoff: relative rounding error of the Gram matrices, about the square of noise.
    """
    root, inverse, M, T, unit = FirstPass.of(D, M, T, eps)
    # The product of both factors of a whole matrix with this noise damps by as much as they do.
    damped = T + 4 * noise * shifted(T, first_shift(T, noise))
    # The error makes the factor's matrix positive, and added to T it bounds lengths from above.
    error = gram_error(roundoff)
    basis = Basis(root, inverse, M, shifted(T, error), shifted_cholesky(damped, error))
    polar = polar_in(basis, M, T, steps, noise)
    return polar._replace(of_B=product(root, polar.of_B) * unit)


def polar_in(basis: Basis, M: Tensor, WC: Tensor, steps: int, noise: float) -> PolarGram:
    """The generator ``(Q N11 + 2 W' N21) S^(-1/2)``, in terms of X and W.

    ``N = [[N11, -N21^H], [N21, *]]`` is the polar factor of psi in the basis ``[Q, W']``, and the
    direction ``(Q N11 + W' N21) S^(1/2)``.

    Args:
        basis: the basis in which psi is 2p x 2p.
        M: ``Q^H B S^(1/2)``.
        WC: ``(W - Q E)^H C``, C the part of ``B S^(1/2)`` that is orthogonal to Q.
        steps: steps of msign.
        noise: anything below this counts as zero.
    """
    root, inverse, E, T, L = basis
    p = T.shape[-1]
    psi = skew_blocks(skew(M), solved(L, WC) / 2)
    N = _unless_noise(polar_factor(psi, steps, columns=p), frobenius_norm(psi), noise)
    N11, N21 = product(skew(N[..., :p, :]), inverse), product(N[..., p:, :], inverse)
    of_W = solved(L, 2 * N21, adjoint=True)
    of_X = product(inverse, add_product(N11, E, of_W, alpha=-1))
    square = product(N11.mH, N11) + product(of_W.mH, product(T, of_W))
    return PolarGram(of_X, of_W, product(root, N11), sym(square))


def shifted_cholesky(T: Tensor, shift: Tensor | float) -> Tensor:
    """The Cholesky factor L of ``T + shift I``; NaN if that is not positive."""
    L, info = torch.linalg.cholesky_ex(shifted(T, shift))
    return torch.where((info > 0)[..., None, None], torch.nan, L)


def shifted(T: Tensor, shift: Tensor | float) -> Tensor:
    """``T + shift I``."""
    T = T.clone()
    T.diagonal(dim1=-2, dim2=-1).add_(shift)
    return T


def solved(L: Tensor, M: Tensor, *, adjoint: bool = False) -> Tensor:
    """``L^(-1) M``, or ``L^(-H) M``."""
    return torch.linalg.solve_triangular(L.mH if adjoint else L, M, upper=adjoint)


def skew_blocks(Omega: Tensor, K: Tensor) -> Tensor:
    """``[[Omega, -K^H], [K, 0]]``."""
    above = torch.cat([Omega, -K.mH], dim=-1)
    below = torch.cat([K, torch.zeros_like(K)], dim=-1)
    return torch.cat([above, below], dim=-2)


def _unless_noise(A: Tensor, norm: Tensor, noise: Tensor | float) -> Tensor:
    """A, or zero if the matrix whose polar factor it is consists of rounding errors only.

    A gradient normal to the manifold has a relative gradient of zero, up to rounding; its polar
    factor would be a full-length step in an arbitrary direction.
    """
    zero = norm * 0 + noise * 0  # but NaN if the noise is infinite, as a gradient's may be
    return torch.where((norm <= noise)[..., None, None], per_matrix(zero, A), A)


def _widened(M: Tensor) -> Tensor:
    """The matrices in double precision, on devices that have it."""
    return M if M.device.type == "mps" else cast(M, wide_dtype(M))
