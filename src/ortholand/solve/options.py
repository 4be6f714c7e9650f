"""Checks of a solver's options, before anything runs. Methods have their own rules."""

import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from numbers import Integral, Real
from time import perf_counter
from typing import Any, NamedTuple

from ortholand.safe_step import RULES as SAFE_STEP_RULES

LOOP_OPTIONS = ("gtol", "maxiter", "maxfev", "atol", "maxtime", "noise", "disp", "clock")
Rule = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a test


class Status(IntEnum):
    """Why a solver stopped."""

    CONVERGED = 0
    MAXITER = 1
    CALLBACK = 2
    STALLED = 3
    NON_FINITE = 4
    MAXTIME = 5
    MAXFEV = 6
    UNBOUNDED = 7


class InterruptedRunError(Exception):
    """A run must stop while a method is at work; with what is to blame, in words."""

    def __init__(self, status: Status, fault: str) -> None:
        super().__init__(fault)
        self.status, self.fault = status, fault


class Limits(NamedTuple):
    """When to stop, in the user's unit."""

    gtol: float | None
    maxiter: float
    atol: float = 0.0
    maxtime: float = math.inf
    noise: float = 0.0
    maxfev: float = math.inf
    display: bool = False
    clock: Callable[[], float] = perf_counter  # times the user's functions


def one_of_two(name: str, first: Any, second: Any, places: tuple[str, str]) -> Any:
    if first is not None and second is not None and first is not second:
        raise ValueError(f"Give {name} once, got {places[0]}={first!r} and {places[1]}={second!r}.")
    return second if first is None else first


def limits_from(
    options: Any, gtol: float | None, maxiter: float | None, usual_maxiter: float, disp: Any = None
) -> tuple[Limits, dict[str, Any]]:
    """When to stop, and the options that are left for the method."""
    if not (options is None or isinstance(options, (dict, Mapping))):  # dict: looked up faster
        raise TypeError(f"options must be a dict, such as {{'maxtime': 60}}, got {options!r}.")
    rest = dict(options or {})
    gtol = one_of_two("gtol", gtol, rest.pop("gtol", None), ("gtol", "options['gtol']"))
    given = rest.pop("maxiter", None)
    maxiter = one_of_two("maxiter", maxiter, given, ("maxiter", "options['maxiter']"))
    maxiter = usual_maxiter if maxiter is None else maxiter
    if gtol is not None and not (is_number(gtol) and 0 <= gtol < 1):
        raise ValueError(
            "gtol must be in [0, 1), as a fraction of the gradient's usual norm, or None, got "
            f"{gtol!r}. For an absolute tolerance use options={{'atol': ...}}."
        )
    found = {name: rest.pop(name) for name in ("atol", "maxtime", "noise") if name in rest}
    for name, value in found.items():
        if not is_number(value) or not value >= 0:
            raise ValueError(f"options[{name!r}] must be a number >= 0, got {value!r}.")
    if not (maxiter == math.inf or (is_whole(maxiter) and maxiter >= 0)):
        raise ValueError(f"maxiter must be a whole number >= 0, or None, got {maxiter!r}.")
    maxfev = rest.pop("maxfev", None)
    if not (maxfev is None or maxfev == math.inf or is_count(maxfev)):
        raise ValueError(f"options['maxfev'] must be a whole number >= 1, got {maxfev!r}.")
    disp = one_of_two("disp", disp, rest.pop("disp", None), ("disp", "options['disp']"))
    if not (disp is None or isinstance(disp, bool) or is_whole(disp)):  # as in SciPy
        raise ValueError(f"disp must be True or False, got {disp!r}.")
    clock = rest.pop("clock", perf_counter)
    if not callable(clock):
        raise TypeError(f"options['clock'] must be a function without arguments, got {clock!r}.")
    found |= dict(maxfev=math.inf if maxfev is None else maxfev, display=bool(disp), clock=clock)
    return Limits(gtol, maxiter, **found), rest


def check_options(method: Any, rules: Mapping[str, Rule], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in rules:
            raise ValueError(
                f"method={method!r} has the options {(*LOOP_OPTIONS, *rules)}, got {name!r}."
            )
        rule, holds = rules[name]
        if not holds(value):
            raise ValueError(f"options[{name!r}] must be {rule}, got {value!r}.")


def check_lam(lam: Any) -> None:
    if lam is not None and not (is_number(lam) and 0 <= lam < math.inf):
        raise ValueError(f"lam must be a number >= 0, or None for the method's own, got {lam!r}.")


def is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Real) and not isinstance(value, bool))


def is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


def is_function_or_none(value: Any) -> bool:
    return value is None or callable(value)


MOMENTUM_RULE: Rule = ("a number in [0, 1)", lambda v: is_number(v) and 0 <= v < 1)
BALL_RULES: dict[str, Rule] = {
    "eps": ("a number in (0, 1)", lambda v: is_number(v) and 0 < v < 1),
    "safe_step": (f"one of {tuple(SAFE_STEP_RULES)}", lambda v: v in tuple(SAFE_STEP_RULES)),
}
