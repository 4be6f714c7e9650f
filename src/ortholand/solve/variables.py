"""Conversion between the user's variables and the solver's.

The user's are NumPy or torch, tall or wide, one block or a tree of them. The solver has one array:
tall matrices, or one vector for several blocks. It is NumPy's if the user's are, or if torch's
calls would take longer than the arithmetic; otherwise torch's, on the user's device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.solve.arrays import Array, copy_of, norm
from ortholand.solve.manifolds import Geometry, Manifold, Packing, Product, default_manifold
from ortholand.solve.structure import LEAF, Structure, assign_manifolds, is_leaf, is_numbers

REAL_OR_COMPLEX = (torch.float32, torch.float64, torch.complex64, torch.complex128)
NUMPY_CHARS = "fdFD"  # single and double precision, real and complex
SMALL = 2**15  # numbers up to which NumPy handles a tensor on the CPU


class Block:
    """One of the user's arrays."""

    def __init__(self, x: Array, manifold: Manifold, name: str) -> None:
        self.manifold, self.name = manifold, name
        self.shape, self.dtype = tuple(x.shape), x.dtype
        manifold.check_shape(self.shape, name)
        self.as_it_is = manifold.inward(x) is x  # neither transposed nor reshaped

    def outward(self, X: Any) -> Any:
        """A point in the user's form."""
        return X if self.as_it_is else self.manifold.outward(X, self.shape)

    def inward(self, x: Any) -> Any:
        """A point in the solver's form."""
        return x if self.as_it_is else self.manifold.inward(x)

    def outward_gradient(self, G: Any) -> Any:
        """A gradient in the user's form."""
        return G if self.as_it_is else self.manifold.outward_gradient(G, self.shape)

    def inward_gradient(self, G: Any) -> Any:
        """A gradient in the solver's form."""
        return G if self.as_it_is else self.manifold.inward_gradient(G)


