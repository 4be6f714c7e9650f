"""Loading a state dict so that state comes back as it was saved, hooks included."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ortholand.geometry.derivatives import relative_gradient
from ortholand.geometry.matrices import is_square, real_dtype, working_dtype
from ortholand.geometry.rounding import ROUNDING_STATE
from ortholand.geometry.scales import scale_of, unscaled
from ortholand.geometry.views import as_matrices, as_weight
from ortholand.landing.step import COUNTS
from ortholand.sharding.placement import is_dtensor, restored

Group = Mapping[str, Any]
# Accumulations of generators, which for square weights are skew.
GENERATORS = ("momentum_buffer", "exp_avg")


def load_bit_for_bit(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    *,
    makes_generators: bool,
) -> None:
    """Let torch load, then undo its casts, before the user's post-hooks run.

    The state restored is what the user's pre-hooks have left. ``makes_generators``: whether the
    optimizer accumulates generators, which for square weights are skew.
    """
    final: list[dict[str, Any]] = []

    def remember(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        final.append(_completed(loaded, optimizer.param_groups))
        return final[-1]

    def put_back(_: Any) -> None:
        restore_state(optimizer, final[-1], makes_generators=makes_generators)

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def _completed(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The state, with the groups' own options where it lacks them, as another optimizer's may."""
    if len(state_dict["param_groups"]) != len(groups):
        return state_dict  # torch will say so
    pairs = zip(groups, state_dict["param_groups"], strict=True)
    kept = ("params", "param_names")
    completed = [
        {**{name: value for name, value in group.items() if name not in kept}, **saved}
        for group, saved in pairs
    ]
    return {**state_dict, "param_groups": completed}


@torch.no_grad()
def restore_state(
    optimizer: Optimizer, state_dict: dict[str, Any], *, makes_generators: bool
) -> None:
    """Give every weight copies of its saved state."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, (p, group) in zip(saved, params, strict=True):
        for name, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor) and name in optimizer.state[p]:
                state = _restored(name, value, p, group)
                if name in GENERATORS and group["orthogonal"] and makes_generators:
                    state = _as_generator(state, p, group)
                optimizer.state[p][name] = state


def _restored(name: str, value: Tensor, p: Tensor, group: Group) -> Tensor:
    orthogonal, wanted = group["orthogonal"], working_dtype(p.dtype)
    if name == "step" and not orthogonal:
        # torch counts Adam's steps on the host.
        return restored(value, p, torch.device("cpu"))
    state = restored(value, p, p.device)
    if name in (*COUNTS, *ROUNDING_STATE):
        return state
    is_number = not state.is_floating_point() and not state.is_complex()
    if is_number and not orthogonal:
        return state
    if orthogonal and not state.is_complex() and not (name in GENERATORS and p.is_complex()):
        wanted = real_dtype(wanted)
    return state if state.dtype == wanted else state.to(wanted)


def _as_generator(state: Tensor, p: Tensor, group: Group) -> Tensor:
    """The state itself if it is a generator; else that of the Euclidean gradients it holds.

    torch's SGD accumulates Euclidean gradients. For tall weights so do we; for square ones we
    accumulate relative gradients, which are skew, as the safe step requires.
    """
    if is_dtensor(p) or state.shape != p.shape or p.device.type == "meta":
        return state
    B = as_matrices(state, group["view"])
    if not is_square(B):
        return state
    size = torch.linalg.vector_norm(B, dim=(-2, -1))
    is_skew = torch.linalg.vector_norm(B + B.mH, dim=(-2, -1)) <= 1e-3 * size
    if bool(is_skew.all()):
        return state
    W = as_matrices(p.detach(), group["view"]).to(B.dtype)
    X = unscaled(W, scale_of(group["scale"], p.shape, group["view"]))
    skew = torch.where(is_skew[..., None, None], B, relative_gradient(X, B))
    return as_weight(skew, p, group["view"]).contiguous()
