"""Whether weights are where their optimizer may start: checked when groups are added or changed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.rounding import ROUNDING_STATE
from ortholand.geometry.scales import FAN, check_scale_fits, scale_of
from ortholand.geometry.views import View, check_weight, matrices_shape
from ortholand.landing.step import COUNTS
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_entries_apart, name_of
from ortholand.weights import apparent_scale, distances

Group = Mapping[str, Any]
LOOKS_ORTHONORMAL = 0.1  # a distance not reached by chance, except with few columns
OF_NO_VIEW = (*COUNTS, *ROUNDING_STATE)  # state that does not depend on a weight's view


def check_group(group: Group, radius: float, *, spectral: bool) -> bool:
    """Raise unless all weights of a group can be stepped; whether some have no values yet."""
    for i, p in enumerate(group["params"]):
        check_entries_apart(p, partial(name_of, group, i))
    if not group["orthogonal"]:
        return False
    awaits_values, view = False, group["view"]
    for i, p in enumerate(group["params"]):
        name = name_of(group, i)
        check_weight(p, name, view)
        if p.device.type == "meta":
            awaits_values = True
        else:
            scale = scale_of(group["scale"], p.shape, view)
            check_start(p, name, view, radius, spectral=spectral, scale=scale)
    return awaits_values


def check_change(
    group: Group, before: Plan, states: Mapping[Tensor, Any], check: Callable[[], None]
) -> None:
    """Raise if an option changed that makes a weight's state meaningless, or the weight unfit."""
    if not group["orthogonal"] and not before.orthogonal:
        return
    old = {"orthogonal": before.orthogonal, "view": before.view, "scale": before.scale_option}
    changed = [name for name in old if group[name] != old[name]]
    if not changed:
        return
    what = changed[0]
    for i, p in enumerate(group["params"]) if what != "scale" else ():
        has_state = any(name not in OF_NO_VIEW for name in states.get(p, {}))
        if has_state and (p.ndim > 2 or what == "orthogonal"):
            raise ValueError(
                f"The option {what!r} of a weight with state must not change, but that of "
                f"{name_of(group, i)} was {old[what]!r} and is {group[what]!r} now. Set it back, "
                "or remove the state: optimizer.state.pop(weight)."
            )
    try:
        check()
    except ValueError as error:
        if what != "scale":
            raise
        raise ValueError(
            f"When the option scale changes, the weights must follow, but it was "
            f"{old[what]!r} and is {group[what]!r} now, and they have not. "
            f"Set it back, or multiply the weights. {error}"
        ) from None


@torch.no_grad()
def check_start(
    p: Tensor, name: str, view: View, radius: float, *, spectral: bool, scale: float = 1.0
) -> None:
    """Raise if a matrix of the weight is outside the ball, or not finite.

    It may be slightly outside, by the rounding of the weight's own type over many steps.
    ``scale``: the matrix that must be in the ball is the weight divided by this.
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
        f"view {view!r}, is at distance {d:.4g}. {_scale_advice(p, view, scale)}"
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
    said = f"scale={found:.4g}"
    if abs(found / fan - 1) < 1e-2 and fan != 1:
        said += f' or scale="{FAN}"'
    return (
        f"It looks like {found:.4g} times orthonormal, not {scale:.4g} times: if that is meant, "
        f"say {said} in its group. Else: "
    )


def _advice(p: Tensor, view: View, radius: float, scale: float) -> str:
    also = f" Say scale={scale:.4g} there, too." if scale != 1 else ""
    if p.ndim < 3:
        return (
            "Project it first with ortholand.orthogonalize_(...), which takes a tensor, groups or "
            f"a model.{also}"
        )
    other: View = "kernel" if view == "matrix" else "matrix"
    if float(distances(p, other, scale=scale).max()) <= radius:
        return f"In the view {other!r} it is within: say view={other!r} in its group."
    return (
        f"If the view {other!r} is meant, say view={other!r} in its group: 'matrix' sees one "
        "matrix (size of the first dimension) x (all others), 'kernel' a stack of matrices, the "
        "last two dimensions. Else project it in the view that is meant, with "
        f"ortholand.orthogonalize_(weight, view=...).{also}"
    )
