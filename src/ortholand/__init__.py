"""Optimisation under orthogonality constraints without retractions: the landing algorithm.

This module exports what most programs need. The rest is in its submodules:

- :mod:`ortholand.geometry`: distance, projection, random samples; relative and Riemannian gradients
  and Hessians; ``sym`` and ``skew``.
- :mod:`ortholand.fields`: the landing, PLAM and penalty fields.
- :mod:`ortholand.safe_step`: how far a step may go; the rules, or your own.
- :mod:`ortholand.retractions`: exponential, polar, Cayley and QR.
- :mod:`ortholand.landing`: what a landing step is; the attractions, or your own.
- :mod:`ortholand.optim`: the optimizers.
- :mod:`ortholand.parameters`: marks, groups, projection and errors of a model's parameters.
- :mod:`ortholand.averages`: EMA and SWA of orthogonal weights.
- :mod:`ortholand.sharding`: weights spread over ranks, and what their steps cost.
- :mod:`ortholand.solve`: minimisation of a function, or of a sum of many terms.
- :mod:`ortholand.nn`: convolutions that are isometries, and networks with certificates.
- :mod:`ortholand.flow`: the landing flow, an ordinary differential equation.
- :mod:`ortholand.trivializations`: weights as exp(A), for any Euclidean optimizer.
- :mod:`ortholand.native`: compiled code, or why there is none.
- :mod:`ortholand.about`: what a bug report needs.
- :mod:`ortholand.integrations`: adapters of PEFT, and callbacks of trainers; not imported here.
"""

from importlib.metadata import PackageNotFoundError, version

from ortholand import nn as nn
from ortholand.fields import landing_field
from ortholand.geometry import distance, msign, random_orthogonal
from ortholand.optim import (
    PLAM,
    LandingAdam,
    LandingMuon,
    LandingSGD,
    PenaltySGD,
    PowerLawLR,
    RiemannianSGD,
    explain,
)
from ortholand.parameters import orthogonal, orthogonality_error, orthogonalize_, param_groups
from ortholand.retractions import retract
from ortholand.safe_step import safe_step_size
from ortholand.solve import (
    L1,
    L21,
    Box,
    Constraint,
    Covariance,
    Euclidean,
    GeneralizedStiefel,
    Grassmann,
    Nonnegative,
    Prox,
    Rotations,
    Sphere,
    Stiefel,
    check_gradient,
    check_hessian,
    minimize,
    minimize_finite_sum,
)
from ortholand.trivializations import rebase_, trivialize_, untrivialize_

try:
    __version__ = version("ortholand")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "L1",
    "L21",
    "PLAM",
    "Box",
    "Constraint",
    "Covariance",
    "Euclidean",
    "GeneralizedStiefel",
    "Grassmann",
    "LandingAdam",
    "LandingMuon",
    "LandingSGD",
    "Nonnegative",
    "PenaltySGD",
    "PowerLawLR",
    "Prox",
    "RiemannianSGD",
    "Rotations",
    "Sphere",
    "Stiefel",
    "check_gradient",
    "check_hessian",
    "distance",
    "explain",
    "landing_field",
    "minimize",
    "minimize_finite_sum",
    "msign",
    "orthogonal",
    "orthogonality_error",
    "orthogonalize_",
    "param_groups",
    "random_orthogonal",
    "rebase_",
    "retract",
    "safe_step_size",
    "trivialize_",
    "untrivialize_",
]
