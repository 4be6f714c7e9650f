"""Bounds of a network's Lipschitz constant, and what they certify."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ortholand.nn.kernels import ROUNDED
from ortholand.nn.layers import MaxMin, UnitRowLinear

Bound = Callable[[Any], float | None]


def lipschitz_bound(model: nn.Module, *, margins: bool = False) -> float:
    """A proved bound L: ``|f(x) - f(y)| <= L |x - y|`` in Euclidean norm, for the stored weights.

    It is the product of the layers' bounds. Those of orthogonal layers contain the measured errors
    of their factors, so it is above 1 by about as much, and holds at any time in training. What the
    forward pass itself rounds (1e-6 of the scores in float32) is not part of it.

    Args:
        model: an ``nn.Sequential``, also nested, of layers with a known bound. A module of your own
            needs a method ``lipschitz_bound()`` that returns it, such as ``1 + L`` for x + f(x).
        margins: bound differences of two scores, divided by the square root of 2, instead of all
            scores. That is what :func:`certified_accuracy` needs, and may be smaller if the last
            layer is linear.

    >>> from ortholand.nn import MaxMin, OrthogonalLinear
    >>> model = nn.Sequential(OrthogonalLinear(6, 8), MaxMin(), OrthogonalLinear(8, 3))
    >>> 1 <= lipschitz_bound(model) < 1 + 1e-5
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    return _bound(model, "", margins) * ROUNDED


def certified_radii(logits: Tensor, bound: float) -> Tensor:
    """For each row of scores, the radius within which no perturbation changes the prediction.

    The bound is what :func:`lipschitz_bound` returned, with or without ``margins``.

    >>> certified_radii(torch.tensor([[3.0, 1.0, 0.0]]), bound=1.0)
    tensor([1.4142], dtype=torch.float64)
    """
    # Scores in half precision have errors that are not part of the bound.
    precise = logits.dtype in (torch.float32, torch.float64)
    if not precise or logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"logits must be float32 or float64 scores (samples, classes) of at least 2 classes, "
            f"got {logits.dtype} of shape {tuple(logits.shape)}. Use a last layer with one score "
            "for each class, without torch.autocast."
        )
    if not 0 < bound < math.inf:
        raise ValueError(
            f"bound must be positive and finite, got {bound!r}. Use lipschitz_bound(model)."
        )
    best, second = logits.detach().double().topk(2, dim=1).values.unbind(1)
    return (best - second) / (math.sqrt(2) * bound)


def certified_accuracy(logits: Tensor, labels: Tensor, radius: float, bound: float) -> float:
    """The share of samples that are predicted correctly, whatever a perturbation within the radius.

    Args:
        logits: scores ``(samples, classes)``.
        labels: the true classes ``(samples,)``, integers.
        radius: the Euclidean norm of perturbations, in units of the model's input.
        bound: what :func:`lipschitz_bound` returned.

    >>> logits = torch.tensor([[3.0, 1.0, 0.0], [0.2, 0.0, 0.1]])
    >>> certified_accuracy(logits, torch.tensor([0, 0]), radius=0.5, bound=1.0)
    0.5
    """
    radii = certified_radii(logits, bound)
    if labels.shape != logits.shape[:1] or labels.is_floating_point() or not len(labels):
        raise ValueError(
            f"labels must be one integer for each of the {len(logits)} samples (at least one), got "
            f"{labels.dtype} of shape {tuple(labels.shape)}."
        )
    if not 0 <= radius < math.inf:
        raise ValueError(f"radius must be finite and at least 0, got {radius!r}.")
    correct = logits.argmax(1) == labels
    return float((correct & (radii > radius)).double().mean())


