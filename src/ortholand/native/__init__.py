"""The landing step of small square matrices on the CPU as compiled code, where a compiler is found.

Nothing here is needed: without a compiler the optimizers use torch's operations, with the same
results up to rounding. Small matrices are then slower, because a step of many operations costs
their launches rather than their arithmetic.

The source (``landing.cpp``) is compiled when a size of matrix first needs it, in a second or two,
and kept in the user's cache folder for later runs. ``ORTHOLAND_NATIVE=0`` switches all this off.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

LANES_UP_TO = 8  # matrices up to this size are computed side by side, and compiled by size
LARGEST_SIZE = 128  # as in landing.cpp
SCALARS = {torch.float32: "float", torch.float64: "double"}
SOURCE = Path(__file__).with_name("landing.cpp")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fno-math-errno",  # sqrt as one instruction
    "-fno-trapping-math",  # comparisons in vectors
    "-fopenmp-simd",
    "-shared",
    "-fPIC",
    "-pthread",
)
COMPILE_SECONDS = 120

ATTRACTIONS = {"coupled": 0, "decoupled": 1, "after": 2}
_OPTIONS = struct.Struct("10d6i")  # struct Options of landing.cpp

# (packed options, address of the packed parameters, their number, size of the matrices)
Kernel = Callable[[bytes, int, int, int], None]


class Options(NamedTuple):
    """``struct Options`` of ``landing.cpp``, field by field."""

    lr: float
    lam: float
    eps: float
    farthest: float  # distance from which a Newton-Schulz step still leads back within eps
    omega: float
    momentum: float
    dampening: float
    beta1: float
    beta2: float
    adam_eps: float
    attraction: int
    safe: bool
    maximize: bool
    moments: int  # 0: none, 1: momentum, 2: Adam
    nesterov: bool
    threads: int

    def pack(self) -> bytes:
        """The bytes of the C structure."""
        return _OPTIONS.pack(*self)


def has_kernel(dtype: torch.dtype, size: int) -> bool:
    """Whether matrices of this type and size can be stepped by compiled code, if it compiles."""
    return dtype in SCALARS and size <= LARGEST_SIZE


def kernel(dtype: torch.dtype, size: int) -> Kernel | None:
    """The compiled step for matrices ``size x size``; None where there is none."""
    return _kernel(SCALARS[dtype], size if size <= LANES_UP_TO else 0)


@cache
def _kernel(scalar: str, size: int) -> Kernel | None:
    if os.environ.get("ORTHOLAND_NATIVE", "1") == "0":
        return None
    try:
        library = _loaded(scalar, size)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("No compiled step for small matrices, torch's operations are used: %s", error)
        return None
    step = library.ortholand_landing
    step.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    step.restype = None
    return step


def _loaded(scalar: str, size: int) -> ctypes.CDLL:
    path = _built(scalar, size)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a damaged file: made again, once
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_built(scalar, size)))


def _built(scalar: str, size: int) -> Path:
    """The compiled library: from the cache, or made now."""
    compiler = _compiler()
    definitions = (f"-DSCALAR={scalar}", f"-DSIZE={size}")
    command = [compiler, *FLAGS, *_machine_flags(), *definitions]
    identity = "\n".join([SOURCE.read_text(), *command, _processor()])
    name = f"landing-{scalar}-{size}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    path = cache_folder() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Elsewhere first, then moved in one step: other processes may be doing the same.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / name
            subprocess.run(
                [*command, str(SOURCE), "-o", str(made)],
                check=True,
                capture_output=True,
                timeout=COMPILE_SECONDS,
            )
            made.replace(path)
    return path


def cache_folder() -> Path:
    """Where compiled code is kept: ``ORTHOLAND_CACHE``, or the user's cache folder."""
    if folder := os.environ.get("ORTHOLAND_CACHE"):
        return Path(folder) / "native"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ortholand" / "native"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C++ compiler was found (CXX, c++, g++, clang++)")


def _machine_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)


def _processor() -> str:
    """What code for "native" depends on: a cache folder may be shared between machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
