"""The engine of compiled code (:mod:`ortholand.native`), on the CPU.

Matrices of up to 128 columns take the whole step in one call of ``torch.ops.ortholand``, which checks
all tensors before it moves any. ``matrix_step`` is the reference.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ortholand import native
from ortholand.landing.after import After
from ortholand.landing.coupled import Coupled
from ortholand.landing.decoupled import Decoupled
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.step import LIMITED, SKIPPED, Slot, count_of
from ortholand.native import PLAIN_TYPES
from ortholand.optim.plan import Plan
from ortholand.optim.weights import check_memory
from ortholand.safe_step import Frobenius, Spectral, farthest_before_landing

# Parts that have a compiled twin, by exact type: a subclass may do something else. Numbers: steps.h.
ATTRACTIONS: dict[type, int] = {Coupled: 0, Decoupled: 1, After: 2}
RULES: dict[type, int] = {type(None): 0, Frobenius: 1, Spectral: 3}
MOMENTS = (Momentum, AdamMoments)

# Answers of landing_check, as in ops.cpp; of what torch would not show it, the first.
REFUSALS = {
    -100: "{what} that torch's operations do not read as plain memory",
    -1: "{what} on another device than the CPU",
    -2: "{what} of another type than float32 and float64, or not all of one type",
    -3: "a gradient of another shape",
    -4: "state of another shape",
    -5: "memory of strides {strides}: use weight.contiguous()",
    -6: "gradient or state in another memory layout",
    -7: "memory that was freed",
    -8: f"more than {native.LARGEST_SIZE} columns, where torch's products are as fast",
}
UNREADABLE, OTHER_LAYOUT, NO_KERNELS = -100, -6, -9
Lists = list[Sequence[Tensor]]


class CompiledEngine:
    """Steps real matrices in plain CPU memory."""

    name = "compiled"

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:  # noqa: ARG002
        """Why compiled code cannot step a weight."""
        why_not = _group_refusal(plan)
        if why_not is not None:
            return why_not
        refused = _checked([slot], plan)[2]
        return refused[0][1] if refused else None

    def claim(
        self,
        slots: list[Slot],
        plan: Plan,
        *,
        alone: bool,  # noqa: ARG002
    ) -> tuple[Callable[[], None] | None, list[Slot]]:
        """The step of all weights that compiled code can step, and those that it cannot."""
        if _group_refusal(plan) is not None:
            return None, slots
        taken, lists, refused = _checked(slots, plan)
        run = partial(_run, taken, lists, plan) if taken else None
        return run, [slot for slot, _ in refused]


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
    if type(options.rule) not in RULES:
        return f"safe_step {options.rule.name!r} has no compiled form" if options.rule else ""
    return None


def _checked(slots: list[Slot], plan: Plan) -> tuple[list[Slot], Lists, list[tuple[Slot, str]]]:
    """The weights that can step, their tensors, and the others with the reasons.

    Asks for the code that they need, and copies what lies in memory otherwise than its weight.
    """
    names = (*plan.state_kinds,)
    taken = [slot for slot in slots if _is_plain(slot, names)]
    refused: list[tuple[Slot, str]] = []
    if len(taken) < len(slots):
        refused = [(slot, _oddity(slot)) for slot in slots if not _is_plain(slot, names)]
    laid_out: set[int] = set()
    while taken:
        lists = _lists(taken, names)
        answers = _answers(lists, plan)
        if not answers:
            return taken, lists, refused
        asked, taken = taken, []
        for slot, answer in zip(asked, answers, strict=True):
            weight = slot.weight
            if answer > 0:
                native.add_kernels(weight.dtype, answer - 1)
                taken.append(slot)
            elif answer == OTHER_LAYOUT and id(weight) not in laid_out:
                laid_out.add(id(weight))
                taken.append(_laid_out(slot, plan))
            elif answer:
                refused.append((slot, _reason(answer, slot, plan)))
            else:
                taken.append(slot)
    return [], [], refused


def _is_plain(slot: Slot, names: Sequence[str]) -> bool:
    """Whether a weight is what it seems: torch hands over the values of subclasses and views."""
    weight, gradient, state = slot
    return (
        type(weight) in PLAIN_TYPES
        and type(gradient) in PLAIN_TYPES
        and not weight.is_neg()
        and not weight.is_inference()
        and all(type(state[name]) in PLAIN_TYPES and not state[name].is_neg() for name in names)
    )


def _oddity(slot: Slot) -> str:
    weight, gradient, _ = slot
    if type(weight) not in PLAIN_TYPES or type(gradient) not in PLAIN_TYPES:
        return f"a {type(weight).__name__} with a gradient that is a {type(gradient).__name__}"
    if weight.is_inference() or weight.is_neg():
        return "marked as negated, or made in inference mode"
    return "state that is not a plain tensor, or marked as negated"


def _lists(slots: list[Slot], names: Sequence[str]) -> Lists:
    """Weights, gradients, and state of three kinds, as the operations take them."""
    weights, gradients, states = zip(*slots, strict=True)
    state = [[one[name] for one in states] for name in names]
    return [weights, gradients, *state, *[[]] * (3 - len(names))]


def _answers(lists: Lists, plan: Plan) -> Sequence[int]:
    """For each weight what landing_check says; nothing if all can step."""
    operations = native.operations()
    if operations is None:
        return [NO_KERNELS] * len(lists[0])
    try:
        return operations.landing_check(*lists, plan.view == "kernel")
    except RuntimeError:  # one of them is on another device, or shown by a transform
        if len(lists[0]) == 1:
            return [UNREADABLE]
        each = [[part[i : i + 1] for part in lists] for i in range(len(lists[0]))]
        return [answer for one in each for answer in _answers(one, plan) or (0,)]


def _reason(answer: int, slot: Slot, plan: Plan) -> str:
    weight = slot.weight
    if answer == NO_KERNELS:
        why_not = native.why_no_code(weight.dtype) or "no code for this type"
        if plan.fused:
            _warn_once(why_not, plan.warned)
        return why_not
    if weight.dtype not in native.SCALARS:
        return native.why_no_code(weight.dtype) or ""
    if not weight.is_cpu:
        return f"on the device {weight.device.type!r}, not on the CPU"
    return REFUSALS[answer].format(what="weight, gradient or state", strides=weight.stride())


def _laid_out(slot: Slot, plan: Plan) -> Slot:
    """The slot with gradient and state in the memory layout of the weight; state is kept so."""
    check_memory(slot, plan.name_of)  # copying reads it
    weight, gradient, state = slot
    for name, kind in plan.state_kinds.items():
        value = state[name]
        state[name] = _copied(value, weight) if kind == "matrix" else value.contiguous()
    return Slot(weight, _copied(gradient, weight), state)


@torch.no_grad()
def _copied(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.stride() == like.stride():
        return tensor
    copy = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def _run(slots: list[Slot], lists: Lists, plan: Plan) -> None:
    """Step weights that were checked; it is checked again beyond Python."""
    step, kernels = native.operations().landing_step, plan.view == "kernel"
    for scale, members, tensors in _by_scale(slots, lists, plan):
        weights, _, *state = tensors
        increment_version([*weights, *chain(*state)])
        counts = step(*tensors, kernels, *_options(plan.at_scale(scale))).tolist()
        for name, numbers in zip((SKIPPED, LIMITED), counts, strict=True):
            if any(numbers):
                for slot, number in zip(members, numbers, strict=True):
                    count_of(name, slot.state, slot.weight.device).add_(number)


def _by_scale(
    slots: list[Slot], lists: Lists, plan: Plan
) -> Iterator[tuple[float, list[Slot], Lists]]:
    if not isinstance(plan.scale_option, str):
        yield float(plan.scale_option), slots, lists
        return
    scales = [plan.scale_of(slot.weight.shape) for slot in slots]
    for scale in dict.fromkeys(scales):
        members = [slot for slot, own in zip(slots, scales, strict=True) if own == scale]
        yield scale, members, _lists(members, (*plan.state_kinds,))


def _options(plan: Plan) -> tuple[list[float], list[int]]:
    """``struct Options`` of ``steps.h``, field by field: numbers, then choices."""
    if "options" not in plan.notes:
        plan.notes["options"] = _made_options(plan)
    return plan.notes["options"]


def _made_options(plan: Plan) -> tuple[list[float], list[int]]:
    landing: Any = plan.landing
    options, moments = landing.options, landing.moments
    momentum = moments if isinstance(moments, Momentum) else Momentum()
    adam = moments if isinstance(moments, AdamMoments) else AdamMoments()
    kind = 2 if moments is adam else 1 if plan.state_kinds else 0
    farthest = farthest_before_landing(options.aim)
    balls = [options.lr, plan.scale, options.lam, options.eps, options.aim, farthest, options.omega]
    numbers = [*balls, momentum.momentum, momentum.dampening, *adam.betas, adam.eps]
    attraction, rule = ATTRACTIONS[type(options.attraction)], RULES[type(options.rule)]
    choices = [attraction, rule, plan.maximize, kind, momentum.nesterov]
    return [*map(float, numbers)], [*map(int, choices)]


def _warn_once(reason: str, warned: set[str]) -> None:
    """Warn, once per optimizer, that the compiled steps requested are not available."""
    if reason not in warned:
        warned.add(reason)
        warnings.warn(
            f"fused=True, but there is no compiled code: {reason}. torch's operations step "
            "instead, with the same results; leave fused out to silence this.",
            stacklevel=8,
        )
