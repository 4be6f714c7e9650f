"""Averages of weights, such as EMA and SWA, whose orthogonal weights are orthogonal too."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, swa_utils

from ortholand.geometry.matrices import has_float64, wide_dtype
from ortholand.geometry.scales import Scale
from ortholand.geometry.views import Blocks, ViewName
from ortholand.optim.options import CONSTRAINT
from ortholand.parameters import Selectors, orthogonalize_, param_groups


class AveragedModel(swa_utils.AveragedModel):
    """``torch.optim.swa_utils.AveragedModel`` that keeps orthogonal weights orthogonal.

    An average of orthogonal matrices is not orthogonal. Here each update first averages as torch
    does, then replaces the averages of orthogonal weights by the nearest orthogonal ones. All other
    weights, buffers and the ``state_dict`` are those of torch's class.

    Args:
        model: the model to average.
        device: where the average is kept; by default, where the model is.
        avg_fn: as in torch.
        multi_avg_fn: as in torch.
        use_buffers: whether buffers are averaged (True) or copied.
        decay: for an exponential average: ``decay * average + (1 - decay) * weight``. It can be
            pickled, unlike torch's functions. Without it and the functions, all updates
            count equally.
        orthogonal: which weights are orthogonal, as in :func:`ortholand.param_groups`; an optimizer
            or its groups, which know view, blocks and scale; or None for the marks of the model.
        view: as in :func:`ortholand.param_groups`.
        blocks: as in :func:`ortholand.param_groups`.
        scale: as in :func:`ortholand.param_groups`.

    >>> import ortholand as ol
    >>> from ortholand.averages import AveragedModel
    >>> from torch import nn
    >>> model = nn.Sequential(ol.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2))
    >>> average = AveragedModel(model, decay=0.99)
    >>> average.update_parameters(model)  # after each step of the optimizer
    >>> ol.orthogonality_error(average.module) < 1e-5
    True
    """

    def __init__(
        self,
        model: nn.Module,
        device: Any = None,
        avg_fn: Any = None,
        multi_avg_fn: Any = None,
        use_buffers: bool = False,
        *,
        decay: float | None = None,
        orthogonal: Selectors | Optimizer | list[dict[str, Any]] | None = None,
        view: ViewName | None = None,
        blocks: Blocks | None = None,
        scale: Scale | None = None,
    ) -> None:
        if decay is not None:
            if avg_fn is not None or multi_avg_fn is not None:
                raise ValueError(
                    "One rule makes the average, but got decay and a function. Leave one out."
                )
            if not 0 <= decay < 1:
                raise ValueError(f"decay must be in [0, 1), got {decay!r}. Example: decay=0.999.")
            multi_avg_fn = partial(_decay, decay)
        self._landed = _named_groups(model, orthogonal, view=view, blocks=blocks, scale=scale)
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Average in the weights of the model, and land."""
        super().update_parameters(model)
        for names, constraint in self._landed:
            averages = [self.module.get_parameter(name) for name in names]
            # A singular value decomposition in float32 rounds by more than storage does.
            exact = [X.to(wide_dtype(X)) if has_float64(X) else X for X in averages]
            named = list(zip(names, exact, strict=True))
            orthogonalize_([{**constraint, "params": named}])
            for average, X in zip(averages, exact, strict=True):
                average.copy_(X)


def _named_groups(
    model: nn.Module, orthogonal: Any, **given: Any
) -> list[tuple[list[str], dict[str, Any]]]:
    """The names of orthogonal weights in a model, with their constraints."""
    groups = orthogonal.param_groups if isinstance(orthogonal, Optimizer) else orthogonal
    if not (isinstance(groups, list) and groups and isinstance(groups[0], Mapping)):
        groups = param_groups(model, orthogonal, **given)
    elif any(value is not None for value in given.values()):
        raise ValueError(f"Groups state their own constraints, but got {given}. Leave them out.")
    names = {p: name for name, p in model.named_parameters()}
    found = []
    for group in groups:
        if not group.get("orthogonal", True):
            continue
        members = [m[1] if isinstance(m, tuple) else m for m in group["params"]]
        if missing := [p for p in members if p not in names]:
            raise ValueError(
                "An average has the orthogonal weights of its model, but a weight of shape "
                f"{tuple(missing[0].shape)} in the groups is none of this "
                f"{type(model).__name__}'s. Average the model that the optimizer trains."
            )
        constraint = {key: group[key] for key in CONSTRAINT if key in group}
        found.append(([names[p] for p in members], constraint))
    return found


def _decay(decay: float, averages: list[Tensor], weights: list[Tensor], n: Tensor | int) -> None:
    """Torch's own exponential average, by a function that can be pickled."""
    swa_utils.get_ema_multi_avg_fn(decay)(averages, weights, n)
