"""Models as users build them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ortholand as ol
from tests.distributed.training import CASES, everything, full, new_model, sharded, train, whole
from tests.distributed.weights import bag, by_view, set_gradients


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def after_a_forward_pass() -> dict:
    """A model that FSDP2 still holds in one piece when it is projected and its groups are made."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(TwoLayers(), mesh=init_device_mesh("cpu", (2,)))
    x = torch.randn(4, 6)
    with torch.no_grad():
        model(x)
    whole_weights = not hasattr(model.up.weight, "full_tensor")
    ol.orthogonalize_(model, orthogonal=nn.Linear)
    model.reshard()
    error = ol.orthogonality_error(model, orthogonal=nn.Linear)
    with torch.no_grad():
        model(x)
    optimizer = ol.LandingSGD(ol.param_groups(model, orthogonal=nn.Linear), lr=0.1)
    before = whole(model)
    model(x).square().sum().backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(whole(model), before, strict=True)]
    return {"whole": whole_weights, "error": error, "moved": moved}


class Marked(TwoLayers):
    """Two layers, of which it says itself that they are orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        ol.orthogonal(self.up)
        ol.orthogonal(self.down, scale=2.0, options={"lr": 0.01})


def marked_steps(kind: str, bare: bool) -> dict:
    """A model that is marked before it is sharded, wrapped by DDP, or sharded on the meta device.

    Or marked after that, and with weights drawn then; the same model in one process beside it.
    ``bare``: the sharded model's optimizer gets its parameters only.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def built(parallel: bool) -> nn.Module:
        torch.manual_seed(0)
        if kind == "meta" and parallel:
            with torch.device("meta"):
                model = fully_shard(Marked(), mesh=init_device_mesh("cpu", (2,)))
            model.to_empty(device="cpu")
            for p, source in zip(model.parameters(), Marked().parameters(), strict=True):
                factor = 1.1 if p.ndim == 2 else 1.0  # what the projection takes out again
                p.data.copy_(placed_as(factor * source.detach(), p))
            return ol.orthogonalize_(model)
        model = (TwoLayers() if kind == "later" else Marked()).double()
        if parallel and kind == "ddp":
            return DistributedDataParallel(model)
        if parallel:
            model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        if kind == "later":
            ol.orthogonal(model.up)
            ol.orthogonal(model.down, init="random", seed=0, scale=2.0, options={"lr": 0.01})
        return model

    single, spread = built(parallel=False), built(parallel=True)
    first = ol.orthogonality_error(spread)
    given = spread.named_parameters() if bare else ol.param_groups(spread)
    optimizers = [ol.LandingAdam(params, lr=0.02) for params in (ol.param_groups(single), given)]
    for k in range(5):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        for model, optimizer in zip((single, spread), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - x.roll(1)).square().sum().backward()
            optimizer.step()
    names = [name for group in optimizers[1].param_groups for name in group["param_names"]]
    return {
        "first": first,
        "error": ol.orthogonality_error(spread),
        "names": names,
        "keys": list(spread.state_dict()),
        "alone": whole(single),
        "spread": whole(spread),
    }


def tensor_parallel_steps(data: int) -> dict:
    """Tensor parallelism by columns and by rows, on ``data`` ranks each FSDP2 on top of it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def built(parallel: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = TwoLayers().double()
        ol.orthogonalize_(model, orthogonal=nn.Linear)
        if parallel:
            ranks = dist.get_world_size()
            names = ("data", "tensor")
            mesh = init_device_mesh("cpu", (data, ranks // data), mesh_dim_names=names)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            fully_shard(model, mesh=mesh["data"])
        groups = ol.param_groups(model, orthogonal=nn.Linear)
        return model, ol.LandingAdam(groups, lr=0.02, attraction="after")

    single, alone_optimizer = built(parallel=False)
    spread, optimizer = built(parallel=True)
    for k in range(5):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        for model, stepped in ((single, alone_optimizer), (spread, optimizer)):
            stepped.zero_grad()
            (model(x) - x.roll(1)).square().sum().backward()
            stepped.step()
    states = everything(single, alone_optimizer), everything(spread, optimizer)
    return {"alone": states[0], "spread": states[1], "error": ol.orthogonality_error(optimizer)}


def state_of_another_mesh() -> dict:
    """The state of FSDP2 on a mesh of one dimension, loaded on one that also replicates."""
    results = {}
    for first, second in (("fsdp", "hsdp"), ("hsdp", "fsdp")):
        states, optimizers, models = [], [], []
        for kind in (first, second):
            models.append(sharded(new_model(torch.float64), kind))
            optimizers.append(CASES["adam"](models[-1]))
            states.append(optimizers[-1].state_dict())
        train(models[0], optimizers[0], 2)
        models[1].load_state_dict(
            {k: placed_as(v, models[1].get_parameter(k)) for k, v in models[0].state_dict().items()}
        )
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 4, 2)
        one, other = (everything(*pair) for pair in zip(models, optimizers, strict=True))
        results[f"{first} to {second}"] = {"one": one, "other": other}
    return results


def placed_as(value: Tensor, p: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full(value), p.device_mesh, p.placements, src_data_rank=None)


def on_a_part_of_the_ranks() -> dict:
    """A weight that only the first two ranks have, and one that all have."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    meshes = DeviceMesh("cpu", [0, 1]), init_device_mesh("cpu", (dist.get_world_size(),))
    weights = []
    for mesh in meshes:
        whole_weight = 1.1 * ol.random_orthogonal(8, 3, seed=0, dtype=torch.float64)
        weights.append(nn.Parameter(distribute_tensor(whole_weight, mesh, [Shard(0)])))
    ol.orthogonalize_(weights)
    optimizer = ol.LandingSGD(weights, lr=0.1)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {
        "error": ol.orthogonality_error(optimizer),
        "whole": full(weights[1]),
        "part": full(weights[0]) if dist.get_rank() < 2 else None,
    }


def advice_on_fsdp1() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(TwoLayers(), device_id=torch.device("cpu"))
    try:
        ol.param_groups(model, orthogonal=nn.Linear)
    except ValueError as error:
        return str(error)
    return ""


def run_page(code: str) -> float:
    """Code of a page of the documentation; how far its weights are from the manifold."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return ol.orthogonality_error(namespace["optimizer"])


def parts_on_another_device(
    shape: tuple[int, ...], make: Callable[..., Any], options: dict[str, Any]
) -> dict[str, str]:
    """CPU offload, played: weights on the CPU, and a mesh that says it is of another device.

    Where the state is after two steps.
    """
    module = sharded(bag([shape]))
    (weight,) = module.parameters()
    optimizer = make(by_view(module), **options)
    set_gradients(module, 0)
    gradient = weight.grad
    weight.device_mesh._device_type = "meta"
    for _ in range(2):
        weight.grad = gradient
        optimizer.step()
    devices = {}
    for name, value in optimizer.state[weight].items():
        here = value.to_local() if hasattr(value, "to_local") else value
        devices[name] = here.device.type
    weight.device_mesh._device_type = "cpu"
    return devices
