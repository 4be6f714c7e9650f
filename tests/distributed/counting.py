"""What a step communicates."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ortholand as ol
from tests.distributed.training import whole
from tests.distributed.weights import set_gradients, twins


class Traffic(TorchDispatchMode):
    """Counts numbers that a rank adds to sums, those it receives, and those read by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = self.received = self.read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func._overloadpacket
        if packet is torch.ops.c10d.allreduce_:
            self.summed += sum(tensor.numel() for tensor in args[0])
        if packet is torch.ops.c10d.alltoall_base_:
            received, _, _, sizes, _ = args[:5]
            self.received += received.numel() - sizes[dist.get_rank()]
        self.read += packet is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


def counted(shapes: list[tuple[int, ...]], make: Callable[..., Any], **options: Any) -> dict:
    """What a step of such weights communicates, and how far it is from that of one process."""
    from torch.distributed.tensor.debug import CommDebugMode

    single, alone_optimizer, spread, optimizer = twins(shapes, make, **options)
    for module, stepped in ((single, alone_optimizer), (spread, optimizer)):
        set_gradients(module, 0)
        stepped.step()
    set_gradients(spread, 1)
    with CommDebugMode() as counter, Traffic() as traffic:
        optimizer.step()
    set_gradients(single, 1)
    alone_optimizer.step()
    pairs = zip(whole(spread), whole(single), strict=True)
    counts = {str(op): number for op, number in counter.get_comm_counts().items()}
    return {
        "counts": counts,
        "summed": traffic.summed,
        "received": traffic.received,
        "read": traffic.read,
        "error": max((a - b).abs().max().item() for a, b in pairs),
    }


def all_counted(cases: list[tuple], longest: int | None = None) -> list[dict]:
    """``longest``: the message from which on a step takes several portions."""
    from ortholand.optim.engines import sharded

    if longest is not None:
        sharded.LONGEST_MESSAGE = longest
    return [counted(shapes, make, **options) for shapes, make, options in cases]


def calls(cases: list[tuple]) -> list[int]:
    """How many of the library's Python functions a step calls, when all has been prepared."""
    folder, results = str(Path(ol.__file__).parent), []
    for shapes, make, options in cases:
        _, _, spread, optimizer = twins(shapes, make, **options)
        for k in range(3):
            set_gradients(spread, k)
            optimizer.step()
        set_gradients(spread, 3)
        names: list[str] = []

        def note(frame: Any, event: str, _: Any, names: list[str] = names) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(folder):
                names.append(frame.f_code.co_qualname)

        sys.setprofile(note)
        optimizer.step()
        sys.setprofile(None)
        results.append(len(names))
    return results


def changing(lr: float | torch.Tensor, scale: float) -> float:
    """How far weights are from those of one process where each step differs from the last."""
    shapes = [(40, 4), (24, 8), (40, 4), (8, 64), (40, 4)]
    options = {"lr": lr, "momentum": 0.5, "scale": scale}
    single, alone_optimizer, spread, optimizer = twins(shapes, ol.LandingSGD, **options)
    for k in range(8):
        if k == 5 and isinstance(lr, torch.Tensor):
            lr.fill_(0.05)
        for module, stepped in ((single, alone_optimizer), (spread, optimizer)):
            set_gradients(module, k)
            weights = dict(module.named_parameters())
            missing = {1: "w2", 2: "w0", 3: "w1"}  # from 1 to 2, others of the same kinds
            if k in missing:
                weights[missing[k]].grad = None
            if k == 5 and not isinstance(lr, torch.Tensor):
                stepped.param_groups[0]["lr"] = 0.05
            stepped.step()
    pairs = zip(whole(spread), whole(single), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
