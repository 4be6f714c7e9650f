"""Workflows are read, for want of their runners. A reader of YAML comes with the frameworks."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_can_be_read_and_names_what_exists(path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    assert workflow.keys() <= {
        "name",
        True,
        "permissions",
        "concurrency",
        "env",
        "jobs",
    }  # True: on
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        matrix = job.get("strategy", {}).get("matrix", {})
        text = yaml.safe_dump(job)
        assert set(re.findall(r"matrix\.(\w+)", text)) <= matrix.keys()
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert len(step.keys() & {"run", "uses"}) == 1
            assert re.fullmatch(r"[\w/-]+@[\w/.]+", step.get("uses", "a@v1"))
            for line in step.get("run", "").splitlines():
                if line.startswith("make "):
                    assert set(line.split()[1:]) <= set(targets)
                for place in re.findall(r"(?:tests|src)/[\w./*]*|\./?lab", line):
                    assert list(ROOT.glob(place)), place
            for line in step.get("with", {}).get("cache-dependency-path", "").split():
                assert (ROOT / line).exists()


def test_the_platforms_are_those_of_the_metadata():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "platforms.yml").read_text())
    systems = workflow["jobs"]["tests"]["strategy"]["matrix"]["system"]
    classifiers = (ROOT / "pyproject.toml").read_text()
    named = {"macos-latest": "MacOS", "windows-latest": "Microsoft :: Windows"}
    assert systems == list(named)
    assert all(f"Operating System :: {named[system]}" in classifiers for system in systems)
    assert workflow["env"]["ORTHOLAND_NATIVE"] == "0"
