"""Joint diagonalisation: one rotation that makes many matrices as diagonal as possible."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ortholand.geometry.manifold import random_orthogonal
from ortholand.geometry.matrices import real_dtype, sym
from ortholand.problems.base import (
    AtLastPoint,
    Problem,
    as_generator,
    check_hermitian,
    check_tensor,
    drawn_in,
)


@dataclass(frozen=True, eq=False)
class JointDiagonalization(Problem):
    """``f(X) = sum_k ||off(X^H C_k X)||_F^2`` over square X with orthonormal columns.

    The ``C_k`` are symmetric or Hermitian, and off(M) is M without its diagonal. Permuting the
    columns of X or changing their signs (phases) does not change the cost. If the C_k commute,
    the smallest cost is 0, at their common eigenvectors.

    Attributes:
        C: the matrices, ``(K, n, n)``.
        truth: the X from which the data were made, if any; :func:`amari_distance` of
            ``X^H`` and this measures how close X comes.
        exact: whether ``truth`` is a minimiser, that is, whether there is no noise.

    >>> problem = JointDiagonalization.planted(4, 10, seed=0)
    >>> bool(problem.optimum() < 1e-25)
    True
    """

    C: Tensor
    truth: Tensor | None = None
    exact: bool = False
    _last: AtLastPoint = field(default_factory=AtLastPoint, init=False, repr=False)

    def __post_init__(self) -> None:
        check_tensor("C", self.C, 3, allow_complex=True)
        check_hermitian("C", self.C)

    @classmethod
    def planted(
        cls,
        n: int,
        count: int,
        *,
        noise: float = 0.0,
        seed: int | torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> JointDiagonalization:
        """``C_k = Q D_k Q^H + noise E_k``: normal diagonals D_k, symmetric normal noise E_k.

        Args:
            n: size of the matrices.
            count: number of matrices.
            noise: its strength. With 0 the smallest cost is 0, at Q.
            seed: seed of Q, the D_k and the E_k.
            dtype: real or complex.
        """
        generator = as_generator(seed)
        wide = drawn_in(dtype)
        D = torch.randn(count, 1, n, generator=generator, dtype=real_dtype(wide))
        E = torch.randn(count, n, n, generator=generator, dtype=wide)
        Q = random_orthogonal(n, n, seed=generator, dtype=wide)
        C = sym((Q * D) @ Q.mH + noise * E)
        return cls(C.to(dtype), Q.to(dtype), exact=noise == 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return self.C.shape[-1], self.C.shape[-1]

    @property
    def data(self) -> Tensor:
        """C: X has its type and lives on its device."""
        return self.C

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        return _squares(self._rotated(X)[1])

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X: ``4 sum_k C_k X off(X^H C_k X)``."""
        CX, M = self._rotated(X)
        return 4 * (CX @ M).sum(-3)

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad` from the same products ``X^H C_k X``."""
        CX, M = self._rotated(X)
        return _squares(M), 4 * (CX @ M).sum(-3)

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        """Euclidean Hessian at X applied to V."""
        CX, M = self._last.get(X, self._rotated)
        V = V.unsqueeze(-3)
        dM = 2 * sym(CX.mH @ V)  # of V^H C X + X^H C V, since C is Hermitian
        return 4 * (self.C @ V @ M + CX @ without_diagonal(dM)).sum(-3)

    def solution(self) -> Tensor:
        """The X from which the data were made, if without noise; otherwise raises."""
        if self.truth is None or not self.exact:
            raise ValueError(
                "The minimiser is known only for matrices made jointly "
                "diagonalisable without noise: JointDiagonalization.planted(..., noise=0)."
            )
        return self.truth

    def _rotated(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """``C_k X`` and ``off(X^H C_k X)``, ``(..., K, n, n)`` each."""
        X = X.unsqueeze(-3)
        CX = self.C @ X
        return CX, without_diagonal(X.mH @ CX)


def without_diagonal(M: Tensor) -> Tensor:
    """``off(M)``: each matrix with zeros on its diagonal."""
    return M - torch.diag_embed(M.diagonal(dim1=-2, dim2=-1))


def _squares(M: Tensor) -> Tensor:
    squares = (M.conj() * M).real if M.is_complex() else M.square()
    return squares.sum((-3, -2, -1))
