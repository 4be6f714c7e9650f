"""What a step does on a device: counted on meta tensors, where every operation is one launch."""

import math
import weakref
from collections import Counter
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortholand.geometry import matrices

# What launches nothing: views, memory, and what torch records around a step.
VIEWS = (
    "view",
    "_unsafe_view",
    "reshape",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "diagonal",
    "split",
    "split_with_sizes",
    "slice",
    "select",
    "unbind",
    "detach",
    "alias",
    "permute",
    "t",
    "_conj",
    "real",
    "view_as_real",
    "lift_fresh",
    "empty",
    "empty_like",
    "new_empty",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
)
PRODUCTS = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_")
READS = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Counted(TorchDispatchMode):
    """Launches, multiplications in products, host reads, and the peak of memory in bytes."""

    def __init__(self):
        super().__init__()
        self.names, self.work, self.reads = Counter(), 0, []
        self.alive, self.bytes, self.peak, self.before = {}, 0, 0, 0

    def note(self, tensor):
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()

        def free(_):
            self.bytes -= size
            del self.alive[key]

        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, free)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in READS:
            self.reads.append(name)
        if name in PRODUCTS:
            A, B = args[1:3] if "add" in name else args[:2]
            self.work += math.prod(A.shape) * B.shape[-1]
        if name not in VIEWS:
            self.names[name] += 1
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        return out

    @property
    def temporary(self):
        """The peak of the memory that was not there before."""
        return self.peak - self.before

    @property
    def launches(self):
        return sum(self.names.values())


def states(optimizer):
    """All tensors that the state of an optimizer consists of."""
    return [value for state in optimizer.state.values() for value in state.values()]


# The library keeps few identities, and earlier tests may have filled the room for them.
@mock.patch.dict(matrices._identities, clear=True)
def counted(make, shapes, steps=2, **options):
    """What the last of some steps does on weights of these shapes."""
    weights = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimizer = make(weights, **options)
    optimizer._awaits_values = False
    for _ in range(steps - 1):
        optimizer.step()
    with Counted() as counts:
        for tensor in (*weights, *(weight.grad for weight in weights), *states(optimizer)):
            counts.note(tensor)
        counts.before = counts.bytes
        optimizer.step()
    return counts


def products(make, n, p, **options):
    """Multiplications of a step of an n x p matrix, in units of n p^2."""
    return counted(make, [(n, p)], **options).work / (n * p * p)
