"""Loads compiled code as libraries, compiling it first if necessary.

Libraries that came with the package are used (:mod:`.prebuilt`). Otherwise each is compiled when it
is first needed, in seconds, and kept in the user's cache folder (:mod:`.safekeeping`).
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ortholand.native import prebuilt
from ortholand.native.recipe import FLAGS, FOLDER, OLDEST_TORCH, Unit
from ortholand.native.safekeeping import (
    ELSEWHERE,
    NoCodeError,
    is_sealed,
    own_folder,
    seal_path,
    write_seal,
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
Functions = Mapping[str, Any]  # names, with the types of results and arguments
NONE: Functions = {}
_too_slow: set[str] = set()  # the compilers that exceeded it in this process
LONGEST_COMPLAINT = 200  # characters of what a compiler says


def load(unit: Unit, functions: Functions) -> ctypes.CDLL:
    """A library that has some functions: prebuilt, cached, or compiled now; or NoCodeError."""
    found = prebuilt_library(unit, functions)
    if isinstance(found, ctypes.CDLL):
        return found
    if found:
        log.info("The code that came with the package is not used: %s", found)
    try:
        path = library_path(unit)
        return _kept(path, functions) or _made(unit, path, functions)
    except NoCodeError as error:
        raise NoCodeError(f"{found}; {error}" if found else str(error)) from error


def prebuilt_library(unit: Unit, functions: Functions = NONE) -> ctypes.CDLL | str | None:
    """The library that came with the package, or why it is not used; None if none came with it.

    Sanitizers need their own code.
    """
    if not prebuilt.FOLDER.is_dir() or _sanitizing():
        return None
    try:
        return _opened(prebuilt.library_path(unit), functions)
    except NoCodeError as reason:
        return str(reason)
    except (OSError, AttributeError) as error:
        return f"prebuilt code cannot be loaded: {error}"


def library_path(unit: Unit) -> Path:
    """Where a compiled unit is kept; the name identifies everything that goes into it."""
    identity = hashlib.sha256("\n".join([*compile_command(unit), _processor()]).encode())
    try:
        for path in (*unit.paths, *sorted(FOLDER.glob("*.h"))):
            identity.update(path.read_bytes())
    except OSError as error:
        raise NoCodeError(f"the sources cannot be read ({error}): install again") from error
    return own_folder() / f"{unit.name}-{identity.hexdigest()[:16]}.so"


def compile_command(unit: Unit) -> list[str]:
    """The compiler and its arguments, except the output."""
    folder = Path()
    if not unit.scalar:
        found, wanted = version("torch"), ".".join(map(str, OLDEST_TORCH))
        if tuple(map(int, found.split(".")[:2])) < OLDEST_TORCH:
            raise NoCodeError(f"compiled steps need torch {wanted} or newer, and this is {found}")
        spec = importlib.util.find_spec("torch")
        folder = Path(spec.origin or "").parent if spec else folder
    # Tuned for Zen, GCC breaks up chains of multiply-adds: tall steps take a quarter longer.
    machine = ["-march=native", "-mtune=generic"]
    if platform.machine() in ("arm64", "aarch64"):
        machine = ["-mcpu=native"]
    flags = *FLAGS, *machine, *_sanitize_flags()
    return [compiler(), *flags, *unit.arguments(folder / "include", folder / "lib")]


def _kept(path: Path, functions: Functions) -> ctypes.CDLL | None:
    """The library in the cache; None if there is none, or if it must be recompiled."""
    try:
        return _opened(path, functions) if is_sealed(path) else None
    except (OSError, AttributeError) as error:
        log.info("Compiling again, because %s is damaged: %s", path, error)
        return None


def _made(unit: Unit, path: Path, functions: Functions) -> ctypes.CDLL:
    """The library, compiled now and put into the cache."""
    _announce(path.parent)
    try:
        # Made elsewhere, then moved: other processes may be doing the same. It is loaded before
        # the move, so that nothing they do in the meantime can matter here.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _compile(compile_command(unit), made)
            made.chmod(0o700)
            write_seal(made)
            library = _opened(made, functions)
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
    log.info("Compiling for this processor, some seconds each; kept in %s", folder)


def _compile(command: Sequence[str], output: Path) -> None:
    """Run the compiler; one that exceeded its time once is not run again in this process."""
    # A sanitizer loaded into this process is not meant for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    too_slow = NoCodeError(f"the compiler took more than {COMPILE_SECONDS} s")
    if command[0] in _too_slow:
        raise too_slow
    try:
        # A pipe would stay open as long as a server that the compiler starts (ccache's).
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
    message = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    said = f"{program} gave {code}" + (f", {message.strip()}" if message else "")
    return said[:LONGEST_COMPLAINT]


def _opened(path: Path, functions: Functions) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def compiler() -> str:
    """The path of a C++ compiler."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoCodeError("no C++ compiler found (CXX, c++, g++, clang++)")


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
