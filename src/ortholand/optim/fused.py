"""Steps parameters of small square matrices on the CPU by compiled code (:mod:`ortholand.native`).

The optimizers' own code is the reference for it; what this module does not take is stepped there.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ortholand.native import ATTRACTIONS, Options, has_kernel, kernel
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.plain import skipped_count
from ortholand.safe_step import farthest_before_landing

Group = Mapping[str, Any]


def wants_fused(group: Group) -> bool:
    """Whether the group's options allow compiled steps, by themselves."""
    fused = group["fused"]
    if fused is None:  # whoever asks for batches or single steps gets them, as in torch
        fused = group["foreach"] is None
    return (
        fused
        and group["safe_step"] != "tight"
        and not isinstance(group["lr"], Tensor)  # reading it would be a host sync
        and not torch.compiler.is_compiling()
    )


def fused_step(
    optimizer: OrthogonalOptimizer, params: list[Tensor], group: Group, states: Sequence[str]
) -> list[Tensor]:
    """Step the parameters of a group that compiled code can step; return the others.

    ``states`` names the state: none, a momentum buffer, or Adam's two moments and step number.
    """
    if not wants_fused(group):
        return params
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    rest = []
    for p in params:
        size = _size(p, group["view"])
        state = [optimizer.load(p, name, group) for name in states] if size else []
        if size and kernel(p.dtype, size) and all(s.is_contiguous() for s in state):
            alike.setdefault((p.dtype, size), []).append(p)
        else:
            rest.append(p)
    options = _options(group, len(states)).pack() if alike else b""
    for (dtype, size), members in alike.items():
        step = kernel(dtype, size)
        assert step is not None
        gradients = [p.grad.contiguous() for p in members if p.grad is not None]
        packed = array("q")
        for p, G in zip(members, gradients, strict=True):
            state = [optimizer.load(p, name, group) for name in states]
            packed.extend(_row(p, G, state, skipped_count(optimizer.state[p], p.device), size))
        step(options, packed.buffer_info()[0], len(members), size)
    return rest


def _row(p: Tensor, G: Tensor, state: list[Tensor], skipped: Tensor, size: int) -> list[int]:
    """``struct Parameter`` of ``landing.cpp``."""
    increment_version([p, *state])  # autograd must know that they are written to
    addresses = [s.data_ptr() for s in state] + [0] * (3 - len(state))
    count = p.numel() // (size * size)
    return [p.data_ptr(), G.data_ptr(), *addresses, skipped.data_ptr(), count]


def _size(p: Tensor, view: str) -> int:
    """Rows of the parameter's square matrices, or 0 if compiled code cannot step it."""
    if view == "kernel":
        rows, columns = p.shape[-2:]
    else:
        rows = p.shape[0]
        columns = p.numel() // rows
    G = p.grad
    fits = (
        rows == columns
        and has_kernel(p.dtype, rows)
        and type(p) in (nn.Parameter, Tensor)  # subclasses (sharded, fake) are not plain memory
        and type(G) is Tensor
        and p.device.type == "cpu"
        and p.is_contiguous()
        and G.dtype == p.dtype
        and not p.is_neg()
        and not G.is_neg()
        and not p.is_inference()
    )
    return rows if fits else 0


def _options(group: Group, n_states: int) -> Options:
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    return Options(
        lr=group["lr"],
        lam=group["lam"],
        eps=group["eps"],
        farthest=farthest_before_landing(group["eps"]),
        omega=group["omega"],
        momentum=group.get("momentum", 0.0),
        dampening=group.get("dampening", 0.0),
        beta1=beta1,
        beta2=beta2,
        adam_eps=group.get("adam_eps", 0.0),
        attraction=ATTRACTIONS[group["attraction"]],
        safe=group["safe_step"] is not None,
        maximize=group["maximize"],
        moments={0: 0, 1: 1, 3: 2}[n_states],
        nesterov=group.get("nesterov", False),
        threads=torch.get_num_threads(),
    )
