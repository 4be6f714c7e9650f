"""How the weights of a group step: all that engines need to know about an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.scales import Scale, scale_of
from ortholand.geometry.views import View
from ortholand.landing.description import LandingStep
from ortholand.landing.step import MatrixStep, StateKind

WholeStep = Callable[[Tensor, Tensor, dict[str, Tensor]], MatrixStep]


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
