"""Blocks and vectors on ranks: where each is whole on its rank, and where ranks share some."""

import pytest
import torch

import ortholand as ol
from tests.distributed.gridding import stepped_as_placed
from tests.distributed.ranks import run

# Among them blocks that fall to ranks evenly, unevenly, to some ranks only, and not at all.
GRIDS = [
    ({"blocks": (4, 1)}, [(16, 6), (12, 5), (8, 8)]),
    ({"blocks": (6, 1)}, [(18, 6), (24, 2)]),
    ({"blocks": (2, 4)}, [(16, 16), (4, 8)]),
    ({"view": "rows"}, [(16, 6), (6, 5), (2, 8)]),
    ({"view": "columns"}, [(6, 16), (5, 7)]),
    ({"view": "vector"}, [(8, 3), (5, 4)]),
]
OPTIMIZERS = [
    (ol.LandingAdam, {"lr": 0.01}),
    (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9}),
]


@pytest.mark.parametrize(("constraint", "shapes"), GRIDS)
@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_blocks_step_as_in_one_process_however_they_are_placed(make, options, constraint, shapes):
    constraint = {**constraint, "scale": "fan"}
    for results in run(stepped_as_placed, 4, make, options, shapes, constraint):
        alone = results.pop("alone")
        assert alone["skipped"] > 0
        for place, got in results.items():
            assert got.keys() == alone.keys(), place
            for name, want in alone.items():
                if isinstance(want, torch.Tensor):
                    assert got[name].shape == want.shape, (place, name)
                    assert (got[name] - want).abs().max() < 1e-12, (place, name)
                else:
                    assert got[name] == pytest.approx(want, rel=1e-9, abs=1e-13), (place, name)
