"""Marks are found on ranks as they are in one process."""

import pytest

from tests.distributed.marked import differences
from tests.distributed.ranks import run


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_marks_in_plain_parameters_are_those_of_param_groups(kind):
    for each in run(differences, 2, kind, 5):
        assert each == [0.0, 0.0, 0.0]
