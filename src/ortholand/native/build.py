"""Loads the C++ sources of this folder as libraries, compiling them first if necessary.

Libraries that came with the package are used (:mod:`.prebuilt`). Otherwise each is compiled when a
type and size of matrix first needs it, in a second or two, and kept in the user's cache folder for
later runs (:mod:`.safekeeping`).
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ortholand.native import prebuilt
from ortholand.native.prebuilt import PrebuiltError
from ortholand.native.recipe import FLAGS, Unit, definitions
from ortholand.native.recipe import SOURCES as FOLDER
from ortholand.native.safekeeping import (
    ELSEWHERE,
    NoCodeError,
    is_sealed,
    own_folder,
    seal_of,
    seal_path,
)

log = logging.getLogger(__name__)

SANITIZE_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",  # only line numbers for the report: this halves the compilation time
    "-O1",
)
COMPILE_SECONDS = 120
_too_slow: set[str] = set()  # the compilers that exceeded it in this process
LONGEST_COMPLAINT = 200  # characters of what a compiler says


def load(source: str, scalar: str, size: int, symbols: Sequence[str]) -> ctypes.CDLL:
    """The compiled source for a type and size of matrix: prebuilt, cached, or compiled now.

    Args:
        source: the file's name without ``.cpp``.
        scalar: type of the entries in C++.
        size: rows of the matrices if they are compiled by size, else 0.
        symbols: functions that it must have.

    Raises:
        NoCodeError: if no code can be had here.
    """
    unit = Unit(source, scalar, size)
    try:
        library = _prebuilt(unit, symbols)
        return _compiled(unit, symbols) if library is None else library
    except PrebuiltError as why_not:
        log.info("The code that came with the package is not used: %s", why_not)
        try:
            return _compiled(unit, symbols)
        except NoCodeError as error:
            raise NoCodeError(f"{why_not}; {error}") from error


def why_not_prebuilt(source: str, scalar: str, size: int) -> str | None:
    """Why code that came with the package is not used; None if it is, or if there is none."""
    try:
        _prebuilt(Unit(source, scalar, size), ())
    except PrebuiltError as reason:
        return str(reason)
    return None


def _prebuilt(unit: Unit, symbols: Sequence[str]) -> ctypes.CDLL | None:
    """The library that came with the package; None if none did, or if sanitizers need their own.

    Raises:
        PrebuiltError: if it cannot be used.
    """
    if _sanitizing() or not prebuilt.is_there():
        return None
    try:
        return _opened(prebuilt.library_path(unit), symbols)
    except (OSError, AttributeError) as error:
        raise PrebuiltError(f"prebuilt code cannot be loaded: {error}") from error


def _compiled(unit: Unit, symbols: Sequence[str]) -> ctypes.CDLL:
    try:
        path = library_path(*unit)
    except OSError as error:
        raise NoCodeError(f"the sources cannot be read ({error}): install again") from error
    kept = _kept(path, symbols)
    return _made(unit, path, symbols) if kept is None else kept


def library_path(source: str, scalar: str, size: int) -> Path:
    """Where the compiled source is kept; the name identifies everything that goes into it."""
    identity = hashlib.sha256("\n".join([*compile_command(scalar, size), _processor()]).encode())
    for path in (FOLDER / f"{source}.cpp", *sorted(FOLDER.glob("*.h"))):
        identity.update(path.read_bytes())
    return own_folder() / f"{Unit(source, scalar, size).name}-{identity.hexdigest()[:16]}.so"


def compile_command(scalar: str, size: int) -> list[str]:
    """The compiler and its flags."""
    flags = *FLAGS, *_machine_flags(), *_sanitize_flags()
    return [compiler(), *flags, *definitions(scalar, size)]


def _kept(path: Path, symbols: Sequence[str]) -> ctypes.CDLL | None:
    """The library in the cache; None if there is none, or if it must be recompiled."""
    try:
        return _opened(path, symbols) if is_sealed(path) else None
    except (OSError, AttributeError) as error:
        log.info("Compiling again, because %s is damaged: %s", path, error)
        return None


def _made(unit: Unit, path: Path, symbols: Sequence[str]) -> ctypes.CDLL:
    """The library, compiled now and put into the cache."""
    _announce(path.parent)
    try:
        # Made elsewhere, then moved: other processes may be doing the same. It is loaded before
        # the move, so that nothing they do in the meantime can matter here.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = compile_command(unit.scalar, unit.size)
            _compile([*command, str(FOLDER / f"{unit.source}.cpp")], made)
            made.chmod(0o700)
            _write_seal(made)
            library = _opened(made, symbols)
            made.replace(path)
            seal_path(made).replace(seal_path(path))
            return library
    except AttributeError as error:
        raise NoCodeError(f"the compiled library lacks a function: {error}") from error
    except OSError as error:
        raise NoCodeError(
            f"no library can be made in {path.parent} ({error}): {ELSEWHERE}"
        ) from error


@cache
def _announce(folder: Path) -> None:
    """Log, once per process, why a few seconds pass."""
    log.info("Compiling for this processor, a second or two each; kept in %s", folder)


def _compile(command: Sequence[str], output: Path) -> None:
    """Run the compiler; one that exceeded its time once is not run again in this process."""
    # A sanitizer loaded into this process is not meant for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    too_slow = NoCodeError(f"the compiler took more than {COMPILE_SECONDS} s")
    if command[0] in _too_slow:
        raise too_slow
    try:
        # Not a pipe: a server that the compiler starts (ccache's) would keep it open.
        with tempfile.TemporaryFile() as said:
            code = _run([*command, "-o", str(output)], stderr=said, env=environment)
            said.seek(0)
            complaints = said.read()
    except subprocess.TimeoutExpired as error:
        _too_slow.add(command[0])
        raise too_slow from error
    except OSError as error:
        raise NoCodeError(f"the compiler cannot be run: {error}") from error
    if code:
        raise NoCodeError(f"the compiler failed: {_complaint(command[0], code, complaints)}")


def _run(command: Sequence[str], **options: Any) -> int:
    """The exit code of a program; if it is not waited for to the end, its children end too."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=nothing, stdout=nothing, start_new_session=True, **options
    )
    try:
        return process.wait(COMPILE_SECONDS)
    except BaseException:
        with suppress(OSError):  # it may just have ended
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()
        raise


