"""What docs/at_scale.md and docs/running.md show runs on ranks. Tables: tests/lab/benchmarks."""

import re
from pathlib import Path

from tests.distributed.building import run_page
from tests.distributed.ranks import run

DOCS = Path(__file__).parents[2] / "docs"
BEFORE = """
from torch import nn
from torch.distributed.fsdp import fully_shard
import ortholand as ol
model = nn.Sequential()
model.layers = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96))
"""


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(r"^```py\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_program_at_scale_runs():
    (block,) = blocks("at_scale.md")
    for error in run(run_page, 2, block):
        assert error < 1e-4


def test_three_lines_shard():
    (block,) = [block for block in blocks("running.md") if "fully_shard" in block]
    for error in run(run_page, 2, BEFORE + block):
        assert error < 1e-4
