"""Means of many terms: f and its gradient by batches, and what SAGA remembers of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.derivatives import multiplier, relative_gradient
from ortholand.geometry.matrices import is_square
from ortholand.solve.arrays import gram_product, identity, minus_product
from ortholand.solve.batches import Source, Stream
from ortholand.solve.objective import Objective, power_of_two_near
from ortholand.solve.variables import Variables


class GradientTable:
    """The last gradient of every batch, and their mean."""

    def __init__(self, n_batches: int, like: Tensor) -> None:
        self.gradients = like.new_zeros(n_batches, *like.shape)
        self.mean = torch.zeros_like(like)
        self.weights = torch.ones(n_batches, dtype=torch.float64)

    def estimate(self, k: int, G: Tensor) -> Tensor:
        """SAGA's estimate of the full gradient from batch k's; remembers G.

        Unbiased if batches are drawn with probabilities ``weights``.
        """
        change = G - self.gradients[k]
        estimate = self.mean + change
        self.mean = torch.add(self.mean, change, alpha=float(self.weights[k]))
        self.gradients[k] = G
        return estimate


def generator(X: Tensor, G: Tensor) -> Tensor:
    """A generator of the relative gradient: psi for square X, ``G - X K`` for tall X.

    Multipliers do not change it: ``tr(X^H X C)`` is constant on the manifold, but its gradient
    ``X C``, kept while X moves, would come to look like a gradient along the manifold.
    """
    if is_square(X):
        return relative_gradient(X, G)
    K = multiplier(gram_product(X, X) - identity(X), gram_product(X, G))
    return minus_product(G, X, K)


class FiniteSum(Objective):
    """The mean of the terms; a full evaluation is one pass over all batches."""

    def __init__(
        self,
        fun: Callable[..., Any],
        variables: Variables,
        source: Source,
        *,
        jac: Callable[..., Any] | bool | None = None,
        remember: bool = False,
    ) -> None:
        super().__init__(fun, variables, jac=jac)
        self.source, self.n_batches = source, 0
        self.table: GradientTable | None = None
        if remember and not isinstance(source, Stream):
            self.table = GradientTable(len(source), variables.start)

    def batch(self, X: Tensor, batch: Any) -> tuple[float, Tensor]:
        self.args = (batch,)
        value, G = self._value_and_gradient(X)
        return (value, G) if self.scale == 1 else (value / self.scale, G / self.scale)

    def value_and_gradient(self, X: Tensor) -> tuple[float, Tensor]:
        """Cost and gradient of all terms; the table, if any, then holds those at this X."""
        value, G = self.mean(X)
        if self.unit is None:  # chosen by the first gradient; it is nearly always 1
            self.unit = power_of_two_near(G)
            return (value, G) if self.unit == 1 else self.value_and_gradient(X)
        return value, G

    def mean(self, X: Tensor) -> tuple[float, Tensor]:
        """The mean of what :meth:`batch` returns, with the table filled."""
        sizes, value = [], 0.0
        total: Any = 0.0
        for k, (size, batch) in enumerate(self.source):
            v, g = self.batch(X, batch)
            sizes.append(size)
            value += size * v
            total = total + size * g
            if self.table is not None:
                self.table.gradients[k] = self.generator(X, g)
        n = sum(sizes)
        if n == 0:
            raise ValueError("data must have at least one batch with a term in it, got none.")
        self.n_batches = len(sizes)
        value, mean = value / n, total / n
        if self.table is not None:
            self.table.mean = self.generator(X, mean)  # it is linear in G
            self.table.weights = torch.tensor(sizes, dtype=torch.float64) / n
        return value, mean

    def generator(self, X: Tensor, G: Tensor) -> Tensor:
        return generator(X, G)
