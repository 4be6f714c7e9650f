"""``orthogonalize_``, ``orthogonality_error`` and the checks of a group, on sharded weights."""

import pytest
import torch

from tests.distributed.accidents import helpers
from tests.distributed.ranks import run


def test_helpers_tell_of_sharded_weights_what_they_tell_of_whole_ones():
    for result in run(helpers, 2):
        spread, alone = result["spread"], result["alone"]
        assert spread["before"] == pytest.approx(alone["before"], rel=1e-12)
        assert spread["mean"] == pytest.approx(alone["mean"], rel=1e-12)
        assert spread["max"] == pytest.approx(alone["max"], rel=1e-12)
        assert spread["max"] > 0.1
        assert spread["after"] < 1e-14 * 20
        for got, want in zip(spread["weights"], alone["weights"], strict=True):
            assert torch.allclose(got, want, rtol=0, atol=1e-14)
        assert "must start within 0.01 of the manifold" in spread["refused"]
        assert "'w0' of shape (20, 4)" in spread["refused"]
        assert "w0 has NaN or infinite" in result["not finite"]
