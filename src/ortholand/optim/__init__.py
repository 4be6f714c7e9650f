"""Optimizers with orthogonal weights, on ``torch.optim.Optimizer``."""

from ortholand.optim.landing_sgd import LandingSGD
from ortholand.optim.schedules import PowerLawLR

__all__ = ["LandingSGD", "PowerLawLR"]
