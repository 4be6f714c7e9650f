"""Loading a state dict so that state comes back as it was saved, hooks included.

Everything is checked and copied before anything is loaded: an error leaves the optimizer as it was.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient
from ortholand.geometry.matrices import is_square, real_dtype, working_dtype
from ortholand.geometry.rounding import COMPENSATION, ROUNDING_STATE, SEED
from ortholand.geometry.scales import scale_of, unscaled
from ortholand.geometry.views import as_matrices, as_weight
from ortholand.landing.step import COUNTS, StateKind
from ortholand.optim.origins import ADAM_STATE, NO_OPTIONS, completed_groups
from ortholand.optim.weights import NO_DIMENSIONS, batch_shape, name_of
from ortholand.sharding.placement import is_dtensor, local_part, restored

Group = Mapping[str, Any]
# Accumulations of generators, which for square weights are skew.
GENERATORS = ("momentum_buffer", "exp_avg")
INTEGERS = (*COUNTS, SEED)
KEPT_AS_SAVED = (*COUNTS, *ROUNDING_STATE)
NEVER_NEGATIVE = (*INTEGERS, "exp_avg_sq", "step")


def load_bit_for_bit(
    optimizer: Any, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Let torch load all but the tensors, which it would cast; add these before post-hooks run.

    What is loaded is what the user's pre-hooks have left.
    """
    tensors: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def prepare(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        groups = completed_groups(optimizer, loaded)
        others = dict(loaded["state"])
        for saved, group in zip(groups, optimizer.param_groups, strict=True):
            kinds = optimizer.checked_state_kinds(saved)
            named = {**saved, **{name: group[name] for name in NO_OPTIONS & group.keys()}}
            for i, (key, p) in enumerate(zip(saved["params"], group["params"], strict=True)):
                if key in others:
                    weight = _Weight(p, named, kinds, name_of(named, i), key)
                    state = weight.checked(others[key])
                    tensors[p] = {
                        name: weight.ready(name, value, optimizer.makes_generators)
                        for name, value in state.items()
                        if isinstance(value, Tensor)
                    }
                    others[key] = {k: v for k, v in state.items() if k not in tensors[p]}
        return {**loaded, "state": others, "param_groups": groups}

    def put_in(_: Any) -> None:
        for p, state in tensors.items():
            optimizer.state[p].update(state)

    handles = [
        optimizer.register_load_state_dict_pre_hook(prepare),
        optimizer.register_load_state_dict_post_hook(put_in, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Weight:
    """A weight whose state is loaded."""

    p: Tensor
    group: Group
    kinds: Mapping[str, StateKind]  # of the state of an orthogonal weight
    name: str
    key: Any  # of its entry in the state

    def checked(self, state: Any) -> dict[str, Any]:
        """The state, if it is one that the weight can have."""
        if not isinstance(state, Mapping):
            raise self._error("state", "a dictionary", _described(state))
        state = dict(state)
        if isinstance(state.get("step"), Real) and not isinstance(state["step"], bool):
            # Older versions of torch counted in Python's numbers.
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
        for name, value in state.items():
            is_none = value is None and name == "momentum_buffer"
            if name in self.expected and not is_none:
                self._check(name, value)
        is_adam = "betas" in self.group and not self.group["orthogonal"]
        if is_adam and 0 < len(missing := ADAM_STATE - state.keys()) < len(ADAM_STATE):
            raise self._error(min(missing), "there, as the rest of Adam's state is", "not")
        return state

    @cached_property
    def expected(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shapes and types of the state that the weight may have. Other names are not checked."""
        shape, dtype = self.p.shape, working_dtype(self.p.dtype)
        expected = dict.fromkeys((*GENERATORS, COMPENSATION), (shape, dtype))
        if not self.group["orthogonal"]:
            expected |= {"exp_avg_sq": (shape, dtype), "step": (NO_DIMENSIONS, torch.float32)}
        per_matrix = batch_shape(shape, self.group["view"]), real_dtype(dtype)
        for name, kind in self.kinds.items():
            expected[name] = (shape, dtype) if kind == "matrix" else per_matrix
        return expected | dict.fromkeys(INTEGERS, (NO_DIMENSIONS, torch.int64))

    def _check(self, name: str, value: Any) -> None:
        """Raise if a value cannot be this state of the weight."""
        shape, dtype = self.expected[name]
        is_integer = not dtype.is_floating_point and not dtype.is_complex
        if isinstance(value, Tensor) and value.layout is torch.strided and value.shape == shape:
            found = value.dtype
            if found.is_complex:
                fits = dtype.is_complex
            elif found.is_floating_point:
                fits = not is_integer
            else:
                fits = found is not torch.bool and (is_integer or name == "step")
            if fits and not _is_sound(name, value):
                sound = "finite" if name in GENERATORS else "at least 0"
                raise self._error(name, f"{sound} in all entries", "not")
            if fits:
                return
        numbers = "integers" if is_integer else "floating-point numbers"
        rule = f"a dense tensor of {numbers} of shape {tuple(shape)}"
        raise self._error(name, rule, _described(value))

    def _error(self, name: str, rule: str, found: str) -> ValueError:
        return ValueError(
            f"The {name!r} that is loaded for a weight must be {rule}, but that of {self.name}, of "
            f"shape {tuple(self.p.shape)} and type {self.p.dtype}, is {found}. Load what the "
            "optimizer saved, or let the weight start without state: "
            f"del state_dict['state'][{self.key!r}]."
        )

    def ready(self, name: str, value: Tensor, makes_generators: bool) -> Tensor:
        """A copy of a saved tensor, placed like the weight, in the type in which it is kept."""
        p, orthogonal = self.p, self.group["orthogonal"]
        if name == "step" and not orthogonal:
            # torch counts Adam's steps on the host.
            return restored(value, p, torch.device("cpu"))
        state = restored(value, p, p.device)
        if name not in self.expected or name in KEPT_AS_SAVED:
            return state
        state = state.to(self.expected[name][1])
        if name in GENERATORS and orthogonal and makes_generators:
            return _as_generator(state, p, self.group)
        return state


def _is_sound(name: str, value: Tensor) -> bool:
    """Whether a step can start from these numbers; a second moment may have overflowed."""
    here = local_part(value)
    if here.device.type == "meta":
        return True
    if name in GENERATORS:
        return bool(torch.isfinite(here).all())
    return name not in NEVER_NEGATIVE or here.is_complex() or bool((here >= 0).all())


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{reprlib.repr(value)} of type {type(value).__name__}"
    layout = "" if value.layout is torch.strided else f", {value.layout}"
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{layout}"


def _as_generator(state: Tensor, p: Tensor, group: Group) -> Tensor:
    """The state itself if it is a generator; else that of the Euclidean gradients it holds.

    torch's SGD accumulates Euclidean gradients. For tall weights so do we; for square ones we
    accumulate relative gradients, which are skew, as the safe step requires.
    """
    if is_dtensor(p) or p.device.type == "meta":
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
