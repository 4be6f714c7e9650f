"""docs/at_scale.md is true: its code runs on ranks, its tables come from the commands it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from building import run_page
from ranks import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "at_scale.md").read_text()


def at_scale(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "at_scale.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_code_of_the_page_runs():
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    for error in run(run_page, 2, block):
        assert error < 1e-4


def test_the_tables_on_paper_are_what_the_formulas_say():
    printed = at_scale("--predict")
    assert printed.returncode == 0, printed.stderr
    rows = [line for line in printed.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for row in rows:
        assert row in PAGE


@pytest.mark.slow_distributed
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_formulas_and_counts_agree(ranks):
    counted = at_scale("--small", "--ranks", ranks)
    assert counted.returncode == 0, counted.stdout + counted.stderr
    assert "formulas and counts agree" in counted.stdout
    assert counted.stdout.count("allreduce_") >= 3
