"""What may be asked of ``minimize``: checked before anything runs."""

import math
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from numbers import Integral, Real
from typing import Any

from ortholand.safe_step import RULES as SAFE_STEP_RULES
from ortholand.solve.loop import Limits

LOOP_OPTIONS = ("atol", "maxtime")


def check_method(method: Any, known: Collection[str]) -> None:
    """Raise unless there is such a method."""
    if not isinstance(method, str) or method not in known:
        raise ValueError(f"method must be one of {tuple(known)}, got {method!r}.")


def check_callback(callback: Any) -> None:
    """Raise unless it can be called."""
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function or None, got {callback!r}.")


def limits_from(
    method: str, options: Any, gtol: float | None, maxiter: float | None
) -> tuple[Limits, dict[str, Any]]:
    """When to stop, and the options that are left for the method."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict, as {{'maxtime': 60}}, got {options!r}.")
    rest = dict(options or {})
    atol, maxtime = rest.pop("atol", 0.0), rest.pop("maxtime", math.inf)
    maxiter = (1_000 if method == "newton" else 10_000) if maxiter is None else maxiter
    if gtol is not None and not (is_number(gtol) and 0 <= gtol < 1):
        raise ValueError(
            "gtol must be in [0, 1), as a fraction of the first gradient's norm, or None, got "
            f"{gtol!r}. For an absolute tolerance use options={{'atol': ...}}."
        )
    for name, value in [("options['atol']", atol), ("options['maxtime']", maxtime)]:
        if not is_number(value) or not value >= 0:
            raise ValueError(f"{name} must be a number >= 0, got {value!r}.")
    if not (maxiter == math.inf or (is_whole(maxiter) and maxiter >= 0)):
        raise ValueError(f"maxiter must be a whole number >= 0, or None, got {maxiter!r}.")
    return Limits(gtol, atol, maxiter, maxtime), rest


def method_options(
    method: str, constructor: Callable[..., Any], lam: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """The method's own options, each of which must be one and make sense."""
    _check_lam(method, lam)
    known = [name for name in signature(constructor).parameters if name != "lam"]
    for name, value in options.items():
        if name not in known:
            known += ["retraction"] if method.startswith("retraction") else []
            raise ValueError(
                f"method={method!r} has the options {(*LOOP_OPTIONS, *known)}, got {name!r}."
            )
        rule, holds = RULES[name]
        if not holds(value):
            raise ValueError(f"options[{name!r}] must be {rule}, got {value!r}.")
    if method != "newton" and isinstance(options.get("preconditioner"), str):
        raise ValueError("preconditioner='auto' is for method='newton'; pass a function, or None.")
    return options


def _check_lam(method: str, lam: Any) -> None:
    if lam is None:
        return
    if not is_number(lam) or not 0 <= lam < math.inf:
        raise ValueError(f"lam must be a number >= 0, or None for the method's own, got {lam!r}.")
    if method == "landing" and lam == 0:
        raise ValueError("lam must be > 0 for method='landing': without attraction nothing lands.")


def is_number(value: Any) -> bool:
    """A real number, NumPy's included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """A whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """A whole number >= 1."""
    return is_whole(value) and value >= 1


# What a value must be, in words and as a test.
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "memory": ("a whole number >= 1", is_count),
    "inner_maxiter": ("a whole number >= 1, or None", lambda v: v is None or is_count(v)),
    "preconditioner": (
        "a function (X, V) -> V, or None; for 'newton' also 'auto'",
        lambda v: v is None or callable(v) or (isinstance(v, str) and v == "auto"),
    ),
    "momentum": ("a number in [0, 1)", lambda v: is_number(v) and 0 <= v < 1),
    "step": (
        "a number > 0, a function k -> eta_k, or None",
        lambda v: v is None or callable(v) or (is_number(v) and 0 < v < math.inf),
    ),
    "eps": ("a number in (0, 1)", lambda v: is_number(v) and 0 < v < 1),
    "safe_step": (f"one of {tuple(SAFE_STEP_RULES)}", lambda v: v in tuple(SAFE_STEP_RULES)),
}
