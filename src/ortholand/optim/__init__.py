"""Optimizers with orthogonal weights, on ``torch.optim.Optimizer``."""

from ortholand.optim.explain import Explanation, explain
from ortholand.optim.infeasible import PLAM, PenaltySGD
from ortholand.optim.landing_adam import LandingAdam
from ortholand.optim.landing_muon import LandingMuon
from ortholand.optim.landing_sgd import LandingSGD
from ortholand.optim.riemannian_sgd import RiemannianSGD
from ortholand.optim.schedules import PowerLawLR

__all__ = [
    "PLAM",
    "Explanation",
    "LandingAdam",
    "LandingMuon",
    "LandingSGD",
    "PenaltySGD",
    "PowerLawLR",
    "RiemannianSGD",
    "explain",
]
