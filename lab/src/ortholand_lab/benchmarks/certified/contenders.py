"""Networks that are alike except for how their weights keep norms, and how these are trained."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Adam, Optimizer

import ortholand as ol
from ortholand.nn import MaxMin, OrthogonalConv2d, OrthogonalLinear, UnitRowLinear

Convolution = Callable[[int, int, int, int], nn.Module]  # channels in and out, kernel, stride
Linear = Callable[[int, int], nn.Module]
LANDING, MUON, AOC, RESHAPED, CAYLEY, FREE = (
    "landing",
    "landing-muon",
    "aoc",
    "reshaped",
    "cayley",
    "free",
)


@dataclass(frozen=True)
class Contender:
    """A way to make layers and to train them.

    Args:
        label: its name in tables and figures.
        colour: of its curves.
        rates: learning rates to choose from.
        optimizer: what trains a model.
        linear: makes an inner linear layer.
        last: makes the last one.
        convolution: makes a convolution with circular padding.
        believed: whether its weights are said to have norm 1.
        installed: whether it can be run here.
    """

    label: str
    colour: str
    rates: tuple[float, ...]
    optimizer: Callable[[nn.Module, float], Optimizer]
    linear: Linear
    last: Linear
    convolution: Convolution
    believed: bool = True
    installed: bool = True


def small_cnn(contender: Contender) -> nn.Sequential:
    """Four convolutions and two linear layers for CIFAR-10."""
    conv = contender.convolution
    return nn.Sequential(
        *(conv(3, 16, 4, 2), MaxMin(), conv(16, 32, 4, 2), MaxMin()),
        *(conv(32, 32, 3, 1), MaxMin(), conv(32, 64, 4, 2), MaxMin()),
        *(nn.Flatten(), contender.linear(1024, 64), MaxMin(), contender.last(64, 10)),
    )


def perceptron(contender: Contender) -> nn.Sequential:
    """Three fully connected layers for MNIST."""
    linear = contender.linear
    return nn.Sequential(
        *(nn.Flatten(), linear(784, 128), MaxMin(), linear(128, 128), MaxMin()),
        contender.last(128, 10),
    )


def free_convolution(channels: int, outputs: int, k: int, stride: int) -> nn.Conv2d:
    """torch's convolution, of which nothing is kept."""
    padding = (k - stride) // 2
    return nn.Conv2d(channels, outputs, k, stride, padding, padding_mode="circular")


def orthogonium(module: str) -> Any:
    """A module of orthogonium, whose docstrings make Python warn when it compiles them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"orthogonium.layers.{module}")


def aoc_convolution(channels: int, outputs: int, k: int, stride: int) -> nn.Module:
    """Orthogonium's convolution, which orthogonalises its factors in each forward pass."""
    kind, padding = orthogonium("conv.AOC").AdaptiveOrthoConv2d, (k - stride) // 2
    return kind(channels, outputs, k, stride=stride, padding=padding, padding_mode="circular")


def aoc_linear(inputs: int, outputs: int) -> nn.Module:
    """Orthogonium's linear layer with orthonormal rows or columns."""
    return orthogonium("linear").OrthoLinear(inputs, outputs)


def aoc_last(inputs: int, outputs: int) -> nn.Module:
    """Orthogonium's linear layer with unit rows."""
    return orthogonium("linear").UnitNormLinear(inputs, outputs)


class ReshapedConv2d(nn.Module):
    """A convolution whose kernel, as a matrix ``(out, in * k * k)``, torch keeps orthonormal."""

    def __init__(self, channels: int, outputs: int, k: int, stride: int) -> None:
        super().__init__()
        self.flat = nn.Linear(channels * k * k, outputs)
        parametrizations.orthogonal(self.flat)
        self.shape, self.stride = (outputs, channels, k, k), (stride, stride)

    @property
    def weight(self) -> Tensor:
        """The kernel."""
        return self.flat.weight.view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images with circular padding."""
        padded = pad(x, ((self.shape[-1] - self.stride[0]) // 2,) * 4, "circular")
        return conv2d(padded, self.weight, self.flat.bias, self.stride)


class Cayley(nn.Module):
    """The Cayley transform of tall matrices ``[U; V]`` by Trockman and Kolter (2021).

    With ``A = U - U^T + V^T V`` it is ``[I - A; -2 V] (I + A)^-1``. Wide ones are transposed.
    """

    def forward(self, W: Tensor) -> Tensor:
        """The orthonormal matrix."""
        if W.shape[0] < W.shape[1]:
            return self(W.mT).mT
        U, V = W.split([W.shape[1], W.shape[0] - W.shape[1]])
        identity = torch.eye(len(U), dtype=W.dtype, device=W.device)
        A = U - U.mT + V.mT @ V
        return torch.linalg.solve(identity + A, torch.cat([identity - A, -2 * V]), left=False)


class UnitRows(nn.Module):
    """Rows divided by their norms."""

    def forward(self, W: Tensor) -> Tensor:
        """The rows, each of norm 1."""
        return W / W.norm(dim=1, keepdim=True)


def cayley_linear(inputs: int, outputs: int) -> nn.Module:
    """A linear layer whose weight a Cayley transform computes in each forward pass."""
    return parametrize.register_parametrization(nn.Linear(inputs, outputs), "weight", Cayley())


def unit_row_linear(inputs: int, outputs: int) -> nn.Module:
    """A last layer whose rows are divided by their norms in each forward pass."""
    return parametrize.register_parametrization(nn.Linear(inputs, outputs), "weight", UnitRows())


def adam(model: nn.Module, lr: float) -> Optimizer:
    """torch's Adam."""
    return Adam(model.parameters(), lr=lr)


def landing_adam(model: nn.Module, lr: float) -> Optimizer:
    """The library's Adam, which steps marked weights on the manifold."""
    return ol.LandingAdam(model.parameters(), lr=lr)


def landing_muon(model: nn.Module, lr: float) -> Optimizer:
    """The library's Muon, which turns all planes of a factor by one angle, of lr radians."""
    return ol.LandingMuon(model.parameters(), lr=lr)


def _unavailable(*_: Any) -> nn.Module:
    raise NotImplementedError("These layers are for fully connected networks.")


ADAM_RATES = (0.003, 0.01, 0.03)
CONTENDERS: dict[str, Contender] = {
    LANDING: Contender(
        *("landing", "#0072B2", (0.01, 0.03, 0.1), landing_adam, OrthogonalLinear, UnitRowLinear),
        lambda channels, outputs, k, stride: OrthogonalConv2d(channels, outputs, k, stride),
    ),
    MUON: Contender(
        *("landing, Muon", "#56B4E9", (0.02, 0.05, 0.1), landing_muon),
        *(OrthogonalLinear, UnitRowLinear),
        lambda channels, outputs, k, stride: OrthogonalConv2d(channels, outputs, k, stride),
    ),
    AOC: Contender(
        *("AOC (orthogonium)", "#D55E00", ADAM_RATES, adam, aoc_linear, aoc_last, aoc_convolution),
        installed=bool(find_spec("orthogonium")),
    ),
    RESHAPED: Contender(
        *("reshaped kernels, torch", "#009E73", ADAM_RATES, adam, cayley_linear, unit_row_linear),
        ReshapedConv2d,
    ),
    CAYLEY: Contender(
        *("Cayley layers", "#CC79A7", ADAM_RATES, adam, cayley_linear, unit_row_linear),
        _unavailable,
    ),
    FREE: Contender(
        *("no constraint", "#000000", (0.001, 0.003, 0.01), adam, nn.Linear, nn.Linear),
        free_convolution,
        believed=False,
    ),
}
