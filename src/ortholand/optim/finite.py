"""Which matrices of a batch are finite, told without a host sync."""

import math

from torch import Tensor

from ortholand.geometry.matrices import max_abs


def is_finite(size: Tensor) -> Tensor:
    """True for each number, none of them negative, that is neither infinite nor NaN."""
    return size < math.inf  # false for NaN too


def finite_matrices(M: Tensor) -> Tensor:
    """True for each matrix without NaN or infinite entries."""
    return is_finite(max_abs(M))
