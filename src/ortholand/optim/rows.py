"""Steps of tall matrices whose rows are spread over ranks: one sum over ranks, the rest local.

Every landing step is a combination of columns, ``X' = X + X a + B b``, B the generator of the
direction, and the p x p coefficients a and b depend on three Gram matrices alone:

    D = X^H X - I,    T = X^H B,    P = B^H B.

Each is a sum over rows, so each rank computes the part of its own rows, one all-reduce adds them
up, and each rank moves its own rows. Norms come from the same matrices: with ``L = X a + B b``,
``L^H L = a^H (S a + T b) + b^H (T^H a + P b)``, which for "move, then land" also says where the
moved point is.

A step is a generator function: it yields this rank's parts of what must be summed, is sent the
sums, and returns a :class:`.base.MatrixStep`. Whoever runs it (:mod:`.sharded`) puts the sums of
many into one message.

What differs from the steps in one place (:mod:`.landing`) is rounding. A norm from Gram matrices
is known up to ``sqrt(u) ||B||``, not ``u ||B||``: where the tangent part is smaller than that, the
safe step is shorter, and LandingAdam's second moment larger, than they would be.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import frobenius_norm, per_matrix, skew, sym
from ortholand.geometry.sharded import shared_residual
from ortholand.optim.base import MatrixStep
from ortholand.optim.landing import after_step, coupled_step, decoupled_step, unless_zero
from ortholand.optim.momentum import mean_square, one_minus_power

Group = Mapping[str, Any]
RowStep = Generator[list[Tensor], list[Tensor], MatrixStep]
RowStepFunction = Callable[[Tensor, Tensor, dict[str, Tensor], Group, "Rows"], RowStep]


class Rows(NamedTuple):
    """How much of the matrices is here."""

    here: int
    total: int  # n

    @property
    def share(self) -> float:
        """This rank's share of the identity; those of all ranks add up to 1."""
        return self.here / self.total


class Gram(NamedTuple):
    """What the coefficients of a step depend on, per matrix."""

    D: Tensor  # X^H X - I, (k, p, p)
    T: Tensor  # X^H B
    P: Tensor  # B^H B
    size: Tensor  # ||B||_F^2 before anything was taken from B: what rounding is relative to, (k,)
    n: int  # rows of the whole matrix


class Coefficients(NamedTuple):
    """A step ``X + X a + B b``, and which matrices may take it."""

    a: Tensor  # (k, p, p)
    b: Tensor
    taken: Tensor  # (k,)


def sgd_rows(X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group, rows: Rows) -> RowStep:
    """The step of LandingSGD for rows X ``(k, rows, p)`` of k matrices with gradients G.

    Sums ``2 p^2 + p`` numbers per matrix, with Nesterov momentum ``3 p^2 + p``.
    """
    B, total = G, None
    if group["momentum"]:
        weighted = (1 - group["dampening"]) * G if group["dampening"] else G
        total = torch.add(weighted, state["momentum_buffer"], alpha=group["momentum"])
        B = torch.add(G, total, alpha=group["momentum"]) if group["nesterov"] else total
    parts = [pack(shared_residual(X, rows.share), B.mH @ B), X.mH @ B]
    if total is not None and group["nesterov"]:
        parts.append(X.mH @ total)
    if total is not None and group["dampening"]:
        parts.append(state["momentum_buffer"].ne(0).flatten(1).any(1).to(X.dtype))
    packed, T, *others = yield parts
    D, P = unpack(packed)
    if total is not None and group["dampening"]:
        # The first gradient enters whole, as in torch; only all ranks know that it is the first.
        first = 1 - others[0].real.clamp(max=1)
        whole = per_matrix(1 + first * (1 / (1 - group["dampening"]) - 1), X)
        B, T, P = B * whole, T * whole, P * whole.square()
        total = B
    a, b, taken = coefficients(Gram(D, T, P, trace(P), rows.total), group)
    new_state = {}
    if total is not None:
        XB = others[0] if group["nesterov"] else T
        new_state["momentum_buffer"] = torch.baddbmm(total, X, sym(XB), alpha=-1)
    return MatrixStep(combine(X, B, a, b), taken, new_state)


