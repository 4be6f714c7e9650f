"""Steps for unconstrained parameters: torch's own, guarded against non-finite gradients."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ortholand.geometry.matrices import to_working_dtype, working_dtype
from ortholand.geometry.rounding import exact_value, keep_
from ortholand.landing.step import SKIPPED, Slot, count_of, descent
from ortholand.native import all_below
from ortholand.optim.options import Group, scalar_lr
from ortholand.optim.weights import device_of_steps

Tensors = list[Tensor]
Agreement = Callable[[Tensor], Tensor]  # which may step here -> which may step on all ranks
MOVING = ("momentum_buffer", "exp_avg", "exp_avg_sq")
SGD_OPTIONS = ("momentum", "dampening", "nesterov", "weight_decay", "maximize", "foreach")
MODERATE = 1e15  # its cube does not overflow in float32, so no step of such numbers does


def plain_sgd_step(slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
    """The step of ``torch.optim.SGD`` on each parameter that it leaves finite."""
    _guarded_step(slots, group, _sgd, agree)


def plain_adam_step(slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
    """The step of ``torch.optim.AdamW`` or Adam on each parameter that it leaves finite."""
    for weight, _, state in slots:
        if "exp_avg" not in state:
            dtype = working_dtype(weight.dtype)
            state["exp_avg"] = torch.zeros_like(weight, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=dtype)
            place = device_of_steps(weight, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
    _guarded_step(slots, group, _adam, agree)


def _sgd(slots: list[Slot], weights: Tensors, gradients: Tensors, group: Group) -> None:
    lr, moved = scalar_lr(group["lr"]), weights
    options = {name: group[name] for name in SGD_OPTIONS}
    on_device = isinstance(lr, Tensor) and group.get("capturable")
    if on_device:
        # torch would read lr on the host, so it makes a step of length 1 that starts at zero.
        pairs = zip(gradients, weights, strict=True)
        gradients = [descent(G, group["maximize"]) + group["weight_decay"] * W for G, W in pairs]
        moved = [torch.zeros_like(W) for W in weights]
        options |= {"weight_decay": 0.0, "maximize": False}
    elif group["nesterov"] and group["foreach"] is not False:
        # torch adds the momentum to the gradients in their own memory. (None may mean True.)
        gradients = [gradient.clone() for gradient in gradients]
    buffers = [slot.state.get("momentum_buffer") for slot in slots]
    if _is_fused(group, weights) and len({buffer is None for buffer in buffers}) == 1:
        options |= {"fused": True, "foreach": False}
    options["lr"] = 1.0 if on_device else lr
    sgd(moved, gradients, buffers, **options)
    if on_device:
        for W, step in zip(weights, moved, strict=True):
            W.add_(lr * step)
    if group["momentum"]:
        for slot, buffer in zip(slots, buffers, strict=True):
            slot.state["momentum_buffer"] = buffer


def _adam(slots: list[Slot], weights: Tensors, gradients: Tensors, group: Group) -> None:
    lr, betas, decay = scalar_lr(group["lr"]), group["betas"], group["weight_decay"]
    if group["decoupled_weight_decay"]:  # by hand: torch's function takes it only since 2.7
        for weight in weights if decay else []:
            weight.mul_(1 - lr * decay)
        decay = 0.0
    # torch captures nothing on the CPU, and refuses to try.
    capturable = bool(group.get("capturable")) and not all(weight.is_cpu for weight in weights)
    fused = _is_fused(group, weights)
    takes_lists = capturable or not any(isinstance(n, Tensor) for n in (lr, *betas))
    adam(
        weights,
        gradients,
        [slot.state["exp_avg"] for slot in slots],
        [slot.state["exp_avg_sq"] for slot in slots],
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
        weight_decay=decay,
        eps=group["adam_eps"],
        maximize=group["maximize"],
    )


def _is_fused(group: Group, weights: Tensors) -> bool:
    """Whether the group asks for torch's fused step, and torch has one for its weights."""
    if group.get("fused") is not True or torch.compiler.is_compiling():
        return False
    numbers = (group["lr"], *group.get("betas", ()))
    return not any(isinstance(number, Tensor) for number in numbers) and all(
        weight.is_floating_point() and weight.device.type in ("cpu", "cuda") for weight in weights
    )


def _guarded_step(
    slots: list[Slot],
    group: Group,
    step: Callable[[list[Slot], Tensors, Tensors, Group], None],
    agree: Agreement | None,
) -> None:
    """Run an in-place step; put back, with its state, each parameter that it left non-finite.

    The copies cost memory traffic on vectors and heads, but save the host sync of checking first.
    Where checking is free (:func:`ortholand.native.all_below`), it comes first. Ranks that hold
    different parts of the parameters ``agree`` on what is put back.
    """
    if not slots:
        return
    for slot in slots:
        count_of(SKIPPED, slot.state, slot.weight.device)
    if agree is None and _is_moderate(slots, group):
        _stepped(slots, group, step)
        return
    before = [
        (
            slot.weight.clone(),
            {k: v.clone() for k, v in slot.state.items() if isinstance(v, Tensor)},
        )
        for slot in slots
    ]
    _stepped(slots, group, step)
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


def _stepped(slots: list[Slot], group: Group, step: Callable[..., None]) -> None:
    """Step weights in the type used for computation, and store them in their own.

    Half precision steps in float32, with moments in float32. In float16 Adam's eps is zero, and so
    are squares of gradients below 1e-4; in bfloat16 a second moment that should decay by 0.999
    does not change.
    """
    weights = [exact_value(slot.weight, slot.state) for slot in slots]
    gradients = [to_working_dtype(slot.gradient) for slot in slots]
    if _is_fused(group, weights):  # torch counts gradients as written to, though they are not
        gradients = [gradient.data for gradient in gradients]
    step(slots, weights, gradients, group)
    for slot, weight in zip(slots, weights, strict=True):
        if weight is not slot.weight:
            keep_(slot.weight, weight, slot.state)


def _is_sound(slot: Slot, group: Group) -> Tensor:
    """Whether a parameter and its state are finite, and lr was valid."""
    finite = torch.isfinite(slot.weight).all()
    for name in MOVING:
        if slot.state.get(name) is not None:
            finite = finite & torch.isfinite(slot.state[name]).all()
    lr = scalar_lr(group["lr"])
    return finite & (lr >= 0).to(finite.device) if isinstance(lr, Tensor) else finite


def _is_moderate(slots: list[Slot], group: Group) -> bool:
    """Whether all numbers are so moderate that a step leaves them finite.

    False if unknown. Adam's divisor is at least its eps: with an eps of zero, a gradient of zero
    gives 0 / 0.
    """
    lr = group["lr"]
    if torch.compiler.is_compiling() or isinstance(lr, Tensor):
        return False
    if lr * (2 + group["weight_decay"]) > MODERATE:
        return False
    if "adam_eps" in group and group["adam_eps"] <= 1e-20 * max(lr, 1.0):
        return False
    moved = [slot.state[k] for slot in slots for k in MOVING if slot.state.get(k) is not None]
    for slot in slots:
        moved += [slot.weight, slot.gradient]
    return all_below(MODERATE, moved)
