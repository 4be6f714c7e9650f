"""Orthogonality errors, measured in float64 on float32 weights.

``python benchmarks/orthogonality.py noise``: gradients N(0, 1) / sqrt(n), lr 0.1 (Adam 0.01),
as in comparisons with other libraries. ``python benchmarks/orthogonality.py drift``: 100,000 steps
on one 32 x 32 matrix, the paper's claim that retractions drift while landing does not. Both write a
JSON file to results/ and print a table. POGO and geoopt are included where they are installed.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import ortholand as ol

Make = Callable[[nn.Parameter], torch.optim.Optimizer]

# column: shape of the stack of matrices, number of steps
NOISE_COLUMNS: dict[str, tuple[tuple[int, int, int], int]] = {
    "40x40, 1,000 steps": ((1, 40, 40), 1_000),
    "40x40, 10,000": ((1, 40, 40), 10_000),
    "100x100, 1,000": ((1, 100, 100), 1_000),
    "512x512, 200": ((1, 512, 512), 200),
    "1920 of 4x4, 1,000": ((1920, 4, 4), 1_000),
    "2000x100, 200": ((1, 2000, 100), 200),
}


def ours(make: type, **options: object) -> Make:
    """One of our optimizers on a stack of matrices."""
    return lambda X: make([X], view="kernel", **options)


def noise_methods() -> dict[str, Make]:
    """Rows of the table of errors under noise."""
    attractions = ("coupled", "decoupled", "after")
    return {
        **{f"LandingSGD, {a}": ours(ol.LandingSGD, lr=0.1, attraction=a) for a in attractions},
        **{f"LandingAdam, {a}": ours(ol.LandingAdam, lr=0.01, attraction=a) for a in attractions},
        **{
            f"RiemannianSGD, {r}": ours(ol.RiemannianSGD, lr=0.1, retraction=r)
            for r in ("exponential", "cayley", "polar", "qr")
        },
        **pogo_methods(),
    }


def pogo_methods() -> dict[str, Make]:
    """The nearest rival, if it is installed."""
    try:
        from pogo import POGO, base
    except ImportError:
        return {}
    return {
        "POGO + SGD": lambda X: POGO([X], base.SGD(), 0.1, rows=False),
        "POGO + VectorAdam": lambda X: POGO([X], base.VectorAdam(), 0.01, rows=False),
    }


def error(X: Tensor) -> float:
    """Largest distance to the manifold, itself measured in float64."""
    return ol.orthogonality_error(X.detach().double(), view="kernel")


def noise_error(make: Make, shape: tuple[int, int, int], steps: int, seed: int) -> float:
    """Error after steps of pure noise."""
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=seed))
    optimizer = make(X)
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        X.grad = torch.randn(shape, generator=generator) / shape[-2] ** 0.5
        optimizer.step()
    return error(X)


def noise() -> dict[str, dict[str, float]]:
    """Median error over three seeds, by method and column."""
    result: dict[str, dict[str, float]] = {}
    for name, make in track(noise_methods().items(), "noise"):
        result[name] = {
            column: sorted(noise_error(make, shape, steps, seed) for seed in range(3))[1]
            for column, (shape, steps) in NOISE_COLUMNS.items()
            if not (name.endswith(("polar", "exponential")) and shape[-2] > 500)
        }
    return result


def drift() -> dict[str, dict[str, float]]:
    """Error along 100,000 float32 steps of noise on a 32 x 32 matrix, lr 0.003."""
    methods = {
        **{
            f"LandingSGD, {a}": ours(ol.LandingSGD, lr=0.003, attraction=a)
            for a in ("coupled", "decoupled", "after")
        },
        **{
            f"RiemannianSGD, {r}": ours(ol.RiemannianSGD, lr=0.003, retraction=r)
            for r in ("exponential", "cayley", "polar", "qr")
        },
    }
    return {name: _drift_of(make) for name, make in track(methods.items(), "drift")}


def _drift_of(make: Make) -> dict[str, float]:
    X = nn.Parameter(torch.eye(32)[None])
    optimizer = make(X)
    noise = torch.randn(1000, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    errors = {}
    for k in range(1, 100_001):
        X.grad = noise[k % 1000]
        optimizer.step()
        if k in (100, 1_000, 10_000, 100_000):
            errors[f"{k:,} steps"] = error(X)
    return errors


def show(title: str, result: dict[str, dict[str, float]]) -> None:
    """Print a table of errors."""
    columns = list(next(iter(result.values())))
    table = Table("", *columns, title=title)
    for name, errors in result.items():
        table.add_row(name, *[f"{errors[c]:.1e}" if c in errors else "-" for c in columns])
    Console().print(table)


def main() -> None:
    """Run the measurements named on the command line."""
    torch.set_num_threads(1)
    Path("results").mkdir(exist_ok=True)
    for name in sys.argv[1:] or ["noise", "drift"]:
        result = {"noise": noise, "drift": drift}[name]()
        Path(f"results/orthogonality_{name}.json").write_text(json.dumps(result, indent=1))
        show(name, result)


if __name__ == "__main__":
    main()
