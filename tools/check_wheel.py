"""Is an installed wheel what ``make wheel`` promises? Run by a Python that has nothing but it.

There is no compiler, no extra, and no source tree here: all code must come from the wheel, for all
types and sizes, step as torch's operations do, and write nothing anywhere.
"""

import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

NOWHERE = tempfile.mkdtemp()
os.environ |= {"PATH": NOWHERE, "HOME": NOWHERE, "ORTHOLAND_CACHE": NOWHERE}
os.environ.pop("CXX", None)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ortholand as ol  # noqa: E402
from ortholand import native  # noqa: E402
from ortholand.native import prebuilt, recipe  # noqa: E402

SIZES = (*range(1, 12), 40, 127, 128)
SHAPES = [*((5, size, size) for size in SIZES), (300, 20), (20, 300), (6, 9, 4)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def main() -> None:
    """Everything, for each vector width that this processor has."""
    torch.set_num_threads(1)
    check_package()
    here = prebuilt.library_path(recipe.Unit("steps", "float")).parent.name
    widths = recipe.VECTORS[platform.machine()]
    for vectors in widths[: widths.index(here) + 1]:
        prebuilt.widest = lambda _, vectors=vectors: vectors
        native.forget()
        check_code(vectors)
        errors = [check_steps(dtype) for dtype in TOLERANCE]
        print(f"{vectors}: all types and sizes; largest differences from torch's steps {errors}")
    left = list(Path(NOWHERE).rglob("*"))
    assert not left, f"written: {left}"
    check_command(here)
    Path(NOWHERE).rmdir()
    print("This processor gets", here)


def check_package() -> None:
    """The wheel holds the library alone, without extras and without a command."""
    assert "site-packages" in ol.__file__, ol.__file__
    wheel = distribution("ortholand")
    files = wheel.files or []
    assert any(path.name == recipe.MANIFEST for path in files)
    tops = {path.parts[0] for path in files}
    assert tops == {"ortholand", f"ortholand-{ol.__version__}.dist-info"}, tops
    assert not list(wheel.entry_points), wheel.entry_points
    for module in ("ortholand_lab", "typer", "rich", "matplotlib"):
        try:
            __import__(module)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{module} is installed: this is no empty environment")


def check_code(vectors: str) -> None:
    """Every library comes from the wheel."""
    for unit in recipe.units():
        found = native.library(unit)
        assert not isinstance(found, str), f"{unit}: {found}"
        assert Path(found._name).parent == prebuilt.FOLDER / vectors


def check_steps(dtype: torch.dtype) -> float:
    """Compiled steps are those of torch's operations; the largest difference between them."""
    worst = 0.0
    for shape in SHAPES:
        compiled, reference = (stepped(shape, dtype, fused) for fused in (True, False))
        difference = (compiled - reference).abs().max().item()
        assert difference < TOLERANCE[dtype], (shape, difference)
        worst = max(worst, difference)
    return worst


def stepped(shape: tuple[int, ...], dtype: torch.dtype, fused: bool) -> torch.Tensor:
    """A weight after five steps, some of which the ball shortens.

    Larger gradients would only compare how much each engine allows for rounding in float32.
    """
    generator = torch.Generator().manual_seed(1)
    X = nn.Parameter(ol.random_orthogonal(*shape, seed=0).to(dtype))
    optimizer = ol.LandingSGD([X], lr=0.1, momentum=0.9, view="kernel", fused=fused)
    for _ in range(5):
        X.grad = 0.3 * torch.randn(shape, generator=generator, dtype=dtype)
        if fused:
            (row,) = ol.explain(optimizer)
            assert row.engine == "compiled", row
        optimizer.step()
    return X.detach()


def check_command(vectors: str) -> None:
    """``python -m ortholand`` works without extras, and says where its other commands are."""
    command = [sys.executable, "-I", "-m", "ortholand"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"prebuilt for {vectors}" in said, said
    print(said)
    refused = subprocess.run([*command, "list"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1, refused.stdout
    assert "pip install ./lab" in refused.stderr, refused.stderr


if __name__ == "__main__":
    main()