class Variables:
    """The user's start, and conversion between the two sides.

    Args:
        x0: one array, or a tree of them.
        manifold: the manifold of each block, see :func:`ortholand.minimize`.
        torch_inside: whether the solver's arrays must be tensors.

    Attributes:
        single: whether x0 is one array.
        names: what to call each block.
        rebuild: makes a tree like x0 from its blocks.
        numpy: whether the user's arrays are NumPy's.
        start: a copy of x0 in the solver's form.
        geometry: the manifold as the solver sees it.
    """

    def __init__(self, x0: Any, manifold: Any = None, *, torch_inside: bool = False) -> None:
        self.single = is_numbers(x0) or is_leaf(x0)
        arrays = self._one_array(x0) if self.single else self._tree_of_arrays(x0)
        names = self.names
        self.numpy = isinstance(arrays[0], np.ndarray)
        tree = arrays[0] if self.single else x0
        self.blocks = [
            Block(x, one or default_manifold(x, self.single), name)
            for x, one, name in zip(
                arrays, assign_manifolds(manifold, tree, names), names, strict=True
            )
        ]
        self.inside_numpy = not torch_inside and (self.numpy or _small_on_cpu(arrays))
        # One NumPy array, neither converted nor transposed: the most common case.
        self.plain = self.single and self.numpy and self.inside_numpy and self.blocks[0].as_it_is
        self._set_start(arrays)

    def _one_array(self, x0: Any) -> list[Any]:
        self.rebuild: Callable[[Sequence[Any]], Any] = _only
        self.structure, self.names = LEAF, ["x0"]
        return [_array(x0, "x0")]

    def _tree_of_arrays(self, x0: Any) -> list[Any]:
        self.structure = Structure(x0)
        self.names, self.rebuild = self.structure.names, self.structure.template(x0)
        leaves = self.structure.leaves(x0, "x0")
        arrays = [_array(leaf, name) for leaf, name in zip(leaves, self.names, strict=True)]
        _check_alike(arrays, self.names)
        return arrays

    def _set_start(self, arrays: list[Any]) -> None:
        self.start: Any
        self.geometry: Geometry
        if self.single:
            self.start, self.geometry = self._own(self.blocks[0], arrays[0])
            return
        pairs = [self._own(block, x) for block, x in zip(self.blocks, arrays, strict=True)]
        own, geometries = [X for X, _ in pairs], [geometry for _, geometry in pairs]
        self.packing = Packing(own)
        self.start = self.packing.join(own)
        self.geometry = Product(geometries, self.packing)

    def _own(self, block: Block, x: Any) -> tuple[Any, Geometry]:
        """A copy, because the caller may change x, and its geometry."""
        X = copy_of(block.inward(self._across(x)))
        return X, block.manifold.geometry_for(X, self.numpy)

    @property
    def wide(self) -> bool:
        """Whether a single matrix is transposed for the solver."""
        return self.single and not self.blocks[0].as_it_is

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first block."""
        return self.blocks[0].shape

    @property
    def dtype(self) -> Any:
        """Type of the first block."""
        return self.blocks[0].dtype

    def check_start(self) -> None:
        """Raise unless x0 is finite and near the manifold."""
        parts = [self.start] if self.single else self.packing.split(self.start)
        for block, X in zip(self.blocks, parts, strict=True):
            if not (math.isfinite(norm(X)) or _all_finite(X)):
                raise ValueError(
                    f"{block.name} must be finite, but it has infinite or NaN entries."
                )
            block.manifold.check_start(X, block.shape, block.name, self.numpy)

    def outward(self, X: Any) -> Any:
        """The user's view of X, read-only in NumPy because X is the solver's."""
        if self.plain:
            X.setflags(write=False)
            return X
        if not self.single:
            return self.rebuild(self.outward_blocks(X))
        return self._show(self.blocks[0].outward(X))

    def outward_blocks(self, X: Any) -> list[Any]:
        """The user's view of every block."""
        parts = [X] if self.single else self.packing.split(X)
        return [self._show(b.outward(part)) for b, part in zip(self.blocks, parts, strict=True)]

    def outward_gradient(self, G: Any) -> Any:
        """The user's view of a gradient; new variables convert it differently from a point."""
        parts = [G] if self.single else self.packing.split(G)
        pairs = zip(self.blocks, parts, strict=True)
        return self.rebuild([self._show(b.outward_gradient(part)) for b, part in pairs])

    def owned(self, X: Any) -> Any:
        """A point in the user's form, which the user may write to."""
        if self.plain:
            return X.copy()
        return self.rebuild([copy_of(x) for x in self.outward_blocks(X)])

    def owned_gradient(self, G: Any) -> Any:
        """A gradient in the user's form, which the user may write to."""
        if self.plain:
            return G.copy()
        leaves = self.structure.leaves(self.outward_gradient(G), "jac")
        return self.rebuild([copy_of(g) for g in leaves])

    def missed_by(self, X: Any, distance: float, allowed: float) -> tuple[float, float]:
        """How far the user's X is and may be from the manifold, given the solver's values."""
        if self.plain:
            return distance, allowed
        pairs = zip(self.blocks, self.outward_blocks(X), strict=True)
        found = [m for m in (block.manifold.missed_by(x) for block, x in pairs) if m is not None]
        for missed, more in found:
            distance, allowed = max(distance, missed), max(allowed, more)
        return distance, allowed

    def inward_vector(self, V: Any, name: str) -> Any:
        """A direction returned by a user's function, in the solver's form."""
        return self.inward(V, name, gradient=False)

    def inward(self, G: Any, name: str, gradient: bool = True) -> Any:
        """A gradient or Hessian product returned by a user's function, in the solver's form.

        It may share the user's memory, which the next call may overwrite.
        """
        if self.single:
            block = self.blocks[0]
            fits = self.plain and type(G) is np.ndarray and G.dtype == block.dtype
            if fits and G.shape == block.shape:
                return G
            return self._take(block, G, name, gradient)
        leaves = self.structure.leaves(G, name)
        return self.packing.join(
            [
                self._take(b, leaf, name, gradient)
                for b, leaf in zip(self.blocks, leaves, strict=True)
            ]
        )

    def _show(self, x: Any) -> Any:
        if self.numpy:
            x = x if isinstance(x, np.ndarray) else x.detach().numpy()
            x.setflags(write=False)
            return x
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x.detach()

    def _take(self, block: Block, G: Any, name: str, gradient: bool) -> Any:
        if not (type(G) is np.ndarray and G.dtype == block.dtype and G.shape == block.shape):
            G = self._convert(block, G, name)
        elif not self.inside_numpy:
            G = _shared(G)
        return block.inward_gradient(G) if gradient else block.inward(G)

    def _convert(self, block: Block, G: Any, name: str) -> Any:
        """Convert to the block's type and the solver's library; raise if that is impossible."""
        if not self.numpy and not isinstance(G, Tensor):
            raise TypeError(f"{name} must return a tensor, like x0, got {type(G).__name__}.")
        if self.numpy:
            G = _array(G, f"{name} must return an array", of_result=True)
        if tuple(G.shape) != block.shape or not _fits(G.dtype, block.dtype):
            raise ValueError(
                f"{name} must return a matrix like {block.name}, of shape {block.shape} and "
                f"{block.dtype}, got {tuple(G.shape)} and {G.dtype}. It is the Euclidean gradient "
                "(or Hessian product), without any projection."
            )
        G = self._across(G)
        dtype = _numpy_type(block.dtype) if isinstance(G, np.ndarray) else _torch_type(block.dtype)
        return G if G.dtype == dtype else _cast(G, dtype)

    def _across(self, x: Any) -> Any:
        """An array in the solver's library; memory is shared where possible."""
        if isinstance(x, Tensor):
            x = x.detach()
            # force: also where signs and conjugates are lazy, or zeros take no memory.
            return x.numpy(force=True) if self.inside_numpy else x
        return x if self.inside_numpy else _shared(x)


