"""Retractions: move along the manifold and stay on it, at the price of linear algebra.

``R(X, A) = X + A X + o(A)`` for skew A (the paper's table 1). For a tall X an n x p matrix B may
represent the n x n matrix ``A = Skew(B X^H)``; then nothing n x n is formed where that saves work.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient
from ortholand.geometry.manifold import orthonormal_factor, polar_projection
from ortholand.geometry.matrices import (
    add_identity,
    add_product,
    by_size,
    finite_matrices,
    gram_matrix,
    gram_minus_identity,
    identity_like,
    is_square,
    skew,
    to_working_dtype,
)
from ortholand.geometry.rotations import (
    has_closed_form,
    skew_cayley_minus_identity,
    skew_exponential_minus_identity,
)

Retraction = Callable[[Tensor, Tensor], Tensor]

# Up to this size of a step, squared (||B^H B||_F or ||(A X)^H A X||_F, B a generator), working with
# Gram matrices is as accurate as with the matrices themselves, and faster.
WELL_CONDITIONED = 30.0
CHOLESKY_FROM = 64  # columns; LAPACK's QR is as fast for fewer


def retract(X: Tensor, A: Tensor, method: str | Retraction = "cayley") -> Tensor:
    """Move from X in the direction ``A X`` along the manifold.

    Args:
        X: matrices ``(..., n, p)`` on the manifold; square, tall or (transposed) wide.
        A: skew matrices that act on X from the left (``(..., n, n)``; for wide X on its
            transpose), or for tall and wide X a matrix of X's own shape that represents
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
    _check_shapes(X, A)
    wide = X.shape[-2] < X.shape[-1]
    Y = X.mT if wide else X
    B = A.mT if wide and not is_square(A) else A
    batch = torch.broadcast_shapes(Y.shape[:-2], B.shape[:-2])
    Y, B = Y.expand(*batch, *Y.shape[-2:]), B.expand(*batch, *B.shape[-2:])
    moved = function(to_working_dtype(Y), to_working_dtype(B)).to(X.dtype)
    return moved.mT if wide else moved


def exponential(X: Tensor, A: Tensor) -> Tensor:
    """``exp(A) X``, the geodesic of O(n); uses an exponential of size 2p for tall X, 2p < n."""
    if _acts_from_the_left(X, A):
        # (I + F) X has errors as small as a short step, so thousands of steps hardly drift.
        return add_product(X, skew_exponential_minus_identity(_skew_of(X, A)), X)
    W, K = _in_a_basis(X, A)
    return X + W @ skew_exponential_minus_identity(K)[..., : X.shape[-1]]


def cayley(X: Tensor, A: Tensor) -> Tensor:
    """``(I - A/2)^-1 (I + A/2) X``; uses a solve of size 2p for tall X, 2p < n."""
    if _acts_from_the_left(X, A):
        A = _skew_of(X, A)
        if has_closed_form(A):
            return add_product(X, skew_cayley_minus_identity(A), X)
        Z = _solved(identity_like(A) - A / 2, X)
        # Two forms of the same: the first has errors as small as a short step, so thousands of
        # steps in float32 drift a hundred times less; the second's do not grow with a long step.
        branches = [(math.sqrt(A.shape[-1]), lambda X, Z, A: X + A @ Z)]
        return by_size(_norm(A), branches, lambda X, Z, _: 2 * Z - X, X, Z, A)
    P = gram_matrix(A)
    branches = [(WELL_CONDITIONED, _cayley_by_gram)]
    return by_size(_norm(P), branches, _cayley_in_a_basis, X, A, P)


def polar(X: Tensor, A: Tensor) -> Tensor:
    """Nearest point of the manifold to ``X + A X``."""
    Y = X + _tangent(X, A)
    E = gram_minus_identity(Y)
    small = (2 * torch.finfo(E.dtype).eps) ** 0.2  # the first term left out is E^5 / 4
    branches = [(small, _polar_by_series), (WELL_CONDITIONED, _polar_by_eigh)]
    return by_size(_norm(E), branches, _polar_by_svd, Y, E)


def qr(X: Tensor, A: Tensor) -> Tensor:
    """Q of ``X + A X = Q R`` with R's diagonal positive, as a retraction requires."""
    Y = X + _tangent(X, A)
    if X.shape[-1] < CHOLESKY_FROM:
        return orthonormal_factor(Y)
    S = gram_matrix(Y)
    size, branches = _norm(add_identity(S, -1)), [(WELL_CONDITIONED, _qr_by_cholesky)]
    return by_size(size, branches, lambda Y, _: orthonormal_factor(Y), Y, S)


RETRACTIONS: dict[str, Retraction] = {
    function.__name__: function for function in (exponential, polar, cayley, qr)
}


