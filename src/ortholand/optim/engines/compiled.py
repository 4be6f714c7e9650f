"""The engine of compiled code (:mod:`ortholand.native`), on the CPU.

Matrices of up to 128 columns take the whole step in one call of ``torch.ops.ortholand``, which
checks all tensors before it moves any. ``matrix_step`` is the reference.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ortholand import native
from ortholand.landing.after import After
from ortholand.landing.coupled import Coupled
from ortholand.landing.decoupled import Decoupled
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.step import COUNTS, LIMITED, SKIPPED, Slot, count_of
from ortholand.native import PLAIN_TYPES
from ortholand.optim.plan import Plan
from ortholand.optim.weights import States, Tensors, check_memory, gathered
from ortholand.safe_step import Frobenius, Spectral, farthest_before_landing

# Parts that have a compiled twin (steps.h), by exact type: a subclass may do something else.
ATTRACTIONS: dict[type, int] = {Coupled: 0, Decoupled: 1, After: 2}
RULES: dict[type, int] = {type(None): 0, Frobenius: 1, Spectral: 3}
MOMENTS = (Momentum, AdamMoments)
# Views (``struct View`` of ops.cpp): the kind, blocks down and across, 0 for each row or column.
GRID = 3
GRIDS: dict[str, tuple[int, int, int]] = {
    **{"matrix": (0, 1, 1), "kernel": (1, 1, 1), "vector": (2, 1, 1)},
    **{"rows": (GRID, 0, 1), "columns": (GRID, 1, 0)},
}

# Why ops.cpp cannot take a weight, by its answer.
TENSORS = "weight, gradient or state"
REFUSALS = {
    -1: f"{TENSORS} on another device than the CPU",
    -2: f"{TENSORS} of another type than the others",
    -3: "gradient of another shape",
    -4: "state of another shape",
    -5: "memory of strides {strides}: use weight.contiguous()",
    -6: "gradient or state in another memory layout",
    -7: f"memory of {TENSORS} that was freed",
    -8: f"more than {native.LARGEST_SIZE} columns, where torch's products are as fast",
    -100: f"{TENSORS} that is marked as negated, or not in plain memory of the CPU",
}
OTHER_LAYOUT, NO_KERNELS, UNREADABLE = -6, -9, -100
REFUSED, STEPPED = 0, 1  # how a list of answers begins
UNREADABLE_LIST = [REFUSED, UNREADABLE]
Claim = tuple[Callable[[], None] | None, list[Slot]]


class CompiledEngine:
    """Steps real matrices in plain CPU memory."""

    name = "compiled"

    def refusal(self, slot: Slot, plan: Plan) -> str | None:
        """Why compiled code cannot step a weight."""
        _, refused = _checked([slot], plan)
        return refused[0][1] if refused else None

    def claim(self, slots: list[Slot], plan: Plan) -> Claim:
        """The step of all weights that compiled code can step, and those that it cannot."""
        taken, refused = _checked(slots, plan)
        return (partial(_run, taken, plan) if taken else None), [slot for slot, _ in refused]

    def gathered(self, params: list[Tensor], states: States, plan: Plan) -> Tensors | None:
        """All that steps in a group, if there is nothing to prepare; None: prepare slots.

        What else a slot must be is checked beyond Python.
        """
        has_scales = isinstance(plan.scale_option, str)  # of their own
        if has_scales or _group_refusal(plan) is not None or native.operations() is None:
            return None
        return gathered(params, states, plan.state_kinds, len(plan.state_kinds) + len(COUNTS))

    def takes(self, tensors: Tensors, plan: Plan) -> bool:
        """Whether compiled code can step all of them."""
        return not _called(tensors, plan, only_check=True)

    def step(self, tensors: Tensors, plan: Plan) -> bool:
        """Step all of them, or none; whether it did."""
        scale = plan.scale_option
        return _stepped(tensors, plan if scale == 1 else plan.at_scale(float(scale)))


def _group_refusal(plan: Plan) -> str | None:
    """Why compiled code cannot step any weight of a group."""
    if torch.compiler.is_compiling():
        return "torch.compile sees torch's operations only"
    if "why not compiled" not in plan.notes:
        plan.notes["why not compiled"] = _parts_refusal(plan)
    return plan.notes["why not compiled"]


def _parts_refusal(plan: Plan) -> str | None:
    if plan.landing is None:
        return plan.why_not_landing
    if plan.fused is False:
        return "fused=False"
    if plan.fused is None and plan.foreach is not None:
        # A user who asks for batches or single steps gets them, as in torch.
        return f"foreach={plan.foreach} without fused=True"
    options, moments = plan.landing.options, plan.landing.moments
    if isinstance(options.lr, Tensor):
        return "tensor lr, which compiled code would have to wait for"
    if type(moments) not in MOMENTS:
        return f"{type(moments).__name__}, which have no compiled form"
    if options.landings != 1:
        return f"{options.landings} landings, of which compiled code does one"
    if type(options.attraction) not in ATTRACTIONS:
        return f"attraction {options.attraction.name!r} has no compiled form"
    if options.rule is not None and type(options.rule) not in RULES:
        return f"safe_step {options.rule.name!r} has no compiled form"
    return None


def _checked(slots: list[Slot], plan: Plan) -> tuple[list[Slot], list[tuple[Slot, str]]]:
    """The weights that can step, and the others with the reasons.

    Asks for the code that they need, and copies what lies in memory otherwise than its weight.
    """
    why_none = _group_refusal(plan)
    if why_none is not None:
        return [], [(slot, why_none) for slot in slots]
    refused = [(slot, odd) for slot in slots if (odd := _oddity(slot, plan))]
    taken = [slot for slot in slots if not _oddity(slot, plan)]
    laid_out: set[Tensor] = set()
    while taken and (answers := _answers(taken, plan)):
        asked, taken = taken, []
        for slot, answer in zip(asked, answers, strict=True):
            if answer > 0:
                native.add_kernels(slot.weight.dtype, answer - 1)
            if answer >= 0:
                taken.append(slot)
            elif answer == OTHER_LAYOUT and slot.weight not in laid_out:
                laid_out.add(slot.weight)
                taken.append(_laid_out(slot, plan))
            else:
                refused.append((slot, _reason(answer, slot, plan)))
    return taken, refused


def _oddity(slot: Slot, plan: Plan) -> str | None:
    """Why torch would not hand over the very tensors: subclasses may have their own way."""
    weight, gradient, state = slot
    if type(weight) not in PLAIN_TYPES or type(gradient) not in PLAIN_TYPES:
        return f"a {type(weight).__name__} with a gradient that is a {type(gradient).__name__}"
    if weight.is_inference():
        return "made in inference mode"
    plain = all(type(state[name]) in PLAIN_TYPES for name in plan.state_kinds)
    return None if plain else "state that is no plain tensor"


def _answers(slots: list[Slot], plan: Plan) -> Sequence[int]:
    """For each weight what ops.cpp says; nothing if all can step."""
    if native.operations() is None:
        return [NO_KERNELS] * len(slots)
    answers = _called(Tensors.of(slots, plan.state_kinds), plan, only_check=True)
    if answers != UNREADABLE_LIST:
        return answers[1:]
    if len(slots) == 1:
        return [UNREADABLE]
    return [answer for slot in slots for answer in _answers([slot], plan) or (0,)]


def _reason(answer: int, slot: Slot, plan: Plan) -> str:
    weight = slot.weight
    if not weight.is_cpu:
        return f"on the device {weight.device.type!r}, not on the CPU"
    why_not = native.why_no_code(weight.dtype)
    if why_not is None:
        return REFUSALS[answer].format(strides=weight.stride())
    if plan.fused and why_not not in plan.warned:  # once per optimizer
        plan.warned.add(why_not)
        warnings.warn(
            f"fused=True, but there is no compiled code: {why_not}. torch's operations step "
            "instead, with the same results; leave fused out to silence this.",
            stacklevel=8,  # who called step
        )
    return why_not


@torch.no_grad()
def _laid_out(slot: Slot, plan: Plan) -> Slot:
    """The slot with gradient and state in the memory layout of the weight; state is kept so."""
    check_memory(slot, plan.name_of)  # it is read

    def copied(tensor: Tensor) -> Tensor:
        same = tensor.stride() == weight.stride()
        return tensor if same else torch.empty_like(weight).copy_(tensor)

    weight, gradient, state = slot
    for name, kind in plan.state_kinds.items():
        state[name] = copied(state[name]) if kind == "matrix" else state[name].contiguous()
    return Slot(weight, copied(gradient), state)


def _run(slots: list[Slot], plan: Plan) -> None:
    """Step weights that were checked."""
    scales = [plan.scale_of(slot.weight.shape) for slot in slots]
    for scale in dict.fromkeys(scales):
        members = [slot for slot, own in zip(slots, scales, strict=True) if own == scale]
        if not _stepped(Tensors.of(members, plan.state_kinds), plan.at_scale(scale)):
            raise RuntimeError(
                "A weight, its gradient and its state must not change during a step, but did."
            )


def _stepped(tensors: Tensors, plan: Plan) -> bool:
    """Step weights, all or none: ops.cpp checks everything first. Whether they did."""
    answers = _called(tensors, plan, only_check=False)
    if answers and answers[0] != STEPPED:
        return False
    increment_version(tensors.moved)
    if not answers:
        return True
    n = len(tensors.gradients)
    for name, numbers in ((SKIPPED, answers[1 : n + 1]), (LIMITED, answers[n + 1 :])):
        if any(numbers):
            for state, number in zip(tensors.states, numbers, strict=True):
                count_of(name, state, torch.device("cpu")).add_(number)
    return True


def _called(tensors: Tensors, plan: Plan, *, only_check: bool) -> Sequence[int]:
    """What ops.cpp says about a step, or a check."""
    moved, gradients, _ = tensors
    try:
        return native.operations().landing_step(moved, gradients, _settings(plan), only_check)
    except RuntimeError:  # torch itself would not hand one of them over
        return UNREADABLE_LIST


def _settings(plan: Plan) -> Tensor:
    """``struct Options`` of ``steps.h``, field by field, but for the threads; then the view."""
    if "settings" not in plan.notes:
        landing: Any = plan.landing
        options, moments = landing.options, landing.moments
        is_adam = isinstance(moments, AdamMoments)
        momentum, adam = (Momentum(), moments) if is_adam else (moments, AdamMoments())
        numbers = [
            *(options.lr, plan.scale, options.lam, options.eps, options.aim),
            *(farthest_before_landing(options.aim), options.omega),
            *(momentum.momentum, momentum.dampening, *adam.betas, adam.eps),
            *(ATTRACTIONS[type(options.attraction)], RULES[type(options.rule)], plan.maximize),
            *(2 if is_adam else bool(plan.state_kinds), momentum.nesterov),
            *(GRIDS[plan.view] if isinstance(plan.view, str) else (GRID, *plan.view)),
        ]
        plan.notes["settings"] = torch.tensor(
            [*map(float, numbers)], dtype=torch.float64, device="cpu"
        )
    return plan.notes["settings"]
