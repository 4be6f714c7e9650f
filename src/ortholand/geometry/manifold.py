"""The manifold of matrices with orthonormal columns: distance, nearest point, random points.

Orientation: a tall or square matrix has orthonormal *columns*, a wide one orthonormal *rows*.
"""

import torch
from torch import Tensor

from ortholand.geometry.matrices import gram_minus_identity, tall, to_working_dtype, working_dtype
from ortholand.geometry.scales import Scale, check_scale, check_scale_fits, scale_of, unscaled
from ortholand.geometry.views import View, as_matrices, as_weight


def gram_residual(X: Tensor) -> Tensor:
    """``D = X^H X - I`` (``X X^H - I``, conjugated, for wide X); float32 for half precision."""
    return gram_minus_identity(tall(to_working_dtype(X)))


def distance(X: Tensor, *, spectral: bool = False) -> Tensor:
    """``d = ||X^H X - I||_F`` of each matrix: the paper's distance to the manifold.

    Args:
        X: matrices ``(..., n, p)``.
        spectral: use the spectral norm instead, by eigenvalues.

    Below 1, X has full rank. An iteration that keeps ``d <= eps < 1``, as every safe step here
    does, never crosses a singular matrix, so the sign of a square X's determinant never changes:
    started in SO(n), it stays in the determinant +1 component.

    >>> import torch
    >>> distance(torch.diag(torch.tensor([1.0, 2.0]))).item()
    3.0
    """
    return residual_norm(gram_residual(X), spectral=spectral)


def weight_distances(weight: Tensor, view: View, *, spectral: bool, scale: float) -> Tensor:
    """:func:`distance` of each matrix of ``weight / scale``."""
    return distance(unscaled(as_matrices(weight, view), scale), spectral=spectral)


def nearest_weight(weight: Tensor, view: View, scale: float) -> Tensor:
    """The weight whose matrices are ``scale`` times the :func:`polar_projection` of a weight's."""
    X = polar_projection(to_working_dtype(as_matrices(weight, view)))
    return as_weight(X * scale, weight, view)


def residual_norm(D: Tensor, *, spectral: bool = False) -> Tensor:
    """The norm of Hermitian matrices; the spectral norm of a non-finite one is infinite."""
    if not spectral:
        return torch.linalg.vector_norm(D, dim=(-2, -1))
    finite = torch.isfinite(D).all(-1).all(-1)
    D = torch.where(finite[..., None, None], D, torch.zeros_like(D))  # LAPACK may not return
    return torch.linalg.eigvalsh(D).abs().amax(-1).masked_fill(~finite, torch.inf)


def potential(X: Tensor) -> Tensor:
    """``N(X) = d^2 / 4`` of each matrix; its gradient is ``X (X^H X - I)``."""
    return distance(X).square() / 4


def polar_projection(X: Tensor) -> Tensor:
    """Nearest matrix with orthonormal columns (rows if wide): the factor ``U V^H`` of the SVD."""
    U, _, Vh = torch.linalg.svd(to_working_dtype(X), full_matrices=False)
    return (U @ Vh).to(X.dtype)


def orthonormal_factor(X: Tensor) -> Tensor:
    """Q of ``X = Q R`` with a positive diagonal of R, for tall or square X of full rank."""
    Q, R = torch.linalg.qr(X)
    return Q * torch.sgn(R.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)


def random_orthogonal(
    *shape: int,
    seed: int | torch.Generator,
    special: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    scale: Scale = 1.0,
) -> Tensor:
    """Haar-distributed matrices with orthonormal columns (rows if wide).

    Args:
        *shape: ``(..., n, p)``, as for :func:`torch.randn`.
        seed: an integer, or a generator on ``device``.
        special: for square matrices, determinant +1: Haar on SO(n) (SU(n) if complex).
        dtype: real or complex; torch's default type if not given.
        device: the device of the result.
        scale: factor of the matrices: a positive number, or ``"fan"`` for
            ``sqrt(max(1, n / p))``, like the group option of the optimizers.

    >>> X = random_orthogonal(5, 3, seed=0)
    >>> bool(distance(X) < 1e-5)
    True
    """
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(
            f"random_orthogonal needs a shape (..., n, p) of positive sizes, got {shape}. "
            "Example: random_orthogonal(40, 40, seed=0)."
        )
    if special and shape[-2] != shape[-1]:
        raise ValueError(
            f"special=True needs square matrices, got shape {shape}: the determinant of a "
            "rectangular matrix is not defined. Leave special out."
        )
    check_scale(scale)
    *batch, n, p = shape
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(seed, torch.Generator):
        seed = torch.Generator(device or torch.get_default_device()).manual_seed(seed)
    size, working = (*batch, max(n, p), min(n, p)), working_dtype(dtype)
    gaussian = torch.randn(size, generator=seed, dtype=working, device=device)
    Q = orthonormal_factor(gaussian)  # with the phases fixed the law is exactly Haar
    if special:
        Q[..., 0] *= torch.linalg.det(Q).conj().unsqueeze(-1)
    factor = scale_of(scale, torch.Size(shape), "kernel")
    check_scale_fits(factor, dtype, f"a matrix {n} x {p}")
    return ((Q.mT if n < p else Q) * factor).to(dtype).contiguous()
