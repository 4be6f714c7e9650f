"""Scaled weights on ranks."""

from typing import Any

import torch

import ortholand as ol
from tests.distributed.training import full, sharded, whole
from tests.distributed.weights import bag, by_view, set_gradients, twins


def wrong_scales(shapes: list[tuple[int, ...]], scale: Any) -> list[str]:
    """What is said where weights are scaled, and the optimizer is not told; then when it is."""
    spread = sharded(bag(shapes, scale=scale))
    messages = []
    for p in spread.parameters():
        try:
            ol.LandingSGD([p])
        except ValueError as error:
            messages.append(str(error))
    optimizer = ol.LandingSGD(by_view(spread), lr=1e-4, scale=scale)
    set_gradients(spread, 0)
    optimizer.step()
    optimizer.param_groups[0]["scale"] = 0.5
    before = whole(spread)
    try:
        optimizer.step()
    except ValueError as error:
        messages.append(str(error))
    assert all(map(torch.equal, whole(spread), before))
    return messages


def helped(shapes: list[tuple[int, ...]], scale: Any) -> list[float]:
    """Errors before and after a projection, and how far that is from one in one process."""
    single, spread = bag(shapes), sharded(bag(shapes))
    groups = [[{**group, "scale": scale} for group in by_view(m)] for m in (single, spread)]
    errors = [ol.orthogonality_error(groups[1])]
    for group in groups:
        ol.orthogonalize_(group)
    errors.append(ol.orthogonality_error(groups[1]))
    pairs = zip(whole(spread), whole(single), strict=True)
    return [*errors, max((a - b).abs().max().item() for a, b in pairs)]


def half_precision(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> dict[str, Any]:
    """Steps of bfloat16 weights, a skipped one, and one with lr = 0."""
    single, alone, spread, optimizer = twins(
        shapes, ol.LandingSGD, dtype=torch.bfloat16, lr=0.01, **options
    )
    for k in range(3):
        for module, stepped in ((single, alone), (spread, optimizer)):
            set_gradients(module, k)
            stepped.step()
    pairs = zip(whole(spread), whole(single), strict=True)
    error = max((a - b).abs().max().item() for a, b in pairs)
    before = [full(p) for p in spread.parameters()]
    for p in spread.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    set_gradients(spread, 9)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    stays = all(map(torch.equal, whole(spread), before))
    return {"error": error, "stays": stays, "skipped": optimizer.skipped_steps()}
