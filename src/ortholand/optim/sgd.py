"""Base of the optimizers that are SGD except for the move: momentum, plain groups, checks."""

from ortholand.landing.moments import Momentum
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.options import Group, check_at_least_zero


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
        return Momentum(group["momentum"], group["nesterov"], group["dampening"])
