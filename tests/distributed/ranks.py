"""Runs a function on several ranks, each a process of this machine, and compares results."""

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

SECONDS = 400  # until a run counts as hung; collectives give up earlier
PRELOADED = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "ortholand",
]


def run(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on each of the ranks; what each of them returns.

    A function of an importable module; results are tensors and what ``torch.load`` reads with
    weights_only=True. The processes are forked from one that has torch imported already.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        started = start_processes(
            _on_rank,
            args=(ranks, folder, function, arguments),
            nprocs=ranks,
            join=False,
            start_method="forkserver",
        )
        try:
            _wait(started)
        finally:
            for process in started.processes:
                if process.is_alive():
                    process.kill()
        return [torch.load(_result(folder, rank), weights_only=True) for rank in range(ranks)]


def _wait(started: Any) -> None:
    end = time.monotonic() + SECONDS
    while not started.join(timeout=1):
        if time.monotonic() > end:
            raise TimeoutError(f"The ranks did not end within {SECONDS} seconds.")


def _on_rank(rank: int, ranks: int, folder: str, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    # FSDP2's own advice, on how a model's output is to be used and on hooks.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=180),
    )
    try:
        torch.save(function(*arguments), _result(folder, rank))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}.pt"


def assert_same(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    """The same weights and state, by name, up to a tolerance; anything else must be equal."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, dict):
            assert_same(got[name], value, tolerance)
        elif isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype, name
            assert (got[name] - value).abs().max() <= tolerance, name
        else:
            assert got[name] == value, name
