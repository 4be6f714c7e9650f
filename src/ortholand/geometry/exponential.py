"""``exp(A) - I`` of matrices of any size, by products.

Without the identity a short step keeps its relative accuracy, and thousands of them do not drift.
Moreover, torch's ``matrix_exp`` (2.13; pytorch issue 196592) loses half the digits for a single
matrix of norm 0.05 to 0.58 in float32, 0.005 to 0.05 in float64; and its derivative is another
exponential, of twice the size, where autograd here differentiates a few products.
"""

import math

import torch
from torch import Tensor

from ortholand.geometry.branches import by_size, extremes
from ortholand.geometry.matrices import (
    add_product,
    identity_like,
    per_matrix,
    product,
    subtract_identity,
)

POLISH_EVERY = 8  # squarings, each of which doubles the distance from the unitary matrices


def exponential_minus_identity(A: Tensor, *, is_skew: bool = False) -> Tensor:
    """``exp(A) - I`` of each square matrix; if A is skew, ``exp(A)`` is unitary up to rounding.

    The norms decide the degree of the series, and are read on the host. Where they cannot be
    (``torch.compile``, ``vmap``), torch's function is used for the norms at which it is accurate.
    """
    size = _one_norm(A)
    if not _is_readable(size):
        return _without_reading(A, size)
    branches = [(_reach(A, 4), _of_degree_4), (_reach(A, 9), _of_degree_9)]
    return by_size(size, branches, _by_squaring_skew if is_skew else _by_squaring, A)


def _one_norm(A: Tensor) -> Tensor:
    return A.detach().abs().sum(-2).amax(-1)


def _is_readable(size: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    try:
        size.flatten()[:1].tolist()
    except RuntimeError:  # how vmap says no; there is no way to ask
        return False
    return True


def _without_reading(A: Tensor, size: Tensor) -> Tensor:
    short = (size < _reach(A, 9))[..., None, None]
    # The branch not taken must be finite too: its gradient is multiplied by zero.
    by_series = _of_degree_9(torch.where(short, A, 0))
    return torch.where(short, by_series, subtract_identity(torch.linalg.matrix_exp(A)))


def _reach(A: Tensor, degree: int) -> float:
    """The norm up to which the exponential series of this degree is accurate to rounding."""
    unit = torch.finfo(A.dtype).eps / 2
    return (unit * math.factorial(degree + 1)) ** (1 / degree)


def _of_degree_4(A: Tensor) -> Tensor:
    A2 = product(A, A)
    return A + product(A2, identity_like(A) / 2 + A / 6 + A2 / 24)


def _of_degree_9(A: Tensor) -> Tensor:
    identity, A2 = identity_like(A), product(A, A)
    A3 = product(A2, A)
    high = identity / 720 + A / 5040 + A2 / 40320 + A3 / 362880
    return A + A2 / 2 + product(A3, identity / 6 + A / 24 + A2 / 120 + product(A3, high))


def _of_degree_16(A: Tensor) -> Tensor:
    """Horner's scheme in ``A^4``: six products."""
    A2 = A @ A
    A3, A4 = A2 @ A, A2 @ A2
    powers = [identity_like(A), A, A2, A3]

    def four_terms(k: int) -> Tensor:
        terms = [P * (1 / math.factorial(k + i)) for i, P in enumerate(powers)]
        return terms[0] + terms[1] + terms[2] + terms[3]

    high = four_terms(12) + A4 / math.factorial(16)
    for k in (8, 4):
        high = add_product(four_terms(k), A4, high)
    return add_product(A + A2 / 2 + A3 / 6, A4, high)


def _by_squaring(A: Tensor, polish: bool = False) -> Tensor:
    """``exp(A) = exp(A / 2^k)^(2^k)``, with each matrix's own k."""
    squarings = _squarings(A)
    most = int(max(extremes(squarings)))
    F = _of_degree_16(A * per_matrix(torch.exp2(-squarings), A))
    for k in range(1, most + 1):
        still = squarings >= k
        F = _where(still, add_product(F, F, F, beta=2), F)
        if polish and k % POLISH_EVERY == 0:
            F = _where(still, _polish(F), F)
    return _where(squarings > 1, _polish(F), F) if polish and most > 1 else F


def _squarings(A: Tensor) -> Tensor:
    """How often to halve A to come within reach; for an infinite A, as often as its type allows."""
    limit = math.log2(torch.finfo(A.dtype).max) + 20
    needed = (_one_norm(A) / _reach(A, 16)).log2().ceil()
    return needed.nan_to_num(0).clamp(0, math.ceil(limit))


def _by_squaring_skew(A: Tensor) -> Tensor:
    return _by_squaring(A, polish=True)


def _where(chosen: Tensor, F: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(chosen[..., None, None], F, otherwise)


def _polish(F: Tensor) -> Tensor:
    """A Newton-Schulz step of ``I + F``. It corrects rounding, so it is not differentiated."""
    with torch.no_grad():
        E = add_product(F + F.mH, F.mH, F)
        correction = add_product(E, F, E) / 2
    return F - correction
