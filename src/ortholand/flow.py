"""The landing flow: the ordinary differential equations behind the algorithm."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ortholand.fields import Field, landing_along, landing_field
from ortholand.geometry.derivatives import relative_gradient


class Trajectory(NamedTuple):
    """Points of a flow: ``X[k]`` at time ``t[k]``; ``A[k]`` is the momentum, if there is one."""

    t: Tensor
    X: Tensor
    A: Tensor | None = None


def landing_flow(
    gradient: Callable[[Tensor], Tensor],
    x0: Tensor,
    times: Tensor,
    *,
    lam: float = 1.0,
    momentum: bool = False,
    field: Field = landing_field,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> Trajectory:
    """Solve ``X' = -Lambda(X)``, or with ``momentum`` the paper's second-order flow.

    ``A' = psi(X) - A, X' = -(A + lam (X X^T - I)) X`` for square X, from ``A = 0``.

    Args:
        gradient: Euclidean gradient of f at X.
        x0: starting point, one real matrix; the integration is done in float64.
        times: increasing times at which to return the trajectory, beginning with the start.
        lam: attraction to the manifold.
        momentum: whether to follow the flow with momentum.
        field: another field to follow instead of the landing field.
        rtol: relative tolerance of the integrator.
        atol: absolute tolerance of the integrator.

    Raises:
        RuntimeError: if the integrator fails, as it must when a trajectory (PLAM's, say)
            explodes in finite time.

    >>> import torch
    >>> path = landing_flow(lambda X: 0 * X, 1.1 * torch.eye(2), torch.linspace(0, 5, 6))
    >>> bool((path.X[-1] - torch.eye(2)).abs().max() < 1e-4)
    True
    """
    from scipy.integrate import solve_ivp  # here: importing ortholand must stay cheap

    if x0.ndim != 2 or x0.is_complex():
        raise ValueError(
            f"landing_flow integrates one real matrix, got shape {tuple(x0.shape)}, {x0.dtype}."
        )
    X0 = x0.detach().double().cpu()
    start = torch.stack([X0, torch.zeros_like(X0)]) if momentum else X0[None]

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        X, *moments = torch.from_numpy(flat).reshape(start.shape)
        G = gradient(X)
        if not moments:
            return -field(X, G, lam).reshape(-1).numpy()
        (A,) = moments
        towards = landing_along(X, A, lam)
        return -torch.stack([towards, A - relative_gradient(X, G)]).reshape(-1).numpy()

    t = times.detach().double().cpu()
    options = {"t_eval": t.numpy(), "rtol": rtol, "atol": atol}
    span = float(t[0]), float(t[-1])
    solution = solve_ivp(velocity, span, start.reshape(-1).numpy(), **options)
    if not solution.success:
        raise RuntimeError(f"The flow could not be followed to the end: {solution.message}")
    states = torch.from_numpy(solution.y.T.copy()).reshape(-1, *start.shape)
    return Trajectory(t, states[:, 0], states[:, 1] if momentum else None)
