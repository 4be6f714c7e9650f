"""Where batches come from: indices, lists, DataLoaders, anything that can be read repeatedly.

Iterating over a source gives each batch once with its number of terms, for f itself; its ``epoch``
gives the batches in the order of stochastic steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.derivatives import multiplier, relative_gradient
from ortholand.geometry.matrices import is_square
from ortholand.solve.arrays import Array, gram_product, identity, minus_product
from ortholand.solve.objective import Objective, power_of_two_near
from ortholand.solve.options import is_count
from ortholand.solve.variables import Variables

DEFAULT_BATCHES = 100  # if the batch size is left open


class Batches:
    """Batches that can be read by number."""

    def __init__(self, batches: Sequence[Any], shuffle: bool, random: torch.Generator) -> None:
        self.batches, self.shuffle, self.random = batches, shuffle, random

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, k: int) -> Any:
        return self.batches[k]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((_size(batch), batch) for batch in self.batches)

    def epoch(self) -> Iterator[Any]:
        n = len(self.batches)
        order = torch.randperm(n, generator=self.random).tolist() if self.shuffle else range(n)
        return (self.batches[k] for k in order)


class Indices(Batches):
    """Batches of indices."""

    def __init__(
        self,
        n_terms: int,
        batch_size: int,
        shuffle: bool,
        random: torch.Generator,
        variables: Variables,
    ) -> None:
        self.n_terms, self.batch_size, self.variables = n_terms, batch_size, variables
        self.shuffle, self.random = shuffle, random
        super().__init__(self._split(), shuffle, random)

    def _split(self) -> list[Array]:
        order = torch.arange(self.n_terms)
        if self.shuffle:
            order = torch.randperm(self.n_terms, generator=self.random)
        device = self.variables.start.device
        blocks = order.split(self.batch_size)
        return [block.numpy() if self.variables.numpy else block.to(device) for block in blocks]

    def epoch(self) -> Iterator[Array]:
        """New batches of reshuffled terms: stochastic steps need no fixed ones."""
        return iter(self._split())


class Stream:
    """Batches as an iterable gives them, in its own order."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((_size(batch), batch) for batch in self.data)

    def epoch(self) -> Iterator[Any]:
        return iter(self.data)


class LoaderBatches(Sequence[Any]):
    """The batches of a DataLoader that does not shuffle, by number, without keeping them."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.keys = _fixed_keys(loader)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, k: Any) -> Any:
        dataset, key = self.loader.dataset, self.keys[k]
        together = self.loader.batch_sampler is not None
        return self.loader.collate_fn([dataset[i] for i in key] if together else dataset[key])


Source: TypeAlias = Batches | Stream


def open_source(
    n_terms: int | None,
    data: Iterable[Any] | None,
    batch_size: int | None,
    method: str,
    shuffle: bool,
    random: torch.Generator,
    variables: Variables,
) -> Source:
    if (n_terms is None) == (data is None):
        raise ValueError(
            "Give either n_terms, for fun(X, indices), or data, for fun(X, batch); got "
            f"{'neither' if data is None else 'both'}."
        )
    if data is not None:
        if batch_size is not None:
            raise ValueError(
                f"data has its own batches, but batch_size={batch_size!r} was given too. Leave it "
                "out, and set it where data is made."
            )
        return _data_source(data, method, shuffle, random)
    if n_terms is None or not is_count(n_terms):
        raise ValueError(f"n_terms must be a whole number >= 1, got {n_terms!r}.")
    size = math.ceil(n_terms / DEFAULT_BATCHES) if batch_size is None else batch_size
    if not is_count(size) or size > n_terms:
        raise ValueError(
            f"batch_size must be a whole number from 1 to n_terms={n_terms}, got {size!r}."
        )
    return Indices(n_terms, size, shuffle, random, variables)


def _data_source(
    data: Iterable[Any], method: str, shuffle: bool, random: torch.Generator
) -> Batches | Stream:
    from torch.utils.data import DataLoader, IterableDataset  # here: not all need it

    if not isinstance(data, Iterable) or isinstance(data, (Tensor, np.ndarray, Mapping, str)):
        raise TypeError(
            f"data must be a list, a DataLoader or another iterable of batches, got "
            f"{type(data).__name__}. Example: data=list(Z.split(32))."
        )
    if isinstance(data, Iterator):
        raise TypeError(
            f"data must be something that can be read repeatedly, got a one-time "
            f"{type(data).__name__}. Keep the batches: data=list(data)."
        )
    if isinstance(data, Sequence):
        return Batches(data, shuffle, random)
    if method == "sgd":
        return Stream(data)
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return Batches(LoaderBatches(data), shuffle, random)
    return Batches(list(data), shuffle, random)


def _fixed_keys(loader: Any) -> list[Any]:
    """The keys of a DataLoader's batches; raise unless they stay the same."""
    from torch.utils.data import RandomSampler

    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    inner = getattr(sampler, "sampler", sampler)
    keys = [] if isinstance(inner, RandomSampler) else list(sampler)
    if isinstance(inner, RandomSampler) or keys != list(sampler):
        raise ValueError(
            "method='saga' remembers the gradient of each batch, so batches must stay the same, "
            f"but this DataLoader shuffles (its sampler is a {type(inner).__name__}). Make it with "
            "shuffle=False: the order of batches is random anyway. Or use method='sgd'."
        )
    return keys


def _size(batch: Any) -> int:
    """Number of terms in a batch: rows of the first tensor or array in it; 1 if there is none."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return _size(batch[0]) if isinstance(batch, (list, tuple)) and batch else 1


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
