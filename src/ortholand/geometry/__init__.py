"""Matrices with orthonormal columns: pure functions on ``(..., n, p)`` tensors."""

from ortholand.geometry.derivatives import (
    relative_gradient,
    relative_gradient_times_x,
    relative_hessian,
    remove_normal,
    riemannian_gradient,
    riemannian_hessian,
)
from ortholand.geometry.manifold import (
    distance,
    gram_residual,
    polar_projection,
    potential,
    random_orthogonal,
)
from ortholand.geometry.matrices import skew, sym
from ortholand.geometry.polar import msign
from ortholand.geometry.rotations import skew_cayley, skew_exponential

__all__ = [
    "distance",
    "gram_residual",
    "msign",
    "polar_projection",
    "potential",
    "random_orthogonal",
    "relative_gradient",
    "relative_gradient_times_x",
    "relative_hessian",
    "remove_normal",
    "riemannian_gradient",
    "riemannian_hessian",
    "skew",
    "skew_cayley",
    "skew_exponential",
    "sym",
]
