"""Arithmetic in the types that a function asks for, whatever context it is called in."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()
# A quick answer for the common case, where this torch has one.
_is_any_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def without_autocast(
    tensors: Iterable[Tensor] | Callable[[], Iterable[Tensor]],
) -> AbstractContextManager[object]:
    """A context without automatic casts on the devices of some tensors: they are for networks."""
    if not torch.compiler.is_compiling() and not _is_any_enabled():
        return _NOTHING
    found = tensors() if callable(tensors) else tensors
    devices = {tensor.device.type for tensor in found}
    casting = [device for device in devices if torch.is_autocast_enabled(device)]
    if not casting:
        return _NOTHING
    stack = ExitStack()
    for device in casting:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
