"""Loading a state dict so that state comes back as it was saved, or else nothing changes."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.derivatives import relative_gradient
from ortholand.geometry.matrices import is_square, working_dtype
from ortholand.geometry.rounding import COMPENSATION, ROUNDING_STATE, SEED
from ortholand.geometry.scales import scale_of, unscaled
from ortholand.geometry.views import Grid, as_matrices, as_weight, described, view_of
from ortholand.landing.step import COUNTS, StateKind
from ortholand.optim.options import Group
from ortholand.optim.plan import name_of
from ortholand.optim.weights import NO_DIMENSIONS, Layout, state_layout
from ortholand.sharding.placement import is_dtensor, local_part, restored

NO_OPTIONS = {"params", "param_names"}
# Options that say what is accumulated: an optimizer and the source of its state share them.
MOMENTS = ("momentum", "dampening", "betas")
SKEW = ("safe_step", "retraction")  # options of optimizers whose buffers of square weights are skew

# What torch's SGD and Adam have that means the same here; eps is called adam_eps.
SGD = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}
ADAM = {"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"}
ADAM_STATE = {"exp_avg", "exp_avg_sq", "step"}
HOW_TORCH_STEPS = {"foreach", "fused", "capturable", "differentiable"}
OF_SCHEDULERS = ("_lr", "_momentum")  # endings of the names of what they keep in groups

# Accumulations of generators, which for square weights are skew.
GENERATORS = ("momentum_buffer", "exp_avg")
NEVER_NEGATIVE = (*COUNTS, SEED, "exp_avg_sq", "step")


def load_bit_for_bit(
    optimizer: Any,
    load: Callable[[dict[str, Any]], None],
    check_options: Callable[[Group], None],
    state_dict: dict[str, Any],
) -> None:
    """Let torch load all but the tensors, which it would cast; add these before post-hooks run."""
    tensors: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def prepare(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        groups, others = completed_groups(optimizer, loaded), dict(loaded["state"])
        for saved, group in zip(groups, optimizer.param_groups, strict=True):
            check_options(saved)
            kinds = optimizer.state_kinds(saved) if saved["orthogonal"] else {}
            named = {**saved, **{name: group[name] for name in NO_OPTIONS & group.keys()}}
            for i, (key, p) in enumerate(zip(saved["params"], group["params"], strict=True)):
                if saved["orthogonal"] and group["orthogonal"]:
                    _check_grids(saved, group, p, name_of(named, i))
                if key in others:
                    weight = _Weight(p, named, kinds, name_of(named, i), key)
                    state = weight.checked(others[key])
                    found = {k: v for k, v in state.items() if isinstance(v, Tensor)}
                    makes = optimizer.makes_generators
                    tensors[p] = {k: weight.ready(k, v, makes) for k, v in found.items()}
                    others[key] = {k: v for k, v in state.items() if k not in found}
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


# --- groups: whose state it is


def completed_groups(optimizer: Any, loaded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A state's groups, with the optimizer's own options where they lack them; or raise."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    saved_groups, states = loaded.get("param_groups"), loaded.get("state")
    if not isinstance(saved_groups, list) or not isinstance(states, Mapping):
        raise ValueError(
            "A state must be what an optimizer's state_dict() returns, with a dictionary 'state' "
            f"and a list 'param_groups', but got {reprlib.repr(dict(loaded))}. The state_dict() of "
            "a model is loaded into the model."
        )
    completed = []
    for number, saved in enumerate(saved_groups):
        group = groups[min(number, len(groups) - 1)]
        options = saved
        if "orthogonal" not in saved:
            options, strange = _translated(saved, group, optimizer.defaults, states)
        else:  # it may lack options that are newer than itself, but not the decay of its moments
            moments = MOMENTS if optimizer.makes_generators else (*MOMENTS, *SKEW)
            lacks_decay = any(k in group and k not in saved for k in ("momentum", "betas"))
            strange = (set(moments) & saved.keys()) - (set() if lacks_decay else group.keys())
        if strange:
            raise ValueError(
                f"A {kind} can continue only from a state whose options and buffers are its own, "
                f"but group {number} of this state has {', '.join(map(repr, sorted(strange)))} of "
                "another optimizer. Load the model's weights instead, then train them with a new "
                f"{kind}, without this state."
            )
        own = {name: value for name, value in group.items() if name not in NO_OPTIONS}
        if "view" in saved:  # older versions had no blocks
            own["blocks"] = None
        completed.append({**own, **options})
    sizes, saved_sizes = ([len(g["params"]) for g in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"A state must have the optimizer's groups, but this {kind} has groups of {sizes} "
            f"parameters, and the state has groups of {saved_sizes}. Make the groups as they were "
            "when it was saved, or train the weights with a new optimizer, without this state."
        )
    return completed


def _translated(
    saved: Group, group: Group, defaults: Group, states: Mapping[Any, Any]
) -> tuple[dict[str, Any], set[str]]:
    """The options to take from a group of torch's SGD or Adam, and what neither of them has."""
    is_adam, known, meaningful = _is_adam(group), set(), set()
    if is_adam and "betas" in saved:
        known, meaningful = ADAM, ADAM_STATE
    elif "dampening" in saved:
        known, is_sgd = SGD, "momentum" in group and not is_adam
        meaningful = {"momentum_buffer"} if is_sgd else set()
    kept = NO_OPTIONS | (group.keys() - defaults.keys())  # the latter are the user's own
    kept |= {name for name in saved if name.endswith(OF_SCHEDULERS)}
    strange = saved.keys() - known - kept - HOW_TORCH_STEPS
    if not saved.get("amsgrad"):
        strange.discard("amsgrad")
    strange = strange - (SGD & ADAM) or strange  # what all optimizers have shows nothing
    for key in saved["params"]:
        state = states.get(key)
        if isinstance(state, Mapping):
            strange |= {k for k, v in state.items() if v is not None and k not in meaningful}
    here = {("adam_eps" if k == "eps" else k): v for k, v in saved.items() if k in known | kept}
    return {name: value for name, value in here.items() if name in group or name in kept}, strange


