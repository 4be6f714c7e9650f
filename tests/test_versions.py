"""What is promised of versions is what is tested: in metadata, pins, linter and workflow."""

import re
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata("ortholand").get_all("Classifier")))
REQUIRED = [Requirement(r) for name in ("ortholand", "ortholand-lab") for r in requires(name)]
NEEDED = [r for r in REQUIRED if not r.marker and r.name != "ortholand"]  # without extras


def pins(name, python):
    """Versions by package that a file of constraints pins for a version of Python."""
    lines = (ROOT / name).read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = [r for r in pinned if not r.marker or r.marker.evaluate({"python_version": python})]
    versions = {r.name: str(r.specifier).removeprefix("==") for r in pinned}
    assert len(versions) == len(pinned)  # none twice
    return versions


def test_every_oldest_version_is_pinned():
    oldest = pins("constraints-oldest.txt", PYTHONS[0])
    assert {r.name for r in NEEDED} >= {"torch", "numpy", "scipy", "matplotlib"}
    for requirement in NEEDED:
        floor = str(requirement.specifier).removeprefix(">=")
        assert Version(oldest[requirement.name]) == Version(floor), requirement.name


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_has_pins_that_are_allowed(python):
    pinned = pins("constraints.txt", python)
    for requirement in NEEDED:
        assert requirement.specifier.contains(pinned[requirement.name]), requirement.name
    assert pinned.keys() == pins("constraints.txt", PYTHONS[-1]).keys()


def test_the_workflow_and_the_linter_know_these_pythons():
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    assert f"python: {PYTHONS}".replace("'", '"') in workflow
    for name in ("ortholand", "ortholand-lab"):
        assert metadata(name)["Requires-Python"] == f">={PYTHONS[0]}"
    target = "py" + PYTHONS[0].replace(".", "")
    assert f'target-version = "{target}"' in (ROOT / "pyproject.toml").read_text()
