"""Solvers for a cost on matrices with orthonormal columns, without retractions."""

from ortholand.solve.check import check_gradient, check_hessian
from ortholand.solve.finite_sum import minimize_finite_sum
from ortholand.solve.manifolds import (
    Constraint,
    Euclidean,
    GeneralizedStiefel,
    Grassmann,
    Rotations,
    Sphere,
    Stiefel,
)
from ortholand.solve.manifolds.operators import Covariance
from ortholand.solve.method import Method
from ortholand.solve.minimize import METHODS, minimize
from ortholand.solve.prox import L1, L21, Box, Nonnegative, Prox

__all__ = [
    "L1",
    "L21",
    "METHODS",
    "Box",
    "Constraint",
    "Covariance",
    "Euclidean",
    "GeneralizedStiefel",
    "Grassmann",
    "Method",
    "Nonnegative",
    "Prox",
    "Rotations",
    "Sphere",
    "Stiefel",
    "check_gradient",
    "check_hessian",
    "minimize",
    "minimize_finite_sum",
]
