"""Random numbers for torch's own initialisations, which use only the global generator."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Generator[None, None, None]:
    """A context in which the CPU's random numbers depend only on the seed; restored afterwards."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would also seed the GPUs, and leave them so.
        torch.default_generator.manual_seed(seed)
        yield
