"""Exact means and scatter of a stream, updated batch by batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Count, mean and scatter of all rows so far."""

    count: int
    mean: Tensor  # (n,)
    scatter: Tensor  # of deviations from the mean: (n,) sums of squares, or the (n, n) matrix

    @classmethod
    def of_nothing(cls, n: int, *, matrix: bool) -> Moments:
        """The moments before the first row."""
        shape = (n, n) if matrix else (n,)
        zero = torch.zeros(shape, dtype=torch.float64)
        return cls(0, torch.zeros(n, dtype=torch.float64), zero)

    def merged(self, deviations: Tensor, mean: Tensor) -> Moments:
        """The moments including a batch, given by its mean and its rows' deviations from it."""
        count = self.count + len(deviations)
        shift = mean - self.mean
        pairs = self.count * len(deviations) / count
        if self.scatter.ndim == 1:
            new = deviations.square().sum(0) + pairs * shift.square()
        else:
            new = deviations.mT @ deviations + pairs * torch.outer(shift, shift)
        mean = self.mean + len(deviations) / count * shift
        return Moments(count, mean, self.scatter + new)
