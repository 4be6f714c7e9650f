"""Base of the optimizers that are SGD except for the move: momentum, plain groups, checks."""

from ortholand.landing.moments import Momentum
from ortholand.landing.step import Slot
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.options import Group, check_at_least_zero
from ortholand.optim.plain import Agreement, plain_sgd_step


class OrthogonalSGD(OrthogonalOptimizer):
    """SGD on orthogonal weights. A subclass says how a matrix moves in a direction."""

    def check_options(self, options: Group) -> None:
        """Check SGD's conditions, which are torch's own."""
        check_at_least_zero("momentum", options["momentum"])
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError(
                "nesterov=True needs momentum > 0 and dampening = 0, got "
                f"momentum={options['momentum']} and dampening={options['dampening']}."
            )

    keeps_generators = True

    def moments(self, group: Group) -> Momentum:
        """SGD's momentum."""
        return Momentum(group["momentum"], group["dampening"], group["nesterov"])

    def plain_step(self, slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
        """The step of ``torch.optim.SGD``."""
        plain_sgd_step(slots, group, agree)
