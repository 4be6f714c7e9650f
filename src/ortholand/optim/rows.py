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

import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import per_matrix, skew, sym
from ortholand.geometry.shards import shared_residual
from ortholand.optim.base import MatrixStep
from ortholand.optim.landing import after_step, coupled_step, decoupled_step, unless_zero

Group = Mapping[str, Any]
RowStep = Generator[list[Tensor], list[Tensor], MatrixStep]


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


def sgd_rows(
    X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group, rows: Rows
) -> RowStep:
    """The step of LandingSGD for rows X ``(k, rows, p)`` of k matrices with gradients G."""
    B, total = G, None
    if group["momentum"]:
        buffer = state["momentum_buffer"]
        total = torch.add((1 - group["dampening"]) * G, buffer, alpha=group["momentum"])
        B = torch.add(G, total, alpha=group["momentum"]) if group["nesterov"] else total
    parts = [pack(shared_residual(X, rows.share), B.mH @ B), X.mH @ B]
    if group["nesterov"]:
        parts.append(X.mH @ total)
    if group["momentum"] and group["dampening"]:
        parts.append(state["momentum_buffer"].ne(0).any(-1).any(-1).to(X.dtype))
    packed, T, *others = yield parts
    D, P = unpack(packed)
    if total is not None and group["dampening"]:
        B, T, P = _first_undampened(B, T, P, others[-1], group["dampening"])
        total = B
    a, b, taken = coefficients(Gram(D, T, P, trace(P), rows.total), group)
    new_state = {}
    if total is not None:
        T = others[0] if group["nesterov"] else T
        new_state["momentum_buffer"] = torch.baddbmm(total, X, sym(T), alpha=-1)
    return MatrixStep(combine(X, B, a, b), taken, new_state)


def adam_rows(
    X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group, rows: Rows
) -> RowStep:
    """The step of LandingAdam for rows X ``(k, rows, p)`` of k matrices with gradients G."""
    beta1, beta2 = group["betas"]
    mean = torch.add((1 - beta1) * G, state["exp_avg"], alpha=beta1)  # its normal part goes later
    parts = [pack(shared_residual(X, rows.share), mean.mH @ mean), X.mH @ G]
    parts += [X.mH @ state["exp_avg"], squared_norm(G).to(parts[0].real.dtype)]
    packed, XG, Xm, size = yield parts
    ...
