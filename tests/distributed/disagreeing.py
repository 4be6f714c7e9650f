"""Ranks whose options or groups differ."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ortholand as ol
from tests.distributed.accidents import KINDS
from tests.distributed.training import everything, sharded
from tests.distributed.weights import bag, by_view, set_gradients

SHAPES = {"rows": (20, 4), "owners": (9, 9), "columns": (3, 50), "here": (7, 2, 3, 3)}


def tried(optimizer: Any, module: nn.Module, seed: int = 0) -> str:
    """The error of a step, or that weights or state changed nevertheless."""
    before = everything(module, optimizer)
    set_gradients(module, seed)
    try:
        optimizer.step()
    except ValueError as error:
        after, skipped = everything(module, optimizer), before.pop("skipped")
        unmoved = all(torch.equal(after[name], value) for name, value in before.items())
        unmoved &= after["skipped"] == skipped
        return str(error) if unmoved else f"moved: {error}"
    return "stepped"


def each(function: Callable[..., Any], cases: list[tuple]) -> list[Any]:
    """The function of each case, in the same processes."""
    return [function(*case) for case in cases]


def at_first_step(make: Callable[..., Any], options: dict[str, Any], other: dict[str, Any]) -> str:
    """The last rank has other options."""
    module = sharded(bag(list(KINDS.values())))
    last = dist.get_rank() == dist.get_world_size() - 1
    optimizer = make(by_view(module), **options)
    if last:
        for group in optimizer.param_groups:
            group.update(other)
    return tried(optimizer, module)


def at_construction(make: Callable[..., Any], options: dict[str, Any], other: dict) -> str:
    """The last rank has other options."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return made(
        make, by_view(sharded(bag(list(KINDS.values())))), options | other if last else options
    )


def made(make: Callable[..., Any], groups: Any, options: dict[str, Any]) -> str:
    """The error of a constructor."""
    try:
        make(groups, **options)
    except ValueError as error:
        return str(error)
    return "made"


def after_a_change(shape: tuple[int, ...], orthogonal: bool, changes: list[dict]) -> list[str]:
    """One rank changes its options after two steps, then takes that back."""
    results = []
    for rank in range(dist.get_world_size()):
        for change in changes:
            module = sharded(bag([shape, shape]))
            momentum = 0.5 if orthogonal else 0.9
            optimizer = ol.LandingSGD(by_view(module), momentum=momentum, orthogonal=orthogonal)
            steps = [tried(optimizer, module), tried(optimizer, module)]
            group = optimizer.param_groups[0]
            kept = copy.copy(dict(group))
            if dist.get_rank() == rank:
                group.update(change)
            steps.append(tried(optimizer, module))
            group.update({name: kept[name] for name in change})
            steps.append(tried(optimizer, module))
            results.append(steps)
    return results


def other_groups(kind: str) -> str:
    """The last rank has a group less, a weight less, or other weights in its groups."""
    module = sharded(bag([(20, 4), (12, 3), (8, 8)]))
    a, b, c = module.parameters()
    groups = [{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.2}]
    if dist.get_rank() == dist.get_world_size() - 1:
        groups = {
            "a group less": groups[:1],
            "a group more": [*groups, {"params": [groups[0]["params"].pop()]}],
            "a weight less": [{"params": [a], "lr": 0.1}, groups[1]],
            "another order": [{"params": [b, a], "lr": 0.1}, groups[1]],
            "groups exchanged": groups[::-1],
        }[kind]
    return made(ol.LandingSGD, groups, {"lr": 0.3})


def replicas_differ() -> str:
    """FSDP2 on two of four ranks each, and one pair has another lr."""
    module = sharded(bag([(20, 4), (8, 8)]), "hsdp")
    optimizer = ol.LandingSGD(by_view(module), lr=0.1)
    if dist.get_rank() >= 2:
        optimizer.param_groups[0]["lr"] = 0.2
    return tried(optimizer, module)


def scheduled() -> dict:
    """All ranks change lr in every step, as a scheduler does; options that mean the same."""
    module = sharded(bag([(20, 4), (9, 9), (3, 50), (7, 2, 3, 3)]))
    first = dist.get_rank() == 0
    lr = torch.tensor(0.1, dtype=torch.float64) if first else 0.1
    optimizer = ol.LandingSGD(by_view(module), lr=lr, momentum=0.5)
    own = nn.Parameter(torch.ones(3 + dist.get_rank()))  # only this rank has such a weight
    optimizer.add_param_group(
        {"params": [("own", own)], "orthogonal": False, "lr": 0.1 * dist.get_rank()}
    )
    steps = []
    for k in range(4):
        own.grad = torch.ones_like(own)
        steps.append(tried(optimizer, module, k))
        for group in optimizer.param_groups[:-1]:
            group["lr"] = group["lr"] * 0.5
    return {"steps": steps}


def messages_of_schedule() -> dict:
    """Messages of a step after lr has changed on all ranks."""
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    module = sharded(bag([(20, 4), (12, 3)]))
    optimizer = ol.LandingSGD(by_view(module), lr=0.1)
    for k in range(3):
        set_gradients(module, k)
        optimizer.param_groups[0]["lr"] *= 0.5
        with CommDebugMode() as counter:
            optimizer.step()
        counts.append(counter.get_total_counts())
    return {"counts": counts}
