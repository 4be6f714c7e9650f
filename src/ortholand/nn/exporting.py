"""Networks as torch's own layers, to be used without this library."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.fx import symbolic_trace

from ortholand.nn.convolution import OrthogonalConv2d
from ortholand.nn.layers import MaxMin, OrthogonalLinear, UnitRowLinear, sort_pairs

PADDED = {"circular": nn.CircularPad2d, "zeros": nn.ZeroPad2d}


def export(model: nn.Module) -> nn.Module:
    """A copy of a model with torch's own layers in place of those of ``ortholand.nn``.

    An orthogonal convolution becomes an ``nn.Conv2d`` with the composed kernel (behind a layer that
    pads, if more pixels are needed after an image than before it), linear layers become
    ``nn.Linear``, and ``MaxMin`` an ``fx.GraphModule``. Nothing keeps their weights orthogonal.

    >>> from ortholand.nn import OrthogonalConv2d
    >>> export(OrthogonalConv2d(4, 6, 3))
    Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), padding_mode=circular)
    """
    replaced = {id(m): _plain(m) for m in model.modules() if isinstance(m, tuple(PLAIN))}
    # deepcopy takes what is in its memo for the copy of an object.
    return copy.deepcopy(model, dict(replaced))


def _plain(module: nn.Module) -> nn.Module:
    for kind, make in PLAIN.items():
        if type(module).forward is kind.forward:  # a parametrized layer is one of a subclass
            return make(module).train(module.training)
    raise ValueError(f"export() needs layers without a forward of their own, but got {module}.")


def _plain_convolution(conv: OrthogonalConv2d) -> nn.Module:
    before, after = conv.padding
    options: dict[str, Any] = dict(stride=conv.stride, groups=conv.groups, device="meta")
    if before == after:
        options.update(padding=before, padding_mode=conv.padding_mode)
    sizes = (conv.in_channels, conv.out_channels, conv.kernel_size)
    plain = _with_weights(nn.Conv2d(*sizes, **options), conv.kernel(), conv.bias)
    if before == after:
        return plain
    return nn.Sequential(PADDED[conv.padding_mode](conv.padding * 2), plain)


def _plain_linear(layer: OrthogonalLinear) -> nn.Module:
    plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
    return _with_weights(plain, layer.weight.flatten(1), layer.bias)


def _with_weights(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Module:
    layer.weight = nn.Parameter(weight.detach().clone())
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer


def _plain_max_min(layer: MaxMin) -> nn.Module:
    return symbolic_trace(lambda x: sort_pairs(x, layer.dim))


PLAIN: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    OrthogonalConv2d: _plain_convolution,
    OrthogonalLinear: _plain_linear,
    UnitRowLinear: _plain_linear,
    MaxMin: _plain_max_min,
}
