"""What to log of a run: distances from the manifold, and steps skipped or shortened."""

from typing import Any

from ortholand.optim.base import OrthogonalOptimizer
from ortholand.parameters import orthogonality_error


def measurements(*optimizers: Any) -> dict[str, float]:
    """The largest orthogonality error, and the numbers of skipped and limited steps so far.

    Args:
        optimizers: this library's, or what frameworks wrap around them; others count nothing.

    Returns:
        Numbers by name, ready for a logger. Reads from the device. All ranks must call it
        if weights are sharded. Empty without an optimizer of this library.

    >>> import ortholand as ol, torch
    >>> measurements(ol.LandingSGD([torch.eye(3).requires_grad_()], lr=0.1))
    {'orthogonality_error': 0.0, 'skipped_steps': 0, 'limited_steps': 0}
    """
    ours = [each for each in map(_unwrapped, optimizers) if isinstance(each, OrthogonalOptimizer)]
    if not ours:
        return {}
    return {
        "orthogonality_error": max(orthogonality_error(each) for each in ours),
        "skipped_steps": sum(each.skipped_steps() for each in ours),
        "limited_steps": sum(each.limited_steps() for each in ours),
    }


def _unwrapped(optimizer: Any) -> Any:
    while not isinstance(optimizer, OrthogonalOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
