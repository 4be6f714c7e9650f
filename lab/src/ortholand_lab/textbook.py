"""The paper's table 1 as a short program has it: the baselines on which its verdicts rest.

The library's own retractions compute the same maps, but faster and with less drift.
"""

import torch
from torch import Tensor, nn

from ortholand.geometry import polar_projection
from ortholand.geometry.manifold import orthonormal_factor
from ortholand.geometry.matrices import identity_like
from ortholand.retractions import Retraction


def textbook_exponential(X: Tensor, A: Tensor) -> Tensor:
    """``exp(A) X``."""
    return torch.linalg.matrix_exp(A) @ X


def textbook_polar(X: Tensor, A: Tensor) -> Tensor:
    """Nearest orthogonal matrix to ``X + A X``, by its singular value decomposition."""
    return polar_projection(X + A @ X)


def textbook_cayley(X: Tensor, A: Tensor) -> Tensor:
    """``(I - A/2)^-1 (I + A/2) X``."""
    identity = identity_like(A)
    return torch.linalg.solve(identity - A / 2, (identity + A / 2) @ X)


def textbook_qr(X: Tensor, A: Tensor) -> Tensor:
    """Q of ``X + A X`` by Householder's method."""
    return orthonormal_factor(X + A @ X)


# By the names of the library's own.
TEXTBOOK_RETRACTIONS: dict[str, Retraction] = {
    "exponential": textbook_exponential,
    "polar": textbook_polar,
    "cayley": textbook_cayley,
    "qr": textbook_qr,
}
RETRACTION_NAMES = tuple(TEXTBOOK_RETRACTIONS)
# Both forms: by a name of the library's, and by the same with "-textbook".
RETRACTION_FORMS: dict[str, str | Retraction] = {
    **{name: name for name in RETRACTION_NAMES},
    **{f"{name}-textbook": function for name, function in TEXTBOOK_RETRACTIONS.items()},
}


class MatrixExponential(nn.Module):
    """The trivialization ``W = exp(A)`` of square weights, A = L - L^T, L the lower triangle."""

    def forward(self, V: Tensor) -> Tensor:
        """The weight, or a weight for each of the last two dimensions."""
        L = V.tril()
        return torch.linalg.matrix_exp(L - L.mT)


def textbook(method: str) -> str:
    """The name of a method as the paper has it: other than ours where it is a retraction."""
    return f"{method}-textbook" if method in RETRACTION_NAMES else method
