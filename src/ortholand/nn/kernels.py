"""Kernels of orthogonal convolutions, composed from orthonormal factors.

For a projector ``Q = U U^T`` the convolution with the two taps ``Q`` and ``I - Q`` is orthogonal:
its symbol ``Q + (I - Q) z`` is unitary wherever ``|z| = 1``. So is a product of such convolutions
along both axes (BCOP, Li et al. 2019), and each adds one to the size of the kernel. An orthonormal
matrix after them changes the number of channels. If its columns are the pixels of ``s x s``
patches, it also divides the size of the image by s (AOC, Boissin et al. 2025).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ROUNDED = 1 + 1e-9  # Norms are computed in float64, whose errors are far below this.
VERTICAL, HORIZONTAL = 2, 3  # dimensions of a kernel (groups, rows, height, width, channels)


class Factors(NamedTuple):
    """The orthonormal factors of a kernel, from the last to the first that an image meets.

    ``mix``: ``(groups, rows, m * stride**2)``; its columns are the pixels of patches.
    ``projectors``: the U of each projector, ``(degree, 2, groups, m, m // 2)``, for both axes.
    ``lift``: the transpose of the first factor, ``(groups, channels, m)``.
    """

    mix: Tensor
    projectors: Tensor | None
    lift: Tensor | None


def compose(factors: Factors, stride: int) -> Tensor:
    """The kernel ``(groups, rows, height, width, channels)`` of factors."""
    mix, projectors, lift = factors
    kernel = mix.unflatten(-1, (-1, stride, stride)).movedim(2, -1)
    if projectors is not None:
        vertical, horizontal = _coefficients(projectors @ projectors.mT).unbind(1)
        kernel = _convolve(_convolve(kernel, horizontal, HORIZONTAL), vertical, VERTICAL)
    return kernel if lift is None else _times(kernel, lift.mT)


def _coefficients(Q: Tensor) -> Tensor:
    """All coefficients but the last of ``(Q_1 + (I - Q_1) z) ... (Q_d + (I - Q_d) z)``.

    They add up to I, so that nothing needs to be multiplied by the last one.
    """
    coefficients = Q[:1]
    for factor in Q[1:]:
        products = coefficients @ factor
        last = factor - products.sum(0, keepdim=True)
        moved = torch.cat([torch.zeros_like(last), coefficients - products])
        coefficients = torch.cat([products, last]) + moved
    return coefficients


def _convolve(kernel: Tensor, coefficients: Tensor, axis: int) -> Tensor:
    """The kernel after a convolution along one axis with these coefficients and the last one."""
    degree, side_by_side = len(coefficients), coefficients.permute(1, 2, 0, 3).flatten(2)
    products = _times(kernel, side_by_side).unflatten(-1, (degree, -1))
    taps = [*products.unbind(-2), kernel - products.sum(-2)]
    if kernel.shape[axis] == 1:
        return torch.cat(taps, axis)
    after = (0, 0) * (kernel.ndim - 1 - axis)
    moved = [functional.pad(tap, (*after, by, degree - by)) for by, tap in enumerate(taps)]
    return torch.stack(moved).sum(0)


def _times(kernel: Tensor, M: Tensor) -> Tensor:
    """The kernel with its channels multiplied by one matrix for each group."""
    return (kernel.flatten(1, 3) @ M).view(*kernel.shape[:-1], -1)


def norm_bound(factors: Factors) -> float:
    """A bound of the norm of the convolution that these factors have if nothing is rounded.

    An eigenvalue ``1 + d`` of ``U U^T`` gives the symbol ``Q + (I - Q) z`` the norm ``1 + 2 d``.
    """
    mix, projectors, lift = factors
    bound = _excess(mix).add(1).sqrt()
    if lift is not None:
        bound = bound * _excess(lift).add(1).sqrt()
    if projectors is not None:
        bound = bound * (1 + 2 * _excess(projectors)).prod(0).prod(0)
    return float(bound.max()) * ROUNDED


def _excess(X: Tensor) -> Tensor:
    """By how much the largest squared singular value of each matrix exceeds 1, at least 0."""
    return (torch.linalg.matrix_norm(X, 2).square() - 1).clamp(min=0)
