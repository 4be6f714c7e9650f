"""What a step of sharded weights costs: messages, numbers on the wire and arithmetic.

``python benchmarks/at_scale.py`` counts them on 2 and on 4 ranks of this machine (gloo), beside
what the formulas of ``at_scale_costs.py`` say; it fails if they differ. ``python
benchmarks/at_scale.py --predict`` prints what the formulas say of hundreds of GPUs and thousands of
matrices. The tables of ``docs/at_scale.md`` are these. CPU time is the median of a few steps, of
the busiest rank.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ortholand as ol
from at_scale_costs import (
    METHODS,
    Cost,
    Weights,
    fsdp,
    landing_adam_rows,
    landing_columns,
    landing_owners,
    landing_rows,
    parametrization,
    polar_everywhere,
    polar_owners,
    qr_by_gram,
    qr_everywhere,
    qr_owners,
)

STEPS = 5  # of which times are the median, after two that warm up
BYTES = 4  # per number


# --- what is run


class Run(NamedTuple):
    """A method on some weights: what makes its step, and what the formula says."""

    name: str
    prepare: Callable[[nn.Module], Callable[[], None]]
    cost: Callable[[Weights], Cost]
    turned: bool = False  # wide weights
    within: float = 0.0  # relative error of the formula's arithmetic


def optimizer_step(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable:
    """The step of an optimizer; gradients are there before."""

    def prepare(model: nn.Module) -> Callable[[], None]:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = make(model.parameters(), lr=0.01, **options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return optimizer.step

    return prepare


def decomposing_step(factor: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Descend, then decompose: what one would write with torch alone."""

    def prepare(model: nn.Module) -> Callable[[], None]:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        gradients = [torch.ones_like(p) for p in model.parameters()]

        @torch.no_grad()
        def step() -> None:
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                Q = factor(p - 0.01 * gradient)
                p.copy_(Q.redistribute(placements=p.placements))

        return step

    return prepare


def qr_factor(Y: torch.Tensor) -> torch.Tensor:
    """Q of ``Y = Q R``."""
    return torch.linalg.qr(Y)[0]


def polar_factor(Y: torch.Tensor) -> torch.Tensor:
    """The orthonormal factor of ``Y = Q S``."""
    U, _, Vh = torch.linalg.svd(Y, full_matrices=False)
    return U @ Vh


