"""Steepest descent in the spectral norm on the manifold ("manifold Muon"): the public directions.

The problem: of all tangent R, ``X^T R + R^T X = 0``, with ``||R||_2 <= 1``, find the one with the
largest ``<G, R>``; a step is ``X - lr R``. The largest value is ``||psi||_*``, the nuclear norm of
``psi = Skew(G X^T)``. Here X is tall or square, on the manifold, and real. What is ours is not
here: the library has it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import skew, sym

Sign = Callable[[Tensor], Tensor]  # the polar factor U V^T of a matrix
PUBLISHED_RATE = 0.01  # of the dual ascent; it falls linearly to zero over the inner steps
PUBLISHED_TOLERANCE = 1e-6


class Quality(NamedTuple):
    """How good a direction is.

    Args:
        value: ``<G, R> / (||R||_2 ||psi||_*)``: 1 is the optimum, and a direction that is not
            tangent can have more.
        tangency: ``||Sym(X^T R)||_F / ||R||_F``, zero for a tangent one.
        rms: root mean square of the entries of ``X^T R + R^T X``, by which the published dual
            ascent stops.
    """

    value: float
    tangency: float
    rms: float


def quality(X: Tensor, G: Tensor, R: Tensor) -> Quality:
    """Measure a direction, in float64."""
    X, G, R = X.double(), G.double(), R.double()
    value = (G * R).sum() / (torch.linalg.matrix_norm(R, 2) * best_value(X, G))
    normal = torch.linalg.matrix_norm(sym(X.mT @ R))
    tangency = normal / torch.linalg.matrix_norm(R)
    return Quality(float(value), float(tangency), float(2 * normal / X.shape[-1]))


def best_value(X: Tensor, G: Tensor) -> Tensor:
    """``||psi||_*``, which no tangent direction of spectral norm 1 exceeds."""
    X, G = compressed(X, G)
    return torch.linalg.svdvals(skew(G @ X.mT)).sum()


def compressed(X: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """The same problem with at most 2p rows.

    Every direction here lies in the span of X and G, and a rotation of the rows changes neither
    values nor tangency.
    """
    n, p = X.shape
    if n <= 2 * p:
        return X, G
    Q, _ = torch.linalg.qr(torch.cat([X, G], 1))
    return Q.mT @ X, Q.mT @ G


def exact_sign(M: Tensor) -> Tensor:
    """The polar factor of a tall matrix by the eigenvectors of its Gram matrix.

    Singular values below 1e-8 of the largest are lost in the rounding of float64, and stay zero.
    """
    squares, V = torch.linalg.eigh(M.mT @ M)
    floor = squares[-1] * torch.finfo(M.dtype).eps
    inverse = torch.where(squares > floor, squares, torch.inf).rsqrt()
    return (M @ V) * inverse @ V.mT


def dual_ascent(
    X: Tensor, G: Tensor, steps: int, *, rate: float = PUBLISHED_RATE, sign: Sign = exact_sign
) -> Tensor:
    """Manifold Muon as published: ascent on the dual of the problem.

    Bernstein, Modular Manifolds, Thinking Machines Lab, 2025; written from the description. The
    dual is ``min ||G + 2 X L||_*`` over symmetric L; its (sub)gradient is what is left of tangency,
    ``H = X^T R + R^T X`` with ``R = msign(G + 2 X L)``. It starts where the normal part of G is
    gone, which for square X is the optimum.

    Args:
        X: the point.
        G: the gradient.
        steps: how many times R is computed.
        rate: of the ascent, at its start.
        sign: computes polar factors.
    """
    L = -sym(X.mT @ G) / 2
    R = sign(torch.addmm(G, X, L, alpha=2))
    for k in range(steps - 1):
        H = 2 * sym(X.mT @ R)
        if torch.linalg.matrix_norm(H) < PUBLISHED_TOLERANCE * math.sqrt(H.numel()):
            break
        L = L - rate * (1 - k / steps) * H
        R = sign(torch.addmm(G, X, L, alpha=2))
    return R


def spel(X: Tensor, G: Tensor, *, sign: Sign = exact_sign) -> Tensor:
    """SPEL: the polar factor of the Riemannian gradient (Yang and Lai, arXiv 2601.21487, 2026).

    Tangent and optimal for square X; for tall X neither.
    """
    return sign(G - X @ sym(X.mT @ G))


def closed_form(X: Tensor, G: Tensor) -> Tensor:
    """``R = msign(psi) X``, the solution, by an SVD: the reference for everything here."""
    n, p = X.shape
    Q = torch.linalg.qr(torch.cat([X, G], 1))[0] if n > 2 * p else torch.eye(n).to(X)
    U, s, Vh = torch.linalg.svd(skew((Q.mT @ G) @ (Q.mT @ X).mT))
    kept = (s > s[0] * n * torch.finfo(s.dtype).eps).to(s.dtype)
    return Q @ ((U * kept) @ (Vh @ (Q.mT @ X)))


def fewest_steps(reaches: Callable[[int], bool], cap: int) -> int | None:
    """The fewest steps, within 5 %, that reach something; None if ``cap`` does not.

    Doubles them until it is, and bisects the last interval: what is reached with some number of
    steps is taken to be reached with more.
    """
    low, high = 0, 1
    while not reaches(high):
        if high >= cap:
            return None
        low, high = high, min(2 * high, cap)
    while high - low > max(1, 0.05 * high):
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
