"""Orthogonal Procrustes: rotate A onto B."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ortholand.geometry.manifold import polar_projection, random_orthogonal


@dataclass(frozen=True)
class Procrustes:
    """``f(X) = ||X A - B||_F^2 / p`` over square X with orthonormal columns.

    The scale 1 / p makes the paper's step eta = 0.1 behave as its figure shows; without it the
    landing algorithm rides the boundary of the safe ball and never lands (see the errata page).
    """

    A: Tensor
    B: Tensor

    @classmethod
    def gaussian(cls, p: int, *, seed: int, dtype: torch.dtype = torch.float64) -> "Procrustes":
        """The paper's problem: A and B with independent standard normal entries."""
        generator = torch.Generator().manual_seed(seed)
        A, B = torch.randn(2, p, p, generator=generator, dtype=torch.float64)
        return cls(A.to(dtype), B.to(dtype))

    @classmethod
    def planted(
        cls, p: int, *, seed: int, noise: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> "Procrustes":
        """``B = Q A + noise`` for a random orthogonal Q."""
        generator = torch.Generator().manual_seed(seed)
        A, E = torch.randn(2, p, p, generator=generator, dtype=torch.float64)
        Q = random_orthogonal(p, p, seed=generator, dtype=torch.float64)
        return cls(A.to(dtype), (Q @ A + noise * E).to(dtype))

    @property
    def p(self) -> int:
        """Size of the matrices."""
        return self.A.shape[-1]

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        return (X @ self.A - self.B).square().sum((-2, -1)) / self.p

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X."""
        return 2 / self.p * (X @ self.A - self.B) @ self.A.mT

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:  # noqa: ARG002
        """Euclidean Hessian at X applied to V."""
        return 2 / self.p * V @ self.A @ self.A.mT

    def solution(self, determinant: int | None = None) -> Tensor:
        """The minimiser: the polar factor of ``B A^T``.

        Args:
            determinant: +1 or -1 for the minimiser among the matrices of that determinant, which
                is the one that an iteration started with that determinant can reach.
        """
        M = self.B @ self.A.mT
        X = polar_projection(M)
        if determinant is None or bool(torch.linalg.det(X).sign() == determinant):
            return X
        U, _, Vh = torch.linalg.svd(M)
        U[:, -1] *= -1  # give up the direction of the smallest singular value
        return U @ Vh
