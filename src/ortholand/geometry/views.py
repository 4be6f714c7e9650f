"""How a weight of any rank is viewed as matrices with orthonormal columns.

``"matrix"`` treats a weight ``(out, ...)`` as one matrix ``out x prod(...)``: a linear layer as it
is, a convolution as ``(out, in * kh * kw)``. ``"kernel"`` treats the last two dimensions as the
matrix and all others as a batch: each kh x kw slice of a convolution, as the paper does.
"""

from typing import Literal

import torch
from torch import Tensor

from ortholand.geometry.matrices import tall

View = Literal["matrix", "kernel"]
VIEWS: tuple[View, ...] = ("matrix", "kernel")

_REAL_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT_TYPES = (*_REAL_TYPES, torch.complex64, torch.complex128)


def check_view(view: str) -> None:
    """Raise unless the view exists."""
    if view not in VIEWS:
        raise ValueError(f"view must be one of {VIEWS}, got {view!r}.")


def check_weight(weight: Tensor, name: str = "weight", view: View = "matrix") -> None:
    """Raise unless the weight can be viewed as matrices with orthonormal columns."""
    shape = tuple(weight.shape)
    if view == "kernel" and is_fixed(weight, view):
        raise ValueError(
            f"A 1 x 1 orthogonal matrix cannot move, but {name} of shape {shape} is a stack of "
            'such in view="kernel". Use view="matrix" for it, or leave it out of the orthogonal '
            "group."
        )
    if weight.ndim < 2:
        raise ValueError(
            f"An orthogonal parameter needs at least 2 dimensions, but {name} has shape {shape}. "
            "Put biases and other vectors in a group with orthogonal=False; "
            "ortholand.param_groups(model, orthogonal=...) does that."
        )
    if weight.numel() == 0:
        raise ValueError(
            f"An orthogonal parameter needs at least one entry, but {name} has shape {shape}. "
            "Remove it from the orthogonal group."
        )
    if weight.dtype not in _FLOAT_TYPES:
        raise TypeError(
            f"An orthogonal parameter must be of a floating or complex type of at least 16 bits, "
            f"but {name} is {weight.dtype}. Convert it, for example with .float()."
        )


def is_fixed(weight: Tensor, view: View) -> bool:
    """Whether a weight is a convolution of 1 x 1 kernels, which are 1 or -1 and cannot move."""
    one_by_one = view == "kernel" and weight.ndim > 3 and weight.shape[-2:] == (1, 1)
    return one_by_one and not weight.is_complex()


def matrices_shape(shape: torch.Size, view: View) -> torch.Size:
    """The shape ``(..., n, p)``, n >= p, of the matrices of a weight of that shape."""
    if view == "matrix":
        shape = torch.Size((shape[0], shape[1:].numel()))
    return torch.Size((*shape[:-2], max(shape[-2:]), min(shape[-2:])))


def as_matrices(weight: Tensor, view: View) -> Tensor:
    """The weight as matrices ``(..., n, p)`` with n >= p: a view of its memory where possible."""
    return tall(weight.flatten(1) if view == "matrix" and weight.ndim > 2 else weight)


def as_weight(matrices: Tensor, weight: Tensor, view: View) -> Tensor:
    """Undo :func:`as_matrices`: matrices in the shape of the weight."""
    rows, columns = (
        (weight.shape[0], weight.shape[1:].numel()) if view == "matrix" else weight.shape[-2:]
    )
    oriented = matrices.mT if rows < columns else matrices
    return oriented if oriented.shape == weight.shape else oriented.reshape(weight.shape)
