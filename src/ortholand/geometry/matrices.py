"""Elementary operations on batches of matrices ``(..., n, p)``, real or complex."""

import math

import torch
from torch import Tensor


def skew(M: Tensor) -> Tensor:
    """Skew-Hermitian part ``(M - M^H) / 2`` of each square matrix."""
    return (M - M.mH) / 2


def sym(M: Tensor) -> Tensor:
    """Hermitian part ``(M + M^H) / 2`` of each square matrix."""
    return (M + M.mH) / 2


def subtract_identity(S: Tensor) -> Tensor:
    """``S - I`` for each square matrix, without building the identity."""
    D = S.clone()
    D.diagonal(dim1=-2, dim2=-1).sub_(1)
    return D


def tall(X: Tensor) -> Tensor:
    """The matrices with at least as many rows as columns: wide ones transposed."""
    return X.mT if X.shape[-2] < X.shape[-1] else X


def is_square(X: Tensor) -> bool:
    """Whether the matrices have as many rows as columns."""
    return X.shape[-2] == X.shape[-1]


def max_abs(M: Tensor) -> Tensor:
    """Largest modulus in each matrix; NaN where there is one."""
    return M.abs().amax(dim=(-2, -1))


def frobenius_norm(M: Tensor) -> Tensor:
    """Frobenius norm of each matrix, finite for every finite matrix and never too small.

    Squares overflow in float32 for entries of 1e20. The bound ``max|M_ij| sqrt(n p)`` takes over
    where that happens, and where squares would underflow: a safe step needs a bound from above.
    """
    largest = max_abs(M)
    size = math.sqrt(M.shape[-2] * M.shape[-1])
    underflow = size * torch.finfo(largest.dtype).tiny ** 0.4
    norm = torch.linalg.vector_norm(M, dim=(-2, -1)).clamp(min=underflow)
    return torch.minimum(norm, largest * size)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which arithmetic on this type is done: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_working_dtype(X: Tensor) -> Tensor:
    """``X`` in the type in which arithmetic on it is done."""
    return X.to(working_dtype(X.dtype))
