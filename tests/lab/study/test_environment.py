import os
import platform
from time import sleep

import pytest
import torch

from ortholand_lab.study.environment import Stopwatch, check_device, machine


def test_the_stopwatch_counts_what_is_inside_only():
    stopwatch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with stopwatch:
            sleep(0.01)
        inside = stopwatch.seconds
        sleep(0.02)
        assert stopwatch.seconds == inside
    assert stopwatch.seconds >= 0.02


def test_machine_facts_tell_nothing_private():
    facts = [str(value) for value in machine(torch.device("cpu")).values()]
    assert platform.node() not in facts
    assert not any(os.sep in fact for fact in facts)


@pytest.mark.parametrize("name", ["meta", "nonsense", "cuda:99", ""])
def test_a_device_that_cannot_compute_is_refused(name):
    with pytest.raises(ValueError, match="device must be one that torch can use"):
        check_device(name)


def test_the_cpu_is_accepted():
    assert check_device("cpu") == torch.device("cpu")
