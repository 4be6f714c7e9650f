"""Which engine steps each weight, and why a faster one does not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.views import described
from ortholand.landing.step import Slot
from ortholand.optim.base import OrthogonalOptimizer
from ortholand.optim.engines import ENGINES, SHARDED
from ortholand.optim.plan import Plan, name_of
from ortholand.optim.weights import number_of_matrices, state_layout, zero_state
from ortholand.sharding.placement import is_dtensor

UNCONSTRAINED = "torch"


@dataclass(frozen=True)
class WeightExplained:
    """How one weight steps."""

    weight: str  # its name, or its place in its group
    shape: tuple[int, ...]
    dtype: str
    view: str  # "matrix", "kernel", "4 x 1 blocks", ...; "" if unconstrained
    matrices: int  # how many the weight is; 0 if unconstrained
    engine: str  # "sharded", "compiled", "reference", or "torch" if unconstrained
    form: str  # "matrix_step" if the optimizer's own method steps it, because a part is overridden
    reason: str  # why a faster engine does not step it; "" if there is none
    # Share of its steps so far that the safe step made shorter than lr.
    limited: float | None = None
    scale: float = 1.0  # the weight is this multiple of an orthonormal matrix


class Explanation(tuple[WeightExplained, ...]):
    """One row per weight; prints as a table."""

    optimizer: str  # the name of its class

    def __str__(self) -> str:
        names = ["weight", "shape", "view", "matrices", "scale", "engine", "limited", "reason"]
        if all(row.scale == 1 for row in self):
            names.remove("scale")
        if all(row.limited is None for row in self):  # nothing has stepped yet
            names.remove("limited")
        columns = [[name, *(_cell(row, name) for row in self)] for name in names]
        padded = [[cell.ljust(max(map(len, cells))) for cell in cells] for cells in columns]
        table = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
        table.insert(1, "-" * max(map(len, table)))
        return "\n".join([self.optimizer, *table])

    __repr__ = __str__


def explain(optimizer: OrthogonalOptimizer) -> Explanation:
    """Which engine steps each weight of an optimizer, and why a faster one does not.

    Args:
        optimizer: an optimizer of this library.

    Returns:
        A sequence of :class:`WeightExplained`, which prints as a table.

    Weights without a gradient are treated as if they had one of their own type.

    >>> import torch, ortholand
    >>> X = torch.nn.Parameter(ortholand.random_orthogonal(8, 3, seed=0))
    >>> (row,) = explain(ortholand.LandingSGD([X], fused=False))
    >>> row.engine, row.form, row.reason
    ('reference', '', 'fused=False')
    """
    if not isinstance(optimizer, OrthogonalOptimizer):
        raise TypeError(
            "explain takes an optimizer of this library (LandingSGD, LandingAdam, ...), got "
            f"{type(optimizer).__name__}."
        )
    groups = optimizer.param_groups
    explanation = Explanation(row for group in groups for row in _rows(optimizer, group))
    explanation.optimizer = type(optimizer).__name__
    return explanation


def _rows(optimizer: OrthogonalOptimizer, group: dict[str, Any]) -> Iterator[WeightExplained]:
    optimizer.plan(group)  # checks the options
    plan = Plan(optimizer, group, _Everything())  # which has given every warning already
    for i, p in enumerate(group["params"]):
        matrices, engine, form, limited = 0, UNCONSTRAINED, "", None
        reason = "orthogonal=False" + ", on each rank its own part" * is_dtensor(p)
        if plan.orthogonal:
            matrices = number_of_matrices(p, plan.view)
            engine, form, reason = _who(_slot(optimizer, p, plan), plan)
            limited = optimizer._journal.limited_share(p, optimizer.state.get(p, {}), matrices)
        yield WeightExplained(
            weight=name_of(group, i).strip("'"),
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            view=described(plan.view) if plan.orthogonal else "",
            matrices=matrices,
            engine=engine,
            form=form,
            reason=reason,
            limited=limited,
            scale=plan.scale_of(p.shape) if plan.orthogonal else 1.0,
        )


class _Everything(set[str]):
    def __contains__(self, _: object) -> bool:
        return True


def _who(slot: Slot, plan: Plan) -> tuple[str, str, str]:
    """Engine, form and reason."""
    refusals: list[str] = []
    for engine in ENGINES:
        refusal = engine.refusal(slot, plan)
        if refusal is None:
            form = "" if plan.landing or engine.name != "reference" else "matrix_step"
            return engine.name, form, "; ".join(refusals)
        if engine is not SHARDED:
            refusals.append(refusal)
    raise AssertionError("The last engine refuses nothing.")


@torch.no_grad()
def _slot(optimizer: OrthogonalOptimizer, p: Tensor, plan: Plan) -> Slot:
    """The weight with its state, or with the state it would get; nothing is changed."""
    state = dict(optimizer.state.get(p, {}))
    for name, (shape, dtype) in state_layout(p.shape, p.dtype, plan.state_kinds, plan.view).items():
        state.setdefault(name, zero_state(p, shape, dtype, plan.view))
    gradient = p.grad if p.grad is not None else torch.empty_like(p.detach())
    return Slot(p, gradient, state)


def _cell(row: WeightExplained, name: str) -> str:
    value = getattr(row, name)
    if name == "shape":
        return " x ".join(map(str, value)) or "()"
    if name == "scale":
        return f"{value:.4g}" if row.view else ""
    if name == "limited":
        return "" if value is None else f"{value:.0%}"
    if name == "engine" and row.form:
        return f"{value}, {row.form}"
    return str(value or "")
