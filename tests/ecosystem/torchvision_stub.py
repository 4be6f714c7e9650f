"""What stands in for torchvision while timm is imported, where no torchvision can be.

PyPI's torchvision is compiled for a torch with CUDA, and beside another build its import fails, for
timm and for transformers. timm's models and optimizers use none of what is imported here.
"""

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from torch import nn


class _Named(type):
    """Classes whose members are their own names, as those of an enumeration."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (nn.Module,), {})


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def torchvision_or_a_stub():
    """The installed torchvision, or the stub, which leaves no trace."""
    if find_spec("torchvision") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
