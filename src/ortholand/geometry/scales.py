"""Weights ``W = s Z`` with orthonormal Z: the scale s, and from W to Z and back."""

import math
import sys
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.matrices import to_working_dtype
from ortholand.geometry.views import Grid, View

FAN = "fan"  # sqrt(max(1, out / in)), as modular norms prescribe
Scale = float | Literal["fan"]
NUMBERS = (int, float, np.integer, np.floating)  # that torch takes, none of which can change


def check_scale(scale: object) -> None:
    """Raise unless it is a positive finite number, or "fan"."""
    rule = 'scale must be a positive finite number, or "fan" for sqrt(max(1, out / in))'
    if isinstance(scale, str):
        if scale != FAN:
            raise ValueError(f"{rule}, got {scale!r}.")
        return
    if not isinstance(scale, NUMBERS) or isinstance(scale, bool):
        kind = type(scale).__name__
        raise TypeError(f"{rule}, got {scale!r} of type {kind}: use float(...).")
    if not 0 < scale <= sys.float_info.max:  # an integer may be larger
        raise ValueError(f"{rule}, got {scale!r}. To flip the sign of weights, negate them.")


def check_scale_fits(scale: float, dtype: torch.dtype, name: str) -> None:
    """Raise unless a type can hold weights of this scale: entries are up to ``2^(1/2) scale``."""
    info = torch.finfo(dtype)
    if scale != 1 and not info.tiny <= scale <= info.max / 2:
        raise ValueError(
            f"scale must be from {info.tiny:.2g} to {info.max / 2:.2g} for weights of {dtype}, "
            f"but that of {name} is {scale:.4g}. Use another scale, or a wider type."
        )


def scale_of(scale: Scale, shape: torch.Size, view: View) -> float:
    """The number that the option means for a weight of this shape."""
    if not isinstance(scale, str):
        return float(scale)
    _, _, out, inner = Grid.of(shape, view)
    return math.sqrt(max(1.0, out / inner))


def unscaled(W: Tensor, scale: float) -> Tensor:
    """``Z = W / scale``, in the type used for computation; W itself at scale 1."""
    return W if scale == 1 else to_working_dtype(W) / scale


def follow(W: Tensor, Z: Tensor, moved: Tensor, scale: float) -> Tensor:
    """W after ``Z = W / scale`` has moved: ``W + scale (moved - Z)``; ``moved`` itself at scale 1.

    Not ``scale * moved``: rounded twice in each step, weights would drift.
    """
    return moved if scale == 1 else torch.add(W, moved - Z, alpha=scale)
