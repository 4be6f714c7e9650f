"""Code for vectors that a processor does not have ends the process: none is ever picked."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortholand.native import build, processor
from ortholand.native.processor import AVX2_GENERATION, AVX512_GENERATION, NEEDED, widest
from ortholand.native.recipe import FLAGS, FOLDER, VECTORS, portable_flags
from tests.native.conftest import needs_compiler

ALL = 2**32 - 1
on_linux_x86 = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="for Linux on x86-64"
)
# Where /proc/cpuinfo has another name for it; what it has no name for is not looked up.
CPUINFO = {"sse3": "pni", "lzcnt": "abm"}


def having(names):
    """The registers of a processor that has these features and no others."""
    registers = [0] * 4
    for name in names:
        register, bit = AVX512_GENERATION[name]
        registers[register] |= 1 << bit
    return registers


def test_all_and_nothing():
    assert widest([ALL] * 4) == "x86-64-v4"
    assert widest([0] * 4) == "x86-64"


def test_widths_are_those_that_wheels_have():
    assert sorted(NEEDED) == sorted(VECTORS["x86_64"])


def test_exactly_what_is_needed_is_enough():
    assert widest(having(AVX512_GENERATION)) == "x86-64-v4"
    assert widest(having(AVX2_GENERATION)) == "x86-64-v3"


@pytest.mark.parametrize("missing", AVX2_GENERATION)
def test_without_any_feature_of_avx2_s_generation_the_oldest(missing):
    assert widest(having(set(AVX512_GENERATION) - {missing})) == "x86-64"


@pytest.mark.parametrize("missing", sorted(set(AVX512_GENERATION) - set(AVX2_GENERATION)))
def test_without_any_feature_of_avx512_that_of_avx2(missing):
    assert widest(having(set(AVX512_GENERATION) - {missing})) == "x86-64-v3"


@pytest.mark.parametrize(
    ("saved", "level"),
    [(0, "x86-64"), (0b10, "x86-64"), (0b110, "x86-64-v3"), (0b1111, "x86-64-v3")]
    + [(0b111 | part << 5, "x86-64-v3") for part in (0b001, 0b011, 0b101, 0b110)]
    + [(0b11100111, "x86-64-v4"), (0b11100001, "x86-64"), (0b11100010, "x86-64")],
)
def test_registers_that_the_system_does_not_save_are_not_used(saved, level):
    assert widest([ALL, ALL, ALL, saved]) == level


@given(st.lists(st.integers(0, ALL), min_size=4, max_size=4))
def test_whatever_is_picked_is_there(registers):
    assert all(registers[i] >> bit & 1 for i, bit in NEEDED[widest(registers)].values())


@given(st.lists(st.integers(0, ALL), min_size=4, max_size=4), st.data())
def test_fewer_features_never_give_wider_vectors(registers, data):
    fewer = [r & data.draw(st.integers(0, ALL)) for r in registers]
    order = list(NEEDED)
    assert order.index(widest(fewer)) >= order.index(widest(registers))


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    """The compiled question, as wheels have it."""
    library = tmp_path_factory.mktemp("processor") / "processor.so"
    flags = [*FLAGS, *portable_flags("x86-64")]
    build._compile([build.compiler(), *flags, str(FOLDER / "processor.cpp")], library)
    return library


@pytest.fixture(scope="module")
def asked(question):
    return processor.registers(question)


@on_linux_x86
@needs_compiler
def test_the_processor_says_what_the_kernel_says(asked):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    for name, (register, bit) in AVX512_GENERATION.items():
        if not name.startswith(("saved", "osxsave")):
            assert (asked[register] >> bit & 1) == (CPUINFO.get(name, name) in flags), name


@on_linux_x86
@needs_compiler
def test_the_processor_has_what_the_compiler_finds_in_it(asked):
    """GCC's own question, ``-march=native``, and ours."""
    command = [build.compiler(), "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    level = widest(asked)
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
import runpy, sys
from pathlib import Path
names = runpy.run_path(sys.argv[1])
print(names["widest"](names["registers"](Path(sys.argv[2]))))
"""


@on_linux_x86
@needs_compiler
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_processors(question, name):
    """``/proc/cpuinfo`` is the host's there."""
    python = [sys._base_executable, "-c", ASK, processor.__file__, str(question)]
    command = ["qemu-x86_64", "-cpu", name, *python]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [
        EMULATED[name]
    ]
