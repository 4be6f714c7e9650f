"""An empty cache of compiled code, for tests that fill it or break it; what builds wheels."""

import ctypes
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from ortholand import native
from ortholand.native import recipe
from ortholand.native.recipe import Unit

needs_compiler = pytest.mark.skipif(
    native.why_no_code(torch.float32) is not None, reason="no C++ compiler"
)


QUICK = Unit(recipe.PROCESSOR, "float")  # the quickest to compile


@pytest.fixture
def quick_source(monkeypatch):
    """The processor query as a unit like the others."""
    monkeypatch.setitem(recipe.SOURCES, QUICK.source, (recipe.PROCESSOR,))
    functions = {"ortholand_processor": (ctypes.c_char_p,)}
    monkeypatch.setitem(native.SIGNATURES, QUICK.source, functions)


def answers(library):
    """Whether it is the processor query, and works."""
    return not isinstance(library, str) and bool(library.ortholand_processor())


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no compiled code in memory."""
    monkeypatch.setenv("ORTHOLAND_CACHE", str(tmp_path))
    monkeypatch.delenv("ORTHOLAND_NATIVE", raising=False)
    native.forget()
    yield tmp_path / "native"
    native.forget()


@pytest.fixture(scope="session")
def hook():
    """``hatch_build.py``. Of hatchling it takes a base class, with two attributes."""
    path = Path(__file__).parents[2] / "hatch_build.py"
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = type("BuildHookInterface", (), {})
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, interface.__name__, interface)
        spec.loader.exec_module(module)
    return module
