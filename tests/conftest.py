"""Shared settings of the tests."""

import os

import hypothesis
import torch

# Two workers on two cores: more threads only make them wait for each other.
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
