"""Tests on several processes of one machine, with the gloo backend."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

if sys.platform == "linux":  # no need to know one's own name on a network
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# Processes take seconds to start: the core has one test of each promise.
CORE = (
    "test_weights_that_a_forward_pass_left_whole_are_taken_back_first",
    "test_the_state_of_one_process_goes_on_with_two_ranks",
    "test_tall_weights_and_kernels_step_with_one_all_reduce_and_no_gather",
    "test_square_and_wide_weights_go_to_owners_or_are_turned",
    "test_other_options",
    "test_steps_on_ranks_are_those_of_one_process",
    "test_what_one_rank_cannot_step_no_rank_steps_and_the_others_do",
    "test_helpers_tell_of_sharded_weights_what_they_tell_of_whole_ones",
    "test_a_multiplier_moves_no_iterate",
    "test_scaled_weights_step_on_ranks_as_in_one_process",
)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        if "slow_distributed" not in item.keywords:
            item.add_marker(pytest.mark.distributed)
        if item.name.partition("[")[0] not in CORE:
            item.add_marker(pytest.mark.thorough)
