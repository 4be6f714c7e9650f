"""Principal component analysis: the subspace that keeps most of the variance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ortholand.geometry.manifold import random_orthogonal
from ortholand_lab.problems.base import Problem, check_tensor, drawn_in, inner


@dataclass(frozen=True, eq=False)
class PCA(Problem):
    """``f(X) = -Tr(X^H C X)`` over n x p X with orthonormal columns; C symmetric or Hermitian.

    Every orthonormal basis of the leading p-dimensional eigenspace is a minimiser, so progress is
    measured by :meth:`subspace_error`. A diagonal C may be given as the vector of its diagonal:
    the gradient then costs next to nothing, and the problem is as general as with any C, since
    methods that respect orthogonality treat both alike, up to a rotation of the start.

    >>> problem = PCA.with_gap(6, 2)
    >>> round(problem.optimum().item(), 6)  # of the eigenvalues 1, 1/2, and 1/4 to 0
    -1.5
    """

    C: Tensor  # (n, n), or (n,) for a diagonal matrix
    p: int

    def __post_init__(self) -> None:
        check_tensor("C", self.C, (1, 2), allow_complex=True)
        if self.C.ndim == 1:
            check_tensor("A diagonal C", self.C, 1, allow_complex=False)
        elif self.C.shape[0] != self.C.shape[1]:
            raise ValueError(f"C must be square, or a vector, got shape {tuple(self.C.shape)}.")
        if not 0 < self.p <= self.n:
            raise ValueError(f"PCA needs 0 < p <= n components, got p={self.p}, n={self.n}.")

    @classmethod
    def with_gap(
        cls,
        n: int,
        p: int,
        *,
        gap: float = 0.25,
        diagonal: bool = False,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float64,
    ) -> PCA:
        """Eigenvalues from 1 to 1/2 for p components, and from ``1/2 - gap`` to 0 for the others.

        Args:
            n: dimension.
            p: number of components, below n.
            gap: the gap between the two, in (0, 1/2].
            diagonal: whether C is diagonal, given as a vector; otherwise a random rotation of it.
            seed: seed of the rotation.
            dtype: type of C.
        """
        if not 0 < p < n or not 0 < gap <= 0.5:
            raise ValueError(
                f"PCA.with_gap needs 0 < p < n and a gap in (0, 1/2], got n={n}, p={p}, gap={gap}."
            )
        leading = torch.linspace(1, 0.5, p, dtype=torch.float64)
        others = torch.linspace(0.5 - gap, 0, n - p, dtype=torch.float64)
        values = torch.cat([leading, others])
        if diagonal:
            return cls(values.to(dtype), p)
        return cls.with_spectrum(values, p, seed=seed, dtype=dtype)

    @classmethod
    def with_spectrum(
        cls,
        values: Tensor,
        p: int,
        *,
        seed: int | torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> PCA:
        """``C = Q diag(values) Q^H`` for a random orthogonal (unitary) Q."""
        check_tensor("values", values, 1, allow_complex=False)
        n = len(values)
        Q = random_orthogonal(n, n, seed=seed, dtype=drawn_in(dtype))
        return cls(((Q * values.to(torch.float64)) @ Q.mH).to(dtype), p)

    @property
    def n(self) -> int:
        """Dimension of the data."""
        return self.C.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return self.n, self.p

    @property
    def data(self) -> Tensor:
        """C: X has its type and lives on its device."""
        return self.C

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        return -inner(X, self.times(X))

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X."""
        return -2 * self.times(X)

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad` from one product ``C X``."""
        CX = self.times(X)
        return -inner(X, CX), -2 * CX

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:  # noqa: ARG002
        """Euclidean Hessian at X applied to V."""
        return -2 * self.times(V)

    def times(self, X: Tensor) -> Tensor:
        """``C X``."""
        return self.C[:, None] * X if self.C.ndim == 1 else self.C @ X

    @cached_property
    def leading(self) -> Tensor:
        """Indices of the leading eigenvalues of a diagonal C; otherwise their eigenvectors."""
        if self.C.ndim == 1:
            return self.C.topk(self.p).indices
        return torch.linalg.eigh(self.C).eigenvectors[:, -self.p :].flip(-1)

    def solution(self) -> Tensor:
        """A minimiser: the leading eigenvectors."""
        if self.C.ndim == 2:
            return self.leading
        X = torch.zeros(self.n, self.p, dtype=self.C.dtype, device=self.C.device)
        X[self.leading, torch.arange(self.p, device=X.device)] = 1
        return X

    def subspace_error(self, X: Tensor) -> Tensor:
        """``(sum of sin^2)^(1/2)`` over the angles between the span of X and the solution's.

        For X of full rank, orthonormal or not: ``Tr (X^H X)^-1 X^H (I - V V^H) X``.
        """
        if self.C.ndim == 1:
            E = X.index_fill(-2, self.leading, 0)
        else:
            E = X - self.leading @ (self.leading.mH @ X)
        ratios = torch.linalg.solve(X.mH @ X, E.mH @ E)
        return ratios.diagonal(dim1=-2, dim2=-1).sum(-1).real.clamp(min=0).sqrt()
