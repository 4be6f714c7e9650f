"""Retractions: move along the manifold and stay on it, at the price of linear algebra.

The paper writes a retraction as ``R(X, A) = X + A X + o(A)`` for skew A (its table 1). A square X
takes the skew p x p matrix A itself. For a tall X that matrix is n x n; an n x p matrix B may stand
for it, ``A = Skew(B X^H)``, and then nothing n x n is formed where that saves work.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient, relative_gradient_times_x
from ortholand.geometry.manifold import orthonormal_factor, polar_projection
from ortholand.geometry.matrices import is_square, to_working_dtype

Retraction = Callable[[Tensor, Tensor], Tensor]


def retract(X: Tensor, A: Tensor, method: str | Retraction = "cayley") -> Tensor:
    """Move from X in the direction ``A X`` along the manifold.

    Args:
        X: matrices ``(..., n, p)`` on the manifold; square, tall or (transposed) wide.
        A: skew matrices that act on X from the left (``(..., n, n)``; for wide X on its
            transpose), or for tall and wide X a matrix of X's own shape that stands for
            ``Skew(A X^H)``. Descent is ``retract(X, -eta * psi)``.
        method: ``"exponential"``, ``"polar"``, ``"cayley"``, ``"qr"``, or a function of (X, A).

    Returns:
        The point reached, on the manifold up to rounding if X is.

    >>> import torch
    >>> A = torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]])
    >>> retract(torch.eye(2), A, "exponential").round()
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """
    function = find_retraction(method)
    wide = X.shape[-2] < X.shape[-1]
    Y = X.mT if wide else X
    B = A.mT if A.shape[-2:] == X.shape[-2:] and wide else A
    _check_shapes(Y, B)
    moved = function(to_working_dtype(Y), to_working_dtype(B)).to(X.dtype)
    return moved.mT if wide else moved


def exponential(X: Tensor, A: Tensor) -> Tensor:
    """``exp(A) X``: the geodesic of O(n); by an exponential of size 3p for tall X, p << n."""
    if _acts_from_the_left(X, A, rank=3 * X.shape[-1]):
        return torch.linalg.matrix_exp(_skew_of(X, A)) @ X
    U, V = _low_rank_factors(X, A)
    # exp(U V^H) X = X + U phi(M) C with phi(z) = (e^z - 1) / z, M = V^H U, C = V^H X; and the
    # exponential of [[M, C], [0, 0]] holds phi(M) C in its corner.
    M, C = V.mH @ U, V.mH @ X
    corner = torch.nn.functional.pad(torch.cat([M, C], -1), (0, 0, 0, C.shape[-1]))
    k = M.shape[-1]
    return X + U @ torch.linalg.matrix_exp(corner)[..., :k, k:]


def cayley(X: Tensor, A: Tensor) -> Tensor:
    """``(I - A/2)^-1 (I + A/2) X``; by a solve of size 2p for tall X, p << n."""
    if _acts_from_the_left(X, A, rank=2 * X.shape[-1]):
        half = _skew_of(X, A) / 2
        return torch.linalg.solve(_identity_like(half) - half, X + half @ X)
    U, V = _low_rank_factors(X, A)
    M = V.mH @ U
    return X + U @ torch.linalg.solve(_identity_like(M) - M / 2, V.mH @ X)


def polar(X: Tensor, A: Tensor) -> Tensor:
    """Nearest point of the manifold to ``X + A X``."""
    return polar_projection(X + _tangent(X, A))


def qr(X: Tensor, A: Tensor) -> Tensor:
    """Q of ``X + A X = Q R`` with R's diagonal positive, without which it is no retraction."""
    return orthonormal_factor(X + _tangent(X, A))


RETRACTIONS: dict[str, Retraction] = {
    "exponential": exponential,
    "polar": polar,
    "cayley": cayley,
    "qr": qr,
}


def find_retraction(method: str | Retraction) -> Retraction:
    """The function behind a name; a function stands for itself."""
    if callable(method):
        return method
    if method not in RETRACTIONS:
        raise ValueError(
            f"The retraction must be one of {tuple(RETRACTIONS)} or a function (X, A) -> X, "
            f"got {method!r}."
        )
    return RETRACTIONS[method]


def _check_shapes(X: Tensor, A: Tensor) -> None:
    n, p = X.shape[-2:]
    if A.shape[-2:] not in ((n, n), (n, p)):
        raise ValueError(
            f"For X of shape (..., {n}, {p}), A must be of shape (..., {n}, {n}) or "
            f"(..., {n}, {p}), got {tuple(A.shape)}."
        )


def _acts_from_the_left(X: Tensor, A: Tensor, rank: int) -> bool:
    """Whether to work with the n x n matrix: it is given, or no larger than the cheap form's."""
    return is_square(A) or rank >= X.shape[-2]


def _skew_of(X: Tensor, A: Tensor) -> Tensor:
    return A if is_square(A) else relative_gradient(X, A)


def _tangent(X: Tensor, A: Tensor) -> Tensor:
    return A @ X if is_square(A) else relative_gradient_times_x(X, A)


def _low_rank_factors(X: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """``Skew(B X^H) = U V^H`` with U and V of size n x 2p."""
    return torch.cat([B, -X], -1) / 2, torch.cat([X, B], -1)


def _identity_like(M: Tensor) -> Tensor:
    return torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
