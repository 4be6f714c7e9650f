"""docs/at_scale.md is true: its code runs on ranks. Its tables: tests/lab/benchmarks."""

import re
from pathlib import Path

from tests.distributed.building import run_page
from tests.distributed.ranks import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "at_scale.md").read_text()


def test_the_code_of_the_page_runs():
    (block,) = re.findall(r"^```py\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    for error in run(run_page, 2, block):
        assert error < 1e-4
