"""The numerical kernel that every landing optimizer shares: tangent, attraction, safe step.

Three ways to be attracted to the manifold, each with a safe step of its own:

- ``"coupled"``: the paper's ``X - eta (R + lam X D)``. The attraction shrinks with eta.
- ``"decoupled"``: ``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X.
- ``"after"``: move, then land. ``Y = X - eta R``, then a Newton-Schulz step at Y, which sees
  where the move has led and leaves an error of order eta^4.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortholand.fields import (
    Landing,
    Tangent,
    landing_from_gradient,
    landing_from_relative,
    tangent_from_gradient,
    tangent_from_relative,
)
from ortholand.geometry.manifold import gram_residual
from ortholand.geometry.matrices import is_square
from ortholand.safe_step import (
    RULES,
    check_ball,
    check_rule,
    largest_step,
    largest_step_before_landing,
    largest_step_decoupled,
)


class Move(NamedTuple):
    """A step before it is known to be finite."""

    update: Tensor  # what X loses, (..., n, p)
    size: Tensor  # infinite or NaN where the update is, (...)


def landing_update(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What X loses in a step with ``eta = min(lr, safe step)``, and which matrices take it.

    B is the generator of the direction (:mod:`.momentum`). A matrix whose step would not be finite
    gets the update zero and is reported as not taken; its neighbours in the batch are not touched.
    No value leaves the device.
    """
    update, size = ATTRACTIONS[group["attraction"]](X, B, group)
    taken = size < math.inf  # false for NaN too
    return torch.where(taken[..., None, None], update, 0), taken


def coupled(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> Move:
    """The paper's step, ``eta L``."""
    L, d, tangency_error = landing(X, B, group["lam"])
    root_q = RULES[group["safe_step"] or "frobenius"](L)
    eta = _target(group["lr"], d)
    if group["safe_step"] is not None:
        safe = largest_step(root_q, d, group["lam"], group["eps"], tangency_error)
        eta = torch.minimum(eta, safe)
    return Move(eta[..., None, None] * L, eta * root_q)


def decoupled(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> Move:
    """``eta R + omega X D``."""
    R, D, d, tangency_error = tangent(X, B)
    XD = X @ D
    root_q = RULES[group["safe_step"] or "frobenius"](R)
    eta, omega = _target(group["lr"], d), _if_moving(group["lr"], group["omega"], d)
    if group["safe_step"] is not None:
        normal = torch.linalg.vector_norm(XD, dim=(-2, -1))
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this one cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        safe = largest_step_decoupled(root_q, d, normal, omega, group["eps"], tangency_error)
        eta = torch.minimum(eta, safe)
    return Move(eta[..., None, None] * R + omega[..., None, None] * XD, eta * root_q + omega * d)


def after(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> Move:
    """The move to ``Y = X - eta R`` and the landing from there."""
    R, _, d, tangency_error = tangent(X, B)
    root_q = RULES[group["safe_step"] or "frobenius"](R)
    eta = _target(group["lr"], d)
    if group["safe_step"] is not None:
        safe = largest_step_before_landing(root_q, d, group["eps"], tangency_error)
        eta = torch.minimum(eta, safe)
    move = eta[..., None, None] * R
    landed = loss_by_landing(X - move) * _if_moving(group["lr"], 1.0, d)[..., None, None]
    return Move(move + landed, eta * root_q + d)


def loss_by_landing(Y: Tensor) -> Tensor:
    """What Y loses in one Newton-Schulz step after scaling to the norm of a point on the manifold.

    A tangent move only ever adds to the singular values of X, so Y is too large by about the mean
    m of ``E = Y^H Y - I``. With ``c = (1 + m)^(-1/2)`` the step on ``c Y`` leaves ``3/4 (e - m)^2``
    of an eigenvalue e of E in place of ``3/4 e^2``, for nothing. (E is ``D + eta^2 R^H R`` in exact
    arithmetic; measured, it also sees what rounding did to R.)
    """
    E = gram_residual(Y)
    mean = E.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    c = (1 + mean.clamp(min=0)).rsqrt()[..., None]
    K = c[..., None] ** 3 / 2 * E
    K.diagonal(dim1=-2, dim2=-1).add_((c - 1) ** 2 * (c + 2) / 2)  # 1 - c (3 - c^2) / 2
    return Y @ K


ATTRACTIONS: dict[str, Callable[[Tensor, Tensor, Mapping[str, Any]], Move]] = {
    "coupled": coupled,
    "decoupled": decoupled,
    "after": after,
}


def check_landing_options(options: Mapping[str, Any]) -> None:
    """Raise unless ball, rule and attraction make sense."""
    check_ball(options["lam"], options["eps"])
    if options["safe_step"] is not None:
        check_rule(options["safe_step"])
    if options["attraction"] not in ATTRACTIONS:
        raise ValueError(
            f"attraction must be one of {tuple(ATTRACTIONS)}, got {options['attraction']!r}."
        )
    if not 0 <= options["omega"] <= 0.5:
        raise ValueError(
            f"omega must be in [0, 1/2], got {options['omega']}: 1/2 is a full Newton-Schulz step, "
            "and more overshoots the manifold."
        )


def landing_start_radius(group: Mapping[str, Any]) -> float:
    """How far from the manifold a matrix may start: the safe step holds inside the ball only."""
    return group["eps"] if group["safe_step"] is not None else math.inf


def landing(X: Tensor, B: Tensor, lam: float) -> Landing:
    """The landing field whose tangent part is the one that the generator B stands for."""
    return landing_from_relative(X, B, lam) if is_square(X) else landing_from_gradient(X, B, lam)


def tangent(X: Tensor, B: Tensor) -> Tangent:
    """The tangent part that the generator B stands for."""
    return tangent_from_relative(X, B) if is_square(X) else tangent_from_gradient(X, B)


def _target(lr: float | Tensor, d: Tensor) -> Tensor:
    return torch.ones_like(d) * lr if isinstance(lr, Tensor) else torch.full_like(d, lr)


def _if_moving(lr: float | Tensor, value: float, d: Tensor) -> Tensor:
    """The value, or zero where lr is zero: such a step changes nothing, attraction included."""
    return torch.full_like(d, value) * (lr > 0)
