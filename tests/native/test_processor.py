"""Code for vectors that a processor does not have ends the process: none is ever picked."""

import platform
import shutil
import subprocess
import sys

import pytest

from ortholand.native import build
from ortholand.native.prebuilt import widest
from ortholand.native.recipe import FLAGS, FOLDER, VECTORS, portable_flags
from tests.native.conftest import needs_compiler

on_linux_x86 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="for Linux on x86-64"
)


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    """The compiled question, as wheels have it."""
    library = tmp_path_factory.mktemp("processor") / "processor.so"
    flags = [*FLAGS, *portable_flags("x86-64")]
    build._compile([build.compiler(), *flags, str(FOLDER / "processor.cpp")], library)
    return library


@on_linux_x86
@needs_compiler
def test_widths_are_those_that_wheels_have(question):
    assert widest(question) in VECTORS["x86_64"]


@on_linux_x86
@needs_compiler
def test_the_processor_has_what_the_compiler_finds_in_it(question):
    """GCC's own question, ``-march=native``, and ours."""
    command = [build.compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    level = widest(question)
    assert ("__AVX2__" in macros and "__BMI2__" in macros) == (level != "x86-64")
    assert ("__AVX512VL__" in macros) == (level == "x86-64-v4")


EMULATED = {
    "qemu64": "x86-64",
    "Nehalem": "x86-64",
    "SandyBridge": "x86-64",  # AVX without AVX2
    "Haswell": "x86-64-v3",
    "Haswell,-bmi2": "x86-64",
    "Haswell,-movbe": "x86-64",
    "Haswell,-xsave": "x86-64",  # AVX2, and a system that does not save its registers
    "EPYC": "x86-64-v3",
}
ASK = """
import ctypes, sys
ask = ctypes.CDLL(sys.argv[1]).ortholand_processor
ask.restype = ctypes.c_char_p
print(ask().decode())
"""


@on_linux_x86
@needs_compiler
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.thorough
def test_emulated_processors(question, name):
    """``/proc/cpuinfo`` is the host's there."""
    python = [sys._base_executable, "-c", ASK, str(question)]
    command = ["qemu-x86_64", "-cpu", name, *python]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [
        EMULATED[name]
    ]
