"""Base of the optimizers that are SGD except for the move: momentum, plain groups, checks."""

from collections.abc import Mapping

from torch import Tensor

from ortholand.landing.moments import accumulate, generator, transport
from ortholand.landing.step import MatrixStep, Slot, StateKind
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.options import Group, check_at_least_zero
from ortholand.optim.plain import Agreement, plain_sgd_step


class OrthogonalSGD(OrthogonalOptimizer):
    """SGD on orthogonal weights. A subclass says how a matrix moves in a direction."""

    def move(self, X: Tensor, B: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The new X in the direction that B represents, and which matrices may move there."""
        raise NotImplementedError

    def check_options(self, options: Group) -> None:
        """Check SGD's conditions, which are torch's own."""
        check_at_least_zero("momentum", options["momentum"])
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError(
                "nesterov=True needs momentum > 0 and dampening = 0, got "
                f"momentum={options['momentum']} and dampening={options['dampening']}."
            )

    def state_kinds(self, group: Group) -> Mapping[str, StateKind]:
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
        self, X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group
    ) -> MatrixStep:
        """Momentum, then the move."""
        B, new_state = self.generator(X, G), {}
        if group["momentum"]:
            how = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
            B, total = accumulate(B, state["momentum_buffer"], **how)
            new_state["momentum_buffer"] = self.transport(X, total)
        return MatrixStep.of(self.move(X, B, group), new_state)

    def plain_step(self, slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
        """The step of ``torch.optim.SGD``."""
        plain_sgd_step(slots, group, agree)
