"""LandingAdam: Adam that lands on the manifold."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ortholand.geometry.derivatives import relative_gradient, remove_normal
from ortholand.geometry.matrices import frobenius_norm, is_square, per_matrix
from ortholand.optim.base import MatrixStep, OrthogonalOptimizer, StateKind, options_of
from ortholand.optim.checks import check_adam_options, plain_betas
from ortholand.optim.fused import fused_step
from ortholand.optim.landing import (
    check_landing_options,
    landing_move,
    landing_start_radius,
)
from ortholand.optim.momentum import mean_square, one_minus_power
from ortholand.optim.plain import Agreement, plain_adam_step
from ortholand.optim.rows import RowStepFunction, adam_rows


class LandingAdam(OrthogonalOptimizer):
    r"""Adam with orthogonal weights, by the landing algorithm.

    .. code-block:: text

        psi = Skew(G X^H)                                   relative gradient
        m   = beta1 m + (1 - beta1) psi
        v   = beta2 v + (1 - beta2) ||psi||_F^2 / p         one number per matrix
        A   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + adam_eps)
        X   = the landing step of :class:`ortholand.LandingSGD` in the direction A

    One second moment per matrix, not per entry: the direction then turns with X and with the
    coordinates, as a direction on the manifold should. (For tall and wide matrices the gradient
    without its normal part stands for psi.) Groups with ``orthogonal=False`` take the step of
    ``torch.optim.AdamW``.

    Args:
        params: parameters, named parameters or groups, as for :class:`ortholand.LandingSGD`.
        lr: target step. The columns of the direction are of norm about one, so lr is about the
            angle, in radians, by which a column turns in a step, whatever the size of the matrix.
        betas: decay of the two moments.
        weight_decay: for groups with ``orthogonal=False`` only.
        adam_eps: Adam's own eps, added to the root of the second moment.
        decoupled_weight_decay: AdamW's decay in plain groups (True) or Adam's (False).
        lam: strength of the coupled attraction.
        eps: radius of the ball that the safe step keeps, in (0, 1). *Not* Adam's eps.
        safe_step: as in :class:`ortholand.LandingSGD`.
        attraction: as in :class:`ortholand.LandingSGD`.
        omega: as in :class:`ortholand.LandingSGD`.
        maximize: ascend instead of descend.
        foreach: as in :class:`ortholand.LandingSGD`.
        fused: as in :class:`ortholand.LandingSGD`.
        sharded: as in :class:`ortholand.LandingSGD`.
        orthogonal: default of the group option.
        view: default of the group option.

    >>> import torch, ortholand
    >>> X = torch.nn.Parameter(ortholand.random_orthogonal(8, 3, seed=0))
    >>> optimizer = LandingAdam([X], lr=0.01, attraction="after")
    >>> X[0].sum().backward()
    >>> optimizer.step()
    >>> ortholand.orthogonality_error(optimizer) < 1e-4
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float | Tensor] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        adam_eps: float = 1e-8,
        decoupled_weight_decay: bool = True,
        lam: float = 1.0,
        eps: float = 0.5,
        safe_step: str | None = "frobenius",
        attraction: str = "coupled",
        omega: float = 0.5,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        sharded: str = "rows",
        orthogonal: bool = True,
        view: str = "matrix",
    ) -> None:
        betas = plain_betas(betas)
        super().__init__(params, options_of(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its betas become a tuple."""
        if "betas" in param_group:
            param_group["betas"] = plain_betas(param_group["betas"])
        super().add_param_group(param_group)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Adam's conditions, and landing's."""
        check_adam_options(options)
        check_landing_options(options)

    def start_radius(self, group: Mapping[str, Any]) -> float:
        """The safe step holds inside the ball only; without it, anywhere will do."""
        return landing_start_radius(group)

    def state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:  # noqa: ARG002
        """Adam's two moments, and the number of steps that each matrix has taken."""
        return {"exp_avg": "matrix", "exp_avg_sq": "number", "step": "number"}

    def matrix_step(
        self, X: Tensor, G: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> MatrixStep:
        """Moments, direction, landing step."""
        beta1, beta2 = group["betas"]
        B = relative_gradient(X, G) if is_square(X) else remove_normal(X, G)
        step = state["step"] + 1
        mean = beta1 * state["exp_avg"] + (1 - beta1) * B
        v = mean_square(frobenius_norm(B), X.shape[-1])
        square = beta2 * state["exp_avg_sq"] + (1 - beta2) * v
        root = (square / one_minus_power(beta2, step)).sqrt() + group["adam_eps"]
        direction = mean / per_matrix(one_minus_power(beta1, step) * root, X)
        moved, taken = landing_move(X, direction, group)
        return MatrixStep(moved, taken, {"exp_avg": mean, "exp_avg_sq": square, "step": step})

    def shortcut(self, params: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Compiled code steps what it can."""
        return fused_step(self, params, group, ("exp_avg", "exp_avg_sq", "step"))

    def row_step(self, group: Mapping[str, Any]) -> RowStepFunction | None:
        """Tall matrices step where their rows are."""
        return None if group["sharded"] == "owners" else adam_rows

    def plain_step(
        self, params: list[Tensor], group: Mapping[str, Any], agree: Agreement | None = None
    ) -> None:
        """The step of ``torch.optim.AdamW`` (or Adam)."""
        plain_adam_step(params, self.state, group, agree)
