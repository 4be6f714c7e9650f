"""Weights sharded by columns, along two dimensions of a mesh, or not at all."""

import pytest
import torch

import ortholand as ol
from tests.distributed.placements import stepped_as_placed
from tests.distributed.ranks import run

MATRICES = [(12, 5), (5, 12), (6, 6), (3, 40), (4, 2, 3)]
KERNELS = [(5, 3, 3, 3), (4, 6, 2, 3)]
OPTIMIZERS = [
    (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9}),
    (ol.LandingAdam, {"lr": 0.01, "attraction": "after"}),
    (ol.LandingMuon, {"lr": 0.01}),
    (ol.RiemannianSGD, {"lr": 0.1, "retraction": "qr"}),
]


@pytest.mark.parametrize(("shapes", "view"), [(MATRICES, "matrix"), (KERNELS, "kernel")])
@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_weights_step_as_in_one_process_however_they_are_placed(make, options, shapes, view):
    for results in run(stepped_as_placed, 4, make, options, shapes, view):
        alone = results.pop("alone")
        assert alone["skipped"] > 0
        assert len(results) >= 6
        for place, got in results.items():
            assert got.keys() == alone.keys(), place
            for name, want in alone.items():
                if isinstance(want, torch.Tensor):
                    assert (got[name] - want).abs().max() < 1e-12, (place, name)
                else:
                    assert got[name] == pytest.approx(want, rel=1e-9, abs=1e-13), (place, name)
