"""What a record says about the machine: neither host name nor paths."""

import os
import platform
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from time import perf_counter

import torch

import ortholand
from ortholand.native import why_no_code


def versions() -> dict[str, str]:
    """Versions on which numbers depend: a record made with others is redone.

    Compiled and uncompiled steps differ in rounding.
    """
    compiled = why_no_code(torch.float32) is None
    return {
        "ortholand": ortholand.__version__,
        "torch": torch.__version__,
        "small matrices": "compiled" if compiled else "torch",
    }


def machine(device: torch.device) -> dict[str, str | int]:
    """Facts that explain timings."""
    facts: dict[str, str | int] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "cpu count": os.cpu_count() or 0,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


@contextmanager
def torch_threads(threads: int) -> Generator[None, None, None]:
    """A context in which torch computes with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_device(name: str) -> torch.device:
    """The device with that name.

    Raises:
        ValueError: if torch cannot compute on it here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"The device must be one that torch can use here, got {name!r}. Try --device cpu."
        ) from error
    return device


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """Adds up the seconds spent inside ``with stopwatch:``.

    On a GPU each stop waits for the device, so that work is counted where it was requested.

    Args:
        device: where the work is done.
        clock: returns the seconds; ``time.process_time`` for processor time.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds = 0.0
        self._device, self._clock = device, clock
        self._started = 0.0

    def __enter__(self) -> "Stopwatch":
        self._started = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += self._clock() - self._started
