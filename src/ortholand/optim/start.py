"""Whether weights are where their optimizer may start: checked when groups are added or changed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.scales import FAN, check_scale_fits, scale_of
from ortholand.geometry.views import (
    Grid,
    View,
    check_weight,
    described,
    matrices_shape,
    view_of,
)
from ortholand.optim.options import Group
from ortholand.optim.plan import Plan, name_of
from ortholand.optim.weights import NOT_BUFFERS, check_entries_apart
from ortholand.weights import apparent_scale, distances

LOOKS_ORTHONORMAL = 0.1  # a distance not reached by chance, except with few columns


def check_group(group: Group, radius: float, *, spectral: bool) -> bool:
    """Raise unless all weights of a group can be stepped; whether some have no values yet."""
    for i, p in enumerate(group["params"]):
        check_entries_apart(p, partial(name_of, group, i))
    if not group["orthogonal"]:
        return False
    for i, p in enumerate(group["params"]):
        name, view = name_of(group, i), view_of(group)
        check_weight(p, name, view)
        if p.device.type != "meta":
            scale = scale_of(group["scale"], p.shape, view)
            check_start(p, name, view, radius, spectral=spectral, scale=scale)
    return any(p.device.type == "meta" for p in group["params"])


def check_change(
    group: Group, before: Plan, states: Mapping[Tensor, Any], check: Callable[[], None]
) -> None:
    """Raise if an option changed that makes a weight's state meaningless, or the weight unfit."""
    changed = [name for name, value in before.constraint.items() if group[name] != value]
    if not changed or not (group["orthogonal"] or before.orthogonal):
        return
    what = changed[0]
    values = f"was {before.constraint[what]!r} and is {group[what]!r} now"
    for i, p in enumerate(group["params"]) if what != "scale" else ():
        grids = [Grid.of(p.shape, view_of(options)) for options in (before.constraint, group)]
        is_other = what == "orthogonal" or grids[0] != grids[1]
        if is_other and not NOT_BUFFERS.issuperset(states.get(p, ())):
            raise ValueError(
                f"The option {what!r} of a weight with state must not change, but that of "
                f"{name_of(group, i)} {values}. Set it back, or remove the state: "
                "optimizer.state.pop(weight)."
            )
    try:
        check()
    except ValueError as error:
        if what != "scale":
            raise
        raise ValueError(
            f"If the option scale changes, weights must be rescaled, but it {values}, and they "
            f"were not. Set it back, or multiply the weights. {error}"
        ) from None


@torch.no_grad()
def check_start(
    p: Tensor, name: str, view: View, radius: float, *, spectral: bool, scale: float
) -> None:
    """Raise if a matrix of ``weight / scale`` is outside the ball, or not finite.

    It may be slightly outside, by the rounding of the weight's own type over many steps.
    """
    check_scale_fits(scale, p.dtype, name)
    columns = matrices_shape(p.shape, view)[-1]
    limit = 1.0001 * radius + 16 * torch.finfo(p.dtype).eps * columns**0.5
    d = float(distances(p, view, scale=scale).max())
    if spectral and not d <= limit:  # eigenvalues only where the free bound does not decide
        d = float(distances(p, view, spectral=True, scale=scale).max())
    if d <= limit:
        return
    norm = "||X^T X - I||_2" if spectral else "||X^T X - I||_F"
    if scale != 1:
        norm += f" of X = weight / {scale:.4g}"
    raise ValueError(
        f"An orthogonal parameter must start within {radius} of the manifold "
        f"({norm}; eps, where that is an option), but {name} of shape {tuple(p.shape)}, "
        f"view {described(view)!r}, is at distance {d:.4g}. {_scale_advice(p, view, scale)}"
        f"{_advice(p, view, radius, scale)}"
    )


def _scale_advice(p: Tensor, view: View, scale: float) -> str:
    """Advice on a scale that would fit, if there is one."""
    found = apparent_scale(p, view)
    if not torch.finfo(p.dtype).tiny <= found < torch.inf:  # nothing to divide by
        return ""
    if not float(distances(p, view, spectral=True, scale=found).max()) <= LOOKS_ORTHONORMAL:
        return ""
    fan = scale_of(FAN, p.shape, view)
    said = f' or scale="{FAN}"' if abs(found / fan - 1) < 1e-2 and fan != 1 else ""
    return (
        f"It looks like {found:.4g} times orthonormal, not {scale:.4g} times: if that is meant, "
        f"set scale={found:.4g}{said} in its group. Else: "
    )


def _advice(p: Tensor, view: View, radius: float, scale: float) -> str:
    is_named = view in ("matrix", "kernel")
    given = [] if is_named else [f"{'view' if isinstance(view, str) else 'blocks'}={view!r}"]
    given += [f"scale={scale:.4g}"] if scale != 1 else []
    also = f" Set {' and '.join(given)} there, too." if given else ""
    if p.ndim < 3 or not is_named:
        return (
            "Project it first with ortholand.orthogonalize_(...), which takes a tensor, groups or "
            f"a model.{also}"
        )
    other: View = "kernel" if view == "matrix" else "matrix"
    if float(distances(p, other, scale=scale).max()) <= radius:
        return f"In the view {other!r} it is within: set view={other!r} in its group."
    return (
        f"If the view {other!r} is meant, set view={other!r} in its group: 'matrix' means one "
        "matrix (size of the first dimension) x (all others), 'kernel' a stack of matrices, the "
        "last two dimensions. Else project it in the view that is meant, with "
        f"ortholand.orthogonalize_(weight, view=...).{also}"
    )
