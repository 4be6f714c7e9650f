"""What a step communicates."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

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
    from ortholand.sharding import steps

    if longest is not None:
        steps.LONGEST_MESSAGE = longest
    return [counted(shapes, make, **options) for shapes, make, options in cases]
