"""The border to compiled code: what a tensor must be for its address to leave Python.

Beyond it nothing is checked; a wrong address or length reads or overwrites other memory.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ortholand.native.layout import are_alike, is_dense

PLAIN_TYPES = frozenset((Tensor, nn.Parameter))  # subclasses may have no memory of their own
BYTES = {torch.float32: 4, torch.float64: 8, torch.int64: 8}  # what compiled code knows; all real


def address(tensor: Tensor, dtype: torch.dtype, numel: int) -> int:
    """The address of a tensor's numbers: ``numel`` of them, of that type, contiguous.

    Raises:
        TypeError: if they are of another type, or not in plain memory of the CPU.
        ValueError: if there are more or fewer, with gaps, marked as negated, or beyond their
            storage.
    """
    found = address_if_plain(tensor, dtype, numel)
    if found is None:
        raise _refusal(tensor, dtype, numel)
    return found


def address_if_plain(tensor: Tensor, dtype: torch.dtype, numel: int) -> int | None:
    """The address, or None where :func:`address` raises.

    A step takes 25 microseconds and calls this several times: hence a single condition, made of
    torch's fastest queries. (Non-strided layouts and vmap's tensors raise: they have no storage.)
    """
    try:
        if (
            type(tensor) in PLAIN_TYPES
            and tensor.is_cpu
            and tensor.dtype is dtype
            and tensor.numel() == numel
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes()
            >= (tensor.storage_offset() + numel) * BYTES[dtype]
        ):
            found = tensor.data_ptr()
            return found if found or not numel else None
    except (RuntimeError, KeyError):
        pass
    return None


_address_of, _first_byte = ctypes.addressof, ctypes.c_char.from_buffer


def array_address(array: Any, dtype: np.dtype, size: int) -> int:
    """Where the numbers of a NumPy array are: ``size`` of them, of that type, one after the other.

    Raises:
        TypeError: if it is no such array, or cannot be written to.
        ValueError: if there are more or fewer, or with gaps.
    """
    if type(array) is not np.ndarray or array.dtype != dtype:
        given = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"Compiled code takes NumPy arrays of {dtype}, got {given}.")
    if array.size != size or not array.flags.c_contiguous:
        raise ValueError(
            f"Compiled code takes {size} numbers that lie one after the other in memory, got "
            f"shape {array.shape} with strides {array.strides}: use np.ascontiguousarray."
        )
    buffer: Any = array
    return _address_of(_first_byte(buffer))  # refuses what is read-only


class Extent(NamedTuple):
    """What a tensor in plain memory must have besides its type."""

    shape: torch.Size
    numel: int

    @classmethod
    def of(cls, shape: torch.Size) -> "Extent":
        """The extent of a shape."""
        return cls(shape, shape.numel())


def addresses_if_plain(
    tensors: Sequence[Any], dtype: torch.dtype, extents: Sequence[Extent]
) -> list[int] | None:
    """:func:`address_if_plain` of several tensors, each of its shape; None if one has none.

    One call and one loop for a weight, its gradient and its state: most of a small step is this.
    """
    found = []
    try:
        size = BYTES[dtype]
        for tensor, (shape, numel) in zip(tensors, extents, strict=True):
            if not (
                type(tensor) in PLAIN_TYPES
                and tensor.is_cpu
                and tensor.dtype is dtype
                and tensor.shape == shape
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + numel) * size
            ):
                return None
            place = tensor.data_ptr()
            if not place and numel:
                return None
            found.append(place)
    except (RuntimeError, KeyError):
        return None
    return found


def address_if_dense(
    tensor: Tensor, dtype: torch.dtype, shape: torch.Size, strides: Sequence[int]
) -> int | None:
    """The address of numbers of that shape at these strides, in any order; else None."""
    try:
        numel = shape.numel()
        if (
            type(tensor) in PLAIN_TYPES
            and tensor.is_cpu
            and tensor.dtype is dtype
            and tensor.shape == shape
            and is_dense(shape, strides)
            and are_alike(shape, tensor.stride(), strides)
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes()
            >= (tensor.storage_offset() + numel) * BYTES[dtype]
        ):
            found = tensor.data_ptr()
            return found if found or not numel else None
    except (RuntimeError, KeyError):
        pass
    return None


def _refusal(tensor: Tensor, dtype: torch.dtype, numel: int) -> TypeError | ValueError:
    """The error: what is wrong, and how to put it right."""
    return _wrong_kind(tensor, dtype) or _wrong_memory(tensor, numel)


def _wrong_kind(tensor: Tensor, dtype: torch.dtype) -> TypeError | None:
    if type(tensor) not in PLAIN_TYPES:
        given, fix = f"a {type(tensor).__name__}", "step it by torch's operations"
    elif not tensor.is_cpu:
        given, fix = f"one on {tensor.device}", "step it by torch's operations"
    elif tensor.layout is not torch.strided:
        given, fix = f"one of layout {tensor.layout}", "use tensor.to_dense()"
    elif not _has_storage(tensor):
        given, fix = "one without memory of its own", "do not step inside torch.func transforms"
    elif dtype not in BYTES:
        given, fix = f"{dtype}", f"use one of {', '.join(map(str, BYTES))}"
    elif tensor.dtype is not dtype:
        given, fix = f"{tensor.dtype}", f"use tensor.to({dtype})"
    else:
        return None
    return TypeError(f"Compiled code takes plain CPU tensors of {dtype}, got {given}: {fix}.")


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except RuntimeError:
        return False
    return True


def _wrong_memory(tensor: Tensor, numel: int) -> ValueError:
    if tensor.numel() != numel:
        given = f"{tensor.numel()} (shape {tuple(tensor.shape)})"
        fix = "see that weight, gradient and state have one shape"
    elif not tensor.is_contiguous():
        given, fix = f"strides {tensor.stride()}", "use tensor.contiguous()"
    elif tensor.is_neg():
        given, fix = "one that is marked as negated", "use tensor.resolve_neg()"
    else:
        given = f"a storage of {tensor.untyped_storage().nbytes()} bytes"
        fix = "give it memory again, its storage was freed or made smaller"
    return ValueError(
        f"Compiled code takes {numel} numbers that lie one after the other in memory, "
        f"got {given}: {fix}."
    )
