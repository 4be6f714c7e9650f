"""What a bug report needs to say about an installation."""

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from textwrap import TextWrapper

import torch

import ortholand
from ortholand.native import build, code_path, library_folder, prebuilt, why_no_code
from ortholand.native.recipe import Unit

CPUINFO = Path("/proc/cpuinfo")


def facts() -> dict[str, str]:
    """Versions, machine, compiled code or why there is none; requests code as a step would.

    It contains neither the user's name nor the machine's, except where paths do.

    Example:
        >>> from ortholand.about import facts
        >>> facts()["torch"] == torch.__version__
        True
    """
    return {
        "ortholand": ortholand.__version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": f"{torch.get_num_threads()} of torch, {os.cpu_count()} processors",
        "torch's vectors": torch.backends.cpu.get_cpu_capability(),
        "compiled code": _compiled_code(),
        "cache folder": _cache_folder(),
    }


def table() -> str:
    """The facts, one per line, wrapped at the width that $COLUMNS gives."""
    known = facts()
    margin = max(map(len, known)) + 2
    width = asked_width()
    # Words are never broken: text copied into a report must be searchable, paths above all.
    width = max(width, margin + 1) if width else sys.maxsize
    unbroken = {"break_long_words": False, "break_on_hyphens": False}
    wrap = TextWrapper(width, subsequent_indent=margin * " ", **unbroken)
    return "\n".join(wrap.fill(f"{name:<{margin}}{value}") for name, value in known.items())


def asked_width() -> int | None:
    """The width that $COLUMNS gives, if any."""
    width = os.environ.get("COLUMNS", "")
    return int(width) if width.isdecimal() and int(width) > 0 else None


def _processor() -> str:
    """The processor's name; on Linux only the system has it, not Python."""
    with suppress(OSError, UnicodeDecodeError):
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name") and (name := line.partition(":")[2].strip()):
                return name
    return platform.processor() or platform.machine()


def _compiled_code() -> str:
    """Which code small matrices use, and its origin; one size stands for all."""
    path = code_path(torch.float32)
    if path is None:
        return f"none, torch's operations step: {why_no_code(torch.float32)}"
    if path.is_relative_to(prebuilt.FOLDER):
        return f"prebuilt for {path.parent.name}, by {prebuilt.made_by()}"
    why_not = build.prebuilt_library(Unit("steps", "float"))
    made = f"made here by {build.compiler()} for this processor"
    return f"{made}; {why_not}" if why_not else made


def _cache_folder() -> str:
    try:
        return str(library_folder())
    except RuntimeError as error:
        return f"none: {error}"
