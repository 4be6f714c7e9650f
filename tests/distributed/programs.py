"""What runs on the ranks: a model with every kind of weight, its training, and what is asked."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ortholand as ol

STEPS, BATCH = 100, 8
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}


class Shapes(nn.Module):
    """Tall, square and wide weights; convolutions in both views; biases and a head.

    Sizes that no number of ranks divides, and fewer rows than ranks in some.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.wide_conv = nn.Conv2d(2, 5, 3, dtype=dtype)  # 5 x 18
        self.kernels = nn.Conv2d(5, 6, 3, dtype=dtype, bias=False)  # 30 of 3 x 3
        self.tall_conv = nn.Conv2d(6, 31, (2, 2), dtype=dtype, bias=False)  # 31 x 24
        self.tall = nn.Linear(31, 33, dtype=dtype)
        self.tall_twin = nn.Linear(31, 33, dtype=dtype, bias=False)
        self.square = nn.Linear(33, 33, dtype=dtype)
        self.wide = nn.Linear(33, 29, dtype=dtype)
        self.very_wide = nn.Linear(29, 3, dtype=dtype)
        self.head = nn.Linear(3, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.kernels(torch.tanh(self.wide_conv(x))))
        h = torch.tanh(self.tall_conv(h)).mean((2, 3))
        h = torch.tanh(self.tall(h) - self.tall_twin(h))
        h = torch.tanh(self.wide(torch.tanh(self.square(h))))
        return self.head(self.very_wide(h)) * 1  # FSDP2 wants no view as an output


MATRICES = ["*wide*.weight", "*tall*.weight", "*square.weight"]  # DDP puts a prefix before names


@cache
def start(dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights that every run starts with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Shapes(dtype)
    ol.orthogonalize_(groups_of(model))
    return model.state_dict()


def new_model(dtype: torch.dtype) -> Shapes:
    model = Shapes(dtype)
    model.load_state_dict(start(dtype))
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, kernels and the rest."""
    matrices, rest = ol.param_groups(model, MATRICES, other_options={"weight_decay": 0.01})
    is_kernel = [name.endswith("kernels.weight") for name, _ in rest["params"]]
    kernels = [p for p, chosen in zip(rest["params"], is_kernel, strict=True) if chosen]
    rest["params"] = [p for p, chosen in zip(rest["params"], is_kernel, strict=True) if not chosen]
    return [matrices, {"params": kernels, "orthogonal": True, "view": "kernel"}, rest]


@dataclass(frozen=True)
class Case:
    """An optimizer and its options."""

    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make(groups_of(model), **self.options)


SGD, ADAM = ol.LandingSGD, ol.LandingAdam
CASES = {
    "sgd": Case(SGD, dict(lr=0.1)),
    "sgd-after": Case(SGD, dict(lr=0.1, attraction="after")),
    "sgd-decoupled": Case(SGD, dict(lr=0.1, attraction="decoupled")),
    "sgd-safe": Case(SGD, dict(lr=0.02, lam=30.0, eps=0.1)),  # the safe step binds
    "momentum": Case(SGD, dict(lr=0.02, momentum=0.9, attraction="after")),
    "momentum-dampened": Case(SGD, dict(lr=0.05, momentum=0.8, dampening=0.3, safe_step="tight")),
    "momentum-nesterov": Case(
        SGD, dict(lr=0.02, momentum=0.9, nesterov=True, attraction="decoupled", foreach=False)
    ),
    "momentum-first": Case(SGD, dict(lr=0.05, momentum=0.5, dampening=1.0)),
    "adam": Case(ADAM, dict(lr=0.01)),
    "adam-after": Case(ADAM, dict(lr=0.01, attraction="after", safe_step="tight")),
    "adam-decoupled": Case(ADAM, dict(lr=0.01, attraction="decoupled", safe_step=None)),
    "riemannian": Case(ol.RiemannianSGD, dict(lr=0.05, momentum=0.5, retraction="qr")),
    "plam": Case(ol.PLAM, dict(lr=0.01, momentum=0.5)),
    "penalty": Case(ol.PenaltySGD, dict(lr=0.01)),
}


def batches(dtype: torch.dtype, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    for k in range(first, last):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(BATCH, 2, 6, 6, generator=generator, dtype=dtype)
        yield x, torch.randn(BATCH, 1, generator=generator, dtype=dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, last: int = STEPS, first: int = 0
) -> None:
    """Steps ``first`` to ``last``; each rank of several takes its part of every batch."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for x, y in batches(next(model.parameters()).dtype, first, last):
        optimizer.zero_grad()
        loss = (model(x.chunk(ranks)[rank]) - y.chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()


@cache
def alone(case: str, dtype: torch.dtype, steps: int = STEPS) -> list[Tensor]:
    """The weights after a run in this process alone."""
    model = new_model(dtype)
    train(model, CASES[case](model), steps)
    return whole(model)


def sharded(model: nn.Module, kind: str = "fsdp") -> nn.Module:
    """The model under DDP, FSDP2, or FSDP2 on a mesh that also replicates."""
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    names = ("replicate", "shard")
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names))