def _only(leaves: Sequence[Any]) -> Any:
    return leaves[0]


def _all_finite(X: Any) -> bool:
    """Whether every entry is finite: a norm may overflow."""
    finite = np.isfinite(X) if isinstance(X, np.ndarray) else X.isfinite()
    return bool(finite.all())


def one_matrix(x0: Any, manifold: Any = None) -> Variables:
    """Variables for solvers of one matrix only, in torch."""
    variables = Variables(x0, manifold, torch_inside=True)
    if not variables.single or len(variables.shape) != 2:
        found = variables.shape if variables.single else type(x0).__name__
        raise ValueError(f"x0 must be one matrix (n, p) here, got {found}.")
    return variables


def _array(x: Any, name: str, *, of_result: bool = False) -> Any:
    """An array or tensor of a supported type; integers become float64."""
    if isinstance(x, Tensor):
        if of_result:
            return x.numpy(force=True)
        if x.dtype not in REAL_OR_COMPLEX:
            raise TypeError(
                f"{name} must be of single or double precision, real or complex, got {x.dtype}. "
                "Example: x0.to(torch.float64)."
            )
        return x.detach()
    if type(x) is np.ndarray and x.dtype.isnative and x.dtype.char in NUMPY_CHARS:
        return x
    rule = name if of_result else f"{name} must be a NumPy array or a tensor"
    if not (is_numbers(x) or of_result):
        raise TypeError(f"{rule} of single or double precision, got {x!r:.60}.")
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        return x.astype(np.float64)
    if x.dtype.char not in NUMPY_CHARS:
        raise TypeError(f"{rule} of single or double precision, got {x.dtype}.")
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _fits(dtype: Any, wanted: Any) -> bool:
    """Whether numbers of a type may be rounded to another, which must not have more digits."""
    dtype, wanted = _numpy_type(dtype), _numpy_type(wanted)
    if (dtype.kind == "c") != (wanted.kind == "c"):
        return False
    return dtype.itemsize >= wanted.itemsize


def _cast(G: Any, dtype: Any) -> Any:
    return G.astype(dtype) if isinstance(G, np.ndarray) else G.to(dtype)


def _numpy_type(dtype: Any) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def _torch_type(dtype: Any) -> torch.dtype:
    return getattr(torch, str(dtype).removeprefix("torch."))


def _shared(x: np.ndarray) -> Tensor:
    """A tensor that shares memory with the array where torch allows that."""
    odd = any(step < 0 or step % x.itemsize for step in x.strides)
    if odd or not x.flags.writeable:
        x = x.copy(order="C")
    return torch.from_numpy(x)


def _small_on_cpu(arrays: list[Any]) -> bool:
    on_cpu = all(x.device.type == "cpu" for x in arrays)
    return on_cpu and sum(x.numel() for x in arrays) <= SMALL


def _check_alike(arrays: list[Any], names: list[str]) -> None:
    """Raise unless all blocks are of one library, precision and device."""
    if not arrays:
        raise ValueError("x0 must have at least one block, got none.")
    if len(arrays) == 1:
        return
    kinds = [
        (type(x).__name__, str(_numpy_type(x.dtype.type(0).real.dtype)), "")
        if isinstance(x, np.ndarray)
        else ("Tensor", str(x.dtype.to_real() if x.is_complex() else x.dtype), str(x.device))
        for x in arrays
    ]
    for kind, name in zip(kinds, names, strict=True):
        if kind != kinds[0]:
            raise TypeError(
                "All blocks of x0 must be of one library, precision and device, got "
                f"{names[0]}: {' '.join(kinds[0]).strip()} and {name}: {' '.join(kind).strip()}."
            )
