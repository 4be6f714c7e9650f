"""Arithmetic in the types that a function asks for, whatever surrounds its call."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


@contextmanager
def without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """No automatic casts on the devices of these tensors.

    Automatic mixed precision is for networks. In a step it would round products to half
    precision, and hand compiled code matrices of another type than it was promised.
    """
    devices = {tensor.device.type for tensor in tensors}
    casting = [device for device in devices if torch.is_autocast_enabled(device)]
    with ExitStack() as stack:
        for device in casting:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
