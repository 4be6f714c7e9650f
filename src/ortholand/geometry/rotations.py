"""From skew matrices to rotations: the exponential and the Cayley map.

Both are ``I + a A + b A^2`` for real matrices of size 2 and 3 (Rodrigues' formula), where batched
linear algebra on a million 3 x 3 kernels takes seconds. All are functions of A's skew part.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.geometry.exponential import exponential_minus_identity
from ortholand.geometry.matrices import identity_like, skew

# Functions of t, the square of the angle: the pair a(t), b(t) in I + a A + b A^2.
Coefficients = Callable[[Tensor], tuple[Tensor, Tensor]]


def skew_exponential(A: Tensor) -> Tensor:
    """``exp(Skew(A))`` of each matrix ``(..., n, n)``: orthogonal (unitary) up to rounding.

    >>> import torch
    >>> skew_exponential(torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]])).round()
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """
    return identity_like(A) + skew_exponential_minus_identity(A)


def skew_exponential_minus_identity(A: Tensor) -> Tensor:
    """``exp(Skew(A)) - I``, to the relative accuracy of A, however small A is."""
    if has_closed_form(A):
        return _closed_form(A, _exponential_coefficients)
    return exponential_minus_identity(skew(A), is_skew=True)


def skew_cayley(A: Tensor) -> Tensor:
    """``(I - S/2)^-1 (I + S/2)`` of each matrix's skew part S: orthogonal (unitary)."""
    if has_closed_form(A):
        return identity_like(A) + skew_cayley_minus_identity(A)
    return cayley(skew(A))


def cayley(A: Tensor) -> Tensor:
    """``(I - A/2)^-1 (I + A/2)`` of any square matrices."""
    identity, half = identity_like(A), A / 2
    return torch.linalg.solve(identity - half, identity + half)


def skew_cayley_minus_identity(A: Tensor) -> Tensor:
    """:func:`skew_cayley` minus the identity, if there is a closed form."""
    return _closed_form(A, _cayley_coefficients)


def has_closed_form(A: Tensor) -> bool:
    """Whether these matrices are rotated by formulas: real ones up to 3 x 3, and complex 1 x 1."""
    return 0 < A.shape[-1] <= (1 if A.is_complex() else 3)


def _closed_form(A: Tensor, coefficients: Coefficients) -> Tensor:
    if A.is_complex():
        return torch.complex(*_in_the_plane(A.imag, coefficients))
    if A.shape[-1] == 1:
        return A - A.mT
    if A.shape[-1] == 3:
        return _in_space(A, coefficients)
    cosine, sine = _in_the_plane((A[..., 1, 0] - A[..., 0, 1]) / 2, coefficients)
    return torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2))


def _in_the_plane(angle: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """Cosine minus one, and sine."""
    t = angle * angle
    a, b = coefficients(t)
    return -b * t, a * angle


def _in_space(A: Tensor, coefficients: Coefficients) -> Tensor:
    """Entry by entry: three times faster than with whole matrices, which need a product for A^2."""
    x = (A[..., 2, 1] - A[..., 1, 2]) / 2
    y = (A[..., 0, 2] - A[..., 2, 0]) / 2
    z = (A[..., 1, 0] - A[..., 0, 1]) / 2
    a, b = coefficients(x * x + y * y + z * z)
    ax, ay, az = a * x, a * y, a * z
    bx, by, bz = b * x, b * y, b * z
    xx, yy, zz, xy, xz, yz = bx * x, by * y, bz * z, bx * y, bx * z, by * z
    rows = [-(yy + zz), xy - az, xz + ay, xy + az, -(xx + zz), yz - ax, xz - ay, yz + ax]
    return torch.stack([*rows, -(xx + yy)], -1).unflatten(-1, (3, 3))


def _cayley_coefficients(t: Tensor) -> tuple[Tensor, Tensor]:
    b = 2 / (4 + t)
    return 2 * b, b


def _exponential_coefficients(t: Tensor) -> tuple[Tensor, Tensor]:
    """``sin(angle) / angle`` and ``(1 - cos(angle)) / angle^2``; by their series up to angle 1.

    Each formula is confined to its own range, or gradients would be NaN.
    """
    short, long = t.clamp(max=1), t.clamp(min=1)
    angle = long.sqrt()
    a = torch.where(t < 1, _series(short, 1), angle.sin() / angle)
    return a, torch.where(t < 1, _series(short, 2), (1 - angle.cos()) / long)


def _series(t: Tensor, first: int) -> Tensor:
    """``sum_k (-t)^k / (2k + first)!`` for t up to 1, to rounding, with two derivatives."""
    terms = [(-1) ** k / math.factorial(2 * k + first) for k in range(13)]
    negligible = torch.finfo(t.dtype).eps / 2 * abs(terms[2])  # in the second derivative
    needed = [c for k, c in enumerate(terms) if k < 3 or k * (k - 1) * abs(c) > negligible]
    value = torch.full_like(t, needed[-1])
    for coefficient in reversed(needed[:-1]):
        value = value * t + coefficient
    return value
