"""What the estimators share: checks of parameters, and the warning about non-convergence."""

import math
import warnings
from numbers import Integral, Real
from typing import Any

from scipy.optimize import OptimizeResult
from sklearn.exceptions import ConvergenceWarning


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")


def check_number(name: str, value: Any, *, positive: bool) -> None:
    """Raise unless it is a finite number, positive or at least non-negative."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a number {'>' if positive else '>='} 0, got {value!r}.")


def chosen_components(n_components: Any, most: int, why: str, *, default: int | None = None) -> int:
    """The number of components; for None, as many as possible."""
    if n_components is None:
        return most if default is None else default
    check_count("n_components", n_components)
    if n_components > most:
        raise ValueError(
            f"n_components must be from 1 to {most}, {why}, got {n_components}. None takes as many "
            "as possible."
        )
    return int(n_components)


def warn_unless_converged(
    estimator: Any, result: OptimizeResult, norm: float, tol: float, advice: str
) -> None:
    """Warn if the gradient is larger than requested, and say what to do."""
    if not result.success:
        warnings.warn(
            f"{type(estimator).__name__} did not converge in {result.nit} iterations: the norm of "
            f"the gradient is {norm:.1e}, above tol={tol:.1e}. {advice}",
            ConvergenceWarning,
            stacklevel=3,
        )
