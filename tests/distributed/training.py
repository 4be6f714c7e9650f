"""A model with every kind of weight, and its training on ranks or in one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

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
    "momentum-dampened": Case(
        SGD, dict(lr=0.05, momentum=0.8, dampening=0.3, safe_step="frobenius")
    ),
    "momentum-nesterov": Case(
        SGD, dict(lr=0.02, momentum=0.9, nesterov=True, attraction="decoupled", foreach=False)
    ),
    "momentum-first": Case(SGD, dict(lr=0.05, momentum=0.5, dampening=1.0)),
    "adam": Case(ADAM, dict(lr=0.01)),
    "adam-after": Case(ADAM, dict(lr=0.01, attraction="after", safe_step="frobenius")),
    "adam-decoupled": Case(ADAM, dict(lr=0.01, attraction="decoupled", safe_step=None)),
    "muon": Case(ol.LandingMuon, dict(lr=0.01)),
    "muon-coupled": Case(
        ol.LandingMuon, dict(lr=0.01, attraction="coupled", nesterov=False, foreach=False)
    ),
    "muon-decoupled": Case(ol.LandingMuon, dict(lr=0.01, attraction="decoupled", momentum=0.0)),
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


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and state, each in one piece, by name."""
    weights = {name: full(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            weights[f"{name}: {key}"] = full(value)
    return {"skipped": optimizer.skipped_steps(), **weights}
