"""Points with several blocks: dicts, lists, tuples, and anything torch treats as a pytree."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from ortholand.solve.manifolds import Manifold


class Structure:
    """The shape of a tree, and conversion to a list of its leaves and back."""

    def __init__(self, tree: Any, where: str = "x0") -> None:
        self.where, self.type = where, type(tree)
        self.keys: list[Any] = []
        self.children: list[Structure] | None = None
        if is_leaf(tree):
            return
        if isinstance(tree, dict):
            self.keys = list(tree)
            values = list(tree.values())
        else:
            values, _ = pytree.SUPPORTED_NODES[_node_type(tree)].flatten_fn(tree)
            values, self.keys = list(values), list(range(len(values)))
        self.children = [
            Structure(value, f"{where}[{key!r}]")
            for key, value in zip(self.keys, values, strict=True)
        ]

    @property
    def names(self) -> list[str]:
        """The place of each leaf, as in ``x0[0]``."""
        if self.children is None:
            return [self.where]
        return [name for child in self.children for name in child.names]

    def leaves(self, tree: Any, name: str) -> list[Any]:
        """The leaves of another tree of this structure, in this order."""
        if self.children is None:
            return [tree]
        parts = self._parts(tree, name)
        return [
            leaf
            for child, part in zip(self.children, parts, strict=True)
            for leaf in child.leaves(part, name)
        ]

    def _parts(self, tree: Any, name: str) -> list[Any]:
        if issubclass(self.type, dict):
            if isinstance(tree, dict) and set(tree) == set(self.keys):
                return [tree[key] for key in self.keys]
        elif not is_leaf(tree) and not isinstance(tree, dict):
            parts = list(pytree.SUPPORTED_NODES[_node_type(tree)].flatten_fn(tree)[0])
            if len(parts) == len(self.keys):
                return parts
        raise ValueError(
            f"{name} must return the structure of x0, at {self.where} {self._words()}, got "
            f"{_words(tree)}."
        )

    def _words(self) -> str:
        keys = self.keys if issubclass(self.type, dict) else len(self.keys)
        return f"a {self.type.__name__} of {keys}"

    def template(self, tree: Any) -> Callable[[Sequence[Any]], Any]:
        """A function that makes such a tree from its leaves."""
        if self.children is None:
            return lambda leaves: leaves[0]
        if isinstance(tree, dict):
            values, context = list(tree.values()), None
        else:
            values, context = pytree.SUPPORTED_NODES[_node_type(tree)].flatten_fn(tree)
        makers = [child.template(v) for child, v in zip(self.children, values, strict=True)]
        counts = [len(child.names) for child in self.children]

        def make(leaves: Sequence[Any]) -> Any:
            parts, begin = [], 0
            for maker, count in zip(makers, counts, strict=True):
                parts.append(maker(leaves[begin : begin + count]))
                begin += count
            if self.type is dict:
                return dict(zip(self.keys, parts, strict=True))
            if isinstance(tree, dict):  # an OrderedDict, say
                node = pytree.SUPPORTED_NODES[self.type]
                return node.unflatten_fn(parts, node.flatten_fn(tree)[1])
            return pytree.SUPPORTED_NODES[_node_type(tree)].unflatten_fn(parts, context)

        return make


def is_leaf(tree: Any) -> bool:
    """Whether a tree has no parts."""
    return _node_type(tree) not in pytree.SUPPORTED_NODES


def _node_type(tree: Any) -> Any:
    is_named = isinstance(tree, tuple) and hasattr(tree, "_fields")
    return pytree.namedtuple if is_named else type(tree)


LEAF = Structure(0.0)  # of one array


def is_numbers(tree: Any) -> bool:
    """Whether a tree is an array, or lists of numbers that stand for one."""
    if isinstance(tree, (list, tuple)):
        return len(tree) > 0 and all(_is_rows(part) for part in tree)
    return isinstance(tree, (np.ndarray, np.generic, Tensor)) or hasattr(tree, "__array__")


def _is_rows(part: Any) -> bool:
    if isinstance(part, (list, tuple)):
        return all(_is_rows(p) for p in part)
    return isinstance(part, (int, float, complex, np.generic))


def assign_manifolds(
    manifold: Any, tree: Any, names: Sequence[str] | None = None, where: str = "manifold"
) -> list[Any]:
    """A manifold, or None for the default one, for each leaf; its names, if they are known."""
    if isinstance(manifold, type) and issubclass(manifold, Manifold):
        manifold = manifold()
    if manifold is None or isinstance(manifold, Manifold):
        return [manifold] * len(Structure(tree).names if names is None else names)
    if is_leaf(manifold) or is_leaf(tree) or is_numbers(tree):
        raise TypeError(
            f"{where} must be a manifold such as ol.Stiefel(), or have the structure of x0 with "
            f"one in each place, got {manifold!r}."
        )
    return _assign_parts(manifold, tree, where)


def _assign_parts(manifold: Any, tree: Any, where: str) -> list[Any]:
    if isinstance(tree, dict):
        if not isinstance(manifold, dict) or not set(manifold) <= set(tree):
            raise ValueError(f"{where} may have the keys {list(tree)}, got {manifold!r}.")
        pairs = [(manifold.get(key), tree[key], key) for key in tree]
    else:
        parts = pytree.SUPPORTED_NODES[_node_type(tree)].flatten_fn(tree)[0]
        if not isinstance(manifold, (list, tuple)) or len(manifold) != len(parts):
            raise ValueError(f"{where} must have {len(parts)} parts, got {manifold!r}.")
        pairs = list(zip(manifold, parts, range(len(parts)), strict=True))
    return [
        m for part, t, key in pairs for m in assign_manifolds(part, t, where=f"{where}[{key!r}]")
    ]


def _words(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict of {list(tree)}"
    return f"a {type(tree).__name__}" + (f" of {len(tree)}" if hasattr(tree, "__len__") else "")
