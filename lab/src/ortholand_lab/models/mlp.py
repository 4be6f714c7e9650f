"""Perceptrons: the tanh network of the paper's distillation experiment, and one with ReLU."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from ortholand.geometry import random_orthogonal
from ortholand_lab.models.seeding import seeded


class TanhMLP(nn.Module):
    """``x <- tanh(W x + b)``, repeated, with square orthogonal W.

    Weights are Haar-distributed and biases standard normal.

    Args:
        p: width, also of input and output.
        depth: number of layers.
        seed: seed of weights and biases.
        special: whether weights have determinant +1, as ``exp(A)`` with skew A does.

    >>> import torch
    >>> model = TanhMLP(p=5, depth=2, seed=0)
    >>> model(torch.zeros(3, 5)).shape
    torch.Size([3, 5])
    >>> [name for name, _ in model.named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    """

    def __init__(self, p: int = 100, depth: int = 10, *, seed: int, special: bool = False) -> None:
        super().__init__()
        with seeded(seed):  # torch's own start, replaced below, must not use the global state
            layers = [nn.Linear(p, p) for _ in range(depth)]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in layers:
                W = random_orthogonal(p, p, seed=generator, special=special, device="cpu")
                layer.weight.copy_(W)
                layer.bias.copy_(torch.randn(p, generator=generator))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs for a batch of inputs ``(..., p)``."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def relu_mlp(*widths: int, seed: int) -> nn.Sequential:
    """A perceptron without biases, with ReLU between layers and torch's usual start.

    >>> [tuple(p.shape) for p in relu_mlp(6, 4, 2, seed=0).parameters()]
    [(4, 6), (2, 4)]
    """
    with seeded(seed):
        layers = [nn.Linear(m, n, bias=False) for m, n in pairwise(widths)]
    parts = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*parts[:-1])
