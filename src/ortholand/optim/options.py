"""Options of groups that few programs set: what they are called, mean and default to.

A constructor takes them by keyword, as defaults for all groups; a group may set its own.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from ortholand.safe_step import DEFAULT_RULE


class GroupOptions(TypedDict, total=False):
    """Options of every optimizer.

    Attributes:
        orthogonal: whether the weights are orthogonal (True). Others take the step of
            ``torch.optim.SGD``, or AdamW in optimizers with ``betas``.
        view: ``"matrix"`` treats a convolution weight as ``(out, in * kh * kw)``, ``"kernel"``
            each of its kh x kw slices as a matrix.
        scale: weights are this multiple of orthonormal matrices: a positive number (1), or
            ``"fan"`` for ``sqrt(max(1, out / in))`` of each out x in matrix. lr refers to the
            weight, ball and attraction to X = weight / scale. See ``docs/scaled_weights.md``.
        maximize: ascend instead of descend.
        foreach: step parameters of the same matrix shape as one batch (True), one by one (False),
            or whichever is quicker for their size (None).
        rounding: how float16 and bfloat16 weights keep steps too small for their precision:
            ``"nearest"``, ``"stochastic"``, or ``"compensated"`` (None), which keeps the remainder
            in 2 extra bytes per entry. See ``docs/precision.md``.
    """

    orthogonal: bool
    view: str
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


def options_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's options, from its ``locals()``; ``options`` there are of its table."""
    own = {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}
    further = own.pop("options", {})
    optimizer = arguments["self"]
    for name in further:
        if name not in optimizer.further_options:
            raise TypeError(
                f"{type(optimizer).__name__}.__init__() got an unexpected keyword argument {name!r}"
            )
    return {**own, **further}
