"""How the weights of a group step: all that engines need to know about an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.scales import NUMBERS, Scale, scale_of
from ortholand.geometry.views import View
from ortholand.landing.description import LandingStep
from ortholand.landing.step import MatrixStep, StateKind
from ortholand.optim.weights import name_of, position_of

Group = Mapping[str, Any]
WholeStep = Callable[[Tensor, Tensor, dict[str, Tensor]], MatrixStep]
# Not options, or read where they are used: a tensor lr may change in place.
READ_IN_STEPS = ("params", "param_names", "lr")


@dataclass(frozen=True)
class Plan:
    """How a group steps; remade when the group changes."""

    orthogonal: bool
    view: View
    maximize: bool
    foreach: bool | None
    fused: bool | None
    sharded: str  # "rows", "owners" or "auto"
    state_kinds: Mapping[str, StateKind]
    matrix_step: WholeStep  # the optimizer's own; engines may step by something faster
    landing: LandingStep | None  # a description of matrix_step, if known
    name_of: Callable[[Tensor], str]  # of a weight, for messages
    rescaled: Callable[[float], "Plan"]  # the plan of ``Z = W / scale``, made anew
    terms: Callable[..., Any]  # ``agreement.TermsOf`` of the optimizer: what ranks must agree on
    scale_option: Scale = 1.0  # weights are this multiple of orthonormal matrices
    scale: float = 1.0  # and this times what steps by this plan; 1 before :meth:`at_scale`
    lasts: bool = True  # whether results can be reused in the next step
    why_not_landing: str = ""  # why engines must call matrix_step, where landing is None
    warned: set[str] = field(default_factory=set)  # the optimizer's own: what it has warned of
    notes: dict[str, Any] = field(default_factory=dict)  # what engines have found out about it
    scaled: dict[float, "Plan"] = field(default_factory=dict)  # plans by scale, while they last

    def scale_of(self, shape: torch.Size) -> float:
        """The multiple of orthonormal matrices that weights of this shape are."""
        return scale_of(self.scale_option, shape, self.view)

    def for_shape(self, shape: torch.Size) -> "Plan":
        """The plan for weights of this shape, whose scale may depend on it."""
        return self if self.scale_option == 1 else self.at_scale(self.scale_of(shape))

    def at_scale(self, scale: float) -> "Plan":
        """The plan for steps of ``Z = W / scale``."""
        if scale == 1:
            return self
        plan = self.scaled.get(scale)
        if plan is None:
            plan = self.rescaled(scale)
            if self.lasts:
                self.scaled[scale] = plan
        return plan


def make_plan(optimizer: Any, group: Group, warned: set[str]) -> Plan:
    """How an :class:`ortholand.optim.base.OrthogonalOptimizer` steps a group."""
    landing = optimizer.landing_step(group)
    changed = [name for name in optimizer.hooks if optimizer.is_overridden(name, "landing_step")]
    why_not = f"overridden {', '.join(changed)}" if changed else ""
    if landing is None:
        why_not = f"{type(optimizer).__name__} has no landing step"
    return Plan(
        orthogonal=group["orthogonal"],
        view=group["view"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        fused=group.get("fused", False),
        sharded=group.get("sharded", "rows"),
        state_kinds=optimizer.state_kinds(group) if group["orthogonal"] else {},
        matrix_step=lambda X, G, state: optimizer.matrix_step(X, G, state, group),
        landing=None if changed else landing,
        why_not_landing=why_not,
        name_of=lambda p: name_of(group, position_of(p, group)),
        rescaled=partial(_rescaled, optimizer, group, warned),
        terms=optimizer.terms,
        scale_option=group["scale"],
        lasts=not isinstance(group["lr"], Tensor),
        warned=warned,
    )


def _rescaled(optimizer: Any, group: Group, warned: set[str], scale: float) -> Plan:
    options = optimizer.options_at_scale(group, scale)
    return replace(make_plan(optimizer, options, warned), scale=scale)


def can_last(group: Group) -> bool:
    """Whether no option can change in place, as a tensor, a list or an unknown object can."""
    return all(_is_lasting(value) for name, value in group.items() if name not in READ_IN_STEPS)


def _is_lasting(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_lasting, value))
    return value is None or isinstance(value, (str, *NUMBERS))
