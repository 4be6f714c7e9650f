"""Relative and Riemannian derivatives from Euclidean ones (the paper's section 2).

``G`` is the Euclidean gradient of f at X: ``f(X + E) = f(X) + Re <G, E> + o(E)``, torch's own. A
wide X has orthonormal rows; the relative derivatives are meant for square and tall X.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.geometry.matrices import (
    SMALL,
    add_identity,
    add_product,
    gram_minus_identity,
    identity_like,
    is_tracked,
    skew,
    sym,
)


def relative_gradient(X: Tensor, G: Tensor) -> Tensor:
    """``psi = Skew(G X^H)``, n x n: ``f(X + A X) = f(X) + <A, psi> + o(A)`` for skew A."""
    P = G @ X.mH
    if P.shape[-1] <= SMALL or is_tracked(P):
        return skew(P)
    return P.sub_(P.mH.contiguous()).mul_(0.5)  # in place: two temporaries fewer


def relative_gradient_times_x(X: Tensor, G: Tensor) -> Tensor:
    """``R = psi X = (G X^H X - X G^H X) / 2`` for square and tall X, from n x p products only."""
    return tangent_from_gram(X, G, gram_minus_identity(X))


def tangent_from_gram(
    X: Tensor, G: Tensor, D: Tensor, lam: float = 0.0, W: Tensor | None = None
) -> Tensor:
    """``(G S - X G^H X) / 2 + lam X D`` for tall X, ``D = S - I``; W is ``X^H G``, if known."""
    half = add_product(G, G, D, beta=0.5, alpha=0.5)  # (G + G D) / 2
    inner = G.mH @ X if W is None else W.mH
    pull = D if lam == 1 else lam * D
    return add_product(half, X, torch.sub(pull, inner, alpha=0.5) if lam else inner / -2)


def riemannian_gradient(X: Tensor, G: Tensor, metric: str = "euclidean") -> Tensor:
    """Riemannian gradient of f at a point X of the manifold.

    Args:
        X: point on the manifold, square, tall or wide.
        G: Euclidean gradient.
        metric: ``"euclidean"``, ``G - X Sym(X^H G)``; or ``"canonical"``, ``G - X G^H X``, which
            is twice ``psi X``. For square X the Euclidean one is ``psi X``, as in the paper.
    """
    if X.shape[-2] < X.shape[-1]:
        return riemannian_gradient(X.mT, G.mT, metric).mT
    if metric == "euclidean":
        return G - X @ sym(X.mH @ G)
    if metric == "canonical":
        return G - X @ (G.mH @ X)
    raise ValueError(f"metric must be 'euclidean' or 'canonical', got {metric!r}.")


def remove_normal(X: Tensor, G: Tensor) -> Tensor:
    """``G - X K``, G without its normal part, K its :func:`multiplier`.

    On the manifold this is the orthogonal projection onto the tangent space. At every X it leaves
    the relative gradient unchanged, and removes all of ``X C``, C Hermitian, which a term that is
    constant on the manifold adds to a gradient.
    """
    return G - X @ multiplier(gram_minus_identity(X), X.mH @ G)


def multiplier(D: Tensor, M: Tensor) -> Tensor:
    """The Hermitian ``K = Sym(S^-1 M)``, with ``S = I + D = X^H X`` and ``M = X^H G``.

    It is C for ``G = X C`` with C Hermitian, at every X of full rank. If S is singular, ``Sym(M)``.
    """
    return multiplier_from(gram_factor(D), M)


def gram_factor(D: Tensor) -> Tensor:
    """The Cholesky factor of ``I + D``; the identity if there is none."""
    L, info = torch.linalg.cholesky_ex(add_identity(D))
    return torch.where((info > 0)[..., None, None], identity_like(L), L)


def multiplier_from(L: Tensor, M: Tensor) -> Tensor:
    """:func:`multiplier`, from the Cholesky factor L of S."""
    # M^H S^-1, with the factors on the right: torch is several times faster that way round.
    half = torch.linalg.solve_triangular(L.mH, M.mH, upper=True, left=False)
    return sym(torch.linalg.solve_triangular(L, half, upper=False, left=False))


def relative_hessian(
    X: Tensor,
    A: Tensor,
    *,
    gradient: Tensor | None = None,
    hessian_product: Tensor | None = None,
    fun: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``H_X(A) = Skew(Hess f(X)[A X] X^H - G X^H A)`` for skew A.

    Give either ``gradient`` (G at X) and ``hessian_product`` (the Euclidean Hessian at X applied
    to ``A X``), or ``fun``, from which autograd computes both.

    >>> import torch
    >>> X, A = torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    >>> relative_hessian(X, A, fun=lambda X: X[0, 0])  # f(exp(tA)) = cos(t)
    tensor([[ 0.0000,  0.5000],
            [-0.5000,  0.0000]])
    """
    G, HAX = _euclidean_derivatives(X, A @ X, gradient, hessian_product, fun)
    return skew(HAX @ X.mH - (G @ X.mH) @ A)


def riemannian_hessian(
    X: Tensor,
    xi: Tensor,
    *,
    gradient: Tensor | None = None,
    hessian_product: Tensor | None = None,
    fun: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Riemannian Hessian at X applied to the tangent vector xi, for the Euclidean metric.

    ``Proj_X(Hess f(X)[xi] - xi Sym(X^H G))``. Give ``gradient`` and ``hessian_product`` (the
    Euclidean Hessian applied to xi), or ``fun``. For square X and ``xi = A X`` this is the
    paper's ``Skew(Hess f(X)[A X] X^H - Sym(G X^H) A) X``.
    """
    G, Hxi = _euclidean_derivatives(X, xi, gradient, hessian_product, fun)
    if X.shape[-2] < X.shape[-1]:
        return riemannian_hessian(X.mT, xi.mT, gradient=G.mT, hessian_product=Hxi.mT).mT
    return remove_normal(X, Hxi - xi @ sym(X.mH @ G))


def _euclidean_derivatives(
    X: Tensor,
    direction: Tensor,
    gradient: Tensor | None,
    hessian_product: Tensor | None,
    fun: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Gradient at X, and the Hessian applied to the direction: given, or differentiated twice."""
    if fun is None and gradient is not None and hessian_product is not None:
        return gradient, hessian_product
    if fun is None or gradient is not None or hessian_product is not None:
        given = {"fun": fun, "gradient": gradient, "hessian_product": hessian_product}
        got = ", ".join(f"{k}={None if v is None else 'given'}" for k, v in given.items())
        raise ValueError(
            f"A Hessian needs either fun, or both gradient and hessian_product; got {got}."
        )
    with torch.enable_grad():
        Y = X.detach().requires_grad_()
        # One scalar for a batch of costs: the matrices of a batch do not interact.
        (G,) = torch.autograd.grad(fun(Y).sum(), Y, create_graph=True)
        if not G.requires_grad:  # f is linear
            return G.detach(), torch.zeros_like(X)
        slope = (G * direction.conj()).real.sum() if G.is_complex() else (G * direction).sum()
        (H,) = torch.autograd.grad(slope, Y, allow_unused=True)
    return G.detach(), torch.zeros_like(X) if H is None else H
