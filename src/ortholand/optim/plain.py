"""Steps for unconstrained parameters: torch's own, guarded against non-finite gradients."""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ortholand.geometry.matrices import to_working_dtype, working_dtype
from ortholand.geometry.rounding import exact_value, keep_
from ortholand.landing.step import SKIPPED, Slot, count_of
from ortholand.native import all_below
from ortholand.optim.options import Group, scalar_lr
from ortholand.optim.weights import States, device_of_steps, gathered
from ortholand.optim.weights import Tensors as Gathered

Tensors = list[Tensor]
Agreement = Callable[[Tensor], Tensor]  # which may step here -> which may step on all ranks
MOVING = ("momentum_buffer", "exp_avg", "exp_avg_sq")
SGD_OPTIONS = ("momentum", "dampening", "nesterov", "weight_decay", "maximize", "foreach")
MODERATE = 1e15  # its square does not overflow in float32, nor do many steps of such numbers,
MOST, SMALLEST_EPS = 1e3, 1e-20  # with an lr of at most this, and Adam's eps


def _sgd(slots: list[Slot], weights: Tensors, gradients: Tensors, group: Group) -> None:
    lr, moved = scalar_lr(group["lr"]), weights
    options = {name: group[name] for name in SGD_OPTIONS}
    on_device = isinstance(lr, Tensor) and group.get("capturable")
    if on_device:
        # torch would read lr on the host, so it makes a step of length 1 that starts at zero.
        sign, decay = -1 if group["maximize"] else 1, group["weight_decay"]
        gradients = [sign * G + decay * W for G, W in zip(gradients, weights, strict=True)]
        moved = [torch.zeros_like(W) for W in weights]
        options |= {"weight_decay": 0.0, "maximize": False}
    elif group["nesterov"] and options["foreach"]:
        # torch adds the momentum to the gradients in their own memory.
        gradients = [gradient.clone() for gradient in gradients]
    elif options["foreach"] is None:
        options["foreach"] = not group["nesterov"]  # to the last bit the same, with less Python
    buffers = [slot.state.get("momentum_buffer") for slot in slots]
    kept = [buffer for buffer in buffers if buffer is not None]
    if group.get("fused") and len(kept) in (0, len(buffers)):
        fused, gradients = _fused(slots, weights, gradients, kept, group)
        options |= {"fused": fused, "foreach": options["foreach"] and not fused}
    options["lr"] = 1.0 if on_device else lr
    sgd(moved, gradients, buffers, **options)
    if on_device:
        for W, step in zip(weights, moved, strict=True):
            W.add_(lr * step)
    if group["momentum"]:
        for slot, buffer in zip(slots, buffers, strict=True):
            slot.state["momentum_buffer"] = buffer


