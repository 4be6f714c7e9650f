"""Which parameters compiled code steps on the CPU (:mod:`ortholand.native`), and how.

Small square matrices all at once, large ones one by one (:mod:`.large`). The optimizers' own code
is the reference for it; what this module does not take is stepped there.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ortholand.native import ATTRACTIONS, Kernel, Options, has_kernel, kernel, large_steps
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.large import is_large, step_square, step_tall
from ortholand.optim.plain import skipped_count
from ortholand.safe_step import farthest_before_landing

Group = Mapping[str, Any]
Stepped = tuple[Tensor, list[Tensor]]  # a parameter and its state


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
    small: dict[tuple[torch.dtype, int], list[Stepped]] = {}
    large: list[Stepped] = []
    rest = []
    for p in params:
        rows, columns = _matrix_shape(p, group["view"])
        state = [optimizer.load(p, name, group) for name in states]
        if not _is_plain(p) or not all(s.is_contiguous() for s in state):
            rest.append(p)
        elif rows == columns and has_kernel(p.dtype, rows):
            small.setdefault((p.dtype, rows), []).append((p, state))
        elif _is_large(p, rows, columns, group, states, alone=len(params) == 1):
            large.append((p, state))
        else:
            rest.append(p)
    options = _options(group, len(states)).pack() if small or large else b""
    for (dtype, size), members in small.items():
        step = kernel(dtype, size)
        assert step is not None  # has_kernel
        _step_small(optimizer, members, step, size, options)
    for p, state in large:
        _step_large(optimizer, p, state, group, options)
    return rest


def _step_small(
    optimizer: OrthogonalOptimizer,
    members: Sequence[Stepped],
    step: Kernel,
    size: int,
    options: bytes,
) -> None:
    """Step parameters of square matrices of one small size."""
    # Held until the step is done: they may be copies.
    gradients = [p.grad.contiguous() for p, _ in members if p.grad is not None]
    packed = array("q")
    for (p, state), G in zip(members, gradients, strict=True):
        packed.extend(_row(p, G, state, skipped_count(optimizer.state[p], p.device), size))
    step(options, packed.buffer_info()[0], len(members), size)


def _step_large(
    optimizer: OrthogonalOptimizer, p: Tensor, state: list[Tensor], group: Group, options: bytes
) -> None:
    """Step one parameter that is a large matrix."""
    passes = large_steps(p.dtype)
    assert passes is not None
    assert p.grad is not None
    increment_version([p, *state])
    G = p.grad.contiguous()
    rows, columns = _matrix_shape(p, group["view"])
    if rows == columns:
        taken = step_square(p, G, state[0] if state else None, options, passes)
    else:
        taken = step_tall(p, G, group, options, passes)
    count = skipped_count(optimizer.state[p], p.device)
    if not taken:
        count.add_(1)


def _row(p: Tensor, G: Tensor, state: list[Tensor], skipped: Tensor, size: int) -> list[int]:
    """``struct Parameter`` of ``landing.cpp``."""
    increment_version([p, *state])  # autograd must know that they are written to
    addresses = [s.data_ptr() for s in state] + [0] * (3 - len(state))
    count = p.numel() // (size * size)
    return [p.data_ptr(), G.data_ptr(), *addresses, skipped.data_ptr(), count]


def _matrix_shape(p: Tensor, view: str) -> tuple[int, int]:
    if view == "kernel":
        return p.shape[-2], p.shape[-1]
    return p.shape[0], p.numel() // p.shape[0]


def _is_plain(p: Tensor) -> bool:
    """Whether weight and gradient are real numbers in plain memory of one type."""
    G = p.grad
    return (
        type(p) in (nn.Parameter, Tensor)  # subclasses (sharded, fake) are not plain memory
        and type(G) is Tensor
        and p.device.type == "cpu"
        and p.is_contiguous()
        and G.dtype == p.dtype
        and not p.is_neg()
        and not G.is_neg()
        and not p.is_inference()
    )


def _is_large(
    p: Tensor, rows: int, columns: int, group: Group, states: Sequence[str], *, alone: bool
) -> bool:
    return (
        len(states) < 2  # not Adam
        and p.numel() == rows * columns  # one matrix
        and is_large(rows, columns, group, alone=alone)
        and large_steps(p.dtype) is not None
    )


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
