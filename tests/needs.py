"""What tests need beyond the oldest versions that are allowed (``make test-oldest``)."""

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
COMPILES = (2, 13)

# The tracers of older ones refuse what plans are made of (docs/running.md).
compiled_steps = pytest.mark.skipif(VERSION < COMPILES, reason="torch.compile of a step")
torchs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon")
