"""Different methods for matrices of different sizes, whatever else is in their batch."""

from collections.abc import Callable

import torch
from torch import Tensor

Way = Callable[..., Tensor]


def by_size(
    size: Tensor, branches: list[tuple[float, Way]], otherwise: Way, *batches: Tensor
) -> Tensor:
    """Each matrix by the first method whose limit exceeds its size; NaN sizes by the last.

    Reads the sizes on the host, as torch's own ``matrix_exp`` does.
    """
    chosen = {next((f for limit, f in branches if s < limit), otherwise) for s in extremes(size)}
    if len(chosen) == 1:
        return chosen.pop()(*batches)
    result = torch.empty_like(batches[0])
    left = torch.ones_like(size, dtype=torch.bool)
    for limit, function in [*branches, (None, otherwise)]:
        now = left if limit is None else left & (size < limit)
        result[now] = function(*(M[now] for M in batches))
        left = left & ~now
    return result


def extremes(size: Tensor) -> list[float]:
    """The smallest and largest size, read on the host."""
    if size.numel() < 2:
        return size.flatten().tolist() or [0.0]
    return torch.stack(torch.aminmax(size)).tolist()
