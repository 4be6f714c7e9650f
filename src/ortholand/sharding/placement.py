"""Which rank holds what of a weight spread over ranks (a DTensor, as FSDP2 makes them).

How it is gathered is in :mod:`.exchange`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ortholand.geometry.views import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether the tensor is spread over a device mesh.

    This never imports DTensors: if nothing has imported them, there are none.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class Layout(NamedTuple):
    """Which rank has which rows of a weight, viewed as a matrix ``(first dimension, others)``.

    For a matrix sharded by columns these are the rows of its transpose (``turned``).
    """

    group: ProcessGroup
    rank: int  # in the group
    ranks: int  # that share the weight
    sizes: list[int]  # rows of each rank; the last ranks may have fewer, or none
    shape: tuple[int, int]  # rows and columns of the whole matrix
    turned: bool


def layout_of(weight: DTensor) -> Layout | None:
    """Which rows of the weight are on which rank; None if it is sharded in another way.

    Weights may be sharded on their first dimension, and matrices on their second, over one
    dimension of the mesh; over others they may be replicated.
    """
    from torch.distributed.tensor import Shard

    dims = split_dims(weight)
    if len(dims) != 1:
        return None
    mesh, (dim,) = weight.device_mesh, dims
    turned = weight.placements[dim] == Shard(1) and weight.ndim == 2
    if weight.placements[dim] != Shard(0) and not turned:
        return None
    rows, ranks = weight.shape[int(turned)], mesh.size(dim)
    shape = (rows, weight.numel() // rows)
    sizes = chunk_sizes(rows, ranks)
    return Layout(mesh.get_group(dim), mesh.get_local_rank(dim), ranks, sizes, shape, turned)


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether this rank is outside a DTensor's mesh, and so has no part of it."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    return is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None


def split_dims(weight: DTensor) -> list[int]:
    """The dimensions of the mesh along which ranks have different parts of the weight."""
    mesh = weight.device_mesh
    return [i for i, p in enumerate(weight.placements) if not p.is_replicate() and mesh.size(i) > 1]


def sharing_groups(weight: Tensor) -> tuple[ProcessGroup, ...]:
    """The ranks that have different parts of the weight, for each dimension of the mesh.

    Empty for a plain tensor, and on a rank outside the mesh.
    """
    if not is_dtensor(weight) or is_elsewhere(weight):
        return ()
    return tuple(weight.device_mesh.get_group(i) for i in split_dims(weight))


def is_here(weight: DTensor, view: View) -> bool:
    """Whether every matrix of the weight is whole on the ranks that have it."""
    from torch.distributed.tensor import Shard

    matrices = weight.ndim - 2 if view == "kernel" else 0  # sharding these dimensions is harmless
    for dim, place in enumerate(weight.placements):
        is_whole = place.is_replicate() or weight.device_mesh.size(dim) == 1
        if not is_whole and (type(place) is not Shard or place.dim >= matrices):
            return False
    return True


def chunk_sizes(total: int, ranks: int) -> list[int]:
    """Rows per rank, as for :func:`torch.chunk` and DTensors; the last may have none."""
    chunk = math.ceil(total / ranks)
    return [max(0, min(chunk, total - r * chunk)) for r in range(ranks)]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds, as a plain tensor that shares memory with it."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def rows_of(here: Tensor, layout: Layout) -> Tensor:
    """What this rank holds, as rows of a matrix."""
    return here.mT if layout.turned else here.flatten(1)


def from_rows(rows: Tensor, here: Tensor, layout: Layout) -> Tensor:
    """Undo :func:`rows_of`: rows in the shape of what this rank holds."""
    return rows.mT if layout.turned else rows.reshape(here.shape)


def placed_like(local: Tensor, weight: DTensor) -> Tensor:
    """A DTensor placed like the weight, whose part on this rank is ``local``.

    Made from the weight, whose parts may be on a different device from its mesh (CPU offload).
    """
    placed = torch.empty_like(weight.detach(), dtype=local.dtype)
    local_part(placed).copy_(local)
    return placed


def zeros_per_matrix(weight: DTensor, dtype: torch.dtype) -> Tensor:
    """A zero for each matrix of a weight ``(..., n, p)``, placed like the weight."""
    return torch.zeros_like(weight.detach()[..., 0, 0], dtype=dtype)


def gathered_numbers(local: Tensor, weight: DTensor) -> Tensor:
    """The numbers of all matrices, on every rank, from those of this rank's matrices."""
    from torch.distributed.tensor import DTensor

    shape = weight.shape[:-2]
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = weight.device_mesh, weight.placements
    numbers = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return numbers.full_tensor()


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor in one piece, on every rank: one gather for each dimension of the mesh."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor


def part_of(whole: Tensor, weight: DTensor) -> Tensor:
    """This rank's part of a tensor that every rank has, split like the weight."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_part(everywhere.redistribute(placements=weight.placements))


def restored(value: Tensor, weight: Tensor, device: torch.device) -> Tensor:
    """A copy of a weight's saved state, placed like the weight.

    Each rank takes its own part of a state that was saved whole; numbers are on all ranks.
    """
    if is_dtensor(value) and not is_dtensor(weight):
        raise ValueError(
            f"A state of shape {tuple(value.shape)} is a DTensor, but its parameter is not. "
            "Save the whole state: get_optimizer_state_dict(model, optimizer, "
            "options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict."
        )
    copied = value.detach().to(device, copy=True)
    return _placed(copied, weight) if is_dtensor(weight) else copied


def _placed(state: Tensor, weight: DTensor) -> Tensor:
    if is_dtensor(state):
        if state.device_mesh == weight.device_mesh:
            return state.redistribute(placements=weight.placements)
        state = state.full_tensor()
    if state.shape == weight.shape:
        return placed_like(part_of(state, weight), weight)
    if state.ndim == 0 or not is_here(weight, "kernel"):
        return state  # a number, or numbers that all ranks have
    numbers = zeros_per_matrix(weight, state.dtype)
    local_part(numbers).copy_(part_of(state, weight))
    return numbers
