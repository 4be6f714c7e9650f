"""How each method trains the network: spectral steps on the manifold, and off it.

The published protocol has no momentum, and neither have the methods that follow it; others have
theirs at its default.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ortholand as ol
from ortholand.geometry.derivatives import relative_gradient_times_x
from ortholand.geometry.matrices import is_square, newton_schulz, tall
from ortholand.landing.moments import generator
from ortholand.landing.muon import MuonMoments
from ortholand.landing.point import Point
from ortholand_lab.benchmarks.muon.directions import dual_ascent, spel

OURS, DUAL, SPEL = "landing-muon", "dual-ascent", "spel"
INNER_STEPS = 10  # of the dual ascent in every step of a training


def our_direction(X: Tensor, G: Tensor) -> Tensor:
    """The direction of a step of LandingMuon without momentum."""
    moments = MuonMoments(momentum=0.0)
    direction = moments.direction(Point(X), generator(X, G), G)
    B = direction.of_length_one(X).B
    return B @ X if is_square(X) else relative_gradient_times_x(X, B)


# Of tall or square matrices, for (X, G).
DIRECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    OURS: our_direction,
    DUAL: partial(dual_ascent, steps=INNER_STEPS, sign=ol.msign),
    SPEL: partial(spel, sign=ol.msign),
}


def nearest(Y: Tensor) -> Tensor:
    """The polar factor by products, as published, and once more to reach rounding level."""
    return newton_schulz(ol.msign(Y))


class RetractedDescent(Optimizer):
    """``X <- polar factor of X - lr R``, with a direction R from the table above."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, direction: str) -> None:
        super().__init__(params, {"lr": lr, "direction": direction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step along the direction, then return to the manifold."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                R = DIRECTIONS[group["direction"]](tall(p), tall(p.grad))
                Y = nearest(tall(p) - group["lr"] * R)
                p.copy_(Y if Y.shape == p.shape else Y.mT)
        return loss


class MatrixwiseMuon:
    """What POGO calls a base optimizer: the polar factor of each gradient.

    POGO's own Muon flattens the matrices of a stack into its rows. A layer is a stack of one matrix
    for POGO, so nothing but its normalised gradient would be left: no Muon.
    """

    def get_defaults(self) -> dict[str, Any]:
        """The options of groups: there are none."""
        return {}

    def __call__(self, _point: Tensor, grad: Tensor, _state: object, _group: object) -> Tensor:
        """The polar factors of a stack of gradients."""
        return ol.msign(grad)


def as_stack(weight: Tensor) -> Tensor:
    """A matrix in the shape that POGO requires."""
    return weight[None]


def pogo(params: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """POGO, as installed, with Muon."""
    return import_module("pogo").POGO(params, MatrixwiseMuon(), lr, flatten_fn=as_stack)


def torch_muon(params: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """torch's Muon: orthogonal updates, free weights. Available since torch 2.9."""
    return torch.optim.Muon(params, lr=lr, weight_decay=0.0)


@dataclass(frozen=True)
class Contender:
    """A method to be trained and timed.

    Args:
        label: its name in tables.
        make: its optimizer, from parameters and a learning rate.
        rates: learning rates to choose from.
        constrained: whether its weights are on the manifold, and start there.
        installed: whether it can be run here.
    """

    label: str
    make: Callable[[Iterable[nn.Parameter], float], Optimizer]
    rates: tuple[float, ...]
    constrained: bool = True
    installed: bool = True


ANGLES = (0.05, 0.1, 0.15, 0.2, 0.3)  # by which planes turn in a spectral step
CONTENDERS: dict[str, Contender] = {
    OURS: Contender("LandingMuon, no momentum", partial(ol.LandingMuon, momentum=0.0), ANGLES),
    DUAL: Contender(
        f"manifold Muon, dual ascent, {INNER_STEPS} inner steps",
        partial(RetractedDescent, direction=DUAL),
        ANGLES,
    ),
    SPEL: Contender("SPEL", partial(RetractedDescent, direction=SPEL), ANGLES),
    "pogo-muon": Contender(
        "POGO + Muon", pogo, (0.1, 0.2, 0.3, 0.4, 0.6), installed=bool(find_spec("pogo"))
    ),
    "landing-muon-momentum": Contender(
        "LandingMuon, momentum 0.95", ol.LandingMuon, (0.02, 0.05, 0.1, 0.15, 0.2)
    ),
    "landing-sgd": Contender(
        "LandingSGD, momentum 0.9",
        partial(ol.LandingSGD, momentum=0.9, attraction="after"),
        (0.05, 0.1, 0.2, 0.3, 0.5),
    ),
    "landing-adam": Contender(
        "LandingAdam",
        partial(ol.LandingAdam, attraction="after"),
        (0.1, 0.2, 0.3, 0.5, 1.0),
    ),
    "adamw": Contender(
        "torch AdamW, unconstrained",
        partial(torch.optim.AdamW, weight_decay=0.0),
        (0.001, 0.002, 0.003, 0.005, 0.01),
        constrained=False,
    ),
    "torch-muon": Contender(
        "torch Muon, unconstrained",
        torch_muon,
        (0.03, 0.05, 0.1),  # its bfloat16 takes half a second a step on some CPUs
        constrained=False,
        installed=hasattr(torch.optim, "Muon"),
    ),
}
STEPPED = {
    f"{OURS}-{momentum:g}-{steps}": Contender(
        f"momentum {momentum:g}, {steps} steps",
        partial(ol.LandingMuon, momentum=momentum, steps=steps),
        (0.15,),
    )
    for momentum in (0.0, 0.95)
    for steps in (2, 3, 4, 5, 7)
}
