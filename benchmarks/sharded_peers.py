"""What becomes of other libraries' orthogonal weights in a model sharded by FSDP2.

    torchrun --nproc-per-node 2 benchmarks/sharded_peers.py

A tall weight, ``fully_shard``, ten steps of training with each library's own means; then how far
the weight is from orthogonal, or the error that was raised. Needs geoopt, geotorch and POGO, where
they are installed.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ortholand as ol

OUTPUTS, INPUTS, STEPS, LR = 128, 32, 10, 0.1


def layer() -> nn.Linear:
    """The layer that all start with, its columns orthonormal."""
    torch.manual_seed(0)
    made = nn.Linear(INPUTS, OUTPUTS, bias=False)
    ol.orthogonalize_(made.weight)
    return made


def sharded(model: nn.Module) -> nn.Module:
    """Spread over all ranks."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def ortholand() -> tuple[nn.Module, torch.optim.Optimizer]:
    """This library."""
    model = sharded(layer())
    return model, ol.LandingSGD(model.parameters(), lr=LR, attraction="after")


def geoopt() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parameter of a class of its own, and RiemannianSGD."""
    import geoopt

    model = layer()
    model.weight = geoopt.ManifoldParameter(model.weight.data, manifold=geoopt.Stiefel())
    model = sharded(model)
    return model, geoopt.optim.RiemannianSGD(model.parameters(), lr=LR)


def pogo() -> tuple[nn.Module, torch.optim.Optimizer]:
    """POGO, on columns."""
    from pogo import POGO, base

    model = sharded(layer())
    return model, POGO(model.parameters(), base.SGD(), LR, rows=False)


def geotorch() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parametrization."""
    import geotorch

    model = layer()
    geotorch.orthogonal(model, "weight")
    model = sharded(model)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def torch_parametrization() -> tuple[nn.Module, torch.optim.Optimizer]:
    """torch's own parametrization."""
    model = sharded(nn.utils.parametrizations.orthogonal(layer()))
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Ten steps; the weight, in one piece, as the layer then uses it."""
    x = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(1))
    goal = x @ ol.random_orthogonal(INPUTS, OUTPUTS, seed=2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - goal).square().sum(1).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return model(torch.eye(INPUTS)).mT


def outcome(prepare: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]) -> str:
    """The distance from the manifold after training, or what was raised."""
    try:
        X = train(*prepare())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    return f"||X^T X - I|| = {float(ol.distance(X)):.1e}"


def main() -> None:
    """All libraries, one after the other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for prepare in (ortholand, geoopt, pogo, geotorch, torch_parametrization):
        said = outcome(prepare)
        if dist.get_rank() == 0:
            print(f"{prepare.__name__:22} {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