def adam_rows(X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group, rows: Rows) -> RowStep:
    """The step of LandingAdam for rows X ``(k, rows, p)`` of k matrices with gradients G.

    Sums ``3 p^2 + p + 2`` numbers per matrix. The mean loses its normal part, ``X C``, only when
    ``X^H G`` is known; its Gram matrices lose theirs by algebra.
    """
    beta1, beta2 = group["betas"]
    m = state["exp_avg"]
    F = torch.add((1 - beta1) * G, m, alpha=beta1)
    norms = [frobenius_norm(M).square().to(X.dtype) for M in (m, G)]
    packed, XG, Xm, *norms = yield [
        pack(shared_residual(X, rows.share), F.mH @ F),
        X.mH @ G,
        X.mH @ m,
        *norms,
    ]
    D, P = unpack(packed)
    size_m, size_G = (norm.real.double() for norm in norms)
    H, XF = sym(XG), beta1 * Xm + (1 - beta1) * XG
    C, CXF = (1 - beta1) * H, (1 - beta1) * (H @ XF)
    mean = torch.baddbmm(F, X, C, alpha=-1)
    T = beta1 * Xm + (1 - beta1) * (skew(XG) - D @ H)  # S H = H + D H, and XG - H is skew
    P = P - CXF - CXF.mH + C @ C + C @ (D @ C)

    step = state["step"] + 1
    tangent = _tangent_square(H, D, size_G, rows.total).sqrt()
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * mean_square(tangent, X.shape[-1])
    root = (square / one_minus_power(beta2, step)).sqrt() + group["adam_eps"]
    scale = 1 / (one_minus_power(beta1, step) * root)
    size = (scale * (beta1 * size_m.sqrt() + (1 - beta1) * size_G.sqrt())).square()
    s = per_matrix(scale, X)
    a, b, taken = coefficients(Gram(D, T * s, P * s * s, size, rows.total), group)
    new_state = {"exp_avg": mean, "exp_avg_sq": square, "step": step}
    return MatrixStep(combine(X, mean, a, b * s), taken, new_state)


def summed_numbers(p: int, group: Group) -> int:
    """How many numbers a step sums for a matrix with p columns."""
    if "betas" in group:
        return 3 * p * p + p + 2
    blocks = 3 if group["momentum"] and group["nesterov"] else 2
    return blocks * p * p + p + bool(group["momentum"] and group["dampening"])


def coefficients(gram: Gram, group: Group) -> Coefficients:
    """The landing step, as a combination of the columns of X and B."""
    return ATTRACTIONS[group["attraction"]](gram, group)


def coupled(gram: Gram, group: Group) -> Coefficients:
    """``X - eta (R + lam X D)``."""
    a, b = tangent_coefficients(gram)
    a = a + group["lam"] * gram.D
    root_q = _root_q(_products(a, b, gram), a, b, gram, group)
    eta, taken = coupled_step(root_q, _distance(gram), _tangency_error(gram), group)
    eta = per_matrix(eta, a)
    return Coefficients(-eta * a, -eta * b, taken)


def decoupled(gram: Gram, group: Group) -> Coefficients:
    """``X - eta R - omega X D``."""
    a, b = tangent_coefficients(gram)
    root_q = _root_q(_products(a, b, gram), a, b, gram, group)
    D = gram.D
    normal = inner(D, D + D @ D).clamp(min=0).sqrt().to(_distance(gram).dtype)  # of X D
    eta, omega, taken = decoupled_step(
        root_q, _distance(gram), normal, _tangency_error(gram), group
    )
    eta, omega = per_matrix(eta, a), per_matrix(omega, a)
    return _if_moving(-eta * a - omega * D, -eta * b, taken, group)


def after(gram: Gram, group: Group) -> Coefficients:
    """``Y = c (X - eta R)``, then ``Y - Y E / 2`` with ``E = Y^H Y - I``.

    E is ``c^2 (D + eta^2 R^H R) + (c^2 - 1) I``. What rounding adds to it is in the D of the next
    step.
    """
    a, b = tangent_coefficients(gram)
    products = _products(a, b, gram)
    root_q = _root_q(products, a, b, gram, group)
    p = a.shape[-1]
    eta, m, taken = after_step(root_q, _distance(gram), p, _tangency_error(gram), group)
    c = (m + 1).rsqrt()
    eta, cube = per_matrix(eta, a), per_matrix(c**3 / 2, a)
    W = -cube * (gram.D + eta.square() * _square(products, a, b))  # c (I - E / 2) - I
    W.diagonal(dim1=-2, dim2=-1).add_((1.5 * c - 1 - c**3 / 2)[..., None])
    return _if_moving(W - eta * (a + a @ W), -eta * (b + b @ W), taken, group)


