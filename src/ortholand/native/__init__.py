"""Compiled code for the CPU: steps of matrices, small and large, and a solver for small ones.

This code is optional: without it the optimizers use torch's operations, with the same results up
to rounding. Small matrices are then slower, because a step of many operations mostly pays for
launches rather than arithmetic.

Wheels for Linux come with the libraries (:mod:`.prebuilt`). Elsewhere the sources (``*.cpp``) are
compiled when a type and size of matrix first needs them, in a second or two, and kept in the user's
cache folder for later runs (:mod:`.build`).
``ORTHOLAND_NATIVE=0`` switches all this off. :func:`why_no_code` says why there is no code.
"""

import ctypes
import logging
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ortholand.native.border import address, address_if_plain, array_address
from ortholand.native.build import load
from ortholand.native.recipe import LANES_UP_TO
from ortholand.native.safekeeping import NoCodeError, library_folder

__all__ = [
    "COMPILED_ATTRACTIONS",
    "COMPILED_RULES",
    "LARGEST_SIZE",
    "SCALARS",
    "Kernel",
    "Options",
    "TallKernel",
    "address",
    "all_below",
    "array_address",
    "code_path",
    "has_kernel",
    "kernel",
    "large_steps",
    "library_folder",
    "search_steps",
    "tall_kernel",
    "why_no_code",
]

log = logging.getLogger(__name__)

LARGEST_SIZE = 128  # as in tiles.h
LANES_FROM = 4  # matrices: from this many, tall ones with few columns are computed side by side,
LARGEST_IN_LANES = 512  # if they have no more entries than this, as in tall.cpp
SCALARS = {torch.float32: "float", torch.float64: "double"}
COMPILED_ATTRACTIONS = (0, 1, 2)  # by number: coupled, decoupled, after
COMPILED_RULES = (1, 2, 3)  # of the safe step: frobenius, tight, spectral
SWITCHED_OFF = "switched off by ORTHOLAND_NATIVE=0"
_OPTIONS = struct.Struct("12d6i")  # struct Options of steps.h

_POINTER = ctypes.c_void_p
SIGNATURES = {
    "landing": {"ortholand_landing": (ctypes.c_char_p, _POINTER, ctypes.c_int, ctypes.c_int)},
    "tall": {
        "ortholand_tall": (
            ctypes.c_char_p,
            _POINTER,
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int,
        )
    },
    "large": {
        "ortholand_generator": (
            *[_POINTER] * 2,
            ctypes.c_int64,
            *[ctypes.c_double] * 2,
            ctypes.c_char_p,
        ),
        "ortholand_field": (*[_POINTER] * 2, ctypes.c_int64, *[ctypes.c_double] * 2),
        "ortholand_shift": (*[_POINTER] * 2, ctypes.c_int64, *[ctypes.c_double] * 2),
        "ortholand_overshoot": (*[_POINTER] * 3, ctypes.c_int64, ctypes.c_double),
        "ortholand_norm": (_POINTER, ctypes.c_int64),
        "ortholand_step": (*[ctypes.c_double] * 3, ctypes.c_char_p),
        "ortholand_move": (
            *[_POINTER] * 2,
            ctypes.c_int64,
            *[ctypes.c_double] * 4,
            ctypes.c_char_p,
        ),
    },
    "bounded": {"ortholand_all_below": (_POINTER, ctypes.c_int64, ctypes.c_double)},
    "search": {
        "ortholand_search_new": (ctypes.c_int, *[ctypes.c_int64] * 3, *[_POINTER] * 2),
        "ortholand_search_delete": (_POINTER,),
        "ortholand_search_start": (_POINTER,),
        "ortholand_search_next": (_POINTER, *[ctypes.c_double] * 2),
        "ortholand_search_forget": (_POINTER,),
        "ortholand_search_report": (_POINTER,),
        "ortholand_search_rows": (*[_POINTER] * 2,),
        "ortholand_search_point": (_POINTER, ctypes.c_int),
    },
}

RESULTS = {
    "ortholand_landing": None,
    "ortholand_tall": None,
    "ortholand_generator": ctypes.c_double,
    "ortholand_field": ctypes.c_double,
    "ortholand_shift": None,
    "ortholand_overshoot": ctypes.c_double,
    "ortholand_norm": ctypes.c_double,
    "ortholand_step": ctypes.c_double,
    "ortholand_move": ctypes.c_int,
    "ortholand_all_below": ctypes.c_int,
    "ortholand_search_new": _POINTER,
    "ortholand_search_delete": None,
    "ortholand_search_start": ctypes.c_int,
    "ortholand_search_next": ctypes.c_int,
    "ortholand_search_forget": ctypes.c_int,
    "ortholand_search_report": None,
    "ortholand_search_rows": None,
    "ortholand_search_point": None,
}

# (packed options, address of the packed parameters, their number, size of the matrices)
Kernel = Callable[[bytes, int, int, int], None]
# The same, with rows and columns.
TallKernel = Callable[[bytes, int, int, int, int], None]


