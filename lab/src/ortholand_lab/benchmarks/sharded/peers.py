"""What becomes of other libraries' orthogonal weights in a model sharded by FSDP2.

A tall weight, ``fully_shard``, ten training steps with each library's own tools; then how far
the weight is from orthogonal, or the error raised.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ortholand as ol
from ortholand_lab.benchmarks.sharded.counting import shard

OUTPUTS, INPUTS, STEPS, LR = 128, 32, 10, 0.1


# Each library's own tools: they take the layer, shard it and create an optimizer.


def ortholand(model: nn.Linear) -> Optimizer:
    """Shard the layer and train it with this library."""
    return ol.LandingSGD(shard(model).parameters(), lr=LR, attraction="after")


def geoopt(model: nn.Linear) -> Optimizer:
    """A parameter of a class of its own, and RiemannianSGD."""
    geoopt: Any = import_module("geoopt")  # whose annotations are wrong
    model.weight = geoopt.ManifoldParameter(model.weight.data, manifold=geoopt.Stiefel())
    return geoopt.optim.RiemannianSGD(shard(model).parameters(), lr=LR)


def pogo(model: nn.Linear) -> Optimizer:
    """POGO, with orthonormal columns."""
    from pogo import POGO, base

    return POGO(shard(model).parameters(), base.SGD(), LR, rows=False)


def geotorch(model: nn.Linear) -> Optimizer:
    """geotorch's parametrization, and SGD."""
    import geotorch

    geotorch.orthogonal(model, "weight")
    return torch.optim.SGD(shard(model).parameters(), lr=LR)


def torch_parametrization(model: nn.Linear) -> Optimizer:
    """torch's own parametrization."""
    nn.utils.parametrizations.orthogonal(model)
    return torch.optim.SGD(shard(model).parameters(), lr=LR)


OURS = 'ortholand, `attraction="after"`'
LIBRARIES: dict[str, Callable[[nn.Linear], Optimizer]] = {
    OURS: ortholand,
    "geoopt": geoopt,
    "POGO": pogo,
    "geotorch": geotorch,
    "torch's parametrization": torch_parametrization,
}


def train(prepare: Callable[[nn.Linear], Optimizer]) -> Tensor:
    """Take ten steps; return the whole weight as the layer then uses it."""
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, OUTPUTS, bias=False)
    ol.orthogonalize_(model.weight)
    optimizer = prepare(model)
    x = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(1))
    goal = x @ ol.random_orthogonal(INPUTS, OUTPUTS, seed=2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - goal).square().sum(1).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return model(torch.eye(INPUTS)).mT


def train_all() -> Iterator[dict[str, float]]:
    """The outcome of each library, in words, and the distance from the manifold.

    Without a number the words say what was raised, or that the library is not installed.
    """
    for name, prepare in LIBRARIES.items():
        try:
            yield {name: float(ol.distance(train(prepare)))}
        except ModuleNotFoundError:
            yield {f"{name}: not installed": float("nan")}
        except Exception as error:
            message = f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
            yield {f"{name}: {message}": float("nan")}


def outcome(name: str, values: dict[str, float]) -> str:
    """What became of a library's weights, from all that was yielded."""
    if name in values:
        return f"‖XᵀX - I‖ = {values[name]:.1e}"
    words = [key.removeprefix(f"{name}: ") for key in values if key.startswith(f"{name}: ")]
    return "".join(words) or "not run"
