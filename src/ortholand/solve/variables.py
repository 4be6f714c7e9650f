"""Conversion between the user's variables and the solver's.

The user's are NumPy or torch, tall or wide, one block or a tree of them. The solver has one array:
tall matrices, or one vector for several blocks. It is NumPy's if the user's are, or if torch's
calls would take longer than the arithmetic; otherwise torch's, on the user's device.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ortholand.solve.arrays import Array, all_finite, copy_of, norm, precision, real_vector

EXAMPLES = {"Manifold": "a manifold such as ol.Stiefel()", "Prox": "an ol.Prox, as ol.L1(0.1) is"}


def opened(tree: Any) -> tuple[list[Any], list[Any]] | None:
    """The keys and the parts of a tree; None for a leaf."""
    is_named = isinstance(tree, tuple) and hasattr(tree, "_fields")
    node = pytree.SUPPORTED_NODES.get(cast(Any, pytree.namedtuple) if is_named else type(tree))
    if node is None:
        return None
    parts = list(node.flatten_fn(tree)[0])
    return list(tree) if isinstance(tree, dict) else list(range(len(parts))), parts


class Structure:
    """The shape of a tree, and conversion to a list of its leaves and back."""

    def __init__(self, tree: Any, where: str = "x0") -> None:
        self.where, self.type = where, type(tree)
        self.is_leaf, self.spec = opened(tree) is None, pytree.tree_structure(tree)
        self.keys, parts = opened(tree) or ([], [])
        self.children = [
            Structure(part, f"{where}[{key!r}]") for key, part in zip(self.keys, parts, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        if self.is_leaf:
            return [self.where]
        return [name for child in self.children for name in child.names]

    def leaves(self, tree: Any, name: str) -> list[Any]:
        """The leaves of another tree of this structure, in this order."""
        if self.is_leaf:
            return [tree]
        pairs = zip(self.children, self._parts(tree, name), strict=True)
        return [leaf for child, part in pairs for leaf in child.leaves(part, name)]

    def _parts(self, tree: Any, name: str) -> list[Any]:
        is_dict = issubclass(self.type, dict)
        node = opened(tree) if isinstance(tree, dict) == is_dict else None
        if node is not None and is_dict and set(tree) == set(self.keys):
            return [tree[key] for key in self.keys]
        if node is not None and not is_dict and len(node[1]) == len(self.keys):
            return node[1]
        raise ValueError(
            f"{name} must return the structure of x0, at {self.where} a {self.type.__name__} of "
            f"{self.keys if is_dict else len(self.keys)}, got {_words(tree)}."
        )

    def build(self, leaves: Sequence[Any]) -> Any:
        return leaves[0] if self.is_leaf else pytree.tree_unflatten(list(leaves), self.spec)


def is_numbers(tree: Any) -> bool:
    """Whether a tree is an array, or lists of numbers that stand for one."""
    if isinstance(tree, (list, tuple)):
        return len(tree) > 0 and all(_is_rows(part) for part in tree)
    return isinstance(tree, (np.ndarray, np.generic, Tensor)) or hasattr(tree, "__array__")


def _is_rows(part: Any) -> bool:
    if isinstance(part, (list, tuple)):
        return all(_is_rows(p) for p in part)
    return isinstance(part, (int, float, complex, np.generic))


def assign(manifold: Any, kind: type, tree: Any, where: str = "manifold") -> list[Any]:
    """A manifold, an object of this kind, or None for the default one, for each leaf of a tree."""
    if isinstance(manifold, type) and issubclass(manifold, kind):
        manifold = manifold()
    if manifold is None or isinstance(manifold, kind):
        return [manifold] * len(Structure(tree).names)
    node = None if is_numbers(tree) else opened(tree)
    if node is None or opened(manifold) is None:
        raise TypeError(
            f"{where} must be {EXAMPLES.get(kind.__name__, kind.__name__)}, or have the structure "
            f"of x0 with one in each place, got {manifold!r}."
        )
    keys, parts = node
    if isinstance(tree, dict):
        if not isinstance(manifold, dict) or not set(manifold) <= set(tree):
            raise ValueError(f"{where} may have the keys {list(tree)}, got {manifold!r}.")
        manifold = [manifold.get(key) for key in keys]
    elif not isinstance(manifold, (list, tuple)) or len(manifold) != len(parts):
        raise ValueError(f"{where} must have {len(parts)} parts, got {manifold!r}.")
    return [
        one
        for key, part, given in zip(keys, parts, manifold, strict=True)
        for one in assign(given, kind, part, f"{where}[{key!r}]")
    ]


def _words(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict of {list(tree)}"
    return f"a {type(tree).__name__}" + (f" of {len(tree)}" if hasattr(tree, "__len__") else "")


REAL_OR_COMPLEX = (torch.float32, torch.float64, torch.complex64, torch.complex128)
NUMPY_CHARS = "fdFD"  # single and double precision, real and complex
SMALL = 2**15  # numbers up to which NumPy handles a tensor on the CPU


class Manifold:
    """What a block of ``x0`` is constrained to, and how its arrays look to the solver.

    A new manifold is a subclass of this and a geometry, see :mod:`ortholand.solve.manifolds`.
    """

    def inward(self, x: Any, gradient: bool = False) -> Any:  # noqa: ARG002
        """The user's array, a point or a gradient, in the solver's form."""
        return x

    def outward(self, X: Any, shape: tuple[int, ...], gradient: bool = False) -> Any:  # noqa: ARG002
        """The solver's array, a point or a gradient, in the user's form."""
        return X

    def missed_by(self, X: Any) -> tuple[float, float] | None:  # noqa: ARG002
        """How far the user's array misses the constraint, and may; None: as the solver's does."""
        return None

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        if 0 in shape:
            raise ValueError(f"{name} must have entries, got shape {shape}.")

    def nearness(self, shape: tuple[int, ...], numpy: bool) -> tuple[str, str]:
        """What must be at most 1/2 at a start, and how to get there, for an error message."""
        raise NotImplementedError

    def check_component(self, X: Any, name: str) -> None:
        """Raise if a start near the manifold is on a part of it that is excluded."""

    def geometry(self, X: Any, numpy: bool) -> Any:
        """How a solver moves on the manifold, for a user of NumPy or of torch."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"ol.{type(self).__name__}()"


