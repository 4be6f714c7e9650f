"""Where batches come from: indices, lists, DataLoaders, anything that can be read repeatedly.

Iterating over a source gives each batch once with its number of terms, for f itself; its ``epoch``
gives the batches in the order of stochastic steps.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ortholand.solve.arrays import Array
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
