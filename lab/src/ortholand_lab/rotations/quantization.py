"""Numbers rounded like integers of few bits, with straight-through gradients."""

from dataclasses import dataclass

from torch import Tensor

FEWEST_BITS, MOST_BITS = 2, 16


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of a model are quantised: "W4A4" is ``Quantization(4, 4)``.

    Args:
        weight_bits: bits of weights, symmetric, one scale per output; None leaves them unquantised.
        activation_bits: bits of a layer's inputs, asymmetric, one scale and offset per token;
            None likewise.
    """

    weight_bits: int | None = None
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits"):
            bits = getattr(self, name)
            whole = isinstance(bits, int) and not isinstance(bits, bool)
            if bits is not None and not (whole and FEWEST_BITS <= bits <= MOST_BITS):
                raise ValueError(
                    f"{name} must be a whole number from {FEWEST_BITS} to {MOST_BITS}, or None for "
                    f"no quantisation, got {bits!r}."
                )

    def weight(self, W: Tensor) -> Tensor:
        """A weight ``(outputs, inputs)`` as it would be after quantisation."""
        return W if self.weight_bits is None else fake_quantize(W, self.weight_bits)

    def activation(self, x: Tensor) -> Tensor:
        """Activations ``(..., inputs)`` as they would be after quantisation."""
        if self.activation_bits is None:
            return x
        return fake_quantize(x, self.activation_bits, symmetric=False)


def fake_quantize(x: Tensor, bits: int, *, symmetric: bool = True) -> Tensor:
    """Round each row to ``2^bits`` equidistant numbers; derivatives are those of the identity.

    Args:
        x: numbers ``(..., n)``; each row has its own scale.
        bits: number of bits.
        symmetric: from ``-max |x|`` to ``max |x|`` (one level is unused), else from the smallest
            to the largest, zero included.

    >>> import torch
    >>> fake_quantize(torch.tensor([-0.2, 0.6, 3.0]), bits=3)
    tensor([0., 1., 3.])
    """
    rounded = _symmetric(x.detach(), bits) if symmetric else _asymmetric(x.detach(), bits)
    return x + (rounded - x.detach())


def _symmetric(x: Tensor, bits: int) -> Tensor:
    largest = 2 ** (bits - 1) - 1
    scale = _nonzero(x.abs().amax(-1, keepdim=True) / largest)
    return (x / scale).round() * scale


def _asymmetric(x: Tensor, bits: int) -> Tensor:
    low = x.amin(-1, keepdim=True).clamp_max(0)
    high = x.amax(-1, keepdim=True).clamp_min(0)
    scale = _nonzero((high - low) / (2**bits - 1))
    zero = (low / scale).round()
    levels = ((x / scale).round() - zero).clamp(0, 2**bits - 1)
    return (levels + zero) * scale


def _nonzero(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale == 0, 1)
