"""Random numbers for torch's own initialisations, which know no generator but the global one."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """Make what is created inside depend on the seed alone, on the CPU, and the rest not at all."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would also seed the GPUs, and leave them so.
        torch.default_generator.manual_seed(seed)
        yield