class Options(NamedTuple):
    """``struct Options`` of ``steps.h``, field by field."""

    lr: float
    scale: float  # weights are this times what steps
    lam: float
    eps: float
    aim: float  # largest distance that a step may end at: eps, or a little less
    farthest: float  # distance from which a Newton-Schulz step still leads back within aim
    omega: float
    momentum: float
    dampening: float
    beta1: float
    beta2: float
    adam_eps: float
    attraction: int
    rule: int  # of the safe step; 0: none
    maximize: bool
    moments: int  # 0: none, 1: momentum, 2: Adam
    nesterov: bool
    threads: int

    def pack(self) -> bytes:
        """The bytes of the C structure."""
        return _OPTIONS.pack(*self)


def has_kernel(dtype: torch.dtype, size: int) -> bool:
    """Whether compiled code can step ``size x size`` matrices here."""
    return kernel(dtype, size) is not None


def kernel(dtype: torch.dtype, size: int) -> Kernel | None:
    """The compiled step for ``size x size`` matrices; None if there is none."""
    if dtype not in SCALARS or not 0 < size <= LARGEST_SIZE:
        return None
    library = _code("landing", SCALARS[dtype], _compiled_size(size))
    return None if library is None else library.ortholand_landing


def tall_kernel(dtype: torch.dtype, n: int, p: int, count: int) -> TallKernel | None:
    """The compiled step for ``count`` ``n x p`` matrices, n > p; None if there is none."""
    if dtype not in SCALARS or not 0 < p <= LARGEST_SIZE or n <= p:
        return None
    library = None
    if p <= LANES_UP_TO and n * p <= LARGEST_IN_LANES and count >= LANES_FROM:
        library = _code("tall", SCALARS[dtype], p)
    if library is None:
        library = _code("tall", SCALARS[dtype], 0)
    return None if library is None else library.ortholand_tall


def large_steps(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The passes of a large matrix's step (``large.cpp``); None if there are none."""
    return _code("large", SCALARS[dtype], 0) if dtype in SCALARS else None


def search_steps(dtype: torch.dtype) -> ctypes.CDLL | None:
    """L-BFGS for one small matrix (``search.cpp``); None where there is none."""
    return _code("search", SCALARS[dtype], 0) if dtype in SCALARS else None


def why_no_code(dtype: torch.dtype, size: int = 0, columns: int | None = None) -> str | None:
    """Why there is no compiled code for a type and size of matrix; None if there is.

    Args:
        dtype: type of the entries.
        size: rows of a matrix, or 0 for the code that serves most sizes. With more than
            ``LARGEST_SIZE`` columns, this refers to the passes for a large matrix.
        columns: columns of a tall matrix; None for a square one.
    """
    if dtype not in SCALARS:
        name = str(dtype).removeprefix("torch.")
        return f"{name} is not compiled: float32 and float64 are"
    shorter = size if columns is None else columns
    if shorter > LARGEST_SIZE:
        found = _library("large", SCALARS[dtype], 0)
    elif shorter < size:
        found = _library("tall", SCALARS[dtype], 0)
    else:
        found = _library("landing", SCALARS[dtype], _compiled_size(size))
    return found if isinstance(found, str) else None


def code_path(dtype: torch.dtype, size: int = 0) -> Path | None:
    """The loaded library that steps small matrices of a type and size, or None."""
    library = _code("landing", SCALARS[dtype], _compiled_size(size)) if dtype in SCALARS else None
    return None if library is None else Path(library._name)


def all_below(limit: float, tensors: Sequence[Tensor]) -> bool:
    """Whether all entries are smaller than the limit in modulus, as far as compiled code can tell.

    On the CPU this waits for nothing and launches nothing. False if the tensors are elsewhere or
    of other types or layouts, or if there is no compiled code.
    """
    spans: dict[torch.dtype, list[int]] = {}  # struct Span of bounded.cpp, one after the other
    for tensor in tensors:
        dtype, numel = tensor.dtype, tensor.numel()
        start = address_if_plain(tensor, dtype, numel) if dtype in SCALARS else None
        if start is None:
            return False
        spans.setdefault(dtype, []).extend((start, numel))
    return all(_all_below(limit, dtype, members) for dtype, members in spans.items())


def _all_below(limit: float, dtype: torch.dtype, spans: list[int]) -> bool:
    library = _code("bounded", SCALARS[dtype], 0)
    if library is None:
        return False
    packed = array("q", spans)
    return bool(library.ortholand_all_below(packed.buffer_info()[0], len(spans) // 2, limit))


def _compiled_size(size: int) -> int:
    return size if size <= LANES_UP_TO else 0


def _code(source: str, scalar: str, size: int) -> ctypes.CDLL | None:
    found = _library(source, scalar, size)
    return None if isinstance(found, str) else found


@cache
def _library(source: str, scalar: str, size: int) -> ctypes.CDLL | str:
    """The compiled source for a type and size of matrix, or why there is none."""
    if os.environ.get("ORTHOLAND_NATIVE", "1") == "0":
        return SWITCHED_OFF
    try:
        library = load(source, scalar, size, tuple(SIGNATURES[source]))
    except NoCodeError as reason:
        log.info("No compiled code, torch's operations are used: %s", reason)
        return str(reason)
    for name, signature in SIGNATURES[source].items():
        getattr(library, name).argtypes = signature
        getattr(library, name).restype = RESULTS[name]
    return library
