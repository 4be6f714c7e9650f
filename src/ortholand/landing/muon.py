"""Muon on the manifold: steepest descent in the spectral norm, ``R = msign(Skew(B X^H)) X``.

On the manifold no tangent direction of spectral norm 1 descends faster (``docs/muon.md``). A tall
X has an n x n relative gradient psi of rank 2p at most. With ``X = Q S^(1/2)``, ``S = X^H X``, and
the polar factor W of the part of ``B S^(1/2)`` that is orthogonal to X, ``[Q, W]`` is a basis of
its range in which psi is 2p x 2p, and so is its polar factor N. The direction is again given by a
*generator*, so that attractions and safe steps are those of every other method.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ortholand.fields import product_roundoff
from ortholand.geometry.matrices import (
    frobenius_norm,
    gram_matrix,
    gram_minus_identity,
    is_square,
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
    polar_coefficients,
    polar_factor,
)
from ortholand.landing.attraction import LandingOptions
from ortholand.landing.gram import Gram, cast, combine, trace
from ortholand.landing.moments import accumulate
from ortholand.landing.step import GramSums, MatrixStep, PendingStep, Rows, StateKind

State = dict[str, Tensor]
TURN = 1.01  # bound of the norm of a polar factor: no singular value is above 1, but for rounding


@dataclass(frozen=True)
class MuonMoments:
    """A running mean of gradients, as ``torch.optim.Muon`` has it, and the polar factor of it."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = STEPS
    why_not_apart = None
    go_along_fields = False
    gram_pays = False  # polar factors of whole matrices need no double precision
    compiled = None

    @property
    def state_kinds(self) -> Mapping[str, StateKind]:
        """The momentum buffer, if there is momentum."""
        return {"momentum_buffer": "matrix"} if self.momentum else {}

    def summed_numbers(self, p: int) -> int:
        """How many numbers a step sums over rows, for a matrix with p columns."""
        blocks = 3 if self.momentum and self.nesterov else 2
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

    def polar_generator(self, X: Tensor, B: Tensor, size: Tensor, eps: float) -> Tensor:
        """The generator of ``msign(psi) X`` for the psi that the generator B stands for.

        Args:
            X: matrices ``(..., n, p)``, n >= p, within eps of the manifold.
            B: psi itself for square X, else n x p.
            size: ``||G||_F`` of the gradients: what is smaller by rounding is nothing.
            eps: radius of the ball.
        """
        if is_square(X):
            A = skew(polar_factor(B, self.steps))
            return _unless_noise(
                A, frobenius_norm(B), product_roundoff(X.shape[-2], X.dtype) * size
            )
        return tall_polar_generator(X, B, self.steps, eps)

    def gram_step(
        self, X: Tensor, G: Tensor, state: State, options: LandingOptions, rows: Rows
    ) -> PendingStep:
        """The step of tall matrices of which these rows are here.

        A polar factor enlarges what rounding leaves of small singular values, and a Gram matrix
        squares them: so sums are in double precision.
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

        def finish(sums: GramSums) -> MatrixStep:
            step = self._moved(X2, B2, sums, options, rows, X.dtype)
            if total is None:
                return step
            kept = subtract_product_(total, X, cast(sym(sums.others[-1]), X.dtype))
            return step._replace(state={"momentum_buffer": kept})

        return PendingStep(sums, finish)

    def _moved(
        self,
        X: Tensor,
        B: Tensor,
        sums: GramSums,
        options: LandingOptions,
        rows: Rows,
        dtype: torch.dtype,
    ) -> MatrixStep:
        (D, T), M = sums.hermitian, sums.others[0]
        noise, roundoff = (product_roundoff(rows.total, kind) for kind in (dtype, X.dtype))
        polar = polar_gram(D, M, T, self.steps, options.eps, noise, roundoff)
        d = torch.linalg.vector_norm(D, dim=(-2, -1))
        size = trace(polar.T).sqrt()
        gram = Gram(D, polar.M, polar.T, d, torch.ones_like(d), size, roundoff, rows.apart)
        assert options.attraction.coefficients is not None
        a, b, taken, limited = options.attraction.coefficients(gram, options)
        moved = combine(X, B, a + product(polar.of_X, b), product(polar.of_B, b))
        return MatrixStep(cast(moved, dtype), taken, {}, limited)


def tall_polar_generator(X: Tensor, B: Tensor, steps: int, eps: float) -> Tensor:
    """The n x p generator of ``msign(Skew(B X^H)) X``, nothing n x n.

    With ``N = [[N11, -N21^H], [N21, *]]`` the direction is ``(Q N11 + W N21) S^(1/2)``, and this
    is what ``(Q N11 + 2 W N21) S^(-1/2)`` stands for.
    """
    D = gram_minus_identity(X)
    root, inverse = gram_roots(D, eps)
    Q, B = product(X, inverse), product(in_range(B), root)
    M = product(Q.mH, B)
    B = B - product(Q, M)
    B = B - product(Q, product(Q.mH, B))  # twice: so that it is orthogonal even if it is small
    W = polar_factor(B, steps)
    psi = skew_blocks(skew(M), product(W.mH, B) / 2)
    N = skew(polar_factor(psi, steps))
    N = _unless_noise(N, frobenius_norm(psi), product_roundoff(X.shape[-2], X.dtype))
    p = X.shape[-1]
    return product(product(Q, N[..., :p, :p]) + product(W, 2 * N[..., p:, :p]), inverse)


@dataclass(frozen=True)
class PolarGram:
    """The generator ``X of_X + B of_B``, with its Gram matrices."""

    of_X: Tensor
    of_B: Tensor
    M: Tensor  # X^H times it
    T: Tensor  # its own


def polar_gram(
    D: Tensor, M: Tensor, T: Tensor, steps: int, eps: float, noise: float, roundoff: float
) -> PolarGram:
    """:func:`tall_polar_generator` from Gram matrices ``X^H X - I``, ``X^H B`` and ``B^H B``.

    Args:
        D: of X.
        M: of X and B.
        T: of B.
        steps: of the polar factors.
        eps: radius of the ball.
        noise: what is smaller than that share of B is nothing.
        roundoff: relative rounding error of the Gram matrices.
    """
    p = D.shape[-1]
    root, inverse = gram_roots(D, eps)
    unit = trace(T).sqrt()
    safe = per_matrix(1 / unit.clamp(min=torch.finfo(unit.dtype).tiny ** 0.5), T)
    M = product(product(inverse, M * safe), root)
    T = sym(product(product(root, T * safe * safe), root) - product(M.mH, M))
    # A difference: where rounding has left nothing else, it must not be negative.
    T.diagonal(dim1=-2, dim2=-1).add_(4 * roundoff)
    h = polar_coefficients(T, steps)
    psi = skew_blocks(skew(M), product(h, T) / 2)
    N = skew(polar_factor(psi, steps))
    N = _unless_noise(N, frobenius_norm(psi), noise)
    N11, N21 = product(N[..., :p, :p], inverse), product(N[..., p:, :p], inverse)
    of_B = product(h, 2 * N21)
    of_X = product(inverse, N11 - product(M, of_B))
    square = product(N11.mH, N11) + product(of_B.mH, product(T, of_B))
    return PolarGram(of_X, product(root, of_B) * safe, product(root, N11), sym(square))


def skew_blocks(Omega: Tensor, K: Tensor) -> Tensor:
    """``[[Omega, -K^H], [K, 0]]``."""
    above = torch.cat([Omega, -K.mH], dim=-1)
    below = torch.cat([K, torch.zeros_like(K)], dim=-1)
    return torch.cat([above, below], dim=-2)


def _unless_noise(A: Tensor, norm: Tensor, noise: Tensor | float) -> Tensor:
    """A, or zero where what it is the polar factor of is nothing but rounding.

    A gradient that is normal to the manifold has a relative gradient of zero, up to rounding; made
    a polar factor, that would be a step of full length to anywhere.
    """
    return torch.where((norm <= noise)[..., None, None], torch.zeros_like(A), A)


def _widened(M: Tensor) -> Tensor:
    """The matrices in double precision, on devices that have it."""
    return M if M.device.type == "mps" else cast(M, wide_dtype(M))
