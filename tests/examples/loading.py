"""Examples are scripts: they are loaded from their place, as python does that runs them."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"


def load_example(name, *beside):
    """An example as a module, after what it imports from beside it."""
    for each in (*beside, name):
        if each not in sys.modules:
            spec = spec_from_file_location(each, FOLDER / f"{each}.py")
            sys.modules[each] = module_from_spec(spec)  # before: dataclasses look it up there
            spec.loader.exec_module(sys.modules[each])
    return sys.modules[name]
