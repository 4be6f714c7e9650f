"""``exp(A) - I`` of matrices of any size, by products.

Without the identity thousands of short steps do not drift. Moreover, torch's ``matrix_exp`` (2.13;
pytorch issue 196592) loses half the digits for norms of 0.005 to 0.58, and its derivative is an
exponential of twice the size.
"""

import math
from functools import partial

import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    add_identity,
    add_product,
    by_size,
    extremes,
    identity_like,
    per_matrix,
)

POLISH_EVERY = 8  # squarings, each of which doubles the distance from the unitary matrices


def exponential_minus_identity(A: Tensor, *, is_skew: bool = False) -> Tensor:
    """``exp(A) - I`` of each square matrix; if A is skew, ``exp(A)`` is unitary up to rounding.

    Norms are read on the host. Where they cannot be (``torch.compile``, ``vmap``), torch's function
    is used for the norms at which it is accurate.
    """
    size = _one_norm(A)
    if not _is_readable(size):
        short = (size < _reach(A, 3))[..., None, None]
        # The branch not taken must be finite too: its gradient is multiplied by zero.
        by_series = _series(torch.where(short, A, 0), 3)
        return torch.where(short, by_series, add_identity(torch.linalg.matrix_exp(A), -1))
    branches = [(_reach(A, k), partial(_series, blocks=k)) for k in (2, 3)]
    return by_size(size, branches, partial(_by_squaring, polish=is_skew), A)


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


def _reach(A: Tensor, blocks: int) -> float:
    """The norm up to which :func:`_series` is accurate to rounding."""
    unit, degree = torch.finfo(A.dtype).eps / 2, blocks**2
    return (unit * math.factorial(degree + 1)) ** (1 / degree)


def _series(A: Tensor, blocks: int) -> Tensor:
    """``exp(A) - I`` by the series of degree ``k^2``, in k blocks: ``2 k - 2`` products."""
    powers = [identity_like(A), A]
    while len(powers) <= blocks:
        powers.append(powers[len(powers) // 2] @ powers[-(-len(powers) // 2)])
    last = powers.pop()

    def block(k: int) -> Tensor:
        skipped = 0 if k else 1  # the identity
        terms = [powers[i] / math.factorial(k * blocks + i) for i in range(skipped, blocks)]
        return sum(terms[1:], start=terms[0])

    total = block(blocks - 1) + last / math.factorial(blocks**2)
    for k in range(blocks - 2, -1, -1):
        total = add_product(block(k), last, total)
    return total


def _by_squaring(A: Tensor, polish: bool = False) -> Tensor:
    """``exp(A) = exp(A / 2^k)^(2^k)``, with each matrix's own k."""
    limit = math.log2(torch.finfo(A.dtype).max) + 20  # of an infinite A, as its type allows
    needed = (_one_norm(A) / _reach(A, 4)).log2().ceil()
    squarings = needed.nan_to_num(0).clamp(0, math.ceil(limit))
    most = int(max(extremes(squarings)))
    F = _series(A * per_matrix(torch.exp2(-squarings), A), 4)
    for k in range(1, most + 1):
        still = squarings >= k
        F = _where(still, add_product(F, F, F, beta=2), F)
        if polish and k % POLISH_EVERY == 0:
            F = _where(still, _polish(F), F)
    return _where(squarings > 1, _polish(F), F) if polish and most > 1 else F


def _where(chosen: Tensor, F: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(chosen[..., None, None], F, otherwise)


def _polish(F: Tensor) -> Tensor:
    """A Newton-Schulz step of ``I + F``. It corrects rounding, so it is not differentiated."""
    with torch.no_grad():
        E = add_product(F + F.mH, F.mH, F)
        correction = add_product(E, F, E) / 2
    return F - correction
