"""Which matrices of a batch are finite, told without a host sync."""

import math

from torch import Tensor

from ortholand.geometry.matrices import max_abs


def finite_matrices(M: Tensor) -> Tensor:
    """True for each matrix without NaN or infinite entries."""
    return max_abs(M) < math.inf  # false for NaN too
