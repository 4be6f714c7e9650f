"""What is measured: one optimizer step with a fixed gradient, ours and each installed peer's.

A peer's cost is everything a user pays per step: for parametrizations this includes the forward and
backward pass through them, besides the optimizer's step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ortholand.geometry import random_orthogonal
from ortholand.optim import LandingAdam, LandingSGD, RiemannianSGD
from ortholand.parameters import orthogonalize_, param_groups
from ortholand_lab.models import LeNet5, resnet18

Step = Callable[[], object]
LR = 1e-4


@dataclass(frozen=True)
class StepsCase:
    """What is stepped: how many parameters, their shape, and how a weight is viewed."""

    count: int
    shape: tuple[int, ...]
    view: str = "matrix"
    others: tuple[tuple[int, ...], ...] = ()  # shapes of more parameters
    lr: float = LR  # ours; so large a one that the safe step binds, if that is to be seen

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter."""
        return (self.shape,) * self.count + self.others

    @property
    def rows(self) -> int:
        """Rows of the matrices, of the largest if they differ."""
        return max(shape[-2] for shape in self.shapes)

    @property
    def matrices(self) -> int:
        """Number of all matrices."""
        return sum(torch.Size(shape[:-2]).numel() for shape in self.shapes)

    @property
    def operations(self) -> float:
        """Multiplications of the bare products: three of a square matrix, four of another."""
        sizes = ((torch.Size(s[:-2]).numel(), max(s[-2:]), min(s[-2:])) for s in self.shapes)
        return sum(count * (3 if n == p else 4) * n * p * p for count, n, p in sizes)

    @property
    def numel(self) -> int:
        """Number of all entries."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)


# ResNet-18's convolutions seen as matrices: (filters, channels x height x width).
RESNET_SHAPES = (
    (64, 147),
    *[(64, 576)] * 4,
    *[(128, 576), (128, 64)],
    *[(128, 1152)] * 3,
    *[(256, 1152), (256, 128)],
    *[(256, 2304)] * 3,
    *[(512, 2304), (512, 256)],
    *[(512, 4608)] * 3,
)


def parameters(
    case: StepsCase, *, flat: bool = False, stacked: bool = False, tall: bool = False
) -> list[nn.Parameter]:
    """Orthogonal parameters with gradients.

    ``flat``: all leading dimensions are one; ``stacked``: single matrices have one too; ``tall``:
    wide ones are transposed.
    """
    result = []
    for i, shape in enumerate(case.shapes):
        X = random_orthogonal(*shape, seed=i)
        if stacked or (flat and X.ndim > 2):
            X = X.reshape(-1, *shape[-2:])
        if tall and shape[-2] < shape[-1]:
            X = X.mT.contiguous()
        p = nn.Parameter(X)
        noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(i))
        p.grad = noise / shape[-2] ** 0.5
        result.append(p)
    return result


def _pairs(case: StepsCase) -> list[tuple[Tensor, Tensor]]:
    params = parameters(case, flat=True, tall=True)
    return [(p.detach(), p.grad) for p in params if p.grad is not None]


def bare_products(case: StepsCase) -> Step:
    """The products of a landing update, into existing memory, and nothing else.

    Square: ``G X^T``, ``X X^T``, ``M X``. Tall: ``X^T X``, ``G^T X``, ``G D``, ``X M``.
    """
    steps = [_products_of(X, G) for X, G in _pairs(case)]

    def all_products() -> None:
        for step in steps:
            step()

    return all_products


def _products_of(X: Tensor, G: Tensor) -> Step:
    multiply: Callable[..., Tensor] = torch.mm if X.ndim == 2 else torch.bmm
    n, p = X.shape[-2:]
    out, small = torch.empty_like(X), X.new_empty(*X.shape[:-2], p, p)

    def square() -> None:
        multiply(G, X.mT, out=small)
        multiply(X, X.mT, out=small)
        multiply(small, X, out=out)

    def tall() -> None:
        multiply(X.mT, X, out=small)
        multiply(G.mT, X, out=small)
        multiply(G, small, out=out)
        multiply(X, small, out=out)

    return square if n == p else tall


def unsafe_landing(case: StepsCase) -> Step:
    """The landing step by torch's products and sums, without a safe step or anything else."""
    pairs = _pairs(case)

    def step() -> None:
        for X, G in pairs:
            if X.shape[-2] == X.shape[-1]:
                P, S = G @ X.mT, X @ X.mT
                X.sub_(((P - P.mT) / 2 + S) @ X, alpha=1e-9)
            else:
                S, M = X.mT @ X, G.mT @ X
                X.sub_(G @ S / 2 + X @ (S - M / 2), alpha=1e-9)

    return step


