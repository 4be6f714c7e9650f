"""Counts what a step of sharded weights costs: messages, numbers on the wire and arithmetic.

Imports inside functions take seconds, and are needed only on the ranks.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ortholand as ol
from ortholand_lab.benchmarks.sharded import costs
from ortholand_lab.benchmarks.sharded.costs import Cost, Weights

Step = Callable[[], object]


def shard(model: nn.Module) -> nn.Module:
    """Spread a model over all ranks."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


class Layers(nn.Sequential):
    """Parallel linear layers, whose outputs are summed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The sum of all outputs."""
        return torch.stack([layer(input).sum() for layer in self]).sum()


# --- what is run


def optimizer_step(
    make: Callable[..., torch.optim.Optimizer], model: Layers, **options: Any
) -> Step:
    """The step of an optimizer, with gradients already computed: so small that lr is safe."""
    optimizer = make(shard(model).parameters(), lr=0.01, **options)
    for p in model.parameters():
        p.grad = torch.full_like(p, p.numel() ** -0.5)
    return optimizer.step


def decomposing_step(factor: Callable[[torch.Tensor], Any], model: Layers) -> Step:
    """Descend, then decompose: what one would write with torch alone."""
    parameters: list[Any] = list(shard(model).parameters())
    gradients = [torch.ones_like(p) for p in parameters]

    @torch.no_grad()
    def step() -> None:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.copy_(factor(p - 0.01 * gradient).redistribute(placements=p.placements))

    return step


def polar_factor(Y: torch.Tensor) -> torch.Tensor:
    """The orthonormal factor of ``Y = Q S``."""
    U, _, Vh = torch.linalg.svd(Y, full_matrices=False)
    return U @ Vh


def training_pass(model: Layers) -> Step:
    """Forwards and backwards, for one input, through layers under FSDP2."""
    x = torch.ones(1, cast(nn.Linear, model[0]).in_features)
    shard(model)
    return lambda: model(x).backward()


def parametrized_pass(model: Layers) -> Step:
    """The same with torch's own parametrization: Householder's if tall, Cayley's if square."""
    for layer in model:
        rows, columns = cast(nn.Linear, layer).weight.shape
        chosen = "cayley" if rows == columns else "householder"
        nn.utils.parametrizations.orthogonal(layer, orthogonal_map=chosen)
    return training_pass(model)


class Way(NamedTuple):
    """How the step of a model is made, and the formula for its cost."""

    prepare: Callable[[Layers], Step]
    cost: Callable[[Weights], Cost]
    messages: str = ""  # of all weights of a group, where there is a claim
    within: float = 0.0  # relative error of the formula's arithmetic


# Not fused: compiled code is invisible to the counter.
landing = partial(optimizer_step, ol.LandingSGD, momentum=0.9, fused=False)
landing_adam = partial(optimizer_step, ol.LandingAdam, fused=False)
riemannian = partial(optimizer_step, ol.RiemannianSGD, momentum=0.9)
ROWS, WIDE = "LandingSGD, rows", "LandingSGD, wide"
OWNERS = 'LandingSGD, `sharded="owners"`'
WAYS = {
    ROWS: Way(landing, costs.landing_rows, "1 all-reduce"),
    "LandingAdam, rows": Way(landing_adam, costs.landing_adam_rows, "1 all-reduce"),
    WIDE: Way(landing, costs.landing_columns, "1 all-reduce, 2 all-to-all"),
    OWNERS: Way(partial(landing, sharded="owners"), costs.landing_owners, "2 all-to-all"),
    "RiemannianSGD, QR": Way(partial(riemannian, retraction="qr"), costs.qr_owners),
    "RiemannianSGD, polar": Way(partial(riemannian, retraction="polar"), costs.polar_owners),
    "`torch.linalg.qr` of DTensors": Way(
        partial(decomposing_step, lambda Y: torch.linalg.qr(Y)[0]), costs.qr_everywhere
    ),
    "`torch.linalg.svd` of DTensors": Way(
        partial(decomposing_step, polar_factor), costs.polar_everywhere
    ),
    "forward and backward, free": Way(training_pass, costs.free_pass),
    "the same, torch's parametrization": Way(
        parametrized_pass, costs.parametrized_pass, within=0.02
    ),
}


