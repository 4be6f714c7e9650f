"""Whether ranks that share weights step them with the same options.

They compare them before the first step (:func:`compare_terms`). Then a mark of them travels with
the messages that a step sends anyway, so all ranks find a difference at the same time.
"""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ortholand.sharding.placement import is_dtensor

EXACT = 2**24  # integers up to this are exact in float32, in which messages may be


class Terms(NamedTuple):
    """What the ranks of a process group must agree on, as this rank has it."""

    groups: tuple[dict[str, Any], ...]  # options and shapes of weights, of each group
    mark: int  # a checksum of them, below EXACT


TermsOf = Callable[["dist.ProcessGroup"], Terms]


def terms_of(groups: Iterable[Mapping[str, Any]], ranks: dist.ProcessGroup) -> Terms:
    """The options of all groups that have weights spread over these ranks."""
    found = []
    for group in groups:
        shapes = []
        for mesh, weights in by_mesh(group["params"]):
            if ranks in mesh.get_all_groups():
                shapes += [tuple(p.shape) for p in weights]
        if shapes:
            terms: dict[str, Any] = {"weights": shapes}
            for name in sorted(group.keys() - _NO_TERMS):
                value = group[name]
                terms[name] = value if type(value) in _PRINTED_ALIKE else _plain(value)
            found.append(terms)
    return Terms(tuple(found), zlib.crc32(repr(found).encode()) % EXACT)


_NO_TERMS = {"params", "param_names", "initial_lr"}
_PRINTED_ALIKE = (float, str, bool, type(None))


def by_mesh(weights: Iterable[Tensor]) -> list[tuple[Any, list[Tensor]]]:
    """The DTensors among some weights, for each mesh that this rank is in."""
    found: dict[int, tuple[Any, list[Tensor]]] = {}
    for p in weights:
        if is_dtensor(p):
            found.setdefault(id(p.device_mesh), (p.device_mesh, []))[1].append(p)
    return [pair for pair in found.values() if pair[0].get_coordinate() is not None]


def _plain(value: Any) -> Any:
    """A value that prints alike on all ranks; a tensor elsewhere is not read, nor an object."""
    if isinstance(value, Tensor):
        return value.tolist() if value.is_cpu else None
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    try:
        return value if type(value) in _PRINTED_ALIKE else float(value)
    except (TypeError, ValueError):
        return value if isinstance(value, str) else type(value).__name__


def shares(terms: Terms, ranks: dist.ProcessGroup, like: Tensor) -> Tensor:
    """Two numbers whose sums over the ranks are zero if all have the same mark.

    The last rank subtracts its mark for each of the others.
    """
    size = dist.get_world_size(ranks)
    base = EXACT // size  # sums of this many are exact
    factor = 1 - size if dist.get_rank(ranks) == size - 1 else 1
    return like.new_tensor([factor * (terms.mark % base), factor * (terms.mark // base % base)])


def check(differences: Tensor, terms: Terms, ranks: dist.ProcessGroup) -> None:
    """Raise unless they are zero: sums of :func:`shares`, or marks less one's own."""
    if differences.numpy().any():
        raise ValueError(_difference(terms, ranks))


def compare_terms(weights: Iterable[Tensor], terms: TermsOf) -> None:
    """Raise, on all ranks of the weights' meshes, if the terms of some differ: a message each."""
    on_devices = by_mesh(p for p in weights if p.device.type != "meta")
    device_of = {g: some[-1].device for mesh, some in on_devices for g in mesh.get_all_groups()}
    error = ""
    for ranks, device in device_of.items():
        own = terms(ranks)
        # Nobody raises before the last message, for which others wait.
        message = torch.tensor([own.mark, -own.mark, int(bool(error))], device=device)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=ranks)
        high, low, elsewhere = message.tolist()
        if high != -low:
            error = _difference(own, ranks)
        elif elsewhere and not error:
            error = f"{_RULE}, but those of other ranks differ. {_FIX}"
    if error:
        raise ValueError(error)


def _difference(terms: Terms, ranks: dist.ProcessGroup) -> str:
    """What differs between the ranks, which all call this."""
    everywhere: list[Any] = [None] * dist.get_world_size(ranks)
    dist.all_gather_object(everywhere, terms.groups, group=ranks)
    first = everywhere[0]
    for rank, groups in enumerate(everywhere):
        seen = f"on rank 0 and {{}} on rank {rank} of {len(everywhere)} that share weights"
        if len(groups) != len(first):
            return f"{_RULE}, but there are {len(first)} groups {seen.format(len(groups))}. {_FIX}"
        for i, (one, other) in enumerate(zip(first, groups, strict=True)):
            for name in sorted({*one, *other}):
                if one.get(name) != other.get(name):
                    a, b = (reprlib.repr(described.get(name)) for described in (one, other))
                    return f"{_RULE}, but {name!r} of group {i} is {a} {seen.format(b)}. {_FIX}"
    return f"{_RULE}, but they differ. {_FIX}"


_RULE = "Ranks must step the weights that they share with the same options and groups"
_FIX = "Set them alike on all ranks, from the same configuration."
