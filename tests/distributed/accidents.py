"""Gradients that are not finite, steps of length zero, weights far away."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ortholand as ol
from tests.distributed.training import everything, full, sharded, whole
from tests.distributed.weights import bag, by_view, set_gradients, twins

KINDS = {  # one weight of each way that a step can take
    "tall": (20, 4),
    "square": (9, 9),
    "wide": (6, 9),
    "flat": (3, 50),
    "kernels": (7, 2, 3, 3),
    "one kernel": (5, 3, 3),
}


def with_bad_gradients(bad: float, make: Callable[..., Any], options: dict[str, Any]) -> dict:
    """Two weights of each kind; on the last rank that has rows, a gradient of one is not finite.

    How that of a single process steps, and how that of several.
    """
    shapes = [shape for kind in KINDS.values() for shape in (kind, kind)]
    single, alone_optimizer, spread, optimizer = twins(shapes, make, **options)
    bad_step = 0 if math.isinf(bad) else 1
    for k in range(3):
        set_gradients(single, k)
        set_gradients(spread, k, _spoiler(bad) if k == bad_step else None)
        if k == bad_step:
            for name, p in single.named_parameters():
                if _is_spoilt(name):
                    p.grad.view(-1)[-1] = bad
        alone_optimizer.step()
        optimizer.step()
    states = everything(single, alone_optimizer), everything(spread, optimizer)
    return {"alone": states[0], "spread": states[1]}


def _is_spoilt(name: str) -> bool:
    return int(name[1:]) % 2 == 0


def _spoiler(bad: float) -> Callable[[str, Tensor], None]:
    def spoil(name: str, local: Tensor) -> None:
        rows = torch.tensor([local.shape[0]])
        everywhere = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, rows)
        last = max(r for r, number in enumerate(everywhere) if number)
        if _is_spoilt(name) and dist.get_rank() == last:
            local.view(-1)[-1] = bad

    return spoil


def bad_gradients(make: Callable[..., Any], options: dict[str, Any]) -> list[dict]:
    return [with_bad_gradients(bad, make, dict(options)) for bad in (float("nan"), float("-inf"))]


def still_standing(make: Callable[..., Any], options: dict[str, Any]) -> dict:
    """Whether a step with lr = 0 leaves weights as they were, and any step the gradients."""
    *_, spread, optimizer = twins(list(KINDS.values()), make, **options)
    before = whole(spread)
    set_gradients(spread, 0)
    gradients = [p.grad for p in spread.parameters()]
    copies = [full(g) for g in gradients]
    optimizer.step()
    same = [torch.equal(a, b) for a, b in zip(whole(spread), before, strict=True)]
    kept = [torch.equal(full(g), c) for g, c in zip(gradients, copies, strict=True)]
    own = [p.grad is g for p, g in zip(spread.parameters(), gradients, strict=True)]
    return {"same": same, "kept": kept, "own": own, "skipped": optimizer.skipped_steps()}


def compared(make: Callable[..., Any], options: dict[str, Any], steps: int) -> dict:
    """Steps along random gradients on ranks and in one process."""
    single, alone_optimizer, spread, optimizer = twins(list(KINDS.values()), make, **options)
    for k in range(steps):
        for module, stepped in ((single, alone_optimizer), (spread, optimizer)):
            set_gradients(module, k)
            stepped.step()
    states = everything(single, alone_optimizer), everything(spread, optimizer)
    return {"alone": states[0], "spread": states[1]}


def rounded_on_replicas(make: Callable[..., Any], options: dict[str, Any]) -> dict:
    """Steps of bfloat16 weights, each on two ranks that draw other random numbers."""
    module = sharded(bag(list(KINDS.values()), torch.bfloat16), "hsdp")
    optimizer = make(by_view(module), **options)
    torch.manual_seed(dist.get_rank())
    before = whole(module)
    for k in range(3):
        set_gradients(module, k)
        optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(whole(module), before, strict=True)]
    return {"moved": moved, **everything(module, optimizer)}


def helpers() -> dict:
    """The helpers for parameters, on a sharded model and on a whole one."""
    torch.manual_seed(0)
    shapes = list(KINDS.values())
    single, spread = bag(shapes), bag(shapes)
    for i, (p, q) in enumerate(zip(single.parameters(), spread.parameters(), strict=True)):
        with torch.no_grad():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p)
            q.copy_(p)
    spread = sharded(spread)
    result: dict[str, Any] = {}
    for name, module in (("alone", single), ("spread", spread)):
        groups = by_view(module)
        before = ol.orthogonality_error(groups, reduce=None)
        mean = ol.orthogonality_error(groups, reduce="mean")
        largest = ol.orthogonality_error(groups)
        try:
            ol.LandingSGD(groups, eps=0.01)
            refused = ""
        except ValueError as error:
            refused = str(error)
        ol.orthogonalize_(groups)
        after = ol.orthogonality_error(groups)
        numbers = {"before": before, "mean": mean, "max": largest, "after": after}
        result[name] = {**numbers, "refused": refused, "weights": whole(module)}
    if dist.get_rank() == 1:
        spread.w0.detach().to_local().fill_(float("nan"))
    try:
        ol.orthogonalize_(by_view(spread))
    except ValueError as error:
        result["not finite"] = str(error)
    return result