def whole(model: nn.Module) -> list[Tensor]:
    """All weights, each in one piece."""
    return [full(p) for p in model.parameters()]


def full(tensor: Tensor) -> Tensor:
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def trained(kind: str, cases: list[str], dtype: torch.dtype, steps: int = STEPS) -> dict[str, Any]:
    """The weights after runs on several ranks."""
    results = {}
    for case in cases:
        model = sharded(new_model(dtype), kind)
        optimizer = CASES[case](model)
        train(model, optimizer, steps)
        results[case] = whole(model)
        assert optimizer.skipped_steps() == 0
    return results


# --- weights without a network around them


def bag(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A module of orthogonal weights: in the view "kernel" if they have more than 2 dimensions."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        weight = ol.random_orthogonal(*shape, seed=i, dtype=dtype)
        module.register_parameter(f"w{i}", nn.Parameter(weight))
    return module


def set_gradients(
    module: nn.Module, seed: int, spoil: Callable[[str, Tensor], None] | None = None
) -> None:
    """The same gradients for a module, sharded or not; ``spoil`` changes the local parts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for i, (name, p) in enumerate(module.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        gradient = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            if spoil is not None:
                spoil(name, gradient.to_local())
        p.grad = gradient


def twins(
    shapes: list[tuple[int, ...]], make: Callable[..., Any], **options: Any
) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A module of weights in one process, and the same under FSDP2, with their optimizers."""
    dtype = options.pop("dtype", torch.float64)
    single, spread = bag(shapes, dtype), sharded(bag(shapes, dtype))
    return single, make(_by_view(single), **options), spread, make(_by_view(spread), **options)


def _by_view(module: nn.Module) -> list[dict[str, Any]]:
    view = {True: "kernel", False: "matrix"}
    groups = []
    for kernel in (False, True):
        members = [(n, p) for n, p in module.named_parameters() if (p.ndim > 2) == kernel]
        if members:
            groups.append({"params": members, "view": view[kernel]})
    return groups


# --- counting


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
    """``longest``: the message from which on a step takes several rounds."""
    from ortholand.optim import sharded as steps

    if longest is not None:
        steps.LONGEST_MESSAGE = longest
    return [counted(shapes, make, **options) for shapes, make, options in cases]


# --- checkpoints


def save_and_go_on(folder: str, case: str, dtype: torch.dtype, half: int, last: int) -> dict:
    """Train, skip a step for NaNs on rank 0, save, go on training."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded(new_model(dtype))
    optimizer = CASES[case](model)
    train(model, optimizer, half)
    poisoned_step(optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    saved = everything(model, optimizer)
    train(model, optimizer, last, half)
    return {"saved": saved, "after": everything(model, optimizer)}


def resume(folder: str, case: str, dtype: torch.dtype, half: int, last: int) -> dict:
    """Load what other ranks have saved and go on training: on ranks, or in one process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = new_model(dtype)
    model = sharded(model) if dist.is_initialized() else model
    optimizer = CASES[case](model)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    loaded = everything(model, optimizer)
    train(model, optimizer, last, half)
    return {"saved": loaded, "after": everything(model, optimizer)}


def poisoned_step(optimizer: torch.optim.Optimizer) -> None:
    """A step with a NaN in every gradient, all of them on rank 0."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
            if dist.get_rank() == 0:
                p.grad.to_local().view(-1)[0] = float("nan")
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and state, each in one piece, by name."""
    weights = {name: full(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            weights[f"{name}: {key}"] = full(value)
    return {"skipped": optimizer.skipped_steps(), **weights}


def through_a_whole_state(folder: str, case: str, dtype: torch.dtype) -> dict:
    """Train; save the whole state on rank 0; load it in a new model; train both."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model = sharded(new_model(dtype))
    optimizer = CASES[case](model)
    train(model, optimizer, 3)
    path = f"{folder}/whole.pt"
    whole_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=whole_state)
    if dist.get_rank() == 0:
        torch.save((weights, states), path)
    dist.barrier()
    weights, states = torch.load(path, weights_only=True) if dist.get_rank() == 0 else ({}, {})
    other = sharded(new_model(dtype))
    other_optimizer = CASES[case](other)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=from_rank_0)
    set_optimizer_state_dict(other, other_optimizer, states, options=from_rank_0)
    for trained_model, stepped in ((model, optimizer), (other, other_optimizer)):
        train(trained_model, stepped, 6, 3)
    return {"one": everything(model, optimizer), "other": everything(other, other_optimizer)}


def through_a_local_state(folder: str, case: str, dtype: torch.dtype) -> dict:
    """The same with ``state_dict``, a file for each rank."""
    model, other = sharded(new_model(dtype)), sharded(new_model(dtype))
    optimizer, other_optimizer = CASES[case](model), CASES[case](other)
    train(model, optimizer, 3)
    path = f"{folder}/rank-{dist.get_rank()}.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    weights, states = torch.load(path, weights_only=True)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(states)
    for trained_model, stepped in ((model, optimizer), (other, other_optimizer)):
        train(trained_model, stepped, 6, 3)
    return {"one": everything(model, optimizer), "other": everything(other, other_optimizer)}


def from_one_process(state: dict, weights: dict, case: str, dtype: torch.dtype) -> dict:
    """Go on with the ``state_dict`` of an optimizer that was alone."""
    model = new_model(dtype)
    model.load_state_dict(weights)
    model = sharded(model)
    optimizer = CASES[case](model)
    optimizer.load_state_dict(state)
    train(model, optimizer, 6, 3)
    return everything(model, optimizer)


# --- what may go wrong

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
        groups = _by_view(module)
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
        ol.orthogonalize_(_by_view(spread))
    except ValueError as error:
        result["not finite"] = str(error)
    return result


# --- other ways to shard


def placed(shapes: list[tuple[int, ...]], mesh: Any, placements: list, view: str) -> nn.Module:
    """A module of orthogonal DTensors, in a view, placed as asked."""
    from torch.distributed.tensor import distribute_tensor

    module = bag(shapes) if view == "kernel" else nn.Module()
    for i, shape in enumerate(shapes if view == "matrix" else ()):
        weight = ol.random_orthogonal(shape[0], math.prod(shape[1:]), seed=i, dtype=torch.float64)
        module.register_parameter(f"w{i}", nn.Parameter(weight.view(shape)))
    for name, p in list(module.named_parameters()):
        weight = distribute_tensor(p.data, mesh, placements, src_data_rank=None)
        setattr(module, name, nn.Parameter(weight))
    return module


def stepped_as_placed(
    make: Callable[..., Any], options: dict[str, Any], shapes: list[tuple[int, ...]], view: str
) -> dict:
    """Three steps of weights in every placement on a mesh of 2 x 2, and in one process."""
    from torch.distributed.tensor import Replicate, Shard

    line = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    places = {
        "replicated": (line, [Replicate()]),
        "columns": (line, [Shard(1)]),
        "columns, replicated": (mesh, [Replicate(), Shard(1)]),
        "rows twice": (mesh, [Shard(0), Shard(0)]),
        "rows and columns": (mesh, [Shard(0), Shard(1)]),
        "columns and rows": (mesh, [Shard(1), Shard(0)]),
    }
    if view == "kernel":
        places["columns of kernels"] = (line, [Shard(len(shapes[0]) - 1)])
    results = {}
    for name, (where, placements) in {"alone": (line, [Replicate()]), **places}.items():
        module = placed(shapes, where, placements, view)
        if name == "alone":
            for key, p in list(module.named_parameters()):
                setattr(module, key, nn.Parameter(p.to_local().detach()))
        optimizer = make(module.named_parameters(), view=view, **options)
        for k in range(3):
            set_gradients(module, k)
            if k == 1:
                module.w0.grad.fill_(float("nan"))
            optimizer.step()
        error = ol.orthogonality_error(optimizer, reduce="mean")
        ol.orthogonalize_(optimizer.param_groups)
        results[name] = {"error": error, **everything(module, optimizer)}
    return results


# --- as models are built


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
