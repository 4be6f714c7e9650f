"""Which vector instructions the processor itself reports, and so which code may be loaded.

Code for wider vectors ends the process (SIGILL). Neither the name of a processor nor
``/proc/cpuinfo`` is enough: emulators and containers may show the host's. So a small library that
runs everywhere queries CPUID, and XGETBV, which says whether the operating system saves
the wide registers.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

# (register, bit) as processor.cpp gives them: CPUID 1 ECX, CPUID 7 EBX, CPUID 0x80000001 ECX, XCR0.
SSE42_GENERATION = {  # x86-64-v2
    "sse3": (0, 0),
    "ssse3": (0, 9),
    "cx16": (0, 13),
    "sse4_1": (0, 19),
    "sse4_2": (0, 20),
    "popcnt": (0, 23),
    "lahf_lm": (2, 0),
}
AVX2_GENERATION = {
    **SSE42_GENERATION,
    "fma": (0, 12),
    "movbe": (0, 22),
    "osxsave": (0, 27),
    "avx": (0, 28),
    "f16c": (0, 29),
    "bmi1": (1, 3),
    "avx2": (1, 5),
    "bmi2": (1, 8),
    "lzcnt": (2, 5),
    "saved xmm": (3, 1),
    "saved ymm": (3, 2),
}
AVX512_GENERATION = {
    **AVX2_GENERATION,
    "avx512f": (1, 16),
    "avx512dq": (1, 17),
    "avx512cd": (1, 28),
    "avx512bw": (1, 30),
    "avx512vl": (1, 31),
    "saved masks": (3, 5),
    "saved upper zmm": (3, 6),
    "saved further zmm": (3, 7),
}
# Widest first; as compilers call them (the x86-64 psABI's micro-architecture levels).
NEEDED = {"x86-64-v4": AVX512_GENERATION, "x86-64-v3": AVX2_GENERATION, "x86-64": {}}


def widest(registers: Sequence[int]) -> str:
    """The widest vectors for which the processor has every feature that a compiler may use."""
    return next(
        level
        for level, needed in NEEDED.items()
        if all(registers[i] >> bit & 1 for i, bit in needed.values())
    )


def registers(library: Path) -> list[int]:
    """What the compiled ``processor.cpp`` reports here.

    Raises:
        OSError: if it cannot be loaded.
        AttributeError: if it is another library.
    """
    answer = (ctypes.c_uint32 * 4)()
    ask = ctypes.CDLL(str(library)).ortholand_processor
    ask.restype = None
    ask(answer)
    return list(answer)
