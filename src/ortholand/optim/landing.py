"""The numerical kernel that every landing optimizer shares: momentum, field, safe step, update."""

import math

import torch
from torch import Tensor

from ortholand.fields import Landing, landing_from_gradient, landing_from_relative
from ortholand.geometry.derivatives import relative_gradient, remove_normal
from ortholand.geometry.matrices import is_square
from ortholand.safe_step import RULES, largest_step


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


def landing(X: Tensor, B: Tensor, lam: float) -> Landing:
    """The landing field whose tangent part is the one that the generator B stands for."""
    return landing_from_relative(X, B, lam) if is_square(X) else landing_from_gradient(X, B, lam)


def landing_update(
    X: Tensor,
    B: Tensor,
    lr: float | Tensor,
    *,
    lam: float,
    eps: float,
    safe_step: str | None,
) -> tuple[Tensor, Tensor]:
    """``eta L`` with ``eta = min(lr, safe step)``, and which matrices take it.

    A matrix whose step would not be finite gets the update zero and is reported as not taken;
    its neighbours in the batch are not touched. No value leaves the device.
    """
    L, d, tangency_error = landing(X, B, lam)
    root_q = RULES[safe_step or "frobenius"](L)
    eta = torch.full_like(d, lr) if isinstance(lr, float) else torch.ones_like(d) * lr
    if safe_step is not None:
        eta = torch.minimum(eta, largest_step(root_q, d, lam, eps, tangency_error))
    taken = eta * root_q < math.inf  # false for NaN too
    update = eta[..., None, None] * L
    return torch.where(taken[..., None, None], update, 0), taken
