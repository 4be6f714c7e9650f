"""What an optimizer's options must satisfy. Errors state the rule, the value and the fix."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from ortholand.geometry.rounding import check_rounding
from ortholand.geometry.scales import NUMBERS, check_scale
from ortholand.geometry.views import check_view
from ortholand.landing import find_attraction
from ortholand.safe_step import check_ball, find_rule

SHARDED = ("rows", "owners", "auto")


def check_common_options(options: Mapping[str, Any]) -> None:
    """Check the options that every optimizer here has."""
    check_lr(options["lr"])
    check_view(options["view"])
    check_rounding(options.get("rounding"))
    check_scale(options["scale"])
    for name in ("orthogonal", "maximize"):
        check_bool(name, options[name])
    for name in ("foreach", "fused"):
        if options.get(name) is not None:
            check_bool(name, options[name])


def check_sgd_options(options: Mapping[str, Any]) -> None:
    """Check the options of SGD with momentum, by torch's own conditions."""
    for name in ("momentum", "weight_decay"):
        check_at_least_zero(name, options[name])
    check_finite("dampening", options["dampening"])
    check_bool("nesterov", options["nesterov"])
    if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
        raise ValueError(
            "nesterov=True needs momentum > 0 and dampening = 0, got "
            f"momentum={options['momentum']} and dampening={options['dampening']}."
        )


def check_adam_options(options: Mapping[str, Any]) -> None:
    """Check the options of Adam."""
    plain_betas(options["betas"])
    check_at_least_zero("weight_decay", options["weight_decay"])
    check_at_least_zero("adam_eps", options["adam_eps"])
    check_bool("decoupled_weight_decay", options["decoupled_weight_decay"])


def check_landing_options(options: Mapping[str, Any]) -> None:
    """Raise unless ball, rule and attraction are valid."""
    for name in ("lam", "eps", "omega"):
        check_finite(name, options[name])
    check_ball(options["lam"], options["eps"])
    if options["safe_step"] is not None:
        find_rule(options["safe_step"])
    find_attraction(options["attraction"])
    if options["sharded"] not in SHARDED:
        raise ValueError(f"sharded must be one of {SHARDED}, got {options['sharded']!r}.")
    check_bool("capturable", options["capturable"])
    if not 0 <= options["omega"] <= 0.5:
        raise ValueError(
            f"omega must be in [0, 1/2], got {options['omega']}: 1/2 is a full Newton-Schulz step, "
            "and more overshoots the manifold."
        )


def plain_betas(betas: Sequence[float | Tensor]) -> tuple[float | Tensor, ...]:
    """Adam's betas as a tuple, from any sequence; raise if they are not two numbers in [0, 1).

    A configuration library's list type could not be loaded with ``weights_only=True``.
    """
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {betas!r}.")
    for beta in betas:
        check_finite("betas", beta)
        if not 0 <= beta < 1:
            raise ValueError(f"betas must be in [0, 1), got {tuple(betas)}.")
    return tuple(beta if isinstance(beta, Tensor) else float(beta) for beta in betas)


def check_lr(lr: float | Tensor) -> None:
    """Check that a step size is a number at least 0, or a one-element tensor."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"A tensor lr must have one element, got shape {tuple(lr.shape)}.")
        if lr.device.type == "meta":
            return
    check_at_least_zero("lr", scalar_lr(lr))


def scalar_lr(lr: float | Tensor) -> float | Tensor:
    """The step size; a tensor is returned with no dimensions."""
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.ndim else lr


def descends(lr: float | Tensor) -> bool | Tensor:
    """Whether a step size is valid: a tensor's value is not known before it is used."""
    return lr >= 0 if isinstance(lr, Tensor) else bool(lr >= 0)  # false for NaN


def check_at_least_zero(name: str, value: float | Tensor) -> None:
    """Check that a value is a finite number, zero or more."""
    check_finite(name, value)
    if value < 0:
        raise ValueError(
            f"{name} must be at least 0, got {float(value)}."
            + (" To ascend, use maximize=True." if name == "lr" else "")
        )


def check_finite(name: str, value: float | Tensor) -> None:
    """Check that a value is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, Real | Tensor):  # NumPy's numbers too
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not isinstance(value, (*NUMBERS, Tensor)):
        raise TypeError(f"{name} must be a number that torch takes, got {value!r}: use float(...).")
    if isinstance(value, Tensor) and (value.ndim or value.is_complex()):
        raise TypeError(
            f"{name} must be a number, got a tensor of shape {tuple(value.shape)}, {value.dtype}: "
            "use float(...) of one entry."
        )
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {float(value)}.")


def check_bool(name: str, value: object) -> None:
    """Check that a value is True or False, not merely truthy."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
