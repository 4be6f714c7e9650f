"""What the tests against geoopt share."""

import warnings

import pytest
import torch

with warnings.catch_warnings():  # geoopt compiles functions when it is imported
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    import geoopt

METHODS = ("exponential", "polar", "cayley", "qr")
each_method = pytest.mark.parametrize("method", METHODS)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


__all__ = ["METHODS", "each_method", "gaussian", "geoopt"]
