"""What is compiled, and how: all that a wheel's build must know.

The build imports nothing of the package, so this has only the standard library, and
``hatch_build.py`` loads this file by its path.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PROCESSOR = "processor"  # says which of the others may be loaded, so it must run everywhere
SCALARS = ("float", "double")
# Columns of matrices side by side, compiled by size; 0 for all, and 16 for all in long vectors.
SIZES = (*range(9), 16)
SOURCES = {"ops": ("ops",), "steps": ("landing",), "search": ("../solve/methods/search",)}
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
OLDEST_TORCH = (2, 10)  # whose stable ABI has lists; code made with a newer one runs there too
# By machine: vector widths that a wheel has code for, with the compiler's name of each.
VECTORS: dict[str, tuple[str, ...]] = {
    "x86_64": ("x86-64", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("armv8-a",),
}
MANIFEST = "manifest.json"


class Unit(NamedTuple):
    """One library."""

    source: str  # of SOURCES: "ops" is the border to torch, which calls the "steps"
    scalar: str = ""  # type of the entries in C++; the border serves all
    size: int = 0  # of SIZES

    @property
    def name(self) -> str:
        """The library's name."""
        return f"{self.source}-{self.scalar}-{self.size}" if self.scalar else self.source

    @property
    def paths(self) -> list[Path]:
        """The sources."""
        return [FOLDER / f"{name}.cpp" for name in SOURCES[self.source]]

    def arguments(self, torch_headers: Path, torch_libraries: Path) -> list[str]:
        """A compiler's arguments besides the flags: definitions, sources, libraries."""
        sources = [str(path) for path in self.paths]
        if self.scalar:
            return [f"-DSCALAR={self.scalar}", f"-DSIZE={self.size}", *sources]
        major, minor = OLDEST_TORCH
        version = f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}"
        libraries = f"-L{torch_libraries}", "-Wl,--no-as-needed", "-ltorch_cpu"
        return [version, "-isystem", str(torch_headers), *sources, *libraries]


def units() -> Iterator[Unit]:
    """Everything to compile, except the processor query."""
    yield Unit("ops")
    for scalar in SCALARS:
        yield Unit("search", scalar)
        yield from (Unit("steps", scalar, size) for size in SIZES)


def portable_flags(vectors: str) -> list[str]:
    """Flags for a library that runs on every processor with these vectors, and on older systems."""
    return [f"-march={vectors}", "-s", "-include", str(FOLDER / "portable.h")]


def sources_seal() -> str:
    """The seal of all sources: prebuilt code is used only if it was made from these."""
    paths = sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"), *Unit("search").paths))
    return seal_of(b"".join(path.name.encode() + b"\n" + path.read_bytes() for path in paths))


def seal_of(content: bytes) -> str:
    """The content's length and hash."""
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n"
