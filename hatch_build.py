"""Builds wheels: pure ones, or with compiled code where ``ORTHOLAND_PREBUILT`` asks for it.

Compiling needs torch's headers: ``ORTHOLAND_TORCH`` names the folder of an installed torch, if this
Python has none. Its libraries are not needed, only the name of one.

``ORTHOLAND_PREBUILT=1`` compiles for this machine, ``ORTHOLAND_PREBUILT=aarch64`` for that one, by
a cross compiler. Nothing is compiled for an editable installation, nor for a wheel that pip makes
of a clone: there the compiler is used when code is first needed, for the very processor.
"""

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/ortholand/native")
# PEP 600's manylinux_2_28, which torch's own wheels have: newest versions of symbols.
MANYLINUX = "manylinux_2_28"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# And no libraries but these; torch's is there before any of ours.
TORCH = "libtorch_cpu.so"
ALLOWED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", TORCH}
LOADER = re.compile(r"ld-linux-[\w-]+\.so\.\d")


class PrebuiltHook(BuildHookInterface):
    """Puts libraries into a wheel, and the platform into its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if that was asked for: ``build_data``, what the wheel will have, is changed."""
        wanted = os.environ.get("ORTHOLAND_PREBUILT", "0")
        if self.target_name != "wheel" or version == "editable" or wanted in ("", "0"):
            return
        machine = machine_for(wanted, platform.system(), platform.machine())
        recipe = load_recipe(Path(self.root) / NATIVE / "recipe.py")
        self._folder = tempfile.TemporaryDirectory()
        try:
            made = build_all(recipe, machine, Path(self._folder.name))
            tag = platform_tag(machine, made)
        except BaseException:
            self._folder.cleanup()
            raise
        for path in made:
            inside = path.relative_to(self._folder.name).as_posix()
            build_data["force_include"][str(path)] = f"ortholand/native/libraries/{inside}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was compiled: it is in the wheel."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def machine_for(wanted: str, system: str, here: str) -> str:
    """The machine to compile for."""
    machine = here if wanted == "1" else wanted
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise RuntimeError(
            "ORTHOLAND_PREBUILT must be 1, x86_64 or aarch64, on Linux; got "
            f"{wanted!r} on {system} {here}. Leave it out: a pure wheel works everywhere."
        )
    return machine


def load_recipe(path: Path) -> ModuleType:
    """The package's own module; not by importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_all(recipe: ModuleType, machine: str, folder: Path) -> list[Path]:
    """Compile everything for a machine; the libraries and their manifest."""
    compiler, headers = find_compiler(machine), find_headers()
    jobs = []
    if machine == "x86_64":
        flags = recipe.portable_flags(recipe.VECTORS[machine][0])
        source = recipe.FOLDER / f"{recipe.PROCESSOR}.cpp"
        jobs.append((folder / f"{recipe.PROCESSOR}.so", [*flags, str(source)]))
    with tempfile.TemporaryDirectory() as stub:
        # The name is all that is linked; torch's own library is for this machine only.
        name = f"-Wl,-soname,{TORCH}"
        run([*compiler, "-shared", name, "-x", "c++", "/dev/null", "-o", str(Path(stub) / TORCH)])
        for vectors in recipe.VECTORS[machine]:
            (folder / vectors).mkdir()
            flags = recipe.portable_flags(vectors)
            for unit in recipe.units():
                arguments = unit.arguments(headers, Path(stub))
                jobs.append((folder / vectors / f"{unit.name}.so", [*flags, *arguments]))
        commands = [[*compiler, *recipe.FLAGS, *rest, "-o", str(to)] for to, rest in jobs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
    libraries = [to for to, _ in jobs]
    return [*libraries, write_manifest(recipe, machine, compiler, folder, libraries)]


def find_headers() -> Path:
    """torch's headers."""
    named = os.environ.get("ORTHOLAND_TORCH")
    spec = None if named else importlib.util.find_spec("torch")
    folder = Path(named) if named else Path(spec.origin).parent if spec and spec.origin else Path()
    headers = folder / "include"
    if not (headers / "torch/csrc/stable/library.h").exists():
        raise RuntimeError(
            "ORTHOLAND_PREBUILT needs the headers of torch 2.10 or newer, and found none in "
            f"{headers}: name the folder of an installed torch in ORTHOLAND_TORCH, or leave "
            "ORTHOLAND_PREBUILT out for a pure wheel."
        )
    return headers


def find_compiler(machine: str) -> list[str]:
    """``CXX``, or GCC; for another machine its cross compiler."""
    cross = f"{machine}-linux-gnu-g++"
    names = ["g++", "c++", "clang++"] if machine == platform.machine() else [cross]
    for name in (os.environ.get("CXX"), *names):
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    raise RuntimeError(
        f"ORTHOLAND_PREBUILT needs a C++ compiler for {machine}, and found none of "
        f"{', '.join(names)}: install one, name it in CXX, or leave ORTHOLAND_PREBUILT out for a "
        "pure wheel."
    )


def run(command: list[str]) -> str:
    """What a program says; its complaint is the error's message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} gave {done.returncode}:\n{done.stderr}")
    return done.stdout


def write_manifest(
    recipe: ModuleType, machine: str, compiler: list[str], folder: Path, libraries: Iterable[Path]
) -> Path:
    """What the libraries are; nothing else is loaded."""
    manifest = {
        "machine": machine,
        "compiler": run([*compiler, "--version"]).splitlines()[0],
        "sources": recipe.sources_seal(),
        "seals": {
            path.relative_to(folder).as_posix(): recipe.seal_of(path.read_bytes())
            for path in libraries
        },
    }
    path = folder / recipe.MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return path


def platform_tag(machine: str, made: Iterable[Path]) -> str:
    """Where the libraries run, by the symbols and libraries that they ask for.

    ``linux_*``, which promises nothing and which PyPI refuses, if that is more than manylinux has.
    """
    headers = [run(["objdump", "-p", str(path)]) for path in made if path.suffix == ".so"]
    system = MANYLINUX if all(map(is_portable, headers)) else "linux"
    return f"{system}_{machine}"


def is_portable(headers: str) -> bool:
    """Whether a library with these headers (``objdump -p``) keeps manylinux's promise."""
    needed = re.findall(r"^\s*NEEDED\s+(\S+)", headers, flags=re.MULTILINE)
    versions = re.findall(r"^\s+0x\w+ 0x\w+ \d+ ([A-Z]+)_(\S+)", headers, flags=re.MULTILINE)
    return (
        "Dynamic Section:" in headers  # else nothing was read
        and all(name in ALLOWED or LOADER.fullmatch(name) for name in needed)
        and all(name in NEWEST and is_old(version, NEWEST[name]) for name, version in versions)
    )


def is_old(version: str, newest: tuple[int, ...]) -> bool:
    """Whether a version, as 2.2.5, is no newer than another one."""
    numbers = version.split(".")
    return all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) <= newest
