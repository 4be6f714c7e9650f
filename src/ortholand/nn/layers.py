"""Layers of 1-Lipschitz networks around the convolutions."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ortholand.parameters import orthogonal


class OrthogonalLinear(nn.Linear):
    """A linear layer with orthonormal rows or columns, marked as orthogonal.

    >>> layer = OrthogonalLinear(8, 3, bias=False)
    >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(3), atol=1e-5)
    True
    """

    def reset_parameters(self) -> None:
        """Draw the weight by torch's own random numbers, and set the bias to zero."""
        with torch.no_grad():
            nn.init.normal_(self.weight)
            orthogonal(self, view="matrix" if self.weight.ndim == 2 else "kernel")
            if self.bias is not None:
                nn.init.zeros_(self.bias)


class UnitRowLinear(OrthogonalLinear):
    """A last layer whose rows have norm 1: each score is 1-Lipschitz, whatever the others are.

    The weight is a stack of rows ``(out_features, 1, in_features)``, each an orthonormal matrix.
    With ``lipschitz_bound(model, margins=True)`` it is certified by the distances of its rows.

    >>> bool((UnitRowLinear(8, 3).weight.norm(dim=-1) - 1).abs().max() < 1e-5)
    True
    """

    def reset_parameters(self) -> None:
        """Draw the rows by torch's own random numbers, and set the bias to zero."""
        if self.weight.ndim == 2:  # as nn.Linear made it
            self.weight = nn.Parameter(self.weight.detach().unsqueeze(1))
        super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        """The scores of inputs ``(..., in_features)``."""
        return functional.linear(x, self.weight.squeeze(1), self.bias)


class MaxMin(nn.Module):
    """The larger and the smaller of each pair of channels (GroupSort of 2).

    It only permutes numbers, so it keeps norms, and gradients too. Channel i is paired with channel
    ``i + channels / 2``.

    Args:
        dim: the dimension of the channels, 1 for images in a batch.

    >>> MaxMin()(torch.tensor([[1.0, 2.0, 3.0, 0.0]]))
    tensor([[3., 2., 1., 0.]])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Sort the pairs."""
        if x.shape[self.dim] % 2:
            raise ValueError(
                f"{self} pairs channels, so their number must be even, but the input is "
                f"{tuple(x.shape)}. Give the layer before an even number of outputs."
            )
        return sort_pairs(x, self.dim)


def sort_pairs(x: Tensor, dim: int) -> Tensor:
    """The larger number of each pair of channels, then the smaller."""
    first, second = x.chunk(2, dim)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim)
