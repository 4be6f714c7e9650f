"""PLAM and the penalty method: the infeasible methods that landing is compared with."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ortholand.fields import Field, penalty_field, plam_field
from ortholand.geometry.matrices import finite_matrices
from ortholand.optim.options import Group, GroupOptions, descends, options_of, scalar_lr
from ortholand.optim.sgd import OrthogonalSGD


class FieldSGD(OrthogonalSGD):
    """SGD along a field of X and the (accumulated) Euclidean gradient, with no safeguard.

    Orthogonal weights may start anywhere. Arguments up to ``weight_decay`` are as in
    :class:`ortholand.LandingSGD`; ``lam`` is the attraction to the manifold, and ``options`` are
    those of :class:`ortholand.optim.options.GroupOptions`.
    """

    field: Field
    warns_of_frozen_weights = False  # these methods are known to explode

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        lam: float = 1.0,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(params, options_of(locals()))

    def start_radius(self, group: Group) -> float:  # noqa: ARG002
        """Infinite: weights may start anywhere, since nothing is guaranteed."""
        return float("inf")

    def generator(self, X: Tensor, G: Tensor) -> Tensor:  # noqa: ARG002
        """G itself: these fields use the whole gradient, including its normal part."""
        return G

    def transport(self, X: Tensor, buffer: Tensor) -> Tensor:  # noqa: ARG002
        """The buffer itself: Euclidean gradients are accumulated unchanged."""
        return buffer

    def move(self, X: Tensor, B: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """A step along the field."""
        lr = scalar_lr(group["lr"])
        moved = X - lr * type(self).field(X, B, group["lam"])
        return moved, finite_matrices(moved) & descends(lr)


class PLAM(FieldSGD):
    """PLAM (Gao et al., 2019), the proximal linearised augmented Lagrangian method.

    As published, it has no safeguard, and can explode. Arguments as for :class:`FieldSGD`.
    """

    field = staticmethod(plam_field)


class PenaltySGD(FieldSGD):
    """The penalty method: SGD on ``f + lam N``. Its solutions are not orthogonal.

    Arguments as for :class:`FieldSGD`.
    """

    field = staticmethod(penalty_field)
