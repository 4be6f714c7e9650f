"""Base of the optimizers that are SGD except for the move: momentum, plain groups, checks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ortholand.landing.moments import accumulate, generator, transport
from ortholand.landing.step import MatrixStep, Slot, StateKind
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.checks import check_sgd_options
from ortholand.optim.plain import Agreement, plain_sgd_step


class OrthogonalSGD(OrthogonalOptimizer):
    """SGD on orthogonal weights. A subclass says how a matrix moves in a direction."""

    def move(self, X: Tensor, B: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The new X in the direction that B represents, and which matrices may move there."""
        raise NotImplementedError

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check SGD's conditions."""
        check_sgd_options(options)

    def state_kinds(self, group: Mapping[str, Any]) -> Mapping[str, StateKind]:
        """The momentum buffer, if there is momentum."""
        return {"momentum_buffer": "matrix"} if group["momentum"] else {}

    keeps_generators = True

    def generator(self, X: Tensor, G: Tensor) -> Tensor:
        """What is accumulated: by default, a generator of the relative gradient."""
        return generator(X, G)

    def transport(self, X: Tensor, buffer: Tensor) -> Tensor:
        """The buffer to keep: by default, without its normal part if X is tall."""
        return transport(X, buffer)

    def matrix_step(
        self, X: Tensor, G: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> MatrixStep:
        """Momentum, then the move."""
        B, new_state = self.generator(X, G), {}
        if group["momentum"]:
            B, total = accumulate(
                B,
                state["momentum_buffer"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
            )
            new_state["momentum_buffer"] = self.transport(X, total)
        return MatrixStep.of(self.move(X, B, group), new_state)

    def plain_step(
        self, slots: list[Slot], group: Mapping[str, Any], agree: Agreement | None = None
    ) -> None:
        """The step of ``torch.optim.SGD``."""
        plain_sgd_step(slots, group, agree)
