"""Compiled code for the CPU, where a compiler is found: steps of small square matrices.

Nothing here is needed: without a compiler the optimizers use torch's operations, with the same
results up to rounding. Small matrices are then slower, because a step of many operations costs
their launches rather than their arithmetic.

The sources (``*.cpp``) are compiled when a type and size of matrix first needs
them, in a second or two, and kept in the user's cache folder for later runs.
``ORTHOLAND_NATIVE=0`` switches all this off.
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
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ortholand.cache import cache_folder

log = logging.getLogger(__name__)

LANES_UP_TO = 8  # matrices up to this size are computed side by side, and compiled by size
LARGEST_SIZE = 128  # as in landing.cpp
SCALARS = {torch.float32: "float", torch.float64: "double"}
FOLDER = Path(__file__).parent
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

_POINTER = ctypes.c_void_p
SIGNATURES = {
    "landing": {"ortholand_landing": (ctypes.c_char_p, _POINTER, ctypes.c_int, ctypes.c_int)},
    "large": {
        "ortholand_residual": (*[_POINTER] * 3, ctypes.c_int64, ctypes.c_char_p),
        "ortholand_norm": (_POINTER, ctypes.c_int64),
        "ortholand_move": (
            *[_POINTER] * 4,
            ctypes.c_int64,
            ctypes.c_double,
            ctypes.c_double,
            ctypes.c_char_p,
        ),
    },
    "calm": {"ortholand_calm": (_POINTER, _POINTER, ctypes.c_int, ctypes.c_double)},
}

RESULTS = {"ortholand_residual": ctypes.c_double, "ortholand_norm": ctypes.c_double}

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
    """Whether matrices ``size x size`` can be stepped by compiled code here."""
    return dtype in SCALARS and size <= LARGEST_SIZE and kernel(dtype, size) is not None


def kernel(dtype: torch.dtype, size: int) -> Kernel | None:
    """The compiled step for matrices ``size x size``; None where there is none."""
    library = _library("landing", SCALARS[dtype], size if size <= LANES_UP_TO else 0)
    return None if library is None else library.ortholand_landing


def all_below(limit: float, tensors: Sequence[Tensor]) -> bool:
    """Whether all entries are smaller than the limit in modulus, as far as compiled code can tell.

    On the CPU this waits for nothing and launches nothing. False where the tensors are elsewhere,
    of other types or layouts, or where there is no compiled code.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
        if not plain or tensor.dtype not in SCALARS or not tensor.is_contiguous():
            return False
        by_type.setdefault(tensor.dtype, []).append(tensor)
    return all(_all_below(limit, dtype, members) for dtype, members in by_type.items())


def _all_below(limit: float, dtype: torch.dtype, tensors: Sequence[Tensor]) -> bool:
    library = _library("calm", SCALARS[dtype], 0)
    if library is None:
        return False
    addresses = array("q", [tensor.data_ptr() for tensor in tensors])
    sizes = array("q", [tensor.numel() for tensor in tensors])
    pointers = addresses.buffer_info()[0], sizes.buffer_info()[0]
    return bool(library.ortholand_calm(*pointers, len(tensors), limit))


def large_steps(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The passes of a large matrix's step (``large.cpp``); None where there are none."""
    return _library("large", SCALARS[dtype], 0) if dtype in SCALARS else None


@cache
def _library(source: str, scalar: str, size: int) -> ctypes.CDLL | None:
    """The compiled source for a type and size of matrix; None where there is none."""
    if os.environ.get("ORTHOLAND_NATIVE", "1") == "0":
        return None
    try:
        library = _loaded(source, scalar, size)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("No compiled code for small matrices, torch's operations are used: %s", error)
        return None
    for name, signature in SIGNATURES[source].items():
        getattr(library, name).argtypes = signature
        getattr(library, name).restype = RESULTS.get(name, ctypes.c_int)
    return library


def _loaded(source: str, scalar: str, size: int) -> ctypes.CDLL:
    path = _built(source, scalar, size)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a damaged file: made again, once
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_built(source, scalar, size)))


def _built(source: str, scalar: str, size: int) -> Path:
    """The compiled library: from the cache, or made now."""
    text = FOLDER / f"{source}.cpp"
    command = [_compiler(), *FLAGS, *_machine_flags(), f"-DSCALAR={scalar}", f"-DSIZE={size}"]
    sources = (path.read_text() for path in (text, FOLDER / "steps.h"))
    identity = "\n".join([*sources, *command, _processor()])
    name = f"{source}-{scalar}-{size}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    path = library_folder() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Elsewhere first, then moved in one step: other processes may be doing the same.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / name
            subprocess.run(
                [*command, str(text), "-o", str(made)],
                check=True,
                capture_output=True,
                timeout=COMPILE_SECONDS,
            )
            made.replace(path)
    return path


def library_folder() -> Path:
    """Where compiled code is kept: in ``ORTHOLAND_CACHE``, or in the user's cache folder."""
    folder = os.environ.get("ORTHOLAND_CACHE")
    return (Path(folder) if folder else cache_folder()) / "native"


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
