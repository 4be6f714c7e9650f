"""Starts ranks on this machine: processes that communicate by gloo."""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

Work = Callable[..., Iterator[dict[str, float]]]


def on_ranks(
    ranks: int, work: Work, *arguments: Any, tick: Callable[[int], None]
) -> list[list[dict[str, float]]]:
    """What the module-level generator ``work(*arguments)`` yields on each rank.

    ``tick`` is called with the number of new results.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started: Any = start_processes(
            _on_rank, (ranks, folder, work, arguments), ranks, join=False, start_method="spawn"
        )
        told, ended = 0, False
        try:
            while not ended:
                ended = started.join(timeout=0.5)
                done = len(_lines(folder, 0))
                tick(done - told)
                told = done
        finally:
            for process in started.processes:
                process.kill()
        return [[json.loads(line) for line in _lines(folder, r)] for r in range(ranks)]


def _on_rank(rank: int, ranks: int, folder: str, work: Work, arguments: tuple[Any, ...]) -> None:
    if sys.platform == "linux":  # no need to know one's own name on a network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    with Path(folder, str(rank)).open("w") as file:
        for result in work(*arguments):
            print(json.dumps(result), file=file, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _lines(folder: str, rank: int) -> list[str]:
    path = Path(folder, str(rank))
    return path.read_text().splitlines() if path.exists() else []
