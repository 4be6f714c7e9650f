"""How the weights of a group step: all that engines need to know about an optimizer."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.scales import NUMBERS, Scale, scale_of
from ortholand.geometry.views import View, view_of
from ortholand.landing.description import LandingStep
from ortholand.landing.step import MatrixStep, StateKind
from ortholand.optim.options import CONSTRAINT, Group

# These are no options, or are read where they are used (a tensor lr may change in place).
READ_IN_STEPS = ("params", "param_names", "lr")


class Plan:
    """How a group of an :class:`ortholand.optim.base.OrthogonalOptimizer` steps."""

    def __init__(self, optimizer: Any, group: Group, warned: set[str], scale: float = 1.0) -> None:
        self._optimizer, self._group = optimizer, group
        self.constraint = {name: group[name] for name in CONSTRAINT}
        self.orthogonal: bool = group["orthogonal"]
        self.view: View = view_of(group)
        self.maximize: bool = group["maximize"]
        self.foreach: bool | None = group["foreach"]
        self.fused: bool | None = group.get("fused", False)
        self.sharded: str = group.get("sharded", "rows")  # or "owners", "auto"
        self.scale_option: Scale = group["scale"]  # weights are this times orthonormal matrices,
        self.scale = scale  # and this times what steps by this plan; 1 before :meth:`at_scale`
        self.state_kinds: Mapping[str, StateKind] = (
            optimizer.state_kinds(group) if self.orthogonal else {}
        )
        landing, stale = optimizer.landing_step(group), optimizer.overridden_parts()
        self.landing: LandingStep | None = None if stale else landing  # matrix_step, described
        # Why engines must call matrix_step, where landing is None.
        self.why_not_landing = f"overridden {', '.join(stale)}" if stale else ""
        if landing is None:
            self.why_not_landing = f"{type(optimizer).__name__} has no landing step"
        self.terms = optimizer.terms  # ``agreement.TermsOf``: what ranks must agree on
        self.warned = warned  # what the optimizer has warned of
        self.notes: dict[str, Any] = {}  # what engines have found out about the plan
        self.layouts: dict[tuple[torch.Size, torch.dtype], Any] = {}  # of state, by its weight's
        self._scaled: dict[float, Plan] = {}
        self._seen: dict[View, Plan] = {}

    def matrix_step(self, X: Tensor, G: Tensor, state: dict[str, Tensor]) -> MatrixStep:
        """The optimizer's own step; engines may step by something faster."""
        return self._optimizer.matrix_step(X, G, state, self._group)

    def name_of(self, p: Tensor) -> str:
        """The name of a weight, for messages."""
        return name_of(self._group, position_of(p, self._group))

    def scale_of(self, shape: torch.Size) -> float:
        """The multiple of orthonormal matrices that weights of this shape are."""
        return scale_of(self.scale_option, shape, self.view)

    def at_scale(self, scale: float) -> "Plan":
        """The plan for steps of ``Z = W / scale``; kept, unless a tensor lr may change in place."""
        if scale == 1:
            return self
        plan = self._scaled.get(scale)
        if plan is None:
            group = self._optimizer.options_at_scale(self._group, scale)
            plan = Plan(self._optimizer, group, self.warned, scale)
            plan.view = self.view
            if not isinstance(self._group["lr"], Tensor):
                self._scaled[scale] = plan
        return plan

    def seen_as(self, view: View) -> "Plan":
        """The plan for parts of weights, which are viewed otherwise than the whole."""
        if view == self.view:
            return self
        if view not in self._seen:
            self._seen[view] = plan = copy(self)
            plan.view, plan.notes, plan._scaled, plan._seen = view, {}, {}, {}
        return self._seen[view]


def name_of(group: Group, i: int | None) -> str:
    """The name of a weight of a group, for messages."""
    if i is None:
        return "a part of a weight"
    names = group.get("param_names")
    return repr(names[i]) if names else f"parameter {i} of the group"


def position_of(p: Tensor, group: Group) -> int | None:
    """The index of a weight in its group; None if it is a rank's part of one."""
    return next((i for i, other in enumerate(group["params"]) if other is p), None)


def can_last(group: Group) -> bool:
    """Whether no option can change in place, as a tensor, a list or an unknown object can."""
    return all(_is_lasting(value) for name, value in group.items() if name not in READ_IN_STEPS)


def _is_lasting(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_lasting, value))
    return value is None or callable(value) or isinstance(value, (str, *NUMBERS))