def cayley_solve(case: StepsCase) -> Step:
    """The bare solve of a Cayley retraction, ``(I + A/2)^-1 (I - A/2) X`` with A given."""
    X = parameters(case, flat=True)[0].detach()
    A = LR * (X - X.mT) / 2
    plus, minus = torch.eye(case.rows) + A, torch.eye(case.rows) - A
    return lambda: torch.linalg.solve(plus, minus @ X)


def ours(case: StepsCase) -> dict[str, Step]:
    """Our optimizers, with their defaults."""
    landing = partial(LandingSGD, lr=case.lr, view=case.view)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "LandingSGD": landing,
        "LandingSGD, momentum": partial(landing, momentum=0.9),
        "LandingSGD, after": partial(landing, attraction="after"),
        "LandingSGD, momentum, after": partial(landing, momentum=0.9, attraction="after"),
        "LandingSGD, not compiled": partial(landing, fused=False),
        "LandingAdam, after": partial(LandingAdam, lr=case.lr, view=case.view, attraction="after"),
    }
    for name in () if case.others else ("cayley", "qr"):  # minutes where they differ: ResNet-18
        if case.rows <= 600 or name == "qr":
            retraction = partial(RiemannianSGD, lr=LR, view=case.view, retraction=name)
            makers[f"RiemannianSGD, {name}"] = retraction
    return {name: make(parameters(case)).step for name, make in makers.items()}


def muon(case: StepsCase) -> dict[str, Step]:
    """torch's Muon, which makes updates orthogonal, not weights. Matrices only.

    Its products are in bfloat16: on a CPU a large matrix takes seconds, not worth the wait.
    """
    if len(case.shape) != 2 or case.numel > 3_000_000 or case.rows > 300:
        return {}
    if not hasattr(torch.optim, "Muon"):
        return {}
    return {"torch Muon": torch.optim.Muon(parameters(case), lr=LR).step}


def pogo(case: StepsCase) -> dict[str, Step]:
    """POGO with its two base optimizers. It needs stacks of tall matrices."""
    if not find_spec("pogo"):
        return {}
    library, bases = import_module("pogo"), import_module("pogo.base")
    contenders = {
        "SGD": bases.SGD(),
        "SGD, momentum": bases.SGD(momentum=0.9),
        "VectorAdam": bases.VectorAdam(),
    }
    params = partial(parameters, case, stacked=True, tall=True)
    return {
        f"POGO + {name}": library.POGO(params(), base, LR, rows=False).step
        for name, base in contenders.items()
    }


def geoopt(case: StepsCase) -> dict[str, Step]:
    """geoopt's RiemannianSGD with its two Stiefel manifolds, and its RiemannianAdam."""
    if not find_spec("geoopt"):
        return {}
    library = import_module("geoopt")
    steps: dict[str, Step] = {}
    for name in ("Stiefel", "EuclideanStiefel"):
        # Minutes: the first one solves systems of n x n.
        if not case.others and (name != "Stiefel" or case.rows <= 2000):
            params = _on_manifold(case, library, name)
            steps[f"geoopt, {name}"] = library.optim.RiemannianSGD(params, lr=LR).step
    params = _on_manifold(case, library, "EuclideanStiefel")
    steps["geoopt, RiemannianAdam"] = library.optim.RiemannianAdam(params, lr=LR).step
    return steps


def _on_manifold(case: StepsCase, library: Any, name: str) -> list[Any]:
    params = []
    for p in parameters(case, flat=True, tall=True):
        q = library.ManifoldParameter(p.detach().clone(), manifold=getattr(library, name)())
        q.grad = p.grad
        params.append(q)
    return params


def parametrizations(case: StepsCase) -> dict[str, Step]:
    """torch's and geotorch's parametrizations with the Cayley map, and SGD."""
    if case.rows > 600 or case.matrices > 10_000 or len(case.shapes) > 10:  # seconds, each
        return {}
    by_torch = partial(nn.utils.parametrizations.orthogonal, orthogonal_map="cayley")
    steps = {"torch parametrization, Cayley": _parametrized(case, by_torch)}
    if find_spec("geotorch"):
        by_geotorch = partial(import_module("geotorch").orthogonal, triv="cayley")
        steps["geotorch, Cayley"] = _parametrized(case, by_geotorch)
    return steps


