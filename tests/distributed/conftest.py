"""Tests on several processes of one machine, with the gloo backend."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

if sys.platform == "linux":  # no need to know one's own name on a network
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and "slow_distributed" not in item.keywords:
            item.add_marker(pytest.mark.distributed)