class Layers(nn.Module):
    """Linear layers side by side, with the weights of another model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for weight in model.parameters():
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = weight
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all outputs."""
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def training_pass(parametrize: Callable[[nn.Module], nn.Module] | None = None) -> Callable:
    """Forwards and backwards, for one input, through layers under FSDP2."""

    def prepare(model: nn.Module) -> Callable[[], None]:
        layers = Layers(model)
        if parametrize is not None:
            for layer in layers.layers:
                parametrize(layer)
        fully_shard(layers, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        x = torch.ones(1, layers.layers[0].in_features)
        return lambda: layers(x).backward()

    return prepare


def plain_pass(w: Weights) -> Cost:
    """A gather of all weights, a scatter of their gradients, and products with one vector."""
    numbers = w.n * w.p * w.k
    return Cost(2 * w.others * numbers, 4 * numbers)


def parametrized_pass(w: Weights) -> Cost:
    """The same with a parametrization."""
    costs = plain_pass(w), parametrization(w)
    return Cost(*(a + b for a, b in zip(*costs, strict=True)))


def torch_orthogonal(layer: nn.Module) -> nn.Module:
    """torch's own parametrization: Householder's for tall weights, Cayley's for square ones."""
    rows, columns = layer.weight.shape
    chosen = "cayley" if rows == columns else "householder"
    return nn.utils.parametrizations.orthogonal(layer, orthogonal_map=chosen)


MOMENTUM = {"momentum": 0.9, "fused": False}  # compiled code is invisible to the counter
RUNS = [
    Run("LandingSGD, rows", optimizer_step(ol.LandingSGD, **MOMENTUM), landing_rows),
    Run("LandingAdam, rows", optimizer_step(ol.LandingAdam, fused=False), landing_adam_rows),
    Run("LandingSGD, wide", optimizer_step(ol.LandingSGD, **MOMENTUM), landing_columns, True),
    Run(
        'LandingSGD, `sharded="owners"`',
        optimizer_step(ol.LandingSGD, sharded="owners", **MOMENTUM),
        landing_owners,
    ),
    Run(
        "RiemannianSGD, QR",
        optimizer_step(ol.RiemannianSGD, momentum=0.9, retraction="qr"),
        qr_owners,
    ),
    Run(
        "RiemannianSGD, polar",
        optimizer_step(ol.RiemannianSGD, momentum=0.9, retraction="polar"),
        polar_owners,
    ),
    Run("`torch.linalg.qr` of DTensors", decomposing_step(qr_factor), qr_everywhere),
    Run("`torch.linalg.svd` of DTensors", decomposing_step(polar_factor), polar_everywhere),
    Run("forward and backward, free", training_pass(), plain_pass),
    Run(
        "the same, torch's parametrization",
        training_pass(torch_orthogonal),
        parametrized_pass,
        within=0.02,
    ),
]
NOT_SQUARE = (landing_rows, landing_adam_rows, landing_columns)
SQUARE = [run for run in RUNS if run.cost not in NOT_SQUARE]
TALL, ONE_TALL, SQUARES = (2048, 64, 4), (2048, 64, 1), (256, 256, 4)  # n, p, k


def all_runs(small: bool) -> list[tuple[Run, tuple[int, int, int]]]:
    """Methods and the weights they step."""
    tall, one, squares = (
        ((128, 64, 4), (512, 8, 1), (64, 64, 4)) if small else (TALL, ONE_TALL, SQUARES)
    )
    runs = [(run, one if run.cost is landing_columns else tall) for run in RUNS]
    return runs + [(run, squares) for run in SQUARE]


# --- counting


class Wire(TorchDispatchMode):
    """Counts the numbers that a rank receives from others; sums as a ring would send them."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensors first take themselves apart
        packet, ranks = func._overloadpacket, dist.get_world_size()
        if packet is torch.ops.c10d.allreduce_:
            self.received += sum(2 * (ranks - 1) / ranks * tensor.numel() for tensor in args[0])
        if packet is torch.ops.c10d.alltoall_base_:
            self.received += args[0].numel() - args[3][dist.get_rank()]
        if packet is torch.ops.c10d._allgather_base_:
            self.received += (ranks - 1) * args[1].numel()
        if packet is torch.ops.c10d._reduce_scatter_base_:
            self.received += (ranks - 1) * args[0].numel()
        if packet is torch.ops._c10d_functional.all_gather_into_tensor:
            self.received += (ranks - 1) * args[0].numel()
        return func(*args, **(kwargs or {}))


def added_in_place(_: Any, left: Any, right: Any, **__: Any) -> int:
    """Arithmetic of ``baddbmm_``, by shapes: the one product that torch's counter does not know."""
    return 2 * left.numel() * right[-1]


IN_PLACE = {torch.ops.aten.baddbmm_: added_in_place}


class Count(NamedTuple):
    """What a rank saw of a step."""

    collectives: dict[str, int]
    received: float
    products: float
    seconds: float


def count(run: Run, n: int, p: int, k: int) -> Count:
    """Count a step on this rank."""
    model = nn.Module()
    for i in range(k):
        X = ol.random_orthogonal(n, p, seed=i)
        model.register_parameter(f"w{i}", nn.Parameter(X.mT.contiguous() if run.turned else X))
    step = run.prepare(model)
    step()
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with CommDebugMode() as collectives, Wire() as wire, counter as flops:
        step()
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    counts = {
        str(op).split(".")[-1]: number for op, number in collectives.get_comm_counts().items()
    }
    return Count(counts, wire.received, flops.get_total_flops(), statistics.median(seconds))


def on_rank(rank: int, ranks: int, folder: str, small: bool) -> None:
    """All runs on a rank; the counts go to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    counts = [tuple(count(run, *weights)) for run, weights in all_runs(small)]
    torch.save(counts, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def counted(ranks: int, small: bool) -> list[Count]:
    """The largest of what the ranks saw, for every run."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(on_rank, (ranks, folder, small), ranks, start_method="spawn")
        seen = [torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in range(ranks)]
    busiest = []
    for of_ranks in zip(*seen, strict=True):
        counts = [Count(*values) for values in of_ranks]
        largest = (max(values) for values in zip(*(count[1:] for count in counts), strict=True))
        busiest.append(Count(counts[0].collectives, *largest))
    return busiest


def agrees(count: Count, cost: Cost, k: int, within: float) -> bool:
    """Whether the formula is right, but for a few numbers per matrix that owners also send."""
    few = 4 * k
    arithmetic = abs(count.products - cost.products) <= within * cost.products
    return arithmetic and abs(count.received - cost.received) <= few


# --- tables


def print_counted(ranks: int, small: bool) -> bool:
    """Counts beside formulas; whether they agree."""
    print(f"\n{ranks} ranks\n")
    header = ["step", "weights", "collectives", "KB received", "formula", "MFLOP", "formula"]
    rows, right = [], True
    for (run, (n, p, k)), count in zip(all_runs(small), counted(ranks, small), strict=True):
        cost = run.cost(Weights(n, p, k, ranks))
        same = agrees(count, cost, k, run.within)
        if not same:
            print(f"differs: {run.name}, {(n, p, k)}: {count}, {cost}")
        right &= same
        shape = f"{k} of {p} x {n}" if run.turned else f"{k} of {n} x {p}"
        names = ", ".join(f"{number} {name}" for name, number in count.collectives.items())
        sizes = [f"{number * BYTES / 1e3:.1f}" for number in (count.received, cost.received)]
        flops = [f"{number / 1e6:.1f}" for number in (count.products, cost.products)]
        more = f" + {cost.decompositions / 1e6:.0f} *" if cost.decompositions else ""
        row = [run.name, shape, names or "none", *sizes, flops[0], flops[1] + more]
        rows.append([*row, f"{count.seconds * 1e3:.1f}"])
    print_table([*header, "CPU ms"], rows)
    return right


GPUS = (8, 64, 512)
SCENES = {
    "1,000 tall matrices of 16384 x 256": (16384, 256, 1000),
    "1,000 tall matrices of 8192 x 2048": (8192, 2048, 1000),
    "2,000 square matrices of 4096 x 4096": (4096, 4096, 2000),
    "one tall matrix of 1,000,000 x 256": (1_000_000, 256, 1),
}


def print_predicted(bandwidth: float, products: float, decompositions: float) -> None:
    """What the formulas say of many GPUs."""
    print(f"\n{bandwidth:g} GB/s received per GPU, {products:g} TFLOP/s in products, ", end="")
    print(f"{decompositions:g} TFLOP/s in decompositions, {BYTES} bytes per number")

    def cells(cost: Cost) -> list[str]:
        seconds = cost.received * BYTES / bandwidth / 1e9
        seconds += cost.products / products / 1e12 + cost.decompositions / decompositions / 1e12
        return [digits(cost.received * BYTES / 1e9), digits(1e3 * seconds)]

    for scene, (n, p, k) in SCENES.items():
        print(f"\n{scene}\n")
        rows = []
        for name, cost_of in {"FSDP2's own traffic": fsdp, **METHODS}.items():
            if n > p or cost_of not in (landing_rows, qr_by_gram):
                costs = [cost_of(Weights(n, p, k, ranks)) for ranks in GPUS]
                rows.append([name, *(cell for cost in costs for cell in cells(cost))])
        print_table(["step", *(f"{what}, {R} GPUs" for R in GPUS for what in ("GB", "ms"))], rows)


def digits(number: float) -> str:
    """Two digits or more, no exponent."""
    return "0" if not number else f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Count or predict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="formulas for many GPUs")
    parser.add_argument("--small", action="store_true", help="small matrices: a few seconds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bandwidth", type=float, default=25.0, help="GB/s a GPU receives")
    parser.add_argument("--products", type=float, default=100.0, help="TFLOP/s")
    parser.add_argument("--decompositions", type=float, default=1.0, help="TFLOP/s")
    options = parser.parse_args(arguments)
    if options.predict:
        print_predicted(options.bandwidth, options.products, options.decompositions)
        return 0
    right = [print_counted(ranks, options.small) for ranks in options.ranks]
    print("\n* and so many MFLOP in decompositions, by the textbook; the counter does not see them")
    print("formulas and counts agree" if all(right) else "FORMULAS AND COUNTS DIFFER")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
