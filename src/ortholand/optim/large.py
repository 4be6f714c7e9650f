"""Steps a large matrix on the CPU: torch's products, and compiled passes between them.

``X <- X - eta L``, the paper's step, with two temporaries of the matrix's size where the reference
code (:mod:`.landing`) has four, and two passes over memory where that has ten.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import gram_minus_identity
from ortholand.geometry.views import View, as_matrices
from ortholand.native import LARGEST_SIZE

Group = Mapping[str, Any]


def is_large(rows: int, columns: int, group: Group, *, alone: bool) -> bool:
    """Whether a weight that is one such matrix is best stepped here.

    ``alone``: whether it is the only parameter; small tall ones do better as a batch.
    """
    if group["attraction"] != "coupled":
        return False
    if rows == columns:
        return rows > LARGEST_SIZE and not group["nesterov"] and not group["dampening"]
    return not group["momentum"] and (alone or rows * columns > LARGEST_SIZE**2)


def step_square(
    p: Tensor, G: Tensor, buffer: Tensor | None, options: bytes, passes: ctypes.CDLL
) -> bool:
    """Step a square matrix with or without momentum; whether the step was taken."""
    n = p.shape[0]
    X, G = p.view(n, n), G.view(n, n)
    P, S = torch.mm(G, X.mT), torch.mm(X, X.mT)
    held = 0 if buffer is None else buffer.data_ptr()
    d = passes.ortholand_residual(P.data_ptr(), S.data_ptr(), held, n, options)
    # With momentum P holds the new buffer; else it is free.
    L = torch.mm(S, X, out=P) if buffer is None else torch.mm(S, X)
    addresses = (X.data_ptr(), L.data_ptr(), held, P.data_ptr())
    return bool(passes.ortholand_move(*addresses, n * n, d, 0.0, options))


def step_tall(
    p: Tensor, gradient: Tensor, group: Group, options: bytes, passes: ctypes.CDLL
) -> bool:
    """Step a tall matrix, or a wide one by its transpose; whether the step was taken.

    The right form, ``L = (G + G D) / 2 + X (lam D - G^T X / 2)``, each sum folded into a product.
    """
    field = torch.empty_like(p)
    X, G, L = (_matrix(t, group["view"]) for t in (p, gradient, field))
    half = -0.5 if group["maximize"] else 0.5
    D = gram_minus_identity(X)
    d = passes.ortholand_norm(D.data_ptr(), D.numel())
    torch.addmm(G, G, D, beta=half, alpha=half, out=L)
    L.addmm_(X, torch.mm(G.mT, X).mul_(-half).add_(D, alpha=group["lam"]))
    error = tangency_bound(X, d, passes.ortholand_norm(gradient.data_ptr(), p.numel()))
    addresses = (p.data_ptr(), field.data_ptr(), 0, 0)
    return bool(passes.ortholand_move(*addresses, p.numel(), d, error, options))


def _matrix(weight: Tensor, view: View) -> Tensor:
    """The one matrix that a weight is, n >= p: a view of its memory."""
    matrices = as_matrices(weight, view)
    return matrices.reshape(matrices.shape[-2:])
