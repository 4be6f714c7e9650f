"""Layers whose weights are rotated in every forward pass, so that rotations can be learnt."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ortholand_lab.rotations.quantization import Quantization


def turned(x: Tensor, R: Tensor | None) -> Tensor:
    """``x R`` for each row of x; if rows are longer than R, for each of their parts."""
    if R is None:
        return x
    return (x.unflatten(-1, (-1, R.shape[-1])) @ R).flatten(-2)


class RotatedLinear(nn.Module):
    """A frozen linear layer that reads rotated inputs and writes rotated outputs.

    ``reads`` and ``writes`` name the rotations, which belong to another module.
    """

    def __init__(
        self,
        layer: nn.Linear,
        rotations: nn.Module,
        reads: str | None,
        writes: str | None,
        quantization: Quantization,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.holder = (rotations,)  # in a tuple: not a part of this module
        self.reads, self.writes = reads, writes
        self.quantization = quantization

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        W, bias = self.turned_weights(*map(self._rotation, (self.reads, self.writes)))
        q = self.quantization
        return linear(q.activation(x), q.weight(W), bias)

    def turned_weights(
        self, reads: Tensor | None, writes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, in the type of the rotations."""
        like = writes if reads is None else reads
        W, bias = self.layer.weight, self.layer.bias
        if like is not None:
            W, bias = W.to(like.dtype), None if bias is None else bias.to(like.dtype)
        W = turned(turned(W, reads).mT, writes).mT
        return W, None if bias is None else turned(bias, writes)

    def _rotation(self, name: str | None) -> Tensor | None:
        return None if name is None else self.holder[0].get_parameter(name).to(self.layer.weight)


class RotatedEmbedding(nn.Module):
    """A frozen embedding whose vectors are rotated."""

    def __init__(self, layer: nn.Embedding, rotations: nn.Module, writes: str) -> None:
        super().__init__()
        self.layer = layer
        self.holder = (rotations,)
        self.writes = writes

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors of tokens."""
        vectors = self.layer(tokens)
        return turned(vectors, self.holder[0].get_parameter(self.writes).to(vectors))

    @property
    def weight(self) -> Tensor:
        """The weight without rotation, since models read its type."""
        return self.layer.weight


@torch.no_grad()
def scale_inputs_(layer: nn.Linear, weight: Tensor) -> None:
    """Fuse the weight of the preceding norm into a layer."""
    layer.weight.copy_((layer.weight.double() * weight.double()).to(layer.weight.dtype))