def _adam(slots: list[Slot], weights: Tensors, gradients: Tensors, group: Group) -> None:
    lr, betas = scalar_lr(group["lr"]), group["betas"]
    for weight, _, state in slots:
        if "exp_avg" not in state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(weight, dtype=working_dtype(weight.dtype))
            place = device_of_steps(weight, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
    # torch captures nothing on the CPU, and refuses to try.
    capturable = bool(group.get("capturable")) and not all(weight.is_cpu for weight in weights)
    means = [slot.state["exp_avg"] for slot in slots]
    squares = [slot.state["exp_avg_sq"] for slot in slots]
    fused, gradients = _fused(slots, weights, gradients, [*means, *squares], group)
    takes_lists = capturable or not any(isinstance(n, Tensor) for n in (lr, *betas))
    step = adamw if group["decoupled_weight_decay"] else adam
    step(
        weights,
        gradients,
        means,
        squares,
        [],
        [slot.state["step"] for slot in slots],
        foreach=group["foreach"] if takes_lists and not fused else False,
        capturable=capturable,
        fused=fused,
        has_complex=any(weight.is_complex() for weight in weights),
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["adam_eps"],
        maximize=group["maximize"],
    )


def _fused(
    slots: list[Slot], weights: Tensors, gradients: Tensors, state: Tensors, group: Group
) -> tuple[bool, Tensors]:
    """Whether torch's fused step is wanted and possible, and the gradients for it.

    On the CPU it needs equal strides. torch wrongly counts its gradients as written to.
    """
    wanted, numbers = group.get("fused"), (group["lr"], *group.get("betas", ()))
    if wanted is None and "betas" in group:  # Adam's takes a fifth of the time there
        wanted = group["foreach"] is None and all(weight.is_cpu for weight in weights)
    if not wanted or torch.compiler.is_compiling() or any(isinstance(n, Tensor) for n in numbers):
        return False, gradients
    if isinstance(slots, SoundSlots):
        return True, [G.data for G in gradients]
    for i, W in enumerate(weights):
        is_dense = W.is_contiguous() or (
            W.ndim == 4 and W.is_contiguous(memory_format=torch.channels_last)
        )
        laid_out = all(A.stride() == W.stride() for A in state[i :: len(weights)])
        if not (W.is_floating_point() and (W.is_cuda or (W.is_cpu and is_dense and laid_out))):
            return False, gradients
    pairs = zip(weights, gradients, strict=True)
    return True, [
        G.data if G.stride() == W.stride() else torch.empty_like(W).copy_(G) for W, G in pairs
    ]


@torch.no_grad()
def plain_step(slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
    """The step of torch's AdamW, Adam or SGD; put back, with its state, what it left non-finite.

    This saves the host sync of checking first. Where checking is nearly free, it comes first
    (:func:`sound_slots`). Ranks ``agree`` on what is put back. Half precision steps in float32,
    where Adam's eps is not zero and second moments decay.
    """
    step = _adam if "betas" in group else _sgd
    if isinstance(slots, SoundSlots):
        step(slots, slots.weights, slots.gradients, group)
        return
    if not slots:
        return
    before = []
    for weight, _, state in slots:
        count_of(SKIPPED, state, weight.device)
        tensors = {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
        before.append((weight.clone(), tensors))
    weights = [exact_value(slot.weight, slot.state) for slot in slots]
    step(slots, weights, [to_working_dtype(slot.gradient) for slot in slots], group)
    for slot, weight in zip(slots, weights, strict=True):
        if weight is not slot.weight:
            keep_(slot.weight, weight, slot.state)
    may_step = [_is_sound(slot, group) for slot in slots]
    agreed = [torch.zeros_like(sound) for sound in may_step]
    try:
        agreed = may_step if agree is None else list(agree(torch.stack(may_step)))
    finally:  # with nothing agreed, everything is put back
        for slot, taken, (weight, state) in zip(slots, agreed, before, strict=True):
            slot.weight.copy_(torch.where(taken, slot.weight, weight))
            for name, value in slot.state.items():
                if isinstance(value, Tensor):
                    value.copy_(torch.where(taken, value, state.get(name, 0)))
    for slot, taken in zip(slots, agreed, strict=True):
        slot.state[SKIPPED].add_(taken.logical_not())


def _is_sound(slot: Slot, group: Group) -> Tensor:
    """Whether a parameter and its state are finite, and lr was valid."""
    finite = torch.isfinite(slot.weight).all()
    for name in MOVING:
        if slot.state.get(name) is not None:
            finite = finite & torch.isfinite(slot.state[name]).all()
    lr = scalar_lr(group["lr"])
    return finite & (lr >= 0).to(finite.device) if isinstance(lr, Tensor) else finite


class SoundSlots(list[Slot]):
    """Plain weights on the CPU, laid out like their state, that a step surely leaves finite."""

    def __init__(self, tensors: Gathered) -> None:
        super().__init__(map(Slot, tensors.moved, tensors.gradients, tensors.states))
        self.weights: Tensors = tensors.moved[: len(self)]
        self.gradients: Tensors = tensors.gradients


def sound_slots(
    params: Tensors, states: States, group: Group, notes: dict[str, Any]
) -> SoundSlots | None:
    """The weights of a group that have gradients; None if they must be prepared or guarded.

    Only gradients are read in every step: the rest was moderate when it was first seen.
    """
    if torch.compiler.is_compiling() or not _is_moderate(group):
        return None
    first = next((state for p in params if (state := states.get(p))), {})
    names = [name for name in MOVING if name in first]
    found = gathered(params, states, names, len(first))
    if found is None or not found.gradients:
        return None
    moved, gradients, _ = found
    if not all_below(MODERATE, gradients, moved):
        return None
    known = notes.get("moderate", ())
    if len(known) != len(moved) or not all(map(is_, known, moved)):
        if not all_below(MODERATE, moved):
            return None
        notes["moderate"] = moved
    return SoundSlots(found)


def _is_moderate(group: Group) -> bool:
    """Whether a step of a group's options is bounded by its gradients, and does not add up."""
    lr = group["lr"]
    if isinstance(lr, Tensor) or lr > MOST or lr * group["weight_decay"] > 1:
        return False
    decays = group.get("momentum", 0) < 1 and abs(group.get("dampening", 0)) <= 1
    return decays and group.get("adam_eps", 1.0) > SMALLEST_EPS
