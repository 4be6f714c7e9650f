"""What tests need beyond the oldest versions that are allowed (``make test-oldest``)."""

from importlib.metadata import version

import pytest
import torch


def version_of(package):
    return tuple(int(part) for part in version(package).split(".")[:2])


COMPILES = (2, 13)

# The tracers of older ones refuse what plans are made of (docs/running.md).
compiled_steps = pytest.mark.skipif(
    version_of("torch") < COMPILES, reason="torch.compile of a step"
)
torchs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon")
# Older ones lack groups, and their exponentials do not run with the SciPy of that age.
pymanopts_groups = pytest.mark.skipif(version_of("pymanopt") < (2, 2), reason="pymanopt 2.2")
