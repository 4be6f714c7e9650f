"""LandingAdam: Adam that lands on the manifold."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ortholand.landing.moments import AdamMoments
from ortholand.landing.point import Point
from ortholand.optim.landing_optimizer import LandingWithAdam
from ortholand.optim.options import AdamGroupOptions, Group, options_of


class LandingAdam(LandingWithAdam):
    r"""Adam with orthogonal weights, by the landing algorithm.

    .. code-block:: text

        psi = Skew(G X^H)                                   relative gradient
        m   = beta1 m + (1 - beta1) psi
        v   = beta2 v + (1 - beta2) ||psi||_F^2 / p         one number per matrix
        A   = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + adam_eps)
        X   = the landing step of :class:`ortholand.LandingSGD` in the direction A

    There is one second moment per matrix, not per entry: the direction then rotates with X and with
    the coordinates. (For tall and wide matrices the gradient without its normal part represents
    psi.) Groups with ``orthogonal=False`` take the step of ``torch.optim.AdamW``.

    Args:
        params: parameters, named parameters or groups, as for :class:`ortholand.LandingSGD`.
        lr: target step: about the angle, in radians, by which a column turns in a step.
        betas: decay of the two moments.
        weight_decay: for groups with ``orthogonal=False`` only.
        attraction: as in :class:`ortholand.LandingSGD`, but ``"after"`` by default, which leaves an
            orthogonality error at rounding level.
        **options: further options, for all groups that do not set their own:
            :class:`ortholand.optim.options.AdamGroupOptions`.

    >>> import torch, ortholand
    >>> X = torch.nn.Parameter(ortholand.random_orthogonal(8, 3, seed=0))
    >>> optimizer = LandingAdam([X], lr=0.01)
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
        attraction: str = "after",
        **options: Unpack[AdamGroupOptions],
    ) -> None:
        super().__init__(params, options_of(locals()))

    def moments(self, group: Group) -> AdamMoments:
        """Adam's moments."""
        beta1, beta2 = group["betas"]
        return AdamMoments((beta1, beta2), group["adam_eps"])

    keeps_generators = True

    def generator(self, X: Tensor, G: Tensor) -> Tensor:
        """A generator of the relative gradient: for tall X, G without its normal part."""
        return AdamMoments.generator(Point(X), G)
