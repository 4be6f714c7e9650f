"""Which states an optimizer can continue from: its own, and those that mean the same to it."""

import reprlib
from collections.abc import Mapping
from typing import Any

Group = Mapping[str, Any]

NO_OPTIONS = {"params", "param_names"}
# Options that tell what is accumulated: an optimizer and the source of its state share them.
MOMENTS = ("momentum", "dampening", "betas")
SKEW = ("safe_step", "retraction")  # options of optimizers whose buffers of square weights are skew

# What torch's SGD and Adam have that means the same here; eps is called adam_eps.
SGD = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}
ADAM = {"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"}
ADAM_STATE = {"exp_avg", "exp_avg_sq", "step"}
HOW_TORCH_STEPS = {"foreach", "fused", "capturable", "differentiable"}
OF_SCHEDULERS = ("_lr", "_momentum")  # endings of the names of what they keep in groups


def completed_groups(optimizer: Any, loaded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A state's groups, with the optimizer's own options where they lack them.

    Raises:
        ValueError: if it is no state, the state of another optimizer, or one of other groups.
    """
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
        if "orthogonal" in saved:
            options, strange = saved, _strange_moments(saved, group, optimizer.makes_generators)
        else:
            options, strange = _translated(saved, group, optimizer.defaults, states)
        if strange:
            raise ValueError(
                f"A {kind} can continue only from a state whose options and buffers are its own, "
                f"but group {number} of this state has {', '.join(map(repr, sorted(strange)))} of "
                "another optimizer. Load the model's weights instead, then train them with a new "
                f"{kind}, without this state."
            )
        own = {name: value for name, value in group.items() if name not in NO_OPTIONS}
        completed.append({**own, **options})
    sizes, saved_sizes = ([len(g["params"]) for g in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"A state must have the optimizer's groups, but this {kind} has groups of {sizes} "
            f"parameters, and the state has groups of {saved_sizes}. Make the groups as they were "
            "when it was saved, or train the weights with a new optimizer, without this state."
        )
    return completed


def _strange_moments(saved: Group, group: Group, makes_generators: bool) -> set[str]:
    """The options that tell that a state of this library accumulates something else.

    A state may lack options that are newer than itself, but not the decay of its moments.
    """
    telling = MOMENTS if makes_generators else (*MOMENTS, *SKEW)
    if any(name in group and name not in saved for name in ("momentum", "betas")):
        return {name for name in telling if name in saved}
    return {name for name in telling if name in saved and name not in group}


def _translated(
    saved: Group, group: Group, defaults: Group, states: Mapping[Any, Any]
) -> tuple[dict[str, Any], set[str]]:
    """The options to take from a group of torch's SGD or Adam, and what neither of them has."""
    known, meaningful = _of_torch(saved, group)
    kept = NO_OPTIONS | (group.keys() - defaults.keys())  # the latter are the user's own
    kept |= {name for name in saved if name.endswith(OF_SCHEDULERS)}
    strange = saved.keys() - known - kept - HOW_TORCH_STEPS
    if not saved.get("amsgrad"):
        strange.discard("amsgrad")
    strange = strange - (SGD & ADAM) or strange  # what all optimizers have tells nothing
    for key in saved["params"]:
        state = states.get(key)
        if isinstance(state, Mapping):
            strange |= {k for k, v in state.items() if v is not None and k not in meaningful}
    here = {("adam_eps" if k == "eps" else k): v for k, v in saved.items() if k in known | kept}
    return {name: value for name, value in here.items() if name in group or name in kept}, strange


def _of_torch(saved: Group, group: Group) -> tuple[set[str], set[str]]:
    """Options and state of the optimizer of torch that a group can continue; empty if of none."""
    is_adam = "betas" in group and not group["orthogonal"]
    if is_adam and "betas" in saved:
        return ADAM, ADAM_STATE
    if "dampening" in saved:
        return SGD, {"momentum_buffer"} if "momentum" in group and not is_adam else set()
    return set(), set()
