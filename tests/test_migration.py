"""docs/migrate.md: before and after arrive at the same place."""

import re
from pathlib import Path

import pytest
import torch

# Peers and what they import warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAGE = (Path(__file__).parent.parent / "docs" / "migrate.md").read_text()
LIBRARIES = {
    "geoopt": "geoopt",
    "geotorch and torch's parametrizations": "torch",
    "POGO": "pogo",
    "pymanopt": "pymanopt",
}


def blocks(heading: str) -> tuple[str, str]:
    """The code before and after the move, of one section of the page.

    POGO's task is that of the parametrizations, with the same script after the move.
    """
    after = "geotorch and torch's parametrizations" if heading == "POGO" else heading
    return tuple(
        re.search(rf"^## {section}\n.*?^```{mark}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
        for section, mark in ((heading, "py"), (after, "python"))
    )


def test_every_section_is_tested():
    assert re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE) == list(LIBRARIES)


@pytest.mark.parametrize("heading", LIBRARIES)
def test_before_and_after_arrive_at_the_same_place(heading):
    pytest.importorskip(LIBRARIES[heading])
    before, after = ({}, {})
    for code, namespace in zip(blocks(heading), (before, after), strict=True):
        torch.manual_seed(0)
        exec(compile(code, "docs/migrate.md", "exec"), namespace)
    loss, loss_before = (torch.as_tensor(run["loss"]).item() for run in (after, before))
    assert abs(loss - loss_before) < 0.01 * max(1.0, abs(loss_before))
    assert after["error"] < 1e-4
    assert after["error"] <= max(before["error"], 1e-5)


def test_geotorch_is_what_the_comment_says():
    geotorch = pytest.importorskip("geotorch")
    code = blocks("geotorch and torch's parametrizations")[0]
    assert 'geotorch.orthogonal(model, "weight")' in code
    code = code.replace("orthogonal(model)", 'geotorch.orthogonal(model, "weight")')
    namespace = {"geotorch": geotorch}
    exec(compile(code, "docs/migrate.md", "exec"), namespace)
    assert namespace["error"] < 1e-4
    assert namespace["loss"].item() < 0.01
