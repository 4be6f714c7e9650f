"""The torchrun example, and what happens when a rank dies in it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.dying_rank import EXIT_CODE
from tests.distributed.ranks import assert_same

pytestmark = pytest.mark.slow_distributed

ROOT = Path(__file__).parents[2]
EXAMPLE = ["examples/torchrun_fsdp.py"]
DYING = ["--module", "tests.distributed.dying_rank"]


def started(command):
    command = [sys.executable, *command]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, cwd=ROOT
    )


def torchrun(ranks, program, out, steps):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return started([*command, *program, "--out", str(out), "--every", "2", "--steps", str(steps)])


def checkpoint(out, step):
    """Weights and state that were saved after a step, from one file that torch.load reads."""
    dcp_to_torch_save(out / f"step-{step:06d}", out / "whole.pt")
    saved = torch.load(out / "whole.pt", weights_only=True)
    return {"model": saved["model"], "state": saved["optimizer"]["state"]}


def test_a_rank_that_dies_ends_the_others_and_the_last_checkpoint_resumes(tmp_path):
    died = torchrun(2, DYING, tmp_path / "died", steps=8)
    assert died.returncode != 0
    assert "ChildFailedError" in died.stderr
    assert "rank      : 1" in died.stderr
    assert f"exitcode  : {EXIT_CODE}" in died.stderr
    assert sorted(path.name for path in (tmp_path / "died").iterdir()) == [
        "step-000002",
        "step-000004",
    ]

    resumed = torchrun(2, EXAMPLE, tmp_path / "died", steps=8)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 ranks, from step 4 to 8" in resumed.stdout
    whole = torchrun(2, EXAMPLE, tmp_path / "whole", steps=8)
    assert whole.returncode == 0, whole.stderr
    assert_same(checkpoint(tmp_path / "died", 8), checkpoint(tmp_path / "whole", 8), 0)


def test_the_example_goes_on_with_other_numbers_of_ranks(tmp_path):
    assert torchrun(4, EXAMPLE, tmp_path, steps=4).returncode == 0
    resumed = torchrun(2, EXAMPLE, tmp_path, steps=8)
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 4 to 8" in resumed.stdout
    assert "step 8/8" in resumed.stdout
    assert "collectives of an optimizer step: 2 x allreduce_, 2 x alltoall_base_" in resumed.stdout
    alone = torchrun(1, EXAMPLE, tmp_path / "alone", steps=8)
    assert alone.returncode == 0, alone.stderr
    assert_same(checkpoint(tmp_path, 8), checkpoint(tmp_path / "alone", 8), 1e-5)


def test_without_torchrun_the_example_says_how_to_start_it():
    alone = started(EXAMPLE)
    assert alone.returncode == 2
    assert "start it with torchrun --nproc-per-node 2" in alone.stderr
