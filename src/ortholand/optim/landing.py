"""The numerical kernel that every landing optimizer shares: tangent, attraction, safe step.

Three ways to be attracted to the manifold, each with a safe step of its own:

- ``"coupled"``: the paper's ``X - eta (R + lam X D)``. The attraction shrinks with eta.
- ``"decoupled"``: ``X - eta R - omega X D``; omega = 1/2 is one Newton-Schulz step at X.
- ``"after"``: move, then land. ``Y = X - eta R``, then a Newton-Schulz step at Y, which sees
  where the move has led and leaves an error of order eta^4.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

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
from ortholand.geometry.matrices import (
    add_product,
    is_square,
    per_matrix,
    product,
    sharp_gram_minus_identity,
)
from ortholand.optim.checks import check_bool, check_finite
from ortholand.optim.finite import is_finite
from ortholand.safe_step import (
    RULES,
    check_ball,
    check_rule,
    largest_step,
    largest_step_before_landing,
    largest_step_decoupled,
)


def landing_move(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Where X goes with ``eta = min(lr, safe step)``, and which matrices may go there.

    B is the generator of the direction (:mod:`.momentum`). A matrix whose step would not be finite
    may not; its neighbours in the batch are not touched. No value leaves the device.
    """
    return ATTRACTIONS[group["attraction"]](X, B, group)


def coupled(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The paper's step, ``X - eta L``."""
    L, d, tangency_error = landing(X, B, group["lam"])
    root_q = RULES[group["safe_step"] or "frobenius"](L)
    eta, taken = coupled_step(root_q, d, tangency_error, group)
    return torch.addcmul(X, L, per_matrix(eta, X), value=-1, out=L), taken


def decoupled(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """``X - eta R - omega X D``."""
    R, D, d, tangency_error = tangent(X, B)
    XD = product(X, D)
    root_q = RULES[group["safe_step"] or "frobenius"](R)
    normal = None
    if group["safe_step"] is not None:
        normal = torch.linalg.vector_norm(XD, dim=(-2, -1))
    eta, omega, taken = decoupled_step(root_q, d, normal, tangency_error, group)
    Y = torch.addcmul(X, R, per_matrix(eta, X), value=-1, out=R)
    return unless_zero(group["lr"], Y - per_matrix(omega, X) * XD, X), taken


def after(X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The move to ``Y = c (X - eta R)``, and the Newton-Schulz step ``Y - Y (Y^H Y - I) / 2``.

    A tangent move only ever adds to the singular values of X: ``E = (X - eta R)^H (X - eta R) - I``
    is ``D + eta^2 R^H R``. With ``c = (1 + m)^(-1/2)``, m the mean eigenvalue of the second term,
    the step leaves ``3/4 (e - m)^2`` of an eigenvalue e of E in place of ``3/4 e^2``, for nothing,
    and the safe step still holds: taking its mean from a matrix makes its norm smaller. Y's Gram
    matrix is measured, not derived, so that it also sees what rounding did to R.
    """
    R, _, d, tangency_error = tangent(X, B)
    root_q = RULES[group["safe_step"] or "frobenius"](R)
    eta, m, taken = after_step(root_q, d, X.shape[-1], tangency_error, group)
    c = (m + 1).rsqrt()
    Y = torch.addcmul(X, R, per_matrix(eta, X), value=-1, out=R).mul_(per_matrix(c, X))
    return unless_zero(group["lr"], newton_schulz(Y), X), taken


def coupled_step(
    root_q: Tensor, d: Tensor, tangency_error: Tensor | float, group: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """eta of the coupled attraction, and which matrices may step."""
    safe = None
    if group["safe_step"] is not None:
        safe = largest_step(root_q, d, group["lam"], group["eps"], tangency_error)
    eta = _step_size(group["lr"], safe, root_q)
    return eta, is_finite(eta * root_q)


def decoupled_step(
    root_q: Tensor,
    d: Tensor,
    normal: Tensor | None,
    tangency_error: Tensor | float,
    group: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """eta and omega of the decoupled attraction, and which matrices may step.

    ``normal`` is ``||X D||_F``, needed for a safe step only.
    """
    omega, safe = torch.full_like(d, group["omega"]), None
    if group["safe_step"] is not None:
        assert normal is not None
        # Near the edge of a ball of radius almost 1 a full pull would overshoot; this one cannot.
        gentle = d * (1 - d) / normal.square().clamp(min=torch.finfo(d.dtype).tiny)
        omega = torch.minimum(omega, gentle.clamp(min=0))
        safe = largest_step_decoupled(root_q, d, normal, omega, group["eps"], tangency_error)
    eta = _step_size(group["lr"], safe, root_q)
    return eta, omega, is_finite(eta * root_q + omega * d)


def after_step(
    root_q: Tensor, d: Tensor, p: int, tangency_error: Tensor | float, group: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """eta of "move, then land", the mean m that the move adds, and which matrices may step."""
    safe = None
    if group["safe_step"] is not None:
        safe = largest_step_before_landing(root_q, d, group["eps"], tangency_error)
    eta = _step_size(group["lr"], safe, root_q)
    length = eta * root_q
    taken = is_finite(length)
    if group["safe_step"] is not None:
        taken = taken & (d < 1)  # from there on Newton-Schulz steps may lead anywhere
    # With the rule "tight" root_q is less than ||R||_F, and m too small: less gain, still safe.
    return eta, length.square() / p, taken


def newton_schulz(Y: Tensor) -> Tensor:
    """``Y - Y (Y^H Y - I) / 2``: one step towards the polar factor of Y."""
    return add_product(Y, Y, sharp_gram_minus_identity(Y), alpha=-0.5)


ATTRACTIONS: dict[str, Callable[[Tensor, Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]] = {
    "coupled": coupled,
    "decoupled": decoupled,
    "after": after,
}
SHARDED = ("rows", "owners", "auto")


def check_landing_options(options: Mapping[str, Any]) -> None:
    """Raise unless ball, rule and attraction make sense."""
    for name in ("lam", "eps", "omega"):
        check_finite(name, options[name])
    check_ball(options["lam"], options["eps"])
    if options["safe_step"] is not None:
        check_rule(options["safe_step"])
    if options["attraction"] not in ATTRACTIONS:
        raise ValueError(
            f"attraction must be one of {tuple(ATTRACTIONS)}, got {options['attraction']!r}."
        )
    if options["sharded"] not in SHARDED:
        raise ValueError(f"sharded must be one of {SHARDED}, got {options['sharded']!r}.")
    if options["fused"] is not None:
        check_bool("fused", options["fused"])
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


def _step_size(lr: float | Tensor, safe: Tensor | None, like: Tensor) -> Tensor:
    """``min(lr, safe)`` per matrix; lr itself where nothing is safe."""
    if safe is None:
        return torch.ones_like(like) * lr
    return torch.minimum(safe, lr) if isinstance(lr, Tensor) else safe.clamp(max=lr)


def unless_zero(lr: float | Tensor, moved: Tensor, X: Tensor) -> Tensor:
    """X itself where lr is zero: such a step changes nothing, attraction included."""
    if isinstance(lr, Tensor):
        return torch.where(lr > 0, moved, X)
    return moved if lr > 0 else X
