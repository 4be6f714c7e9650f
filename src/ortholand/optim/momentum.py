"""Momentum and moments of relative gradients, for matrices of any shape; nothing n x n."""

import math

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
    B: Tensor, buffer: Tensor, *, momentum: float, dampening: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Momentum as ``torch.optim.SGD`` has it, per matrix: (direction, new buffer)."""
    if dampening:
        # The first gradient enters whole, as in torch; a buffer of zeros is one not yet started.
        started = buffer.ne(0).any(dim=(-2, -1), keepdim=True)
        weighted = B * (1 - dampening * started.to(buffer.dtype))
    else:
        weighted = B
    total = torch.add(weighted, buffer, alpha=momentum)
    return torch.add(B, total, alpha=momentum) if nesterov else total, total


def transport(X: Tensor, buffer: Tensor) -> Tensor:
    """The buffer as it is kept for the next step.

    Square: the relative gradients are accumulated, as in the paper, and stay as they are; the
    buffer is skew, so ``A X`` is tangent wherever X will have gone. Tall: the buffer loses its
    normal part, which changes neither the direction now nor the tangency later (any B gives a
    tangent step) and keeps past multipliers out of later directions.
    """
    return buffer if is_square(X) else remove_normal(X, buffer)


def mean_square(norm: Tensor, p: int) -> Tensor:
    """Mean of the squared norms of p columns, from the norm of all; bounded against overflow.

    A bound that is too small only makes the direction longer, and the safe step takes care of it.
    """
    return (norm / math.sqrt(p)).clamp(max=1e18).square()


def one_minus_power(beta: float, step: Tensor) -> Tensor:
    """``1 - beta^step``, to full precision also where the power is almost 1."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)
