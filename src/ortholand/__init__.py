"""Optimisation under orthogonality constraints without retractions: the landing algorithm."""

from importlib.metadata import PackageNotFoundError, version

from ortholand.fields import FIELDS, landing_field, penalty_field, plam_field
from ortholand.flow import landing_flow
from ortholand.geometry import (
    distance,
    gram_residual,
    polar_projection,
    potential,
    random_orthogonal,
    relative_gradient,
    relative_gradient_times_x,
    relative_hessian,
    remove_normal,
    riemannian_gradient,
    riemannian_hessian,
    skew,
    sym,
)
from ortholand.optim import (
    PLAM,
    LandingAdam,
    LandingSGD,
    PenaltySGD,
    PowerLawLR,
    RiemannianSGD,
    explain,
)
from ortholand.parameters import orthogonality_error, orthogonalize_, param_groups
from ortholand.retractions import RETRACTIONS, retract
from ortholand.safe_step import paper_step_size, safe_step_size
from ortholand.solve import check_gradient, check_hessian, minimize, minimize_finite_sum
from ortholand.trivializations import rebase_, trivialize_, untrivialize_

try:
    __version__ = version("ortholand")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "FIELDS",
    "PLAM",
    "RETRACTIONS",
    "LandingAdam",
    "LandingSGD",
    "PenaltySGD",
    "PowerLawLR",
    "RiemannianSGD",
    "check_gradient",
    "check_hessian",
    "distance",
    "explain",
    "gram_residual",
    "landing_field",
    "landing_flow",
    "minimize",
    "minimize_finite_sum",
    "orthogonality_error",
    "orthogonalize_",
    "paper_step_size",
    "param_groups",
    "penalty_field",
    "plam_field",
    "polar_projection",
    "potential",
    "random_orthogonal",
    "rebase_",
    "relative_gradient",
    "relative_gradient_times_x",
    "relative_hessian",
    "remove_normal",
    "retract",
    "riemannian_gradient",
    "riemannian_hessian",
    "safe_step_size",
    "skew",
    "sym",
    "trivialize_",
    "untrivialize_",
]
