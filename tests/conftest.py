"""Shared settings of the tests, and which of their cases are the core."""

import os

import hypothesis
import pytest
import torch

from tests.grids import split

# Two workers on two cores: more threads only make them wait for each other.
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.register_profile("core", deadline=None, print_blob=True, max_examples=20)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    split(items)
