"""Orthogonal Procrustes: rotate A onto B."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ortholand.geometry.manifold import polar_projection, random_orthogonal
from ortholand_lab.problems.base import Problem, as_generator, check_tensor, drawn_in


@dataclass(frozen=True, eq=False)
class Procrustes(Problem):
    """``f(X) = ||X A - B||_F^2 / p`` over square X with orthonormal columns; real or complex.

    A and B have p columns, in the paper as many as rows. The factor 1 / p makes its step eta = 0.1
    behave as its figure shows; without it the landing algorithm stays at the boundary of the safe
    ball and never lands (see the errata page).

    >>> problem = Procrustes.planted(3, seed=0)
    >>> bool(problem.optimum() < 1e-20)
    True
    """

    A: Tensor
    B: Tensor

    def __post_init__(self) -> None:
        check_tensor("A", self.A, 2, allow_complex=True)
        check_tensor("B", self.B, 2, allow_complex=True)
        if self.A.shape != self.B.shape or self.A.dtype != self.B.dtype:
            raise ValueError(
                "A and B must have one shape and type, got "
                f"{tuple(self.A.shape)} of {self.A.dtype} and {tuple(self.B.shape)} of "
                f"{self.B.dtype}."
            )

    @classmethod
    def gaussian(
        cls, p: int, *, seed: int | torch.Generator, dtype: torch.dtype = torch.float64
    ) -> Procrustes:
        """The paper's problem: A and B with independent standard normal entries."""
        generator = as_generator(seed)
        A, B = torch.randn(2, p, p, generator=generator, dtype=drawn_in(dtype))
        return cls(A.to(dtype), B.to(dtype))

    @classmethod
    def planted(
        cls,
        p: int,
        *,
        columns: int | None = None,
        seed: int | torch.Generator,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> Procrustes:
        """``B = Q A + noise`` for a random orthogonal (unitary) Q.

        Args:
            p: size of Q.
            columns: columns of A, p by default. With many more the problem is well conditioned.
            seed: seed of A, Q and the noise.
            noise: its strength.
            dtype: real or complex.
        """
        generator = as_generator(seed)
        A, E = torch.randn(2, p, columns or p, generator=generator, dtype=drawn_in(dtype))
        Q = random_orthogonal(p, p, seed=generator, dtype=drawn_in(dtype))
        return cls(A.to(dtype), (Q @ A + noise * E).to(dtype))

    @property
    def p(self) -> int:
        """Number of columns of A and B."""
        return self.A.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return self.A.shape[-2], self.A.shape[-2]

    @property
    def data(self) -> Tensor:
        """A: X has its type and lives on its device."""
        return self.A

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        return self._cost(X @ self.A - self.B)

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X."""
        return 2 / self.p * (X @ self.A - self.B) @ self.A.mH

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad` from one residual."""
        E = X @ self.A - self.B
        return self._cost(E), 2 / self.p * E @ self.A.mH

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:  # noqa: ARG002
        """Euclidean Hessian at X applied to V."""
        return V @ self.curvature

    @cached_property
    def curvature(self) -> Tensor:
        """``2 A A^H / p``, by which the Hessian multiplies from the right."""
        return 2 / self.p * self.A @ self.A.mH

    def solution(self, determinant: int | None = None) -> Tensor:
        """The minimiser: the polar factor of ``B A^H``.

        Args:
            determinant: +1 or -1 for the minimiser among the real matrices of that determinant,
                which is the one that an iteration started with that determinant can reach.
        """
        if determinant is not None and self.A.is_complex():
            raise ValueError(
                f"determinant={determinant} needs real data: unitary matrices are connected, and "
                "an iteration can reach all of them. Leave it out."
            )
        M = self.B @ self.A.mH
        X = polar_projection(M)
        if determinant is None or bool(torch.linalg.det(X).sign() == determinant):
            return X
        U, _, Vh = torch.linalg.svd(M)
        U[:, -1] *= -1  # give up the direction of the smallest singular value
        return U @ Vh

    def _cost(self, E: Tensor) -> Tensor:
        squares = (E.conj() * E).real if E.is_complex() else E.square()
        return squares.sum((-2, -1)) / self.p