class Packing:
    """Blocks of given shapes and types, real or complex, in one vector of real numbers."""

    def __init__(self, blocks: Sequence[Array]) -> None:
        self.parts: list[tuple[slice, tuple[int, ...], Any]] = []
        begin = 0
        for block in blocks:
            end = begin + len(real_vector(block))
            self.parts.append((slice(begin, end), tuple(block.shape), block.dtype))
            begin = end

    def split(self, vector: Any) -> list[Any]:
        if isinstance(vector, np.ndarray):
            return [vector[part].view(dtype).reshape(shape) for part, shape, dtype in self.parts]
        return [
            torch.view_as_complex(vector[part].reshape(*shape, 2))
            if dtype.is_complex
            else vector[part].reshape(shape)
            for part, shape, dtype in self.parts
        ]

    def join(self, blocks: Sequence[Any]) -> Any:
        library: Any = np if isinstance(blocks[0], np.ndarray) else torch
        return library.concatenate([real_vector(block) for block in blocks])


class Block(NamedTuple):
    """One of the user's arrays."""

    manifold: Manifold
    name: str
    shape: tuple[int, ...]
    dtype: Any


class Variables:
    """The user's start, and conversion between the two sides.

    Args:
        x0: one array, or a tree of them.
        manifold: the manifold of each block, see :func:`ortholand.minimize`.
        default: the manifold of an array for which none is given, and which is alone or not.
        torch_inside: whether the solver's arrays must be tensors.

    Attributes:
        single: whether x0 is one array.
        numpy: whether the user's arrays are NumPy's, or JAX's, which become NumPy's.
        start: a copy of x0 in the solver's form.
    """

    def __init__(
        self,
        x0: Any,
        manifold: Any,
        default: Callable[[Any, bool], Manifold],
        *,
        torch_inside: bool = False,
    ) -> None:
        self.structure = Structure(0.0 if is_numbers(x0) else x0)
        self.single = self.structure.is_leaf
        names, leaves = self.structure.names, self.structure.leaves(x0, "x0")
        arrays = [_array(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
        _check_alike(arrays, names)
        self.numpy = isinstance(arrays[0], np.ndarray)
        is_jax = any(type(leaf).__module__.startswith("jax") for leaf in leaves)
        self.jax = sys.modules.get("jax") if is_jax else None  # never imported here
        self.coarsest = 0.0  # precision of the coarsest array that a user's function returned
        manifolds = assign(manifold, Manifold, arrays[0] if self.single else x0)
        self.blocks = [
            Block(one or default(x, self.single), name, tuple(x.shape), x.dtype)
            for x, one, name in zip(arrays, manifolds, names, strict=True)
        ]
        for manifold, name, shape, _ in self.blocks:
            manifold.check_shape(shape, name)
        on_cpu = self.numpy or all(x.device.type == "cpu" for x in arrays)
        few = self.numpy or sum(x.numel() for x in arrays) <= SMALL
        self.inside_numpy = not torch_inside and on_cpu and few
        own = [b.manifold.inward(self._across(x)) for b, x in zip(self.blocks, arrays, strict=True)]
        # One NumPy array, neither converted nor transposed: the most common case.
        self.plain = self.single and self.numpy and self.inside_numpy and own[0] is leaves[0]
        own = [copy_of(X) for X in own]  # the caller may change x0
        self.packing = Packing(own)
        self.start: Any = own[0] if self.single else self.packing.join(own)

    def split(self, X: Any) -> list[Any]:
        return [X] if self.single else self.packing.split(X)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks[0].shape

    def check_finite(self) -> None:
        for block, X in zip(self.blocks, self.split(self.start), strict=True):
            if not (math.isfinite(norm(X)) or all_finite(X)):  # a norm may overflow
                raise ValueError(
                    f"{block.name} must be finite, but it has infinite or NaN entries."
                )

    def outward(self, X: Any, gradient: bool = False) -> Any:
        """The user's view of X, read-only in NumPy because X is the solver's.

        New variables convert gradients differently from points.
        """
        if self.plain:
            X.setflags(write=False)
            return X
        return self.structure.build(self.outward_blocks(X, gradient))

    def outward_blocks(self, X: Any, gradient: bool = False) -> list[Any]:
        pairs = zip(self.blocks, self.split(X), strict=True)
        return [self._show(b.manifold.outward(part, b.shape, gradient)) for b, part in pairs]

    def show(self, i: int, X: Any) -> Any:
        """The user's view of block i alone."""
        block = self.blocks[i]
        return self._show(block.manifold.outward(X, block.shape))

    def take(self, i: int, x: Any, name: str) -> Any:
        """Block i from the user's side, a point."""
        return self._take(self.blocks[i], x, name, gradient=False)

    def owned(self, X: Any, gradient: bool = False) -> Any:
        """The same as an array that the user may write to."""
        if self.plain:
            return X.copy()
        blocks = self.outward_blocks(X, gradient)
        return self.structure.build([x if self.jax else copy_of(x) for x in blocks])

    def missed_by(self, X: Any, distance: float, allowed: float) -> tuple[float, float]:
        """How far the user's X is and may be from the manifold, given the solver's values."""
        if self.plain:
            return distance, allowed
        pairs = zip(self.blocks, self.outward_blocks(X), strict=True)
        found = [m for m in (block.manifold.missed_by(x) for block, x in pairs) if m is not None]
        for missed, more in found:
            distance, allowed = max(distance, missed), max(allowed, more)
        return distance, allowed

    def inward(self, G: Any, name: str, gradient: bool = True) -> Any:
        """A gradient or Hessian product returned by a user's function, in the solver's form.

        It may share the user's memory, which the next call may overwrite.
        """
        first = self.blocks[0]
        fits = self.plain and type(G) is np.ndarray and G.dtype == first.dtype
        if fits and G.shape == first.shape:
            return G
        pairs = zip(self.blocks, self.structure.leaves(G, name), strict=True)
        found = [self._take(block, leaf, name, gradient) for block, leaf in pairs]
        return found[0] if self.single else self.packing.join(found)

    def _show(self, x: Any) -> Any:
        if self.numpy:
            x = x if isinstance(x, np.ndarray) else x.detach().numpy()
            if self.jax is not None:
                return self.jax.numpy.array(x)
            x.setflags(write=False)
            return x
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x.detach()

    def _take(self, block: Block, G: Any, name: str, gradient: bool) -> Any:
        if not (type(G) is np.ndarray and G.dtype == block.dtype and G.shape == block.shape):
            G = self._convert(block, G, name)
        elif not self.inside_numpy:
            G = _shared(G)
        return block.manifold.inward(G, gradient)

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
        if _numpy_type(G.dtype).itemsize < _numpy_type(block.dtype).itemsize:
            self.coarsest = max(self.coarsest, precision(G))
        G = self._across(G)
        if isinstance(G, np.ndarray):
            return G.astype(_numpy_type(block.dtype), copy=False)
        return G.to(getattr(torch, str(block.dtype).removeprefix("torch.")))

    def _across(self, x: Any) -> Any:
        """An array in the solver's library; memory is shared where possible."""
        if isinstance(x, Tensor):
            x = x.detach()
            # force: also where signs and conjugates are lazy, or zeros take no memory.
            return x.numpy(force=True) if self.inside_numpy else x
        return x if self.inside_numpy else _shared(x)


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
    """Whether numbers of a type may be converted to another: both real, or both complex."""
    return (_numpy_type(dtype).kind == "c") == (_numpy_type(wanted).kind == "c")


def _numpy_type(dtype: Any) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def _shared(x: np.ndarray) -> Tensor:
    """A tensor that shares memory with the array where torch allows that."""
    odd = any(step < 0 or step % x.itemsize for step in x.strides)
    if odd or not x.flags.writeable:
        x = x.copy(order="C")
    return torch.from_numpy(x)


def _check_alike(arrays: list[Any], names: list[str]) -> None:
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
