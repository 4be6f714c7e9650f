"""Libraries that came with the package, for several vector widths, as wheels for Linux have them.

They are in the package's own folder, which is as trustworthy as its Python code, so owners are not
checked. Still, a library is loaded only if it is what the manifest says, byte for byte: a
truncated one would end the process.
"""

import ctypes
import json
import platform
from pathlib import Path
from typing import NamedTuple

from ortholand.native.recipe import MANIFEST, PROCESSOR, VECTORS, Unit, seal_of, sources_seal
from ortholand.native.safekeeping import NoCodeError

FOLDER = Path(__file__).parent / "libraries"


class Manifest(NamedTuple):
    """What the libraries were when they were built."""

    machine: str
    compiler: str
    sources: str  # the seal of all
    seals: dict[str, str]  # by name in the folder


def library_path(unit: Unit) -> Path:
    """The library of a unit, checked, for the widest vectors that the processor has."""
    manifest = _manifest()
    vectors = VECTORS[manifest.machine][0]
    if len(VECTORS[manifest.machine]) > 1:
        vectors = widest(_checked(f"{PROCESSOR}.so", manifest))
    return _checked(f"{vectors}/{unit.name}.so", manifest)


def made_by() -> str:
    """The compiler that made the libraries."""
    return _manifest().compiler


def _manifest() -> Manifest:
    """The manifest, after checking that it is for this machine and these sources."""
    try:
        read = Manifest(**json.loads((FOLDER / MANIFEST).read_bytes()))
        manifest, sources = read._replace(seals=dict(read.seals)), sources_seal()
    except (OSError, ValueError, TypeError) as error:
        raise NoCodeError(
            f"the manifest of prebuilt code cannot be read ({error}): install again"
        ) from error
    here = platform.machine()
    if manifest.machine != here or here not in VECTORS:
        raise NoCodeError(f"prebuilt code is for {manifest.machine}, not for {here}")
    if manifest.sources != sources:
        raise NoCodeError("prebuilt code was made from other sources: install again")
    return manifest


def widest(question: Path) -> str:
    """The widest vectors that the processor has, by the compiled ``processor.cpp``."""
    ask = ctypes.CDLL(str(question)).ortholand_processor
    ask.restype = ctypes.c_char_p
    return ask().decode()


def _checked(name: str, manifest: Manifest) -> Path:
    path = FOLDER / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NoCodeError(f"prebuilt code cannot be read ({error}): install again") from error
    if manifest.seals.get(name) != seal_of(content):
        raise NoCodeError(f"the prebuilt {path} is damaged: install again")
    return path
