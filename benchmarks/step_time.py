"""Time of one optimizer step with a fixed gradient: ortholand, the bare products, and peers.

A peer's cost is all that a user pays per step. Run: ``make bench``, which writes
``results/step_time.json`` and prints a table of ratios to the bare products of a landing update.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ortholand as ol
from timing import interleaved_medians, with_threads

# name: (number of parameters, shape of each, view)
CASES: dict[str, tuple[int, tuple[int, ...], str]] = {
    "40x40": (1, (40, 40), "matrix"),
    "100x100": (1, (100, 100), "matrix"),
    "10 of 100x100": (10, (100, 100), "matrix"),
    "200 of 64x64": (200, (64, 64), "matrix"),
    "512x512": (1, (512, 512), "matrix"),
    "1024x1024": (1, (1024, 1024), "matrix"),
    "96 of 5x5 (LeNet)": (1, (16, 6, 5, 5), "kernel"),
    "1920 of 4x4 (LeNet)": (1, (120, 16, 4, 4), "kernel"),
    "262144 of 3x3 (ResNet)": (1, (512, 512, 3, 3), "kernel"),
    "2000x100": (1, (2000, 100), "matrix"),
}
Step = Callable[[], object]


def parameters(count: int, shape: tuple[int, ...], flat: bool = False) -> list[nn.Parameter]:
    """Orthogonal parameters with gradients; ``flat`` joins all leading dimensions into one."""
    result = []
    for i in range(count):
        X = ol.random_orthogonal(*shape, seed=i)
        p = nn.Parameter(X.reshape(-1, *shape[-2:]) if flat else X)
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / shape[-2] ** 0.5
        result.append(p)
    return result


def bare_products(X: Tensor, G: Tensor) -> Tensor:
    """Just the landing update's products and sums, without safe step or anything else."""
    if X.shape[-2] == X.shape[-1]:
        P, S = G @ X.mT, X @ X.mT
        return X - 1e-4 * ((P - P.mT) / 2 + S) @ X
    S, M = X.mT @ X, G.mT @ X
    return X - 1e-4 * (G @ S / 2 + X @ (S - M / 2))


def steps(count: int, shape: tuple[int, ...], view: str) -> dict[str, Step]:
    """The actions to time for one case."""
    bare = parameters(count, shape, flat=len(shape) > 2)
    pairs = [(p.detach(), p.grad) for p in bare]
    ours = {
        f"LandingSGD{suffix}": ol.LandingSGD(
            parameters(count, shape), lr=1e-4, view=view, **options
        ).step
        for suffix, options in {
            "": {},
            ", momentum": {"momentum": 0.9},
            ", after": {"attraction": "after"},
            ", foreach=True": {"foreach": True},
            ", foreach=False": {"foreach": False},
        }.items()
        if count > 1 or "foreach" not in suffix
    }
    return {
        "bare products": lambda: [bare_products(X, G) for X, G in pairs if G is not None],
        "torch SGD, unconstrained": torch.optim.SGD(parameters(count, shape), lr=1e-4).step,
        **ours,
        "LandingAdam, after": ol.LandingAdam(
            parameters(count, shape), lr=1e-4, view=view, attraction="after"
        ).step,
        **{
            f"RiemannianSGD, {name}": ol.RiemannianSGD(
                parameters(count, shape), lr=1e-4, view=view, retraction=name
            ).step
            for name in (("cayley", "qr") if max(shape) <= 600 else ("qr",))
        },
        **pogo_steps(count, shape),
        **geoopt_steps(count, shape),
        **parametrization_steps(count, shape),
    }


def pogo_steps(count: int, shape: tuple[int, ...]) -> dict[str, Step]:
    """POGO with its two base optimizers, if it is installed. It wants stacks of matrices."""
    try:
        from pogo import POGO, base
    except ImportError:
        return {}
    actions: dict[str, Step] = {}
    for name, make in (("SGD", base.SGD), ("VectorAdam", base.VectorAdam)):
        stacks = []
        for p in parameters(count, shape, flat=True):
            stack = nn.Parameter(p.detach().clone())
            stack.grad = p.grad
            stacks.append(stack)
        actions[f"POGO + {name}"] = POGO(stacks, make(), 1e-4, rows=False).step
    return actions


def geoopt_steps(count: int, shape: tuple[int, ...]) -> dict[str, Step]:
    """geoopt's RiemannianSGD with its two Stiefel manifolds, if it is installed."""
    try:
        import geoopt
    except ImportError:
        return {}
    actions: dict[str, Step] = {}
    for name in ("Stiefel", "EuclideanStiefel"):
        manifold = getattr(geoopt, name)()
        params = []
        for p in parameters(count, shape, flat=len(shape) > 2):
            q = geoopt.ManifoldParameter(p.detach().clone(), manifold=manifold)
            q.grad = p.grad
            params.append(q)
        optimizer = geoopt.optim.RiemannianSGD(params, lr=1e-4)
        actions[f"geoopt RSGD, {name}"] = optimizer.step
    return actions


def parametrization_steps(count: int, shape: tuple[int, ...]) -> dict[str, Step]:
    """torch's parametrization with the Cayley map: forward, backward and SGD step."""
    if max(shape[-2:]) > 600 or count > 10:  # seconds per step: not worth the wait
        return {}
    holders = []
    for p in parameters(count, shape, flat=len(shape) > 2):
        holder = nn.Module()
        holder.weight = nn.Parameter(p.detach().clone())
        nn.utils.parametrizations.orthogonal(holder, "weight", orthogonal_map="cayley")
        holders.append((holder, p.grad))
    weights = [q for holder, _ in holders for q in holder.parameters()]
    optimizer = torch.optim.SGD(weights, lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        for holder, G in holders:
            holder.weight.backward(G)
        optimizer.step()

    return {"torch parametrization, Cayley": step}


def main() -> None:
    """Time all cases at one and two threads, save and print them."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    console = Console()
    for n_threads in (1, 2):
        for case, (count, shape, view) in CASES.items():
            actions = steps(count, shape, view)
            times = with_threads(n_threads, lambda a=actions: interleaved_medians(a))
            results.setdefault(f"{n_threads} threads", {})[case] = times
            _print_case(console, case, n_threads, times)
    folder = Path("results")
    folder.mkdir(exist_ok=True)
    record = {"torch": torch.__version__, "dtype": "float32", "median seconds": results}
    (folder / "step_time.json").write_text(json.dumps(record, indent=1))


def _print_case(console: Console, case: str, n_threads: int, times: dict[str, float]) -> None:
    table = Table(title=f"{case}, {n_threads} thread(s)", title_justify="left")
    table.add_column("one step")
    table.add_column("median ms", justify="right")
    table.add_column("x bare products", justify="right")
    for name, seconds in times.items():
        ratio = seconds / times["bare products"]
        table.add_row(name, f"{1e3 * seconds:.3f}", f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
