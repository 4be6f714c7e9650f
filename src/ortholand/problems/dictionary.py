"""Orthogonal dictionary learning: the rotation in which the data are sparsest."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ortholand.geometry.manifold import random_orthogonal
from ortholand.problems.base import (
    AtLastPoint,
    Problem,
    as_generator,
    check_balanced_minimum,
    check_tensor,
    draw_balanced,
)


@dataclass(frozen=True, eq=False)
class Dictionary(Problem):
    """``f(X) = -||X Y||_4^4 / (4 samples)`` over square X with orthonormal rows and columns.

    Among rotations of the data the sparsest has the largest sum of fourth powers (Zhai et al.,
    2020). If ``Y = D S`` with an orthogonal dictionary D and sparse, independent codes S, the
    minimisers are ``D^T`` with its rows in any order and with any signs, up to sampling error.

    Attributes:
        Y: the data, ``(n, samples)``, real.
        truth: D, if the data were made from one.
        exact: whether ``D^T`` is stationary up to rounding, not only up to sampling error.

    >>> problem = Dictionary.planted(4, 400, seed=0)
    >>> problem.recovery_error(problem.truth.mT).item() < 1e-12
    True
    """

    Y: Tensor
    truth: Tensor | None = None
    exact: bool = False
    _last: AtLastPoint = field(default_factory=AtLastPoint, init=False, repr=False)

    def __post_init__(self) -> None:
        check_tensor("Y", self.Y, 2, allow_complex=False)

    @classmethod
    def planted(
        cls,
        n: int,
        samples: int,
        *,
        density: float = 0.2,
        balanced: bool = False,
        seed: int | torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> Dictionary:
        """``Y = D S``: a random orthogonal D, and codes that are 0 or standard normal.

        Args:
            n: size of the dictionary.
            samples: the number of samples.
            density: probability that a code is not 0, in (0, 1).
            balanced: repeat fewer draws of the codes with signs that cancel their odd moments.
                Then ``D^T`` is a minimiser up to rounding (too few samples for that raise an
                error), and :meth:`solution` returns it. Otherwise the minimiser is off by the
                sampling error, about ``samples ** -0.5``.
            seed: seed of the dictionary and the codes.
            dtype: type of Y.
        """
        if not 0 < density < 1:
            raise ValueError(f"density must be in (0, 1), got {density}; 0.2 is usual.")
        generator = as_generator(seed)

        def draw(count: int) -> Tensor:
            chances = torch.full((n, count), density, dtype=torch.float64)
            codes = torch.randn(n, count, generator=generator, dtype=torch.float64)
            return codes * torch.bernoulli(chances, generator=generator)

        S = draw_balanced(draw, n, samples, balanced)
        if balanced:
            check_balanced_minimum(-(S**3), -3 * S**2, S)
        D = random_orthogonal(n, n, seed=generator, dtype=torch.float64)
        return cls((D @ S).to(dtype), D.to(dtype), exact=balanced)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.Y.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return len(self.Y), len(self.Y)

    @property
    def data(self) -> Tensor:
        """Y: X has its type and lives on its device."""
        return self.Y

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        return (X @ self.Y).square().square().sum((-2, -1)) / (-4 * self.samples)

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X: ``-(X Y)^3 Y^T / samples``, the cube of each entry."""
        return self.fun_and_grad(X)[1]

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad` from one product ``X Y``."""
        S = X @ self.Y
        squares = S * S
        cost = (squares * squares).sum((-2, -1)) / (-4 * self.samples)
        return cost, (squares * S) @ self.Y.mT / -self.samples

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        """Euclidean Hessian at X applied to V: ``-3 ((X Y)^2 * (V Y)) Y^T / samples``."""
        (squares,) = self._last.get(X, self._squared_codes)
        return (squares * (V @ self.Y)) @ self.Y.mT * (-3 / self.samples)

    def minibatch(self, index: Tensor | slice) -> Dictionary:
        """The cost of some of the samples."""
        return Dictionary(self.Y[:, index], self.truth)

    def solution(self) -> Tensor:
        """``D^T``, if it is stationary up to rounding; otherwise an error.

        It is checked to be a strict local minimiser, and trusted to be the global one, as theory
        says for many samples. With 200 or more independent draws no solver has found a
        lower point; with 100 draws of 10 sources one did, in a few runs out of a hundred.
        """
        if self.truth is None or not self.exact:
            raise ValueError(
                "The minimiser is known only for data made with balanced=True: "
                "Dictionary.planted(..., balanced=True). For other planted data `truth` is the "
                "dictionary, whose transpose is off by the sampling error."
            )
        return self.truth.mT

    def recovery_error(self, X: Tensor) -> Tensor:
        """``1 - ||X D||_4^4 / n``: from 0, if X is D^T up to order and signs, to below 1."""
        if self.truth is None:
            raise ValueError("recovery_error needs the true dictionary: give it as truth.")
        return 1 - (X @ self.truth).square().square().sum((-2, -1)) / len(self.truth)

    def _squared_codes(self, X: Tensor) -> tuple[Tensor]:
        return ((X @ self.Y).square(),)
