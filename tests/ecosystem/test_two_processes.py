"""Accelerate and Lightning on two processes train as one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ecosystem

PROGRAM = Path(__file__).with_name("two_processes.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(("framework", "starter"), [("accelerate", TORCHRUN), ("lightning", [])])
def test_two_processes_train_as_one(framework, starter):
    pytest.importorskip(framework, reason="needs pip install 'ortholand[ecosystem]'")
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":  # no need to know one's own name on a network
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [sys.executable, *starter, str(PROGRAM), framework],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "two processes agree with one" in done.stdout
