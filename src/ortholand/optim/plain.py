"""Steps for parameters without constraint: torch's own, guarded against non-finite gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ortholand.native import all_below

State = dict[str, Any]
Agreement = Callable[[Tensor], Tensor]  # which may step here -> which may step on all ranks
MODERATE = 1e15  # its square times itself is still a float32, so no step of such numbers overflows
SKIPPED = "skipped"


def count_skipped(state: State, taken: Tensor) -> None:
    """Add the steps not taken to the count kept on the parameter's device."""
    skipped = taken.logical_not()
    skipped_count(state, taken.device).add_(skipped.sum() if skipped.ndim else skipped)


def skipped_count(state: State, device: torch.device) -> Tensor:
    """The count of the steps not taken so far."""
    if SKIPPED not in state:
        state[SKIPPED] = torch.zeros((), dtype=torch.int64, device=device)
    return state[SKIPPED]


def plain_sgd_step(
    params: list[Tensor],
    states: Mapping[Tensor, State],
    group: Mapping[str, Any],
    agree: Agreement | None = None,
) -> None:
    """The step of ``torch.optim.SGD`` on each parameter that stays finite by it."""

    def step() -> None:
        buffers = [states[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            [p.grad for p in params if p.grad is not None],
            buffers,
            foreach=group["foreach"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"]:
            for p, buffer in zip(params, buffers, strict=True):
                states[p]["momentum_buffer"] = buffer

    guarded_step(params, states, group, step, agree)


def plain_adam_step(
    params: list[Tensor],
    states: Mapping[Tensor, State],
    group: Mapping[str, Any],
    agree: Agreement | None = None,
) -> None:
    """The step of ``torch.optim.AdamW`` or Adam on each parameter that stays finite by it."""
    for p in params:
        if "exp_avg" not in states[p]:
            states[p]["exp_avg"] = torch.zeros_like(p)
            states[p]["exp_avg_sq"] = torch.zeros_like(p)
            states[p]["step"] = torch.zeros((), dtype=torch.float32)

    def step() -> None:
        adam(
            params,
            [p.grad for p in params if p.grad is not None],
            [states[p]["exp_avg"] for p in params],
            [states[p]["exp_avg_sq"] for p in params],
            [],
            [states[p]["step"] for p in params],
            foreach=group["foreach"] and not isinstance(group["lr"], Tensor),
            has_complex=any(p.is_complex() for p in params),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adam_eps"],
            maximize=group["maximize"],
        )

    guarded_step(params, states, group, step, agree)


def guarded_step(
    params: list[Tensor],
    states: Mapping[Tensor, State],
    group: Mapping[str, Any],
    step: Callable[[], None],
    agree: Agreement | None = None,
) -> None:
    """Run an in-place step; put back, with its state, each parameter that it left non-finite.

    The copies are memory traffic on vectors and heads, and save a host sync to ask first. Where
    asking costs nothing (:func:`ortholand.native.all_below`), it is asked. Ranks that have
    different parts of the parameters ``agree`` on what is put back.
    """
    if not params:
        return
    for p in params:
        skipped_count(states[p], p.device)
    if agree is None and is_calm(params, states, group):
        step()
        return
    weights_before = [p.clone() for p in params]
    states_before = [{k: v.clone() for k, v in states[p].items()} for p in params]
    step()
    may_step = [torch.isfinite(p).all() for p in params]
    if agree is not None:
        may_step = list(agree(torch.stack(may_step)))
    before_step = zip(weights_before, states_before, may_step, strict=True)
    for p, (weight, before, taken) in zip(params, before_step, strict=True):
        p.copy_(torch.where(taken, p, weight))
        for name, value in states[p].items():
            old = before.get(name, torch.zeros_like(value))
            value.copy_(torch.where(taken, value, old))
        count_skipped(states[p], taken)


def is_calm(params: list[Tensor], states: Mapping[Tensor, State], group: Mapping[str, Any]) -> bool:
    """Whether all numbers are so moderate that a step leaves them finite, squares included.

    False where that is not known.
    """
    if torch.compiler.is_compiling() or isinstance(group["lr"], Tensor):
        return False
    if group["lr"] * (2 + group["weight_decay"]) > MODERATE:
        return False
    moving = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    buffers = [
        states[p][name] for p in params for name in moving if states[p].get(name) is not None
    ]
    return all_below(MODERATE, [*params, *(p.grad for p in params if p.grad is not None), *buffers])
