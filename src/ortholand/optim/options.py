"""Options of groups: what they are called, mean, default to, and must satisfy.

A constructor takes those that few programs set by keyword, as defaults for all groups; a group may
set its own. Errors state the rule, the value and the fix.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypedDict

from torch import Tensor

from ortholand.geometry.rounding import check_rounding
from ortholand.geometry.scales import NUMBERS, check_scale
from ortholand.geometry.views import check_view, plain_blocks
from ortholand.landing import find_attraction
from ortholand.safe_step import DEFAULT_RULE, check_ball, find_rule

Group = Mapping[str, Any]  # or other options by name
CONSTRAINT = ("orthogonal", "view", "blocks", "scale")  # what a weight must satisfy


class GroupOptions(TypedDict, total=False):
    """Options of every optimizer.

    Attributes:
        orthogonal: whether the weights are orthogonal (True). Others take the step of
            ``torch.optim.SGD``, or AdamW in optimizers with ``betas``.
        view: ``"matrix"`` treats a convolution weight as ``(out, in * kh * kw)``, ``"kernel"``
            each of its kh x kw slices as a matrix; ``"rows"`` and ``"columns"`` of that matrix are
            vectors of length 1, and ``"vector"`` is all entries as one.
        blocks: (r, c): the weight is a grid of r x c equal blocks, each an orthogonal matrix of
            its own, as gates and heads are (None).
        scale: weights are this multiple of orthonormal matrices: a positive number (1), or
            ``"fan"`` for ``sqrt(max(1, out / in))`` of each out x in matrix. lr refers to the
            weight, ball and attraction to X = weight / scale. See ``docs/scaled_weights.md``.
        maximize: ascend instead of descend.
        foreach: step matrices of the same width as one batch (True), weights one by one (False),
            or whichever is quicker for their size (None).
        rounding: how float16 and bfloat16 weights keep steps too small for their precision:
            ``"nearest"``, ``"stochastic"``, or ``"compensated"`` (None), which keeps the remainder
            in 2 extra bytes per entry. See ``docs/precision.md``.
    """

    orthogonal: bool
    view: str
    blocks: tuple[int, int] | None
    scale: float | str
    maximize: bool
    foreach: bool | None
    rounding: str | None


class LandingGroupOptions(GroupOptions, total=False):
    """Options of the landing optimizers, and those of all (:class:`GroupOptions`).

    Attributes:
        lam: strength of the coupled attraction (1).
        omega: pull of the decoupled attraction, in [0, 1/2] (1/2).
        eps: radius of the ball ``||X^H X - I||_2 <= eps`` that the safe step keeps, in (0, 1): all
            singular values stay between ``(1 - eps)^(1/2)`` and ``(1 + eps)^(1/2)`` (1/2).
        safe_step: ``"spectral"``, the default; ``"frobenius"``, the paper's ball in the Frobenius
            norm, whose steps shrink with p (see :func:`ortholand.safe_step_size`); or ``None`` for
            no safeguard.
        fused: use compiled code on the CPU, many times faster for small matrices: True, False, or
            None for True unless ``foreach`` is given. Needs a C++ compiler the first time (see
            :mod:`ortholand.native`); without one, and for anything it cannot do, torch's
            operations step. True lets unconstrained groups take torch's fused step.
        sharded: how weights spread over ranks (FSDP2's DTensors) step. ``"rows"``: tall matrices
            where their rows are, after one sum of Gram matrices over the ranks; ``"owners"``: each
            matrix whole on one rank, a different one for each, which moves less data if there are
            many matrices and ranks; ``"auto"``: whichever moves less. See ``docs/at_scale.md``.
        capturable: whether steps may be captured in a CUDA graph, as in ``torch.optim.Adam``:
            unconstrained groups then read nothing on the host either (False). Use it with an lr
            that is a tensor on the device: see ``docs/running.md``.
    """

    lam: float
    omega: float
    eps: float
    safe_step: str | None
    fused: bool | None
    sharded: str
    capturable: bool


class AdamGroupOptions(LandingGroupOptions, total=False):
    """Options of optimizers whose unconstrained groups take Adam's step, and those of landing.

    Attributes:
        adam_eps: Adam's own eps, added to the root of the second moment (1e-8).
        decoupled_weight_decay: AdamW's decay in unconstrained groups (True) or Adam's (False).
    """

    adam_eps: float
    decoupled_weight_decay: bool


COMMON: GroupOptions = {
    "orthogonal": True,
    "view": "matrix",
    "blocks": None,
    "scale": 1.0,
    "maximize": False,
    "foreach": None,
    "rounding": None,
}
LANDING: LandingGroupOptions = {
    **COMMON,
    "lam": 1.0,
    "omega": 0.5,
    "eps": 0.5,
    "safe_step": DEFAULT_RULE,
    "fused": None,
    "sharded": "rows",
    "capturable": False,
}
ADAM: AdamGroupOptions = {**LANDING, "adam_eps": 1e-8, "decoupled_weight_decay": True}


def options_of(arguments: Group) -> dict[str, Any]:
    """A constructor's options, from its ``locals()``; ``options`` there are of its table."""
    own = {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}
    further = own.pop("options", {})
    optimizer = arguments["self"]
    for name in further.keys() - optimizer.further_options.keys():
        raise TypeError(
            f"{type(optimizer).__name__}.__init__() got an unexpected keyword argument {name!r}"
        )
    return {**own, **further}


# --- numbers


def scalar_lr(lr: float | Tensor) -> float | Tensor:
    """The step size; a tensor is returned with no dimensions."""
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.ndim else lr


def descends(lr: float | Tensor) -> bool | Tensor:
    """Whether a step size is valid: a tensor's value is not known before it is used."""
    return lr >= 0 if isinstance(lr, Tensor) else bool(lr >= 0)  # false for NaN


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


# --- checks of one option


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


def check_at_least_zero(name: str, value: float | Tensor) -> None:
    """Check that a value is a finite number, zero or more."""
    check_finite(name, value)
    if value < 0:
        raise ValueError(
            f"{name} must be at least 0, got {float(value)}."
            + (" To ascend, use maximize=True." if name == "lr" else "")
        )


def check_lr(name: str, lr: float | Tensor) -> None:
    """Check that a step size is a number at least 0, or a one-element tensor."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"A tensor {name} must have one element, got shape {tuple(lr.shape)}.")
    if not (isinstance(lr, Tensor) and lr.is_meta):
        check_at_least_zero(name, scalar_lr(lr))


def check_bool(name: str, value: object) -> None:
    """Check that a value is True or False, not merely truthy."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_omega(name: str, omega: float | Tensor) -> None:
    """Check the pull of the decoupled attraction."""
    check_finite(name, omega)
    if not 0 <= omega <= 0.5:
        raise ValueError(
            f"{name} must be in [0, 1/2], got {omega}: 1/2 is a full Newton-Schulz step, and more "
            "overshoots the manifold."
        )


def check_sharded(name: str, value: object) -> None:
    """Check that there is such a way to step sharded weights."""
    if value not in SHARDED:
        raise ValueError(f"{name} must be one of {SHARDED}, got {value!r}.")


SHARDED = ("rows", "owners", "auto")
CHECKS: dict[str, Callable[[str, Any], object]] = {
    "lr": check_lr,
    "lam": lambda name, lam: check_finite(name, lam) or check_ball(lam, eps=0.5),
    "eps": lambda name, eps: check_finite(name, eps) or check_ball(0.0, eps),
    "omega": check_omega,
    **dict.fromkeys(("momentum", "dampening"), check_finite),
    "sharded": check_sharded,
    "view": lambda _, value: check_view(value),
    "blocks": lambda _, value: plain_blocks(value),
    "rounding": lambda _, value: check_rounding(value),
    "scale": lambda _, value: check_scale(value),
    "attraction": lambda _, value: find_attraction(value),
    "safe_step": lambda _, value: value is None or find_rule(value),
    "betas": lambda _, value: plain_betas(value),
    **dict.fromkeys(("weight_decay", "adam_eps"), check_at_least_zero),
    **dict.fromkeys(("orthogonal", "maximize", "nesterov", "capturable"), check_bool),
    "decoupled_weight_decay": check_bool,
    **dict.fromkeys(("foreach", "fused"), lambda k, value: value is None or check_bool(k, value)),
}


def check_each(options: Group, names: Iterable[str]) -> None:
    """Check the options of these names, each for itself."""
    for name in names:
        if name in CHECKS:
            CHECKS[name](name, options[name])