def _complaint(program: str, code: int, output: bytes) -> str:
    """The first error that a compiler reported, shortened."""
    lines = output.decode(errors="replace").strip().splitlines()
    told = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    said = f"{program} gave {code}" + (f", {told.strip()}" if told else "")
    return said[:LONGEST_COMPLAINT]


def _write_seal(library: Path) -> None:
    seal = seal_path(library)
    seal.touch(mode=0o600)
    seal.write_text(seal_of(library.read_bytes()))


def _opened(path: Path, symbols: Sequence[str]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for symbol in symbols:
        getattr(library, symbol)
    return library


def compiler() -> str:
    """The path of a C++ compiler.

    Raises:
        NoCodeError: if there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoCodeError("no C++ compiler found (CXX, c++, g++, clang++)")


def _machine_flags() -> tuple[str, ...]:
    if platform.machine() in ("arm64", "aarch64"):
        return ("-mcpu=native",)
    # Tuned for Zen, GCC breaks up chains of multiply-adds: tall steps take a quarter longer.
    return ("-march=native", "-mtune=generic")


def _sanitize_flags() -> tuple[str, ...]:
    """Flags of ``make sanitize``, with which invalid memory accesses end the process."""
    if not _sanitizing():
        return ()
    # Loading such code without the sanitizer's own library would end the process.
    if not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise NoCodeError("ORTHOLAND_SANITIZE=1 needs libasan in LD_PRELOAD: run make sanitize")
    return SANITIZE_FLAGS


def _sanitizing() -> bool:
    return os.environ.get("ORTHOLAND_SANITIZE", "0") == "1"


def _processor() -> str:
    """What code for "native" depends on: a cache folder may be shared between machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
