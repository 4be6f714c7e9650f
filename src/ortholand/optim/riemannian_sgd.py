"""RiemannianSGD: the retraction methods that landing is compared with."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ortholand.geometry.matrices import finite_matrices
from ortholand.optim.options import Group, GroupOptions, descends, options_of, scalar_lr
from ortholand.optim.sgd import OrthogonalSGD
from ortholand.retractions import RETRACTIONS, Retraction, find_retraction


class RiemannianSGD(OrthogonalSGD):
    """SGD with orthogonal weights, by a retraction: ``X = R(X, -lr A)``.

    Arguments up to ``weight_decay`` and all else are as in :class:`ortholand.LandingSGD`. There is
    no safe step: a retraction stays on the manifold by construction, up to rounding, which
    ``"exponential"`` and ``"cayley"`` accumulate.

    Args:
        retraction: ``"exponential"``, ``"polar"``, ``"cayley"``, ``"qr"``, or a function (X, A) as
            in :mod:`ortholand.retractions`, which is registered there under its name, so that a
            state_dict holds only that name.
        **options: further options, for all groups that do not set their own:
            :class:`ortholand.optim.options.GroupOptions`.

    >>> import torch, ortholand
    >>> X = torch.nn.Parameter(ortholand.random_orthogonal(8, 3, seed=0))
    >>> optimizer = RiemannianSGD([X], lr=0.1, retraction="qr")
    >>> X[0].sum().backward()
    >>> optimizer.step()
    >>> ortholand.orthogonality_error(optimizer) < 1e-5
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        retraction: str | Retraction = "cayley",
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(params, options_of(locals()))

    def check_options(self, options: Group) -> None:
        """Check SGD's conditions, and that the retraction exists."""
        super().check_options(options)
        find_retraction(options["retraction"])

    @classmethod
    def converted(cls, name: str, value: Any) -> Any:
        """An option as it is kept: a retraction that is a function is registered."""
        if name != "retraction" or isinstance(value, str):
            return super().converted(name, value)
        if not callable(value):
            find_retraction(value)  # raises
        name = getattr(value, "__name__", type(value).__name__)
        if RETRACTIONS.setdefault(name, value) is not value:
            raise ValueError(
                f"A retraction named {name!r} exists already. Give the function another __name__."
            )
        return name

    def start_radius(self, group: Group) -> float:  # noqa: ARG002
        """Small, with room for bfloat16: no retraction repairs a start off the manifold."""
        return 0.1

    def move(self, X: Tensor, B: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The retracted point."""
        lr = scalar_lr(group["lr"])
        A = -lr * B
        # Decompositions raise on non-finite input, so it must not reach them.
        sound = finite_matrices(A) & descends(lr)
        A = torch.where(sound[..., None, None], A, 0)
        moved = find_retraction(group["retraction"])(X, A)
        # lr = 0 must change nothing, not even by the rounding of a retraction.
        moved = torch.where(A.ne(0).any(dim=(-2, -1))[..., None, None], moved, X)
        return moved, sound & finite_matrices(moved)
