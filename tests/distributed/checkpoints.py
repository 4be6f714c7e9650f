"""Saving and loading, on ranks."""

import torch
import torch.distributed as dist

from tests.distributed.training import CASES, everything, new_model, sharded, train


def save_and_go_on(folder: str, case: str, dtype: torch.dtype, half: int, last: int) -> dict:
    """Train, skip a step for NaNs on rank 0, save, go on training."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded(new_model(dtype))
    optimizer = CASES[case](model)
    train(model, optimizer, half)
    poisoned_step(optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    saved = everything(model, optimizer)
    train(model, optimizer, last, half)
    return {"saved": saved, "after": everything(model, optimizer)}


def resume(folder: str, case: str, dtype: torch.dtype, half: int, last: int) -> dict:
    """Load what other ranks have saved and go on training: on ranks, or in one process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = new_model(dtype)
    model = sharded(model) if dist.is_initialized() else model
    optimizer = CASES[case](model)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    loaded = everything(model, optimizer)
    train(model, optimizer, last, half)
    return {"saved": loaded, "after": everything(model, optimizer)}


def poisoned_step(optimizer: torch.optim.Optimizer) -> None:
    """A step with a NaN in every gradient, all of them on rank 0."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
            if dist.get_rank() == 0:
                p.grad.to_local().view(-1)[0] = float("nan")
    optimizer.step()


def through_a_whole_state(folder: str, case: str, dtype: torch.dtype) -> dict:
    """Train; save the whole state on rank 0; load it in a new model; train both."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model = sharded(new_model(dtype))
    optimizer = CASES[case](model)
    train(model, optimizer, 3)
    path = f"{folder}/whole.pt"
    whole_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=whole_state)
    if dist.get_rank() == 0:
        torch.save((weights, states), path)
    dist.barrier()
    weights, states = torch.load(path, weights_only=True) if dist.get_rank() == 0 else ({}, {})
    other = sharded(new_model(dtype))
    other_optimizer = CASES[case](other)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=from_rank_0)
    set_optimizer_state_dict(other, other_optimizer, states, options=from_rank_0)
    for trained_model, stepped in ((model, optimizer), (other, other_optimizer)):
        train(trained_model, stepped, 6, 3)
    return {"one": everything(model, optimizer), "other": everything(other, other_optimizer)}


def through_a_local_state(folder: str, case: str, dtype: torch.dtype) -> dict:
    """The same with ``state_dict``, a file for each rank."""
    model, other = sharded(new_model(dtype)), sharded(new_model(dtype))
    optimizer, other_optimizer = CASES[case](model), CASES[case](other)
    train(model, optimizer, 3)
    path = f"{folder}/rank-{dist.get_rank()}.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    weights, states = torch.load(path, weights_only=True)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(states)
    for trained_model, stepped in ((model, optimizer), (other, other_optimizer)):
        train(trained_model, stepped, 6, 3)
    return {"one": everything(model, optimizer), "other": everything(other, other_optimizer)}


def from_one_process(state: dict, weights: dict, case: str, dtype: torch.dtype) -> dict:
    """Go on with the ``state_dict`` of an optimizer that was alone."""
    model = new_model(dtype)
    model.load_state_dict(weights)
    model = sharded(model)
    optimizer = CASES[case](model)
    optimizer.load_state_dict(state)
    train(model, optimizer, 6, 3)
    return everything(model, optimizer)
