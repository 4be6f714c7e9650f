"""Momentum on relative gradients, for matrices of any shape without anything n x n."""

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient, remove_normal
from ortholand.geometry.matrices import is_square


def generator(X: Tensor, G: Tensor) -> Tensor:
    """What stands for the relative gradient: psi itself for square X, G for tall X.

    The relative gradient of a tall X is n x n. Any n x p matrix B gives the skew ``Skew(B X^H)``,
    so B represents it without forming it; G represents psi.
    """
    return relative_gradient(X, G) if is_square(X) else G


def accumulate(
    X: Tensor, B: Tensor, buffer: Tensor, *, momentum: float, dampening: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Momentum on generators as ``torch.optim.SGD`` has it on gradients: (direction, new buffer).

    Square: the relative gradients are accumulated, as in the paper; the buffer is skew, so
    ``A X`` is tangent wherever X has gone meanwhile. Tall: the buffer is n x p and loses its
    normal part at every step, which changes neither the direction now nor the tangency later
    (any B gives a tangent step) and keeps the past multipliers out of the present direction.
    """
    if dampening:
        # The first gradient enters whole, as in torch; a buffer of zeros is one not yet started.
        started = buffer.ne(0).any(dim=(-2, -1), keepdim=True)
        weighted = B * (1 - dampening * started.to(buffer.dtype))
    else:
        weighted = B
    total = torch.add(weighted, buffer, alpha=momentum)
    direction = torch.add(B, total, alpha=momentum) if nesterov else total
    return direction, total if is_square(X) else remove_normal(X, total)