ATTRACTIONS: dict[str, Callable[[Gram, Group], Coefficients]] = {
    "coupled": coupled,
    "decoupled": decoupled,
    "after": after,
}


def tangent_coefficients(gram: Gram) -> tuple[Tensor, Tensor]:
    """a and b of ``R = (B S - X B^H X) / 2``."""
    b = gram.D / 2
    b.diagonal(dim1=-2, dim2=-1).add_(0.5)
    return gram.T.mH / -2, b


def combine(X: Tensor, B: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``X + X a + B b``."""
    return torch.baddbmm(X, X, a).baddbmm_(B, b)


def pack(D: Tensor, P: Tensor) -> Tensor:
    """Two Hermitian matrices in the memory of one, and a row for the second diagonal."""
    diagonal = P.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return torch.cat([D.triu() + P.tril(-1), diagonal], dim=-2)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Undo :func:`pack`."""
    M = packed[..., :-1, :]
    D, P = M.triu() + M.triu(1).mH, M.tril(-1)
    P = P + P.mH
    P.diagonal(dim1=-2, dim2=-1).copy_(packed[..., -1, :])
    return D, P


def inner(M: Tensor, N: Tensor) -> Tensor:
    """``Re tr(M^H N)`` of each pair of matrices, summed in float64 where there is one."""
    dtype = None if M.device.type == "mps" else torch.float64
    return (M.conj() * N).real.sum(dim=(-2, -1), dtype=dtype)


def trace(P: Tensor) -> Tensor:
    """The trace of each Hermitian matrix, summed in float64 where there is one."""
    dtype = None if P.device.type == "mps" else torch.float64
    return P.diagonal(dim1=-2, dim2=-1).real.sum(-1, dtype=dtype)


def _products(a: Tensor, b: Tensor, gram: Gram) -> tuple[Tensor, Tensor]:
    """``X^H L`` and ``B^H L`` for ``L = X a + B b``."""
    return a + gram.D @ a + gram.T @ b, gram.T.mH @ a + gram.P @ b


def _square(products: tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> Tensor:
    """``L^H L`` for ``L = X a + B b``."""
    return sym(a.mH @ products[0] + b.mH @ products[1])


def _root_q(
    products: tuple[Tensor, Tensor], a: Tensor, b: Tensor, gram: Gram, group: Group
) -> Tensor:
    """``sqrt(q)`` of the safe step's rule, rounded up where rounding may have eaten it.

    The hypotenuse of q and its rounding error: q itself as long as it is well above that.
    """
    if group["safe_step"] == "tight":
        q = frobenius_norm(_square(products, a, b))
    else:
        q = inner(a, products[0]) + inner(b, products[1])
    d = _distance(gram)
    return torch.hypot(q, 4 * (1 + d) * _rounding(gram, d, gram.size)).sqrt()


def _distance(gram: Gram) -> Tensor:
    return torch.linalg.vector_norm(gram.D, dim=(-2, -1))


def _tangency_error(gram: Gram) -> Tensor:
    return _rounding(gram, _distance(gram), gram.size.sqrt())


def _rounding(gram: Gram, d: Tensor, size: Tensor) -> Tensor:
    whole = gram.D.new_empty(gram.n, 0)  # the bound depends on the number of rows and the type
    return tangency_bound(whole, d, size)


def _tangent_square(H: Tensor, D: Tensor, size: Tensor, n: int) -> Tensor:
    """``||G - X H||_F^2`` for ``H = Sym(X^H G)`` and ``size = ||G||_F^2``.

    Never below what rounding leaves of it: too small a second moment makes steps too long.
    """
    whole = D.new_empty(n, 0)
    floor = tangency_bound(whole, torch.zeros_like(size), size)
    return torch.maximum(size - inner(H, H) + inner(H, D @ H), floor)


def _if_moving(a: Tensor, b: Tensor, taken: Tensor, group: Group) -> Coefficients:
    a = unless_zero(group["lr"], a, torch.zeros_like(a))
    return Coefficients(a, b, taken)
