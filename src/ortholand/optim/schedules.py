"""Learning rate schedules from the theory of landing."""

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ortholand.optim.options import check_finite


class PowerLawLR(LRScheduler):
    """``lr_k = lr_0 k^(-alpha)`` for k = 1, 2, ...: the paper's decreasing steps.

    For alpha in (1/2, 1) the iterates land on the manifold and approach critical points; the best
    proven rate, ``inf ||psi||^2 = O(k^(-1/3))``, is attained at alpha = 2/3.

    Args:
        optimizer: any optimizer.
        alpha: exponent, at least 0.
        last_epoch: as for every torch scheduler, -1 to start afresh.

    >>> import torch
    >>> X = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = torch.optim.SGD([X], lr=1.0)
    >>> scheduler = PowerLawLR(optimizer, alpha=0.5)
    >>> rates = []
    >>> for _ in range(4):
    ...     rates.append(optimizer.param_groups[0]["lr"])
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates[0], rates[3]
    (1.0, 0.5)
    """

    def __init__(self, optimizer: Optimizer, alpha: float = 2 / 3, last_epoch: int = -1) -> None:
        check_finite("alpha", alpha)
        if alpha < 0:
            raise ValueError(f"alpha must be at least 0, got {alpha}. The paper's best is 2/3.")
        self.alpha = alpha
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Learning rates of the groups at the current step."""
        return [base * (self.last_epoch + 1) ** -self.alpha for base in self.base_lrs]
