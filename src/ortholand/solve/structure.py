"""Points with several blocks: dicts, lists, tuples, and anything torch treats as a pytree."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

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
