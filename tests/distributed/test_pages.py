"""What docs/at_scale.md shows runs on ranks. Tables: tests/lab/benchmarks."""

import re
from pathlib import Path

from tests.distributed.building import run_page
from tests.distributed.ranks import run

DOCS = Path(__file__).parents[2] / "docs"


def test_the_program_at_scale_runs():
    page = (DOCS / "at_scale.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    for error in run(run_page, 2, block):
        assert error < 1e-4