@dataclass(frozen=True)
class Case:
    """A way, and the k matrices of n x p that it steps; of p x n if it is for wide ones."""

    way: str
    n: int
    p: int
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of each matrix."""
        return (self.p, self.n) if self.way == WIDE else (self.n, self.p)

    @property
    def weights(self) -> str:
        """The weights in words."""
        return "{} of {} x {}".format(self.k, *self.shape)

    def cost(self, ranks: int) -> Cost:
        """The cost by the formula."""
        return WAYS[self.way].cost(Weights(self.n, self.p, self.k, ranks))

    def agrees(self, received: float, products: float, ranks: int) -> bool:
        """Whether the counts match, up to a few numbers per matrix that owners also send.

        Each message also carries a checksum of the options.
        """
        cost, within = self.cost(ranks), WAYS[self.way].within
        arithmetic = abs(products - cost.products) <= within * cost.products
        return arithmetic and abs(received - cost.received) <= 4 * self.k + ranks


# --- counting


class Wire(TorchDispatchMode):
    """Counts the numbers that a rank receives from others; sums count as in a ring."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DTensor

        super().__init__()
        self.received, self._sharded = 0.0, DTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._sharded in types:
            return NotImplemented  # DTensors first take themselves apart
        packet, others = func._overloadpacket, dist.get_world_size() - 1
        if packet is torch.ops.c10d.allreduce_:
            self.received += 2 * others / (others + 1) * sum(sent.numel() for sent in args[0])
        elif packet is torch.ops.c10d.alltoall_base_:
            self.received += args[0].numel() - args[3][dist.get_rank()]
        elif packet is torch.ops.c10d._allgather_base_:
            self.received += others * args[1].numel()
        elif packet in (
            torch.ops.c10d._reduce_scatter_base_,
            torch.ops._c10d_functional.all_gather_into_tensor,
        ):
            self.received += others * args[0].numel()
        return func(*args, **(kwargs or {}))


def added_in_place(_: Any, left: Any, right: Any, **__: Any) -> int:
    """Arithmetic of ``baddbmm_``, from shapes: the one product that torch's counter lacks."""
    return 2 * left.numel() * right[-1]


IN_PLACE = {torch.ops.aten.baddbmm_: added_in_place}
COLLECTIVES = {  # torch's names for them
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}


def count(case: Case, steps: int) -> dict[str, float]:
    """What a step costs this rank, with its median CPU time over a few repetitions."""
    from torch.distributed.tensor.debug import CommDebugMode

    torch.manual_seed(0)
    rows, columns = case.shape
    model = Layers(*(nn.Linear(columns, rows, bias=False) for _ in range(case.k)))
    ol.orthogonalize_(list(model.parameters()))
    step = WAYS[case.way].prepare(model)
    step()
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with CommDebugMode() as collectives, Wire() as wire, counter as flops:
        step()
    seen = {str(op).split(".")[-1]: times for op, times in collectives.get_comm_counts().items()}
    calls = {COLLECTIVES.get(name, name): times for name, times in seen.items()}
    counts = {"received": wire.received, "products": flops.get_total_flops()}
    # Processor time of this rank alone, because several ranks may share a core.
    return {**counts, "seconds": statistics.median(_cpu_seconds(step, steps)), **calls}


def _cpu_seconds(step: Step, steps: int) -> Iterator[float]:
    for _ in range(steps):
        dist.barrier()
        start = time.process_time()
        step()
        yield time.process_time() - start


def count_all(cases: tuple[Case, ...], steps: int) -> Iterator[dict[str, float]]:
    """Count all cases on this rank."""
    return (count(case, steps) for case in cases)
