"""Convolutions that keep norms: isometries of images, or transposes of isometries."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ortholand.geometry.matrices import is_plain_cpu, without_autocast
from ortholand.nn.kernels import Factors, compose, norm_bound
from ortholand.parameters import orthogonal

FACTORS = ("mix", "projectors", "lift")
PADDING_MODES = {"circular": "circular", "zeros": "constant"}  # as functional.pad names them


class OrthogonalConv2d(nn.Module):
    """A convolution whose singular values, as an operator on images, are all 1.

    It is an isometry if ``out_channels >= in_channels * stride**2``, else the transpose of one,
    which keeps the norms of gradients. The kernel is a product of orthonormal factors: plain
    parameters, marked as orthogonal. An optimizer of this library keeps them so, and a forward
    pass only multiplies them. The output has the size of the input divided by the stride.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: height and width of the kernel, at least the stride.
        stride: step of the kernel. Images must have a multiple of it as height and width.
        groups: how many groups of channels are convolved separately.
        bias: whether a number is added to each channel of the output.
        padding_mode: ``"circular"``, or ``"zeros"``, with which the norm is at most 1, but what is
            near the border may shrink.
        device: where the parameters are.
        dtype: float32 or float64.

    Where no gradient of the factors is wanted (under ``torch.no_grad``, or if they are frozen), the
    kernel is kept, on the CPU, as long as the factors are equal to copies of them.

    >>> x = torch.randn(5, 3, 8, 8)
    >>> conv = OrthogonalConv2d(3, 16, kernel_size=4, stride=2, bias=False)
    >>> torch.allclose(conv(x).norm(), x.norm(), rtol=1e-4)
    True
    """

    mix: nn.Parameter
    projectors: nn.Parameter | None
    lift: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.groups = kernel_size, stride, groups
        self.padding_mode = padding_mode
        self._check_options()
        shapes = {**self._shapes(), "bias": (out_channels,) if bias else None}
        for name, shape in shapes.items():
            empty = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self._check_type()
        self._kept: tuple[list[Tensor], Tensor] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw factors by torch's own random numbers, and set the bias to zero."""
        for name in FACTORS:
            if (factor := self._parameters[name]) is not None:
                nn.init.normal_(factor)
                orthogonal(self, name, view="kernel")
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images ``(..., in_channels, height, width)``."""
        self._check_images(x)
        x = functional.pad(x, self.padding * 2, PADDING_MODES[self.padding_mode])
        kernel = self._current_kernel()
        return functional.conv2d(x, kernel, self.bias, self.stride, groups=self.groups)

    @property
    def padding(self) -> tuple[int, int]:
        """How many pixels an image is padded by, before and after it, along both axes."""
        total = self.kernel_size - self.stride
        return total // 2, total - total // 2

    def kernel(self) -> Tensor:
        """Compose the kernel ``(out_channels, in_channels // groups, k, k)`` from the factors."""
        self._check_type()
        with without_autocast([self.mix]):
            return self._as_kernel(compose(self._factors(), self.stride))

    @torch.no_grad()
    def lipschitz_bound(self) -> float:
        """A bound of the operator's norm, which contains the errors of factors and of rounding."""
        exact = copy.deepcopy(self).cpu().double()
        error = torch.linalg.vector_norm(self.kernel().cpu() - exact.kernel())
        # Each tap has at most the norm of its entries. Twice, because another number of threads
        # may round the kernel of a forward pass in another way.
        return norm_bound(exact._factors()) + 2 * self.kernel_size * float(error)

    def extra_repr(self) -> str:
        """What this layer is, as torch shows it and as errors name it."""
        rest = {"stride": 1, "groups": 1, "padding_mode": "circular"}
        changed = [f", {n}={getattr(self, n)!r}" for n, v in rest.items() if getattr(self, n) != v]
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return sizes + "".join(changed)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles compose the kernel again."""
        return {**vars(self), "_kept": None}

    def _factors(self) -> Factors:
        return Factors(self.mix, self.projectors, self.lift)

    def _shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The shapes of the factors; without a stride the mix is on the side of fewer channels."""
        groups, k, stride = self.groups, self.kernel_size, self.stride
        channels, rows = self.in_channels // groups, self.out_channels // groups
        m = max(channels, rows // stride**2)
        if stride == 1:
            channels, rows = m, min(channels, rows)
        if m == 1 and k > stride:
            raise ValueError(
                f"With one channel between its factors an orthogonal convolution only shifts "
                f"images, but {self} has no more. Use fewer groups, kernel_size={stride}, or "
                f"{2 * stride**2} output channels for each group."
            )
        return {
            "mix": (groups, rows, m * stride**2),
            "projectors": (k - stride, 2, groups, m, m // 2) if k > stride else None,
            "lift": (groups, channels, m) if m > channels else None,
        }

    def _as_kernel(self, composed: Tensor) -> Tensor:
        """The composed kernel in the order of dimensions that ``conv2d`` takes."""
        mix_is_last = self.stride > 1 or self.out_channels <= self.in_channels
        order = (0, 1, 4, 2, 3) if mix_is_last else (0, 4, 1, 2, 3)
        return composed.permute(order).flatten(0, 1).contiguous()

    def _current_kernel(self) -> Tensor:
        """The kernel, or the kept one if no gradient is wanted and the factors are unchanged.

        Values are compared, because the version of a parameter does not count changes of its
        ``data``. That takes a thirtieth of the time of composing. On a GPU it would wait for the
        device, so nothing is kept there.
        """
        factors = [factor for factor in self._factors() if factor is not None]
        wanted = torch.is_grad_enabled() and any(factor.requires_grad for factor in factors)
        if wanted or not all(is_plain_cpu(factor) for factor in factors):
            self._kept = None
            return self.kernel()
        if self._kept is None or not all(map(_same, self._kept[0], factors)):
            # What is made in inference mode could not serve outside it.
            with torch.inference_mode(False), torch.no_grad():
                self._kept = [factor.clone() for factor in factors], self.kernel()
        return self._kept[1]

    def _check_options(self) -> None:
        sizes = (self.in_channels, self.out_channels, self.kernel_size, self.stride, self.groups)
        if not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(
                f"Channels, kernel_size, stride and groups must be positive integers, got {self}. "
                "Kernels are square: give one number."
            )
        if self.kernel_size < self.stride:
            raise ValueError(
                f"kernel_size must be at least the stride, or pixels are lost, but got {self}. Use "
                f"kernel_size={self.stride}."
            )
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"The numbers of channels must be multiples of groups, but got {self}. Use "
                f"groups={math.gcd(self.in_channels, self.out_channels)} or a divisor of it."
            )
        if self.padding_mode not in PADDING_MODES:
            raise ValueError(
                f"padding_mode must be 'circular' or 'zeros', got {self.padding_mode!r} in {self}. "
                "Other kinds of padding repeat pixels, which increases the norm."
            )

    def _check_type(self) -> None:
        if self.mix.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{self} needs float32 or float64 parameters, because in {self.mix.dtype} its "
                "singular values would be off by a percent. Use layer.float(), and torch.autocast "
                "to convolve in half precision."
            )

    def _check_images(self, x: Tensor) -> None:
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ValueError(
                f"{self} takes images (..., {self.in_channels}, height, width), got "
                f"{tuple(x.shape)}. Change in_channels, or the layer before."
            )
        if x.dtype != self.mix.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{self} has parameters of type {self.mix.dtype}, but images are {x.dtype}. Cast "
                "one of them, or use torch.autocast."
            )
        height, width = x.shape[-2:]
        if min(height, width) < self.kernel_size:
            raise ValueError(
                f"Images must be as large as the kernel, but {self} got {height} x {width} pixels. "
                f"Use kernel_size={max(min(height, width), self.stride)} or fewer strides before."
            )
        if height % self.stride or width % self.stride:
            raise ValueError(
                f"Images must have a multiple of the stride as height and width, but {self} got "
                f"{height} x {width} pixels. Pad them with zeros, or use stride=1."
            )


def _same(kept: Tensor, factor: Tensor) -> bool:
    return kept.dtype == factor.dtype and torch.equal(kept, factor)