def find_retraction(method: str | Retraction) -> Retraction:
    """The function with that name; a function is returned as is."""
    if callable(method):
        return method
    if not isinstance(method, str) or method not in RETRACTIONS:
        raise ValueError(
            f"The retraction must be one of {tuple(RETRACTIONS)} or a function (X, A) -> X, "
            f"got {method!r}."
        )
    return RETRACTIONS[method]


def _check_shapes(X: Tensor, A: Tensor) -> None:
    if X.ndim < 2:
        raise ValueError(f"X must be of shape (..., n, p), got {tuple(X.shape)}. Reshape it first.")
    n, p = X.shape[-2:]
    larger = max(n, p)
    if A.shape[-2:] not in ((larger, larger), (n, p)):
        raise ValueError(
            f"For X of shape (..., {n}, {p}), A must be a skew matrix of shape (..., {larger}, "
            f"{larger}), or B of shape (..., {n}, {p}) that represents Skew(B X^H); "
            f"got {tuple(A.shape)}."
        )


def _acts_from_the_left(X: Tensor, A: Tensor) -> bool:
    """Whether to work with the n x n matrix: it is given, or no larger than the cheap form's."""
    return is_square(A) or 2 * X.shape[-1] >= X.shape[-2]


def _skew_of(X: Tensor, A: Tensor) -> Tensor:
    return A if is_square(A) else relative_gradient(X, A)


def _tangent(X: Tensor, A: Tensor) -> Tensor:
    """``A X``; a generator assumes ``X^H X = I``, which is fine before another projection."""
    return A @ X if is_square(A) else (A - X @ (A.mH @ X)) / 2


def _in_a_basis(X: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """``Skew(B X^H) = W K W^H``, W of 2p orthonormal columns that begin with X's, K skew."""
    S, M = (X.mH @ torch.cat([X, B], -1)).split(X.shape[-1], -1)
    # To first order S^-1 M: with M itself, the part of B along X would blow up X^H X - I in time.
    M = M - add_identity(S, -1) @ M
    Q, R = torch.linalg.qr(B - X @ M)
    lower = torch.cat([R / 2, torch.zeros_like(R)], -1)
    upper = torch.cat([skew(M), -R.mH / 2], -1)
    return torch.cat([X, Q], -1), torch.cat([upper, lower], -2)


def _cayley_in_a_basis(X: Tensor, B: Tensor, _P: Tensor) -> Tensor:
    W, K = _in_a_basis(X, B)
    identity = identity_like(K)
    start = identity[:, : X.shape[-1]]
    return X + 2 * W @ (_solved(identity - K / 2, start) - start)


def _solved(A: Tensor, B: Tensor) -> Tensor:
    """``A^-1 B``; NaN where A is singular, because torch would raise for the whole batch."""
    Z, info = torch.linalg.solve_ex(A, B)
    return torch.where((info > 0)[..., None, None], torch.nan, Z)


def _cayley_by_gram(X: Tensor, B: Tensor, P: Tensor) -> Tensor:
    """By Woodbury's identity, from the Gram matrix H of ``W = [X B]``; ``P = B^H B``."""
    p = X.shape[-1]
    W = torch.cat([X, B], -1)
    top = X.mH @ W
    H = torch.cat([top, torch.cat([top[..., p:].mH, P], -1)], -2)
    system = H / 4
    system.diagonal(p, dim1=-2, dim2=-1).sub_(1)
    system.diagonal(-p, dim1=-2, dim2=-1).add_(1)
    return X - W @ _solved(system, H[..., :p] / 2)


def _polar_by_series(Y: Tensor, E: Tensor) -> Tensor:
    """``Y (I + E)^-1/2`` by the binomial series: two products of size p."""
    identity, E2 = identity_like(E), E @ E
    return Y @ (identity - E / 2 + E2 @ (3 / 8 * identity - 5 / 16 * E + 35 / 128 * E2))


def _polar_by_eigh(Y: Tensor, E: Tensor) -> Tensor:
    values, V = torch.linalg.eigh(E)
    return Y @ ((V * (1 + values).rsqrt().unsqueeze(-2)) @ V.mH)


def _polar_by_svd(Y: Tensor, _E: Tensor) -> Tensor:
    """NaN where Y has overflowed: LAPACK would raise, for the whole batch."""
    finite = finite_matrices(Y)[..., None, None]
    return torch.where(finite, polar_projection(torch.where(finite, Y, 0)), torch.nan)


def _qr_by_cholesky(Y: Tensor, S: Tensor) -> Tensor:
    R, _ = torch.linalg.cholesky_ex(S, upper=True)
    return torch.linalg.solve_triangular(R, Y, upper=True, left=False)


def _norm(M: Tensor) -> Tensor:
    return torch.linalg.vector_norm(M, dim=(-2, -1))
