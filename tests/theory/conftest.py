"""Random data for the tests of the theory, in float64 or complex128 throughout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ortholand import random_orthogonal


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    """``randn(*shape, seed=, dtype=)``: a Gaussian tensor."""

    def sample(
        *shape: int, seed: int | torch.Generator, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return sample


@pytest.fixture
def at_distance(randn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``at_distance(d, n, p, seed=)``: n x p matrices, n >= p, with ``||X^H X - I||_F = d < 1``."""

    def sample(
        d: Tensor | float,
        n: int,
        p: int,
        *,
        seed: int | torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        d = torch.as_tensor(d, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        Q = random_orthogonal(*d.shape, n, p, seed=generator, dtype=dtype)
        V = random_orthogonal(*d.shape, p, p, seed=generator, dtype=dtype)
        e = randn(*d.shape, p, seed=generator)
        e = d[..., None] * e / torch.linalg.vector_norm(e, dim=-1, keepdim=True)
        return (Q * (1 + e).sqrt().unsqueeze(-2)) @ V

    return sample


@pytest.fixture
def order() -> Callable[..., float]:
    """``order(remainder)``: the exponent k of ``remainder(t) = O(t^k)``, seen between two t.

    The next term of the expansion bends the slope by O(t), for which the tests allow 0.15;
    rounding, about 1e-15, stays far below a remainder of t^3 = 1e-9.
    """

    def measure(remainder: Callable[[float], Tensor], t: float = 2e-3) -> float:
        return torch.log2(remainder(t) / remainder(t / 2)).item()

    return measure