def _parametrized(case: StepsCase, parametrize: Callable[[nn.Module], object]) -> Step:
    pairs: list[tuple[Any, Tensor | None]] = []
    for p in parameters(case, flat=True):
        holder = nn.Module()
        holder.weight = nn.Parameter(p.detach().clone())
        parametrize(holder)
        pairs.append((holder, p.grad))
    weights = [q for holder, _ in pairs for q in holder.parameters()]
    optimizer = torch.optim.SGD(weights, lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        for holder, G in pairs:
            holder.weight.backward(G)
        optimizer.step()

    return step


GEMM, TRAFFIC = "512x512 product", "limit, bytes"


def limits(case: StepsCase) -> dict[str, Step]:
    """What the least that a step must do takes: arithmetic, and reading X and G and writing X."""
    A, C = torch.randn(512, 512), torch.empty(512, 512)
    X, G = torch.zeros(case.numel), torch.ones(case.numel)
    return {GEMM: partial(torch.mm, A, A, out=C), TRAFFIC: partial(X.add_, G, alpha=-LR)}


def steps_of(case: StepsCase) -> dict[str, Step]:
    """Everything that is measured for a case."""
    steps = {"bare products": bare_products(case), **limits(case)}
    if case.shape == (40, 40):
        steps["bare Cayley solve"] = cayley_solve(case)
    steps["landing by hand, unsafe"] = unsafe_landing(case)
    steps["torch SGD, unconstrained"] = torch.optim.SGD(parameters(case), lr=LR).step  # the floor
    steps["torch AdamW, unconstrained"] = torch.optim.AdamW(parameters(case), lr=LR).step
    fused = torch.optim.AdamW(parameters(case), lr=LR, fused=True)
    steps["torch AdamW, fused"] = fused.step
    for make in (ours, muon, pogo, geoopt, parametrizations):
        steps.update(make(case))
    return steps


def lenet_iterations() -> dict[str, Step]:
    """Whole training iterations of LeNet-5 on one batch of size 4: forward, backward and step."""
    landing = partial(LandingSGD, lr=1e-3)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "LandingSGD": landing,
        "LandingSGD, after": partial(landing, attraction="after"),
        "LandingSGD, not compiled": partial(landing, fused=False),
        "RiemannianSGD, cayley": partial(RiemannianSGD, lr=1e-3),
    }
    model = LeNet5(seed=0)
    steps = {
        "torch SGD, unconstrained": _iteration(model, torch.optim.SGD(model.parameters(), 1e-3))
    }
    for name, make in makers.items():
        model = LeNet5(seed=0)
        kernels = orthogonalize_(param_groups(model, orthogonal="conv*", view="kernel"))
        steps[name] = _iteration(model, make(kernels))
    return steps


class Recurrent(nn.Module):
    """An LSTM over sequences of vectors; or, as ``gpt``, four blocks of a transformer."""

    def __init__(self, width: int, *, gpt: bool) -> None:
        super().__init__()
        if gpt:
            block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            self.body: nn.Module = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        else:
            self.body = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The output at every place."""
        y = self.body(x)
        return y[0] if isinstance(y, tuple) else y


# Model, its input and the orthogonal weights.
WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "gpt": (partial(Recurrent, 128, gpt=True), (8, 64, 128), "*proj*weight *linear*weight"),
    "resnet-18": (partial(resnet18, seed=0), (16, 3, 32, 32), "*conv*"),
    "lstm": (partial(Recurrent, 256, gpt=False), (8, 64, 256), "*weight_hh*"),
}
BACKWARD = "forward and backward"


def whole_steps(name: str) -> dict[str, Step]:
    """Forward and backward of a model, and the step of each optimizer of all its weights."""
    make, shape, patterns = WHOLE[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def trained() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make()
        model(x).square().mean().backward()
        return model

    model = trained()
    steps: dict[str, Step] = {BACKWARD: lambda: model(x).square().mean().backward()}
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "LandingSGD, momentum": partial(LandingSGD, lr=LR, momentum=0.9),
        "LandingAdam": partial(LandingAdam, lr=LR),
    }
    for kind, optimizer in makers.items():
        groups = param_groups(trained(), orthogonal=patterns.split())
        steps[kind] = optimizer(orthogonalize_(groups)).step
    steps["torch AdamW, fused"] = torch.optim.AdamW(trained().parameters(), fused=True).step
    return steps


def _iteration(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (4,), generator=generator)

    def iterate() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return iterate
