"""Solvers for comparison, and for problems that few have. They plug into ``ortholand.minimize``.

>>> import ortholand, torch
>>> from ortholand_lab.solvers import ConjugateGradient
>>> A = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
>>> x0 = ortholand.random_orthogonal(3, 1, seed=0, dtype=torch.float64)
>>> result = ortholand.minimize(lambda X: (X * (A @ X)).sum(), x0, method=ConjugateGradient)
>>> result.method, round(result.fun, 6)
('cg', 1.0)
"""

from ortholand_lab.solvers.descent import (
    ConjugateGradient,
    GradientDescent,
    RetractionCG,
    RetractionGD,
)
from ortholand_lab.solvers.sampled import minimize_sampled

METHODS = {"cg": ConjugateGradient, "retraction-gd": RetractionGD, "retraction-cg": RetractionCG}

__all__ = [
    "METHODS",
    "ConjugateGradient",
    "GradientDescent",
    "RetractionCG",
    "RetractionGD",
    "minimize_sampled",
]
