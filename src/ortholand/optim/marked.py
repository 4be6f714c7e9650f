"""Groups of an optimizer that was given parameters without saying which of them are orthogonal."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ortholand.marks import Options, marks_on
from ortholand.optim.options import Group


def by_marks(params: ParamsT, defaults: Group, others: Iterable[Tensor] = ()) -> Any:
    """The groups, in which marked weights are orthogonal, and others are not.

    Groups that say so themselves are kept, and so are all if no weight is marked: neither in them
    nor among the ``others``, which the optimizer has already. What torch refuses is left to it.
    """
    if isinstance(params, Tensor) or not defaults["orthogonal"]:
        return params
    groups: list[Any] = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        return groups
    for group in groups:
        group["params"] = _members(group["params"])
    marks = marks_on({*others, *(_weight(each) for group in groups for each in group["params"])})
    if not marks:
        return groups
    parts: list[dict[str, Any]] = []
    ignored: list[float] = []
    for group in groups:
        parts += [group] if "orthogonal" in group else _split(group, marks, defaults, ignored)
    if ignored:
        warnings.warn(
            f"weight_decay={max(ignored)} is ignored for {len(ignored)} marked weights: the norm "
            "of an orthogonal weight is constant. Unmarked weights decay.",
            stacklevel=4,  # who called the constructor
        )
    return parts


def _split(
    group: dict[str, Any], marks: dict[Tensor, Options], defaults: Group, ignored: list[float]
) -> list[dict[str, Any]]:
    """A group for each set of options of marks, and one of the other parameters."""
    parts: list[dict[str, Any]] = []
    if names := group.get("param_names"):  # they go where their parameters go
        named = list(zip(names, group["params"], strict=True))
        group = {**{k: v for k, v in group.items() if k != "param_names"}, "params": named}
    rest: dict[str, Any] = {**group, "orthogonal": False, "params": []}
    decay = group.get("weight_decay", defaults.get("weight_decay", 0.0))
    own = {**group, "weight_decay": 0.0} if decay else group
    for member in group["params"]:
        options, part = marks.get(_weight(member)), rest
        if options is not None:
            ignored += [decay] if decay else []
            wanted: dict[str, Any] = {**own, "orthogonal": True, **options, "params": []}
            alike = [part for part in parts if {**part, "params": []} == wanted]
            if not alike:
                parts.append(wanted)
            part = (alike or parts)[-1]
        part["params"].append(member)
    return [part for part in (*parts, rest) if part["params"]]


def _members(params: Any) -> Any:
    """The parameters of a group, to be read more than once; torch refuses sets."""
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, set) else list(params)


def _weight(member: Any) -> Any:
    return member[1] if isinstance(member, tuple) and len(member) == 2 else member