def _is_adam(group: Group) -> bool:
    """Whether weights of a group take AdamW's own step."""
    return "betas" in group and not group["orthogonal"]


def _check_grids(saved: Group, group: Group, p: Tensor, name: str) -> None:
    """Raise if other parts of a weight were matrices when its state was saved."""
    there, here = view_of(saved), view_of(group)
    is_grid = any(view not in ("matrix", "kernel") for view in (there, here))
    if is_grid and Grid.of(p.shape, there) != Grid.of(p.shape, here):
        raise ValueError(
            "A state must be of the same blocks as its weight, but that of "
            f"{name}, of shape {tuple(p.shape)}, was saved as {described(there)!r}, and the weight "
            f"is {described(here)!r}. Make the groups as they were when it was saved, or train "
            "the weights with a new optimizer, without this state."
        )


# --- state: whether it fits its weight


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
        state, step = dict(state), state.get("step")
        if isinstance(step, Real) and not isinstance(step, bool):
            # Older versions of torch counted in Python's numbers.
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        for name, value in state.items():
            if name in self.expected and not (value is None and name == "momentum_buffer"):
                self._check(name, value)
        missing = ADAM_STATE - state.keys()
        if _is_adam(self.group) and 0 < len(missing) < len(ADAM_STATE):
            raise self._error(min(missing), "there, as the rest of Adam's state is", "not")
        return state

    @cached_property
    def expected(self) -> Layout:
        """Shapes and types of the state that the weight may have. Other names are not checked."""
        shape, dtype = self.p.shape, working_dtype(self.p.dtype)
        expected: Layout = dict.fromkeys((*GENERATORS, COMPENSATION), (shape, dtype))
        if not self.group["orthogonal"]:
            expected |= {"exp_avg_sq": (shape, dtype), "step": (NO_DIMENSIONS, torch.float32)}
        expected |= state_layout(shape, dtype, self.kinds, view_of(self.group))
        return expected | {SEED: (NO_DIMENSIONS, torch.int64)}

    def _check(self, name: str, value: Any) -> None:
        """Raise if a value cannot be this state of the weight."""
        (shape, dtype), is_generator = self.expected[name], name in GENERATORS
        counts = dtype is torch.int64
        if isinstance(value, Tensor) and value.layout is torch.strided and value.shape == shape:
            found, here = value.dtype, local_part(value)
            of_kind = name == "step" or counts != (found.is_floating_point or found.is_complex)
            if found is not torch.bool and of_kind and torch.can_cast(found, dtype):
                # A step can start from these numbers; a second moment may have overflowed.
                is_free = name not in NEVER_NEGATIVE or here.is_complex()
                if here.is_meta or (is_free and not is_generator):
                    return
                if (torch.isfinite(here) if is_generator else here >= 0).all():
                    return
                sound = "finite" if is_generator else "at least 0"
                raise self._error(name, f"{sound} in all entries", "not")
        numbers = "integers" if counts else "floating-point numbers"
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
            # torch counts Adam's steps on the host, in floating point; older versions in integers.
            value = value if value.is_floating_point() else value.float()
            return restored(value, p, torch.device("cpu"))
        state = restored(value, p, p.device, view_of(self.group) if orthogonal else "matrix")
        if name not in self.expected or name in (*COUNTS, *ROUNDING_STATE):
            return state
        state = state.to(self.expected[name][1])
        if name in GENERATORS and orthogonal and makes_generators:
            return _as_generator(state, p, self.group)
        return state


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{reprlib.repr(value)} of type {type(value).__name__}"
    layout = "" if value.layout is torch.strided else f", {value.layout}"
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{layout}"


def _as_generator(state: Tensor, p: Tensor, group: Group) -> Tensor:
    """The state itself if it is a generator; else that of the Euclidean gradients it holds.

    torch's SGD accumulates Euclidean gradients, we of square weights relative ones, which are skew.
    """
    if is_dtensor(p) or p.device.type == "meta":
        return state
    view = view_of(group)
    B = as_matrices(state, view)
    if not is_square(B):
        return state
    size = torch.linalg.vector_norm(B, dim=(-2, -1), keepdim=True)
    is_skew = torch.linalg.vector_norm(B + B.mH, dim=(-2, -1), keepdim=True) <= 1e-3 * size
    if bool(is_skew.all()):
        return state
    W = as_matrices(p.detach(), view).to(B.dtype)
    X = unscaled(W, scale_of(group["scale"], p.shape, view))
    skew = torch.where(is_skew, B, relative_gradient(X, B))
    return as_weight(skew, p, view).contiguous()
