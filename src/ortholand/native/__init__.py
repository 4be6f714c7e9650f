"""Compiled code for the CPU: steps of matrices with up to 128 columns, and what a solver adds.

This code is optional: without it the optimizers use torch's operations, with the same results up
to rounding. Small matrices are then slower, because a step of many operations mostly pays for
launches rather than arithmetic.

torch calls it as ``torch.ops.ortholand``: ``ops.cpp`` checks everything that it is given before
anything is moved. Wheels for Linux come with the libraries (:mod:`.prebuilt`). Elsewhere they are
compiled when they are first needed, and kept in the user's cache folder (:mod:`.build`).
``ORTHOLAND_NATIVE=0`` switches all this off. :func:`why_no_code` says why there is no code.
"""

import ctypes
import itertools
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ortholand.native.build import load
from ortholand.native.recipe import Unit
from ortholand.native.safekeeping import NoCodeError, library_folder

__all__ = [
    "LARGEST_SIZE",
    "PLAIN_TYPES",
    "SCALARS",
    "add_kernels",
    "all_below",
    "code_path",
    "forget",
    "library",
    "library_folder",
    "operations",
    "why_no_code",
]

log = logging.getLogger(__name__)

LARGEST_SIZE = 128  # columns, as in tiles.h
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))  # subclasses may have no memory of their own
SCALARS = {torch.float32: "float", torch.float64: "double"}
SWITCHED_OFF = "switched off by ORTHOLAND_NATIVE=0"

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
# By source: functions, with the types of results and arguments. Of steps only addresses are taken.
# The solver adds its own (solve/methods/search.py).
SIGNATURES: dict[str, dict[str, Any]] = {
    "ops": {
        "ortholand_register": (_INT, ctypes.c_char_p),
        "ortholand_add_kernels": (None, _INT, _INT, _POINTER),
    },
    "steps": {"ortholand_landing": (None,)},
}


def operations() -> Any:
    """The operations of ``ops.cpp``, as torch has registered them; None where there are none."""
    found = _operations()
    return None if isinstance(found, str) else found


def add_kernels(dtype: torch.dtype, columns: int) -> None:
    """Give the operations the code for a type of matrix, of a size (:data:`.recipe.SIZES`).

    If there is none, they will know, and not ask again.
    """
    border, kernels = library(Unit("ops")), library(Unit("steps", SCALARS[dtype], columns))
    step: Any = None if isinstance(kernels, str) else kernels.ortholand_landing
    if not isinstance(border, str):
        border.ortholand_add_kernels(dtype is torch.float64, columns, ctypes.cast(step, _POINTER))


def why_no_code(dtype: torch.dtype, size: int = 0, columns: int | None = None) -> str | None:
    """Why no compiled code steps matrices of a type and size; None if some does.

    ``size`` is the number of rows, or 0 for any; without ``columns`` the matrix is square.
    """
    if dtype not in SCALARS:
        name = str(dtype).removeprefix("torch.")
        return f"{name} is not compiled: float32 and float64 are"
    if (size if columns is None else columns) > LARGEST_SIZE:
        return f"more than {LARGEST_SIZE} columns, where torch's products are as fast"
    for found in (_operations(), library(Unit("steps", SCALARS[dtype]))):
        if isinstance(found, str):
            return found
    return None


def code_path(dtype: torch.dtype) -> Path | None:
    """The library that steps matrices of a type, or None."""
    found = "" if why_no_code(dtype) else library(Unit("steps", SCALARS[dtype]))
    return None if isinstance(found, str) else Path(found._name)


def all_below(limit: float, tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
    """Whether all entries are smaller than the limit in modulus, as far as compiled code can tell.

    And whether others, as many or a multiple, are of the types, shapes and strides of ``tensors``.
    On the CPU this waits for nothing and launches nothing. False if the tensors are elsewhere or
    of other types or layouts, or if there is no compiled code.
    """
    if not PLAIN_TYPES.issuperset(map(type, (*tensors, *others))) or operations() is None:
        return False
    try:
        return not tensors or operations().all_below(tensors, limit, others)
    except RuntimeError:  # on no device of ours, or shown by a transform
        return False


@cache
def library(unit: Unit) -> ctypes.CDLL | str:
    """A library of compiled code, or why there is none."""
    if os.environ.get("ORTHOLAND_NATIVE", "1") == "0":
        return SWITCHED_OFF
    try:
        return load(unit, SIGNATURES.get(unit.source, {}))
    except NoCodeError as reason:
        log.info("No compiled code, torch's operations are used: %s", reason)
        return str(reason)


def forget() -> None:
    """Look again for all libraries when they are next needed, as if nothing were loaded."""
    library.cache_clear()
    _operations.cache_clear()


_spaces = itertools.count()  # a library that is loaded again, from elsewhere, is another one
_named: dict[str, Any] = {}  # operations by the library's path


@cache
def _operations() -> Any:
    """The operations, registered with torch when they are first needed, or why there are none."""
    border = library(Unit("ops"))
    if isinstance(border, str):
        return border
    if border._name not in _named:
        space = "ortholand" + (str(number) if (number := next(_spaces)) else "")
        if border.ortholand_register(space.encode()):
            return "torch refused the compiled operations, see its messages"
        # There is nothing for autograd: its own fallback takes as long as a small step.
        autograd = torch.library.Library(space, "IMPL")
        for name in ("landing_step", "all_below"):
            autograd.impl(name, torch.library.fallthrough_kernel, "AutogradCPU")
        found = getattr(torch.ops, space)
        # Looked up once: torch takes a microsecond for that.
        _named[border._name] = SimpleNamespace(
            landing_step=found.landing_step.default,
            all_below=found.all_below.default,
            autograd=autograd,  # kept: it would take that back otherwise
        )
    return _named[border._name]