def _bound(module: nn.Module, name: str, margins: bool) -> float:
    kind = _defining(module, "forward")
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:
        path, last = f"{name}." if name else "", len(module) - 1
        keys = enumerate(module._modules)  # a shared layer counts as often as it is used
        return math.prod(_bound(module[i], path + k, margins and i == last) for i, k in keys)
    if not all(p.isfinite().all() for p in module.parameters()):
        raise ValueError(f"{name or 'model'} must have finite parameters. Restore earlier ones.")
    if isinstance(module, nn.Linear) and kind in (nn.Linear, UnitRowLinear):
        return _of_rows(module.weight.flatten(1), margins)
    # A subclass that computes something else has no known bound, unless it defines one too.
    owner = _defining(module, "lipschitz_bound")
    rules = [rule for known, rule in RULES.items() if kind and kind.forward is known.forward]
    if kind and owner and issubclass(owner, kind):
        rules = [lambda layer: layer.lipschitz_bound()]
    bound = rules[0](module) if rules else None
    if bound is None or not 0 <= bound < math.inf:
        raise _refusal(module, name, bound)
    return float(bound)


def _defining(module: nn.Module, method: str) -> type[nn.Module] | None:
    """The class that defines a method; None if there is none, or if an object changes its own."""
    changes = (method, "_forward_hooks", "_forward_pre_hooks")
    if any(vars(module).get(name) for name in changes):
        return None
    return next((kind for kind in type(module).__mro__ if method in vars(kind)), None)


def _of_rows(weight: Tensor, margins: bool) -> float:
    rows = weight.detach().cpu().double()
    if margins and len(rows) > 1:
        return float(torch.pdist(rows).max()) / math.sqrt(2)
    return float(torch.linalg.matrix_norm(rows, 2))


def _of_windows(pool: nn.MaxPool2d | nn.AvgPool2d) -> float | None:
    """1 for windows that share no pixel; an average divides each by the root of its size."""
    size, stride = _pair(pool.kernel_size), _pair(pool.stride)
    if any(n > step for n, step in zip(size, stride, strict=True)):
        return None
    if isinstance(pool, nn.MaxPool2d):
        return 1.0 if _pair(pool.dilation) == (1, 1) else None
    if pool.divisor_override is not None:
        return None
    return 1.0 if pool.ceil_mode or any(_pair(pool.padding)) else 1 / math.sqrt(math.prod(size))


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


ONE = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ZeroPad2d),
    *(nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, MaxMin),
)
RULES: dict[type[nn.Module], Bound] = {
    **dict.fromkeys(ONE, lambda _: 1.0),
    nn.LeakyReLU: lambda layer: max(1.0, abs(layer.negative_slope)),
    nn.ELU: lambda layer: max(1.0, abs(layer.alpha)),
    nn.MaxPool2d: _of_windows,
    nn.AvgPool2d: _of_windows,
    nn.Dropout: lambda layer: None if layer.training and layer.p else 1.0,
}
INSTEAD = (  # the first that fits
    ("Norm", "Leave it out: orthogonal layers keep norms by themselves."),
    ("Attention|Transformer", "Attention has no bound. Use OrthogonalConv2d or OrthogonalLinear."),
    ("Conv", "Use ortholand.nn.OrthogonalConv2d, and bound a model before export()."),
    ("Dropout", "Call model.eval(), or leave it out."),
    ("Pool", "Use nn.AvgPool2d or nn.MaxPool2d with windows that share no pixel."),
    ("GELU|SiLU|Mish|PReLU|GLU|Hardswish|Softmax", "Use ortholand.nn.MaxMin or nn.ReLU."),
)
OTHERWISE = "Write it as nn.Sequential, or give it a method lipschitz_bound() that returns a bound."


def _refusal(module: nn.Module, name: str, bound: float | None) -> ValueError:
    kind = type(module).__name__
    advice = next((text for kinds, text in INSTEAD if re.search(kinds, kind)), OTHERWISE)
    if _defining(module, "forward") is None:
        advice = "Remove its hooks, or the forward that replaces that of its class."
    return ValueError(
        f"Every layer needs a proved Lipschitz bound, but {name or 'the model'!r}, {kind}, has "
        f"{'none' if bound is None else bound} here. {advice}"
    )
