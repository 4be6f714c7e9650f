"""How a weight of any rank is viewed as matrices with orthonormal columns.

Every view is a grid of equal blocks, each a matrix of its own:

- ``"matrix"``: one block. A weight ``(out, ...)`` is ``out x prod(...)``: a linear layer as it is,
  a convolution as ``(out, in * kh * kw)``;
- ``(r, c)``, the option ``blocks``: r x c blocks of that matrix, such as the gates of an LSTM;
- ``"rows"``, ``"columns"``: each row or column of that matrix is a block, a vector of length one;
- ``"vector"``: all entries are one vector of length one;
- ``"kernel"``: the last two dimensions are the matrix and all others a batch: each kh x kw slice of
  a convolution, as the paper does.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ortholand.geometry.matrices import tall

ViewName = Literal["matrix", "kernel", "rows", "columns", "vector"]
Blocks = tuple[int, int]
View = ViewName | Blocks
VIEWS: tuple[ViewName, ...] = ("matrix", "kernel", "rows", "columns", "vector")

_REAL_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT_TYPES = (*_REAL_TYPES, torch.complex64, torch.complex128)


def check_view(view: object) -> None:
    """Raise unless a view of that name exists."""
    if view not in VIEWS:
        raise ValueError(
            f"view must be one of {VIEWS}, got {view!r}. For a grid of blocks, set blocks=(r, c)."
        )


def plain_blocks(blocks: Any) -> Blocks | None:
    """The option ``blocks`` as a tuple, from any sequence; raise unless it is a grid, or None."""
    if blocks is None:
        return None
    rule = f"blocks must be two numbers, of rows and columns of blocks, got {blocks!r}"
    if isinstance(blocks, str):
        raise ValueError(
            f'{rule}. "gates" and "qkv" are understood where the module is given: '
            "ortholand.orthogonal(module, name, blocks=...)."
        )
    if not isinstance(blocks, Sequence) or len(blocks) != 2 or bool in map(type, blocks):
        raise TypeError(f"{rule}. Example: blocks=(4, 1) for the gates of an LSTM.")
    try:
        r, c = map(operator.index, blocks)
    except TypeError:
        raise TypeError(f"{rule}. Both must be integers.") from None
    if min(r, c) < 1:
        raise ValueError(f"{rule}. Both must be at least 1.")
    return r, c


def view_of(options: Mapping[str, Any]) -> View:
    """How weights with these options are viewed: by ``blocks``, or else by the view's name."""
    view, blocks = options.get("view", "matrix"), plain_blocks(options.get("blocks"))
    check_view(view)
    if blocks is not None and view != "matrix":
        raise ValueError(
            'blocks divide a weight in view="matrix", but got '
            f"blocks={blocks} and view={view!r}. Leave one of them out."
        )
    return view if blocks is None or blocks == (1, 1) else blocks


def described(view: View) -> str:
    """A view in words."""
    return view if isinstance(view, str) else f"{view[0]} x {view[1]} blocks"


class Grid(NamedTuple):
    """A weight as r x c blocks of a x b entries."""

    r: int
    c: int
    a: int
    b: int

    @classmethod
    def of(cls, shape: torch.Size, view: View) -> "Grid":
        """The blocks of a weight of that shape."""
        if view == "kernel":
            return cls(shape[:-2].numel(), 1, *shape[-2:])
        if view == "vector":
            return cls(1, 1, shape.numel(), 1)
        rows, columns = shape[0], shape[1:].numel()
        lines = {"matrix": (1, 1), "rows": (rows, 1), "columns": (1, columns)}
        r, c = lines[view] if isinstance(view, str) else view
        return cls(r, c, rows // max(r, 1), columns // max(c, 1))  # a rank may have none

    def blocks(self, weight: Tensor) -> Tensor:
        """The blocks ``(r, c, a, b)`` of a weight: a view of its memory where possible."""
        return weight.reshape(self.r, self.a, self.c, self.b).transpose(1, 2)

    def upright(self, M: Tensor) -> Tensor:
        """Matrices with n >= p from those that lie as in a weight, and back."""
        return M.mT if self.a < self.b else M


def check_weight(
    weight: Tensor, name: str = "weight", view: View = "matrix", *, moves: bool = True
) -> None:
    """Raise unless the weight can be viewed as matrices with orthonormal columns, that move."""
    shape = tuple(weight.shape)
    if weight.ndim < (1 if view == "vector" else 2):
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
    if not isinstance(view, str):
        sizes = weight.shape[0], weight.shape[1:].numel()
        for size, number, what in zip(sizes, view, ("rows", "columns"), strict=True):
            if size % number:
                raise ValueError(
                    f"blocks={view} must divide a weight, but {name} of shape {shape} has {size} "
                    f"{what}, and {size} is not a multiple of {number}. Set blocks to numbers "
                    f"that divide {sizes[0]} and {sizes[1]}."
                )
    if moves and is_fixed(weight, view):
        raise ValueError(
            f"A 1 x 1 orthogonal matrix cannot move, but {name} of shape {shape} is a stack of "
            f'such, viewed as "{described(view)}". Use view="matrix" for it, or leave it out of '
            "the orthogonal group."
        )
    if weight.dtype not in _FLOAT_TYPES:
        raise TypeError(
            f"An orthogonal parameter must be of a floating or complex type of at least 16 bits, "
            f"but {name} is {weight.dtype}. Convert it, for example with .float()."
        )


def is_fixed(weight: Tensor, view: View) -> bool:
    """Whether the blocks of a weight are single real numbers, 1 or -1, which cannot move."""
    is_stack = view != "matrix" and not (view == "kernel" and weight.ndim < 4)
    return is_stack and Grid.of(weight.shape, view)[2:] == (1, 1) and not weight.is_complex()


def batch_shape(shape: torch.Size, view: View) -> torch.Size:
    """The shape of one number for each matrix of a weight of that shape."""
    if view in ("matrix", "vector"):
        return torch.Size()
    return shape[:-2] if view == "kernel" else torch.Size(Grid.of(shape, view)[:2])


def matrices_shape(shape: torch.Size, view: View) -> torch.Size:
    """The shape ``(..., n, p)``, n >= p, of the matrices of a weight of that shape."""
    size = Grid.of(shape, view)[2:]
    return torch.Size((*batch_shape(shape, view), max(size), min(size)))


def as_matrices(weight: Tensor, view: View) -> Tensor:
    """The weight as matrices ``(..., n, p)`` with n >= p: a view of its memory where possible."""
    if view == "kernel" or (view == "matrix" and weight.ndim == 2):
        return tall(weight)
    blocks = Grid.of(weight.shape, view).blocks(weight)
    return tall(blocks[0, 0] if view in ("matrix", "vector") else blocks)


def as_weight(matrices: Tensor, weight: Tensor, view: View) -> Tensor:
    """Undo :func:`as_matrices`: matrices in the shape of the weight."""
    grid = Grid.of(weight.shape, view)
    oriented = grid.upright(matrices)
    if oriented.shape == weight.shape:
        return oriented
    return oriented.reshape(grid).transpose(1, 2).reshape(weight.shape)
