"""What is compiled, and how: all that a wheel's build must know.

The build has no torch, so this imports only the standard library, and ``hatch_build.py`` loads this
file by its path.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent
PROCESSOR = "processor"  # says which of the others may be loaded, so it must run everywhere
SCALARS = ("float", "double")
LANES_UP_TO = 8  # matrices up to this size are computed side by side, and compiled by size
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
# By machine: vector widths that a wheel has code for, with the compiler's name of each.
VECTORS: dict[str, tuple[str, ...]] = {
    "x86_64": ("x86-64", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("armv8-a",),
}
MANIFEST = "manifest.json"


class Unit(NamedTuple):
    """One library: a source, compiled for a type and size."""

    source: str  # the file's name without .cpp
    scalar: str  # type of the entries in C++
    size: int  # rows of the matrices where they are compiled by size, else 0

    @property
    def name(self) -> str:
        """The library's name."""
        return "-".join(map(str, self))

    @property
    def path(self) -> Path:
        """The source."""
        return SOURCES / f"{self.source}.cpp"


def units() -> Iterator[Unit]:
    """Everything to compile, except the processor query."""
    for path in sorted(SOURCES.glob("*.cpp")):
        if path.stem != PROCESSOR:
            sizes = range(LANES_UP_TO + 1) if path.stem in ("landing", "tall") else (0,)
            yield from (Unit(path.stem, scalar, size) for scalar in SCALARS for size in sizes)


def definitions(scalar: str, size: int) -> list[str]:
    """The compiler flags that distinguish the units of a source."""
    return [f"-DSCALAR={scalar}", f"-DSIZE={size}"]


def portable_flags(vectors: str) -> list[str]:
    """Flags for a library that runs on every processor with these vectors, and on older systems."""
    return [f"-march={vectors}", "-s", "-include", str(SOURCES / "portable.h")]


def sources_seal() -> str:
    """The seal of all sources: prebuilt code is used only if it was made from these."""
    paths = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    return seal_of(b"".join(path.name.encode() + b"\n" + path.read_bytes() for path in paths))


def seal_of(content: bytes) -> str:
    """The content's length and hash."""
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n"
