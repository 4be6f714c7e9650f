"""Hadamard matrices: orthogonal but for a factor, all entries 1 or -1.

Of powers of two by Sylvester's doubling, of many other sizes by Paley's matrices and their
doublings: 12, 20, 24, 28, 36, 40, ..., and so of most widths that models have (768, 1536, 2560,
3072, 3584, 5120).
"""

import math

import torch
from torch import Tensor


def random_hadamard(n: int, seed: int | torch.Generator) -> Tensor:
    """A Hadamard matrix with random signs, divided by √n: orthogonal, all entries of one size.

    >>> random_hadamard(4, seed=0).abs()[0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])

    Raises:
        ValueError: if none of that size is known here.
    """
    H = hadamard(n) if isinstance(n, int) and n > 0 else None
    if H is None:
        raise ValueError(
            "Hadamard matrices are made for powers of two times 1, 12, 20, 28 and other sizes of "
            f"Paley's here, got size {n}. Use start='random'."
        )
    given = isinstance(seed, torch.Generator)
    generator = seed if given else torch.Generator().manual_seed(seed)
    signs = 2 * torch.randint(2, (n, 1), generator=generator).to(H.dtype) - 1
    return signs * H / n**0.5


def hadamard(n: int) -> Tensor | None:
    """A matrix of 1 and -1 with ``H^T H = n I``; None where these constructions have none."""
    if n == 1:
        return torch.ones(1, 1)
    half = hadamard(n // 2) if n % 2 == 0 else None
    if half is not None:
        return torch.kron(torch.tensor([[1.0, 1], [1, -1]]), half)
    return _paley(n)


def _paley(n: int) -> Tensor | None:
    """From squares modulo a prime q: of size q + 1 if q is 3 mod 4, 2 (q + 1) if it is 1 mod 4."""
    if n % 4 == 0 and _is_prime(n - 1):
        return torch.eye(n) + _bordered(n - 1, -1)
    if n % 4 == 0 and n % 8 != 0 and _is_prime(n // 2 - 1):
        C = _bordered(n // 2 - 1, 1)
        turn, other = torch.tensor([[1.0, 1], [1, -1]]), torch.tensor([[1.0, -1], [-1, -1]])
        return torch.kron(C, turn) + torch.kron(torch.eye(n // 2), other)
    return None


def _bordered(q: int, sign: int) -> Tensor:
    """Whether i - j is a square modulo q: 1, -1, or 0 on the diagonal; with a border of ones."""
    squares = torch.full((q,), -1.0)
    squares[torch.arange(1, q).square() % q] = 1
    squares[0] = 0
    i = torch.arange(q)
    C = torch.ones(q + 1, q + 1)
    C[1:, 1:] = squares[(i[:, None] - i) % q]
    C[1:, 0] = sign
    C[0, 0] = 0
    return C


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, math.isqrt(q) + 1))
