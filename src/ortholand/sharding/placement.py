"""Which rank holds what of a weight spread over ranks (a DTensor, as FSDP2 makes them)."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ortholand.geometry.views import Grid, View, batch_shape

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether the tensor is spread over a device mesh. If nothing imported DTensors, none is."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class Layout(NamedTuple):
    """Which rank has which rows of a weight as a matrix, or of its transpose (``turned``)."""

    group: dist.ProcessGroup
    rank: int  # in the group
    ranks: int  # that share the weight
    sizes: list[int]  # rows of each rank; the last ranks may have fewer, or none
    shape: tuple[int, int]  # rows and columns of the whole matrix
    turned: bool

    @property
    def transposed(self) -> Layout:
        """The layout of the transpose, if its rows are shared out instead."""
        rows, columns = self.shape
        return self._replace(sizes=chunk_sizes(columns, self.ranks), shape=(columns, rows))


def layout_of(weight: DTensor, view: View) -> Layout | None:
    """Which rows of a matrix are on which rank, along one dimension of its mesh; else None."""
    from torch.distributed.tensor import Shard

    if view not in ("matrix", "kernel"):
        return None

    mesh, dims = weight.device_mesh, split_dims(weight)
    place = weight.placements[dims[0]] if len(dims) == 1 else None
    turned = place == Shard(1) and weight.ndim == 2
    if place != Shard(0) and not turned:
        return None
    (dim,), rows = dims, weight.shape[int(turned)]
    ranks, shape = mesh.size(dim), (rows, weight.numel() // rows)
    here = mesh.get_group(dim), mesh.get_local_rank(dim), ranks
    return Layout(*here, chunk_sizes(rows, ranks), shape, turned)


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether this rank is outside a DTensor's mesh, and so has no part of it."""
    return is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None


def split_dims(weight: DTensor) -> list[int]:
    """The dimensions of the mesh along which ranks have different parts of the weight."""
    mesh = weight.device_mesh
    return [i for i, p in enumerate(weight.placements) if not p.is_replicate() and mesh.size(i) > 1]


def sharing_groups(weight: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that have other parts of the weight, for each dimension of its mesh."""
    if not is_dtensor(weight) or is_elsewhere(weight):
        return ()
    return tuple(weight.device_mesh.get_group(i) for i in split_dims(weight))


def is_here(weight: DTensor, view: View) -> bool:
    """Whether every matrix of the weight is whole on the ranks that have it."""
    from torch.distributed.tensor import Shard

    dims = split_dims(weight)
    places = [weight.placements[dim] for dim in dims]
    is_grid = view not in ("matrix", "kernel", "vector")
    if is_grid and len(dims) == 1 and type(places[0]) is Shard:
        dim, ranks = places[0].dim, weight.device_mesh.size(dims[0])
        size, grid = weight.shape[dim], Grid.of(weight.shape, view)
        length = grid.a if dim == 0 else grid.b if weight.ndim == 2 else 0
        return 0 < length < size and not any(n % length for n in chunk_sizes(size, ranks))
    matrices = weight.ndim - 2 if view == "kernel" else 0  # sharding these dimensions is harmless
    return all(type(place) is Shard and place.dim < matrices for place in places)


def local_view(weight: Tensor, view: View) -> View:
    """The view of what a rank holds of a weight whose matrices are all whole on their ranks."""
    if isinstance(view, str) or not is_dtensor(weight):
        return view
    _, _, a, b = Grid.of(weight.shape, view)
    rows, *columns = local_part(weight).shape
    return rows // a, math.prod(columns) // b


def chunk_sizes(total: int, ranks: int) -> list[int]:
    """Rows per rank, as for :func:`torch.chunk` and DTensors; the last may have none."""
    chunk = math.ceil(total / ranks)
    return [max(0, min(chunk, total - r * chunk)) for r in range(ranks)]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds, as a plain tensor that shares memory with it."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor


def rows_of(here: list[Tensor], layout: Layout) -> Tensor:
    """What this rank holds of equal weights, as rows of matrices: ``(k, rows, columns)``."""
    M = here[0].unsqueeze(0) if len(here) == 1 else torch.stack(here)
    return M.mT if layout.turned else M.flatten(2)


def from_rows(rows: Tensor, shape: torch.Size, layout: Layout) -> tuple[Tensor, ...]:
    """Undo :func:`rows_of`: tensors of the shape of what this rank holds of a weight."""
    M = rows.mT if layout.turned else rows
    return M.reshape(len(rows), *shape).unbind()


def placed_like(local: Tensor, weight: Tensor) -> Tensor:
    """A DTensor placed like the weight, whose part on this rank is ``local``."""
    placed = torch.empty_like(weight.detach(), dtype=local.dtype)
    local_part(placed).copy_(local)
    return placed


def zeros_per_matrix(weight: DTensor, view: View, dtype: torch.dtype) -> Tensor:
    """A zero for each matrix of a weight, placed like the weight."""
    if view == "kernel":
        return torch.zeros_like(weight.detach()[..., 0, 0], dtype=dtype)
    from torch.distributed.tensor import DTensor

    shape, here = batch_shape(weight.shape, view), local_part(weight)
    local = batch_shape(here.shape, local_view(weight, view))
    zeros = torch.zeros(local, dtype=dtype, device=here.device)
    placed, stride = (weight.device_mesh, weight.placements), (shape[1], 1)
    return DTensor.from_local(zeros, *placed, shape=shape, stride=stride)


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor in one piece, on every rank: one gather for each dimension of the mesh."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor


def part_of(whole: Tensor, weight: DTensor) -> Tensor:
    """This rank's part of a tensor that every rank has, split like the weight."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_part(everywhere.redistribute(placements=weight.placements))


def restored(value: Tensor, weight: Tensor, device: torch.device, view: View = "matrix") -> Tensor:
    """A copy of a weight's saved state, whole or sharded, placed like the weight."""
    if is_dtensor(value) and not is_dtensor(weight):
        raise ValueError(
            f"A state of shape {tuple(value.shape)} is a DTensor, but its parameter is not. "
            "Save the whole state: get_optimizer_state_dict(model, optimizer, "
            "options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict."
        )
    state = value.detach().to(device, copy=True)
    if not is_dtensor(weight):
        return state
    if is_dtensor(state) and state.device_mesh == weight.device_mesh:
        return state.redistribute(placements=weight.placements)
    state = whole_of(state)
    if state.shape == weight.shape:
        return placed_like(part_of(state, weight), weight)
    if state.ndim and is_here(weight, view):
        return placed_like(part_of(state, weight), zeros_per_matrix(weight, view, state.dtype))
    return state  # a number, or numbers that all ranks have
